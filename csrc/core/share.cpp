#include "share.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace hob {

static constexpr double MEMORY  = 0.95;  // what a layer's observation keeps of its weight at the next one
static constexpr double PROBING = 1.002; // a link that is always first is given more, until it is not
static constexpr double MOST    = 1.1;   // of the link's speed at load
static constexpr double START_S = 0.02;  // weight of the speeds at load, in seconds
static constexpr double STALL   = 4.0;   // so many times what was expected, and STALL_S: the machine did something else
static constexpr double STALL_S = 1e-4;

// A stall says nothing about speeds, and would stay in them for long.
static double usual(double seconds, double expected) { return std::min(seconds, STALL * expected + STALL_S); }

speeds::speeds(double link, double cpu) : link_{ link * START_S, START_S }, most_link_(MOST * link), most_cpu_(cpu) {
    for (sum & s : cpu_) {
        s = { cpu * START_S, START_S };
    }
}

void speeds::sum::add(double b, double s) {
    bytes   = MEMORY * bytes + b;
    seconds = MEMORY * seconds + s;
}

void speeds::observe(const served & s) {
    if (s.delay_s >= 0.0) {
        delay_ += (1.0 - MEMORY) * (usual(s.delay_s, delay_) - delay_);
    }
    double cpu_s = 0.0; // expected
    for (int c = 0; c < N_COPIES; ++c) {
        cpu_s += s.cpu_bytes[c] / cpu(c);
    }
    if (cpu_s == 0.0) {
        idle_ += (1.0 - MEMORY) * (usual(s.cpu_s, idle_) - idle_);
    }
    const double seen = usual(s.cpu_s, idle_ + cpu_s) - idle_;
    for (int c = 0; c < N_COPIES; ++c) {
        if (s.cpu_bytes[c] > 0.0 && seen > 0.0) { // the time is divided as expected
            cpu_[c].add(s.cpu_bytes[c], seen * s.cpu_bytes[c] / cpu(c) / cpu_s);
        } else if (cpu_s == 0.0) { // or it would never be seen again
            cpu_[c].bytes = std::max(cpu_[c].bytes, std::min(PROBING * cpu_[c].bytes, most_cpu_ * cpu_[c].seconds));
        }
    }
    const double link_s = usual(s.link_s, s.link_bytes / link());
    if (s.link_bytes > 0.0 && link_s > 0.0 && (s.link_last || s.link_bytes / link_s > link())) {
        link_.add(s.link_bytes, link_s);
    } else if (cpu_s > 0.0) { // it was done first
        link_.bytes *= PROBING;
    }
    link_.bytes = std::min(link_.bytes, most_link_ * link_.seconds);
}

void share(std::vector<missed> & misses, double cpu_start) {
    double link = 0.0, cpu = cpu_start; // when both would be done
    for (missed & m : misses) {
        m.link = 0;
        cpu += m.cpu_s;
    }
    std::vector<int> order(misses.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return misses[a].link_s > misses[b].link_s; });

    int rest = -1; // the largest that does not fit whole into the link's part
    for (int i : order) {
        missed & m = misses[i];
        if (link + m.link_s <= cpu - m.cpu_s) {
            m.link = m.units;
            link += m.link_s;
            cpu  -= m.cpu_s;
        } else if (rest < 0) {
            rest = i;
        }
    }
    if (rest < 0) {
        return;
    }
    const auto finish = [&](const missed & m, double part) { return std::max(link + part * m.link_s, cpu - part * m.cpu_s); };
    double best = cpu;
    missed & divided = misses[rest];
    if (divided.units > 1) {
        const int units = (int) std::lround((cpu - link) / (divided.link_s + divided.cpu_s) * divided.units);
        if (units > 0 && finish(divided, (double) units / divided.units) < best) {
            divided.link = units;
        }
        return;
    }
    missed * moved = nullptr;
    for (int i : order) {
        missed & m = misses[i];
        if (m.link == 0 && finish(m, 1.0) < best) {
            best  = finish(m, 1.0);
            moved = &m;
        }
    }
    if (moved) {
        moved->link = moved->units;
    }
}

} // namespace hob
