// engine_prefetch.cpp - loads before a layer's turn that no router's prediction asks for: a prompt's next layers, and what
// prefetch() names; and how any such load is queued.

#include "engine.h"

#include <algorithm>

namespace hob {

// A large batch wants nearly every expert of the next layers, too, or those that its sequences have used there: each
// wave of this layer brings a wave of what they miss.
void engine::look_ahead() {
    int left = (layout_.layers[layer_].n_expert + n_waves_ - 1) / n_waves_;
    for (int next = layer_ + 1; next < (int) layout_.layers.size() && left > 0; ++next) {
        const layer_layout & l = layout_.layers[next];
        // the last layer is often computed for the last token only
        if ((int64_t) std::min(n_tokens_, n_tokens_of_[next]) * n_used_ < 2 * l.n_expert) {
            continue;
        }
        bool known = false; // from earlier batches of the sequences
        for (int e = 0; e < l.n_expert && !known; ++e) {
            known = uses(next, e) > 0;
        }
        std::vector<load_request> loads;
        loads.reserve(left);
        for (int e = 0; e < l.n_expert && left > 0; ++e) {
            if ((!known || uses(next, e) > 0) && pool_of(next, COPY_HIGH).find(next, e) < 0) {
                left = load_ahead(next, e, COPY_HIGH, false, loads) ? left - 1 : 0;
            }
        }
        submit_ahead(loads);
    }
}

int engine::prefetch(int layer, int expert, int copy) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    if (layer < 0 || layer >= (int) layout_.layers.size() || expert < 0 || expert >= layout_.layers[layer].n_expert || copy < 0 || copy >= N_COPIES) {
        return -1;
    }
    if (lost_ || (layer == layer_ && n_waves_ > 0 && plan_of_[expert] >= 0)) {
        return 0; // it is being served right now
    }
    pool_of(layer, copy).forget_ahead(); // what it brings may be needed less than what was to go
    if (records_.active().empty() || pool_of(layer, COPY_HIGH).find(layer, expert) >= 0 || pool_of(layer, copy).find(layer, expert) >= 0) {
        return 0;
    }
    std::vector<load_request> loads;
    const bool found = load_ahead(layer, expert, copy, false, loads);
    submit_ahead(loads);
    return found;
}

// Loads of one layer by a link that nobody waits for yet. It has no priorities: they come after what was queued before,
// with one ticket.
void engine::submit_ahead(const std::vector<load_request> & loads) {
    loader_.submit(PRIORITY_DEMAND, loads);
    queued_ahead_ = queued_ahead_ || !loads.empty();
}

// False: there is no slot to spare.
bool engine::load_ahead(int layer, int expert, int copy, bool same_layer, std::vector<load_request> & by_link) {
    // leave the slots that one token can need
    pool & pl = pool_of(layer, copy);
    const int n_used = layout_.groups[pl.group()].n_used;
    if (pl.n_idle(n_used + 1, false) <= n_used) {
        return false;
    }
    const int s = find_victim(pl, layer, copy, false);
    if (s < 0 || (!same_layer && pl.at(s).layer == layer)) {
        return false; // one expert of that layer for another gains nothing
    }
    queue_ahead(PRIORITY_PREFETCH, pl, s, layer, expert, by_link);
    return true;
}

// The slot is loaded before its layer's turn. What a link brings is appended to by_link, for submit_ahead(); other loads are queued
// at once, so that the slot counts as loading from now on.
slot & engine::queue_ahead(load_priority priority, pool & pl, int s, int layer, int expert, std::vector<load_request> & by_link) {
    group_layout & g = layout_.groups[pl.group()];
    const int copy = pl.copy();
    std::vector<load_request> one;
    std::vector<load_request> & loads = g.has_link() ? by_link : one;
    loads.reserve(loads.size() + 1); // before anything is taken
    slot & x = occupy(pl, s, layer, expert, copy);
    x.prefetched = true;
    stats_[layer].prefetches++;
    stats_[layer].bytes_read     += g.expert_bytes(copy);
    stats_[layer].bytes_prefetch += g.expert_bytes(copy);
    event(HOBBIT_EVENT_PREFETCH, layer, expert, copy, s);
    loads.push_back({ &layout_.layers[layer], &g, copy, expert, s, &x.load, 0, layer });
    from_host(loads.back());
    if (!g.has_link()) {
        loader_.submit(priority, loads);
    }
    return x;
}

} // namespace hob
