#include "pool.h"

#include <algorithm>
#include <tuple>

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

int pool::victim(const policy & pol, const policy_context & ctx, bool only_streamed) {
    return free_.empty() ? weakest(pol, ctx, only_streamed) : free_.back();
}

bool pool::may_go(const slot & x, bool only_streamed) const {
    return !x.free() && x.pins == 0 && x.load.done() && (!only_streamed || x.streamed);
}

int pool::weakest(const policy & pol, const policy_context & ctx, bool only_streamed) {
    for (int attempt = 0; attempt < 2; ++attempt) {
        for (; next_ < order_.size() && order_streamed_ == only_streamed; ++next_) {
            const ranked & r = order_[next_];
            const slot & x = slots_[r.slot];
            if (may_go(x, only_streamed) && x.layer == r.layer && x.expert == r.expert) {
                return r.slot;
            }
        }
        if (attempt == 0) {
            rank(pol, ctx, only_streamed);
        }
    }
    return -1;
}

void pool::rank(const policy & pol, const policy_context & ctx, bool only_streamed) {
    order_.clear();
    next_ = 0;
    order_streamed_ = only_streamed;
    for (int s = 0; s < n_slots(); ++s) {
        const slot & c = slots_[s];
        if (may_go(c, only_streamed)) {
            order_.push_back({ pol.priority({ c.layer, c.expert, copy_, c.last_clock, c.last_pass }, ctx), c.last_clock, c.layer, c.expert, s });
        }
    }
    const size_t n = std::min(order_.size(), RANKED);
    std::partial_sort(order_.begin(), order_.begin() + n, order_.end(), [](const ranked & a, const ranked & b) {
        return std::tie(a.priority, a.last_clock, a.layer, a.expert) < std::tie(b.priority, b.last_clock, b.layer, b.expert);
    });
    order_.resize(n);
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
