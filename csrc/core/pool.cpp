#include "pool.h"

namespace hob {

pool::pool(const model_layout & layout, int group, int copy) : copy_(copy) {
    const group_layout & g = layout.groups[group];
    n_expert_ = g.n_expert;
    for (const layer_layout & l : layout.layers) {
        in_group_.push_back(l.in_group);
    }
    where_.assign((size_t) g.n_layers * g.n_expert, -1);
    for (int s = 0; s < g.n_slots[copy]; ++s) {
        slots_.emplace_back();
    }
    for (int s = n_slots() - 1; s >= 0; --s) {
        free_.push_back(s);
    }
}

int pool::victim(const policy & pol, const policy_context & ctx, bool only_streamed) const {
    return free_.empty() ? weakest(pol, ctx, only_streamed) : free_.back();
}

int pool::weakest(const policy & pol, const policy_context & ctx, bool only_streamed) const {
    int    best   = -1;
    double best_p = 0.0;
    for (int s = 0; s < n_slots(); ++s) {
        const slot & c = slots_[s];
        if (c.free() || c.pins > 0 || !c.load.done() || (only_streamed && !c.streamed)) {
            continue;
        }
        const double p = pol.priority({ c.layer, c.expert, copy_, c.last_clock, c.last_pass }, ctx);
        if (best >= 0) {
            const slot & b = slots_[best];
            if (p > best_p) {
                continue;
            }
            if (p == best_p && (c.last_clock > b.last_clock || (c.last_clock == b.last_clock &&
                    (c.layer > b.layer || (c.layer == b.layer && c.expert > b.expert))))) {
                continue;
            }
        }
        best   = s;
        best_p = p;
    }
    return best;
}

void pool::assign(int s, int layer, int expert) {
    slot & x = slots_[s];
    if (x.free()) {
        free_.pop_back(); // victim() hands out the last free slot
        n_resident_++;
    } else {
        where_[index(x.layer, x.expert)] = -1;
    }
    set_streamed(s, false);
    x.layer      = layer;
    x.expert     = expert;
    x.prefetched = false;
    where_[index(layer, expert)] = s;
}

void pool::release(int s) {
    slot & x = slots_[s];
    if (x.free()) {
        return;
    }
    set_streamed(s, false);
    where_[index(x.layer, x.expert)] = -1;
    x.layer = x.expert = -1;
    x.prefetched = false;
    free_.push_back(s);
    n_resident_--;
}

void pool::set_streamed(int s, bool on) {
    n_streamed_ += (int) on - (int) slots_[s].streamed;
    slots_[s].streamed = on;
}

bool pool::consistent() const {
    int resident = 0;
    int streamed = 0;
    for (int s = 0; s < n_slots(); ++s) {
        const slot & x = slots_[s];
        streamed += x.streamed;
        if (x.free()) {
            if (x.pins || x.streamed) {
                return false;
            }
            continue;
        }
        resident++;
        if (where_[index(x.layer, x.expert)] != s) {
            return false;
        }
    }
    int mapped = 0;
    for (int s : where_) {
        mapped += s >= 0;
    }
    return mapped == resident && resident == n_resident_ && streamed == n_streamed_ && (int) free_.size() == n_slots() - resident;
}

} // namespace hob
