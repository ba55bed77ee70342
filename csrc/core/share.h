// share.h - who serves a layer's misses: the link, which brings weights to the device, or the CPU, which
// computes from host memory. Both work at once; the layer is ready when the slower one is.

#pragma once

#include "layout.h"

#include <cstdint>
#include <vector>

namespace hob {

// One missed expert. Its weights are divided along the inner width in units; the link takes the first ones.
struct missed {
    double link_s;   // that the link needs for all of it, in seconds
    double cpu_s;    // that the CPU does
    int    units;    // 1: cannot be divided
    int    link = 0; // units that the link brings; the CPU computes the others. Filled in by share()
};

// How a layer's misses were served.
struct served {
    double link_bytes = 0.0;
    double link_s     = 0.0;   // until they were there, from when they were queued
    bool   link_last  = false; // the link was done after the CPU, so link_s is when it was done; else it was done by then
    double cpu_bytes[N_COPIES] = {};
    double cpu_s      = 0.0;   // that the CPU's part took
    double delay_s    = -1.0;  // from when the loads were queued until the CPU's part began; negative: not known
};

// How fast both are: bytes a second, and how much later than the link the CPU is at work, in seconds. Measured at load
// and corrected while running: over the last tens of layers, each weighted by its time. Types differ in what the CPU
// makes of a byte, so each copy has its speed.
class speeds {
  public:
    speeds(double link, double cpu);
    double link() const { return link_.bytes / link_.seconds; }
    double cpu(int copy) const { return cpu_[copy].bytes / cpu_[copy].seconds; }
    double cpu_start() const { return delay_ + idle_; }

    void observe(const served & s);

  private:
    struct sum {
        double bytes;
        double seconds;
        void add(double b, double s);
    };
    sum link_;
    sum cpu_[N_COPIES];
    double most_link_;   // that the link is believed to do
    double most_cpu_;    // that the CPU is believed to do as long as it has nothing to do
    double delay_ = 0.0;
    double idle_  = 0.0; // that the CPU's part takes when it has nothing to do
};

// Divide so that both finish together. Whole experts first, largest first: those can stay on the device. Then
// one of the others is divided, or, if none can be, given to the one who is done with it sooner.
void share(std::vector<missed> & misses, double cpu_start = 0.0);

} // namespace hob
