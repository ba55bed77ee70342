// share.h - who serves a layer's misses: the link, which brings weights to the device, or the CPU, which
// computes from host memory. Both work at once; the layer is ready when the slower one is.

#pragma once

#include <cstdint>
#include <vector>

namespace hob {

// One missed expert. Its weights are divided along the inner width in units; the link takes the first ones.
struct missed {
    double bytes;
    int    units;    // 1: cannot be divided
    int    link = 0; // units that the link brings; the CPU computes the others. Filled in by share()
};

// How fast both are: bytes a second, and what the CPU's part takes besides, in seconds. Measured at load and corrected
// while running: over the last tens of layers, each weighted by its time.
class speeds {
  public:
    speeds(double link, double cpu);
    double link() const { return link_.bytes / link_.seconds; }
    double cpu()  const { return cpu_.bytes / cpu_.seconds; }
    double cpu_start() const { return cpu_start_; }

    // A layer's misses were served: so many bytes in so many seconds. link_last: the link was done after the CPU,
    // so link_s is when it was done; else it was done by then.
    void observe(double link_bytes, double link_s, bool link_last, double cpu_bytes, double cpu_s);

  private:
    struct sum {
        double bytes;
        double seconds;
        void add(double b, double s);
    };
    sum link_;
    sum cpu_;
    double most_;             // that the link is believed to do
    double cpu_start_ = 0.0;
};

// Divide so that both finish together. Whole experts first, largest first: those can stay on the device. Then
// one of the others is divided, or, if none can be, given to the one who is done with it sooner.
void share(std::vector<missed> & misses, double link_speed, double cpu_speed, double cpu_start = 0.0);

} // namespace hob
