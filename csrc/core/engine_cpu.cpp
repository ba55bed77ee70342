// engine_cpu.cpp - what the CPU computes of a layer's misses, while a link brings the rest: how fast both are, what is done
// meanwhile, and which of the experts get a slot as well.

#include "engine.h"

#include <algorithm>

namespace hob {

void engine::cpu_begins() {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    cpu_us_ = now_us();
}

// Link and CPU would wait for the search for slots, so the next layer's is done while they work. Its records are as they
// will be then: of the experts that its router is about to choose, those that are in high slots are no candidates. But for
// what follow learns from that choice, and for what predictions set aside.
void engine::rank_ahead() {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    const int next = layer_ + 1;
    if (lost_ || next >= (int) layout_.layers.size() || records_.learns() || params_.prefetch != 0 || params_.force_miss || bulk_) {
        return;
    }
    const auto hold = [&](int more) { // this layer's slots are free to go then, but for those that will be empty
        for (const expert_plan & p : plans_) {
            if (p.pins > 0 && p.units == 0) {
                pool_of(layer_, p.copy).at(p.slot).pins += more;
            }
        }
    };
    policy_context ctx = context_for(layout_.layers[next].group);
    ctx.layer = next;
    pool & pl = pool_of(next, COPY_HIGH);
    hold(-1);
    try {
        pl.rank_ahead(*policy_, ctx);
    } catch (const std::bad_alloc &) { // it is done in its turn, if there is memory then
        pl.reorder();
    }
    hold(1);
}

void engine::cpu_done() {
    const int64_t done = now_us();
    device_link * link = nullptr;
    uint64_t ticket = 0;
    served s;
    {
        std::lock_guard<std::recursive_mutex> lock(mutex_);
        if (lost_) {
            return;
        }
        link = layout_.groups[layout_.layers[layer_].group].banks[COPY_HIGH][0].link;
        for (const expert_plan & p : plans_) {
            if (p.cpu) {
                s.cpu_bytes[p.copy] += (double) cpu_bytes(p);
            }
            if (p.load && p.slot >= 0) {
                ticket = std::max(ticket, pool_of(layer_, p.copy).at(p.slot).load.ticket);
                s.link_bytes += (double) part_bytes(p);
            }
        }
    }
    int64_t arrived = done;
    if (ticket > 0) { // without the lock: others may read statistics meanwhile
        link->wait(ticket);
        arrived = now_us();
    }
    // a wait shorter than this may be the question itself: asking a device costs that long
    constexpr int64_t ASKING_US = 25;
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    if (budget_.miss == HOBBIT_MISS_AUTO && !params_.link_speed && !behind_ahead_) {
        s.link_last = arrived - done > ASKING_US;
        s.cpu_s     = (done - cpu_us_) / 1e6;
        if (issued_us_ > 0) {
            s.link_s  = (arrived - issued_us_) / 1e6;
            s.delay_s = (cpu_us_ - issued_us_) / 1e6;
        }
        speeds_.observe(s);
    }
    stats_[layer_].cpu_us  += done - cpu_us_;
    stats_[layer_].wait_us += arrived - done;
}

// Times that the running sequences used an expert.
uint32_t engine::uses(int layer, int expert) const {
    uint32_t n = 0;
    for (const sequence_records * s : records_.active()) {
        n += records_.at(*s, layer, expert).uses;
    }
    return n;
}

// Experts that the CPU computed get a slot, too, while slots are free (but one, which divided experts use), and
// where they are used much more often than what they would push out.
void engine::admit() {
    std::vector<load_request> loads;
    for (const expert_plan & p : plans_) {
        if (!p.cpu || params_.admit == HOBBIT_ADMIT_NEVER) {
            continue;
        }
        pool & pl = pool_of(layer_, p.copy);
        if (pool_of(layer_, COPY_HIGH).find(layer_, p.expert) >= 0 || pl.find(layer_, p.expert) >= 0) { // a part of it, where it is divided
            continue;
        }
        bool wanted = pl.n_free() > 1;
        if (!wanted && params_.admit == HOBBIT_ADMIT_OFTEN && p.copy == COPY_HIGH) {
            const int v = pl.weakest(*policy_, context_for(layout_.layers[layer_].group));
            wanted = v >= 0 && uses(layer_, p.expert) >= 2 * uses(pl.at(v).layer, pl.at(v).expert) + 2;
        }
        if (wanted) {
            load_ahead(layer_, p.expert, p.copy, true, loads);
        }
    }
    submit_ahead(loads);
}

} // namespace hob
