#include "share.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace hob {

static constexpr double MEMORY  = 0.95; // what a layer's observation keeps of its weight at the next one
static constexpr double PROBING = 1.01; // a link that is always first is given more, until it is not
static constexpr double MOST    = 1.1;  // of the link's speed at load
static constexpr double START_S = 0.02; // weight of the speeds at load, in seconds

speeds::speeds(double link, double cpu) : link_{ link * START_S, START_S }, cpu_{ cpu * START_S, START_S }, most_(MOST * link) {}

void speeds::sum::add(double b, double s) {
    bytes   = MEMORY * bytes + b;
    seconds = MEMORY * seconds + s;
}

void speeds::observe(double link_bytes, double link_s, bool link_last, double cpu_bytes, double cpu_s) {
    if (cpu_bytes == 0.0) {
        cpu_start_ += (1.0 - MEMORY) * (cpu_s - cpu_start_); // it had nothing to do
    } else if (cpu_s > cpu_start_) {
        cpu_.add(cpu_bytes, cpu_s - cpu_start_);
    }
    if (link_bytes == 0.0 || link_s <= 0.0) {
        return;
    }
    if (link_last || link_bytes / link_s > link()) {
        link_.add(link_bytes, link_s);
    } else if (cpu_bytes > 0.0) {
        link_.bytes *= PROBING;
    }
    link_.bytes = std::min(link_.bytes, most_ * link_.seconds);
}

void share(std::vector<missed> & misses, double link_speed, double cpu_speed, double cpu_start) {
    double total = 0.0;
    for (missed & m : misses) {
        m.link = 0;
        total += m.bytes;
    }
    std::vector<int> order(misses.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return misses[a].bytes > misses[b].bytes; });

    double on_link = 0.0;
    // fair/link_speed = cpu_start + (total - fair)/cpu_speed
    const double fair = (total + cpu_start * cpu_speed) * link_speed / (link_speed + cpu_speed);
    int rest = -1; // the largest that does not fit whole into the link's part
    for (int i : order) {
        missed & m = misses[i];
        if (on_link + m.bytes <= fair) {
            m.link = m.units;
            on_link += m.bytes;
        } else if (rest < 0) {
            rest = i;
        }
    }
    if (rest < 0) {
        return;
    }
    const auto finish = [&](double link) { return std::max(link / link_speed, cpu_start + (total - link) / cpu_speed); };
    double best = finish(on_link);
    missed & divided = misses[rest];
    if (divided.units > 1) {
        const int units = (int) std::lround((fair - on_link) / divided.bytes * divided.units);
        if (finish(on_link + divided.bytes * units / divided.units) < best) {
            divided.link = units;
        }
        return;
    }
    missed * moved = nullptr;
    for (int i : order) {
        missed & m = misses[i];
        if (m.link == 0 && finish(on_link + m.bytes) < best) {
            best  = finish(on_link + m.bytes);
            moved = &m;
        }
    }
    if (moved) {
        moved->link = moved->units;
    }
}

} // namespace hob
