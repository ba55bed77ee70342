#include "pool.h"

#include <algorithm>
#include <cassert>

namespace hob {

pool::pool(const model_layout & layout, int group, int copy) : group_(group), copy_(copy), slots_(layout.groups[group].n_slots[copy]) {
    const group_layout & g = layout.groups[group];
    n_expert_ = g.n_expert;
    for (const layer_layout & l : layout.layers) {
        in_group_.push_back(l.in_group);
    }
    where_.assign((size_t) g.n_layers * g.n_expert, -1);
    kept_.assign(g.n_layers, 0);
    for (int s = n_slots() - 1; s >= 0; --s) {
        free_.push_back(s);
    }
    lists_.resize(g.n_layers);
    for (size_t l = 0; l < layout.layers.size(); ++l) {
        if (layout.layers[l].group == group) {
            lists_[in_group_[l]].layer = (int) l;
        }
    }
    listed_.resize(where_.size());
    heads_.reserve(lists_.size());
    candidates_.resize(std::max<size_t>(n_expert_, lists_.size()));
    priorities_.resize(candidates_.size());
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

void pool::assign(int s, int layer, int expert) {
    assert(find(layer, expert) < 0);
    slot & x = slots_[s];
    if (x.free()) {
        free_.pop_back(); // victim() hands out the last free slot
        n_resident_++;
    } else {
        set_streamed(s, false);
        kept_[in_group_[x.layer]]--;
        lists_[in_group_[x.layer]].resident--;
        where_[index(x.layer, x.expert)] = -1;
    }
    kept_[in_group_[layer]]++;
    lists_[in_group_[layer]].resident++;
    lists_[in_group_[layer]].stale = true;
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
    lists_[in_group_[x.layer]].resident--;
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
    std::vector<int> residents(kept_.size(), 0);
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
        residents[in_group_[x.layer]]++;
        if (where_[index(x.layer, x.expert)] != s) {
            return false;
        }
    }
    for (size_t l = 0; l < lists_.size(); ++l) {
        if (lists_[l].resident != residents[l]) {
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
