#include "pool.h"

#include <algorithm>
#include <tuple>

namespace hob {

pool::pool(const model_layout & layout, int group, int copy) : group_(group), copy_(copy) {
    const group_layout & g = layout.groups[group];
    n_expert_ = g.n_expert;
    for (const layer_layout & l : layout.layers) {
        in_group_.push_back(l.in_group);
    }
    where_.assign((size_t) g.n_layers * g.n_expert, -1);
    kept_.assign(g.n_layers, 0);
    for (int s = 0; s < g.n_slots[copy]; ++s) {
        slots_.emplace_back();
    }
    for (int s = n_slots() - 1; s >= 0; --s) {
        free_.push_back(s);
    }
}

int pool::n_idle(int most, bool not_held) const {
    int n = 0;
    for (auto x = slots_.begin(); x != slots_.end() && n < most; ++x) {
        n += x->pins == 0 && x->load.done() && !(not_held && x->held);
    }
    return n;
}

int pool::victim(const policy & pol, const policy_context & ctx, bool only_streamed) {
    return free_.empty() ? weakest(pol, ctx, only_streamed) : free_.back();
}

bool pool::may_go(const slot & x, const policy_context & ctx, bool only_streamed) const {
    if (x.free() || x.pins > 0 || x.held || !x.load.done()) {
        return false;
    }
    const bool to_come = x.prefetched && x.last_pass == ctx.pass && x.layer > ctx.layer;
    return !only_streamed || (x.streamed && !to_come);
}

int pool::weakest(const policy & pol, const policy_context & ctx, bool only_streamed) {
    for (int attempt = 0; attempt < 2; ++attempt) {
        for (; next_ < order_.size() && order_streamed_ == only_streamed; ++next_) {
            const ranked & r = order_[next_];
            const slot & x = slots_[r.slot];
            if (may_go(x, ctx, only_streamed) && x.layer == r.layer && x.expert == r.expert) {
                return r.slot;
            }
        }
        if (attempt == 0) {
            rank(pol, ctx, only_streamed);
        }
    }
    return -1;
}

void pool::forget_order() {
    if (order_ahead_ < 0) {
        order_.clear();
        next_ = 0;
    }
}

void pool::rank_ahead(const policy & pol, const policy_context & ctx) {
    begin(ctx.layer);
    rank(pol, ctx, false);
    order_ahead_ = ctx.layer;
}

void pool::begin(int layer) {
    const bool found = order_ahead_ == layer;
    order_ahead_ = -1;
    if (!found) {
        forget_order();
    }
}

void pool::forget_ahead() {
    if (order_ahead_ >= 0) {
        begin(-1);
    }
}

void pool::rank(const policy & pol, const policy_context & ctx, bool only_streamed) {
    forget_order();
    order_streamed_ = only_streamed;
    candidates_.resize(slots_.size());
    priorities_.resize(slots_.size());
    candidate_slots_.resize(slots_.size());
    size_t n = 0;
    int s = 0;
    for (const slot & x : slots_) {
        if (may_go(x, ctx, only_streamed)) {
            candidate & c = candidates_[n];
            c.layer      = x.layer;
            c.expert     = x.expert;
            c.copy       = copy_;
            c.last_clock = x.last_clock;
            c.last_pass  = x.last_pass;
            candidate_slots_[n++] = s;
        }
        ++s;
    }
    pol.priorities(candidates_.data(), n, ctx, priorities_.data());
    const auto before = [](const ranked & a, const ranked & b) {
        return a.priority != b.priority ? a.priority < b.priority
                                        : std::tie(a.last_clock, a.layer, a.expert) < std::tie(b.last_clock, b.layer, b.expert);
    };
    for (size_t i = 0; i < n; ++i) { // few of many get in
        if (order_.size() == RANKED && priorities_[i] > order_.back().priority) {
            continue;
        }
        const candidate & c = candidates_[i];
        const ranked r = { priorities_[i], c.last_clock, c.layer, c.expert, candidate_slots_[i] };
        order_.insert(std::upper_bound(order_.begin(), order_.end(), r, before), r);
        if (order_.size() > RANKED) {
            order_.pop_back();
        }
    }
}

void pool::assign(int s, int layer, int expert) {
    slot & x = slots_[s];
    if (x.free()) {
        free_.pop_back(); // victim() hands out the last free slot
        n_resident_++;
    } else {
        set_streamed(s, false);
        kept_[in_group_[x.layer]]--;
        where_[index(x.layer, x.expert)] = -1;
    }
    kept_[in_group_[layer]]++;
    x.layer  = layer;
    x.expert = expert;
    x.prefetched = x.guessed = x.held = false;
    where_[index(layer, expert)] = s;
}

void pool::release(int s) {
    slot & x = slots_[s];
    if (x.free()) {
        return;
    }
    set_streamed(s, false);
    kept_[in_group_[x.layer]]--;
    where_[index(x.layer, x.expert)] = -1;
    x.layer = x.expert = -1;
    x.prefetched = x.guessed = x.held = false;
    free_.push_back(s);
    n_resident_--;
}

void pool::set_streamed(int s, bool on) {
    slot & x = slots_[s];
    const int more = (int) on - (int) x.streamed;
    n_streamed_ += more;
    kept_[in_group_[x.layer]] -= more;
    x.streamed = on;
}

bool pool::consistent() const {
    int resident = 0;
    int streamed = 0;
    std::vector<int> kept(kept_.size(), 0);
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
        kept[in_group_[x.layer]] += !x.streamed;
        if (where_[index(x.layer, x.expert)] != s) {
            return false;
        }
    }
    int mapped = 0;
    for (int s : where_) {
        mapped += s >= 0;
    }
    return mapped == resident && resident == n_resident_ && streamed == n_streamed_ && kept == kept_ && (int) free_.size() == n_slots() - resident;
}

} // namespace hob
