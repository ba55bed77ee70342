// clairvoyant.h - eviction by what is known to come: the reference that policies are measured against.
//
// With one precision, giving up the copy whose next use is farthest is optimal (Belady). With two costs and copies
// that can stand in for each other no simple rule is, so this one is a heuristic, not a bound: the copy that saves the
// least per step of waiting goes first,
//
//   p = the largest of saved / (use - now) over its next uses
//
// saved is 1 for a use that wants high and B_low/B_high for one that wants low, whichever copy serves it; a low copy
// has no uses from the first on that wants high. Uses that want a skip save nothing.

#pragma once

#include "policy.h"

#include <cstdint>
#include <vector>

namespace hob {

// The uses to come of every expert.
class future {
  public:
    explicit future(const model_layout & layout) : offset_(1, 0) {
        for (const layer_layout & l : layout.layers) {
            offset_.push_back(offset_.back() + l.n_expert);
        }
        uses_.resize(offset_.back());
    }

    // Steps are numbered as the layers run, one after another, from 1. To be called in that order.
    void add(int layer, int expert, int64_t step, int32_t wanted) { of(layer, expert).list.push_back({ step, wanted }); }

    // That step runs now: its uses of the expert, and earlier ones, are past.
    void pass(int layer, int expert, int64_t step) {
        now_ = step;
        uses & u = of(layer, expert);
        while (u.next < u.list.size() && u.list[u.next].step <= step) {
            u.next++;
        }
    }

    struct use { int64_t step; int32_t wanted; };
    struct uses { std::vector<use> list; size_t next = 0; };

    int64_t now() const { return now_; }
    const uses & at(int layer, int expert) const { return uses_[offset_[layer] + expert]; }

  private:
    uses & of(int layer, int expert) { return uses_[offset_[layer] + expert]; }

    std::vector<size_t> offset_; // [n_layers + 1]
    std::vector<uses>   uses_;   // [layer][expert]
    int64_t now_ = 0;
};

// known must live as long as the policy.
std::unique_ptr<policy> make_policy_clairvoyant(const future & known);

} // namespace hob
