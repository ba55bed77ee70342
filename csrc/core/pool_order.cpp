// pool_order.cpp - which slot would be given up first.
//
// Every miss asks, and there may be thousands of slots. But from one layer to the next few things change: a layer's copies
// keep their order among themselves until one comes, that layer is served again, or something else changes that the policy
// looks at (policy::reorders()). So the first of each layer is kept, and a search compares those. Nothing here allocates.

#include "pool.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <tuple>

namespace hob {

bool pool::may_go(const slot & x, const policy_context & ctx) const {
    if (x.free() || x.pins > 0 || x.held || !x.load.done()) {
        return false;
    }
    const bool to_come = x.prefetched && x.last_pass == ctx.pass && x.layer > ctx.layer;
    return !search_streamed_ || (x.streamed && !to_come);
}

int pool::weakest(const policy & pol, const policy_context & ctx, bool only_streamed) {
    if (only_streamed && n_streamed_ == 0) {
        return -1;
    }
    if (order_ahead_ != ctx.layer) {
        forget_ahead();
    }
    const auto before = [](const head & a, const head & b) {
        return a.priority != b.priority ? a.priority < b.priority : std::tie(a.last_clock, a.list) < std::tie(b.last_clock, b.list);
    };
    for (bool anew = false; !anew;) {
        anew = !searching_ || search_streamed_ != only_streamed;
        if (anew) {
            search(pol, ctx, only_streamed);
        }
        while (!heads_.empty()) {
            if (least_ < 0) {
                least_ = (int) (std::min_element(heads_.begin(), heads_.end(), before) - heads_.begin());
            }
            head & h = heads_[least_];
            const listed * all = listed_in(h.list);
            if (usable(h.list, all[h.at], ctx)) {
                assert(is_first(h, pol, ctx));
                return all[h.at].slot;
            }
            least_ = -1;
            h.at = next_of(h.list, h.at, ctx);
            if (h.at < 0) {
                h = heads_.back();
                heads_.pop_back();
                continue;
            }
            const candidate c = candidate_of(h.list, all[h.at]);
            pol.priorities(&c, 1, ctx, &h.priority);
            h.last_clock = c.last_clock;
        }
        searching_ = false; // more may have become free to go since it began
    }
    return -1;
}

// Does what is kept from earlier searches give what looking at all would? Up to rounding. For assert().
bool pool::is_first(const head & h, const policy & pol, const policy_context & ctx) const {
    for (int l = 0; l < (int) lists_.size(); ++l) {
        for (int i = 0; i < lists_[l].n; ++i) {
            const listed & e = listed_[(size_t) l * n_expert_ + i];
            if (e.passed == searches_ || !usable(l, e, ctx)) {
                continue;
            }
            const slot & x = slots_[e.slot];
            const candidate c = { x.layer, x.expert, copy_, x.last_clock, x.last_pass };
            double p;
            pol.priorities(&c, 1, ctx, &p);
            if (p < h.priority - 1e-9 * std::fabs(h.priority)) {
                return false;
            }
        }
    }
    return true;
}

void pool::forget_order() {
    if (order_ahead_ < 0) {
        searching_ = false;
    }
}

void pool::begin(const policy & pol, const policy_context & ctx) {
    for (layer_list & list : lists_) {
        list.stale = list.stale || list.layer == ctx.layer || pol.reorders(ctx, list.layer);
    }
    const bool found = order_ahead_ == ctx.layer;
    order_ahead_ = -1;
    if (!found) {
        searching_ = false;
    }
}

void pool::reorder() {
    order_ahead_ = -1;
    searching_   = false;
    for (layer_list & list : lists_) {
        list.stale = true;
    }
}

void pool::rank_ahead(const policy & pol, const policy_context & ctx) {
    begin(pol, ctx);
    search(pol, ctx, false);
    order_ahead_ = ctx.layer;
}

void pool::forget_ahead() {
    if (order_ahead_ >= 0) {
        reorder(); // priorities were those of another layer's turn
    }
}

// The first of each layer that may go, and its priority now.
void pool::search(const policy & pol, const policy_context & ctx, bool only_streamed) {
    searching_       = false; // until all is found: a policy may run out of memory
    search_streamed_ = only_streamed;
    searches_++;
    heads_.clear();
    least_ = -1;
    for (int l = 0; l < (int) lists_.size(); ++l) {
        layer_list & list = lists_[l];
        if (list.stale) {
            fill(l, pol, ctx);
        }
        if (list.first < 0) {
            list.first = first_of(l);
        }
        int at = list.first;
        if (at >= 0 && !usable(l, listed_in(l)[at], ctx)) {
            at = next_of(l, at, ctx);
        }
        if (at >= 0) {
            heads_.push_back({ 0.0, listed_in(l)[at].last_clock, l, at });
        }
    }
    for (size_t i = 0; i < heads_.size(); ++i) {
        candidates_[i] = candidate_of(heads_[i].list, listed_in(heads_[i].list)[heads_[i].at]);
    }
    pol.priorities(candidates_.data(), heads_.size(), ctx, priorities_.data());
    for (size_t i = 0; i < heads_.size(); ++i) {
        heads_[i].priority = priorities_[i];
    }
    searching_ = true;
}

void pool::fill(int l, const policy & pol, const policy_context & ctx) {
    layer_list & list = lists_[l];
    listed * all = listed_in(l);
    const int * where = &where_[(size_t) l * n_expert_];
    int n = 0;
    for (int e = 0; e < n_expert_ && n < list.resident; ++e) {
        if (where[e] >= 0) {
            all[n] = { 0.0, slots_[where[e]].last_clock, e, where[e], 0 };
            candidates_[n] = candidate_of(l, all[n]);
            n++;
        }
    }
    pol.priorities(candidates_.data(), n, ctx, priorities_.data());
    for (int i = 0; i < n; ++i) {
        all[i].priority = priorities_[i];
    }
    list.n     = n;
    list.first = -1;
    list.stale = false;
}

// Of those that were not passed over, -1 if there is none.
int pool::first_of(int l) const {
    const listed * all = &listed_[(size_t) l * n_expert_];
    int best = -1;
    for (int i = 0; i < lists_[l].n; ++i) {
        const listed & e = all[i];
        if (e.passed == searches_) {
            continue;
        }
        if (best < 0 || e.priority < all[best].priority ||
            (e.priority == all[best].priority && std::tie(e.last_clock, e.expert) < std::tie(all[best].last_clock, all[best].expert))) {
            best = i;
        }
    }
    return best;
}

// Until the next search, or for good where another has got the slot.
void pool::pass_over(int l, int at) {
    layer_list & list = lists_[l];
    listed * all = listed_in(l);
    if (owned(l, all[at])) {
        all[at].passed = searches_;
        return;
    }
    if (list.first == at || list.first == list.n - 1) {
        list.first = -1;
    }
    all[at] = all[--list.n];
}

// The next that may go after one that may not.
int pool::next_of(int l, int at, const policy_context & ctx) {
    listed * all = listed_in(l);
    if (search_streamed_) { // few may go: all others at once
        for (int i = lists_[l].n - 1; i >= 0; --i) {
            if (!usable(l, all[i], ctx)) {
                pass_over(l, i);
            }
        }
        at = first_of(l);
    }
    while (at >= 0 && !usable(l, all[at], ctx)) {
        pass_over(l, at);
        at = first_of(l);
    }
    return at;
}

} // namespace hob
