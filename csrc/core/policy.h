// policy.h - which resident copy to give up: the one interface of the eviction policies.
//
// One policy, one file (policy_*.cpp). A policy gives every candidate a priority; the smallest is
// evicted first, ties by the older last use (lookup clock), then by layer and expert.

#pragma once

#include "records.h"

#include <memory>

namespace hob {

struct candidate {
    int      layer;
    int      expert;
    int      copy;       // copy_kind
    uint64_t last_clock; // lookup clock of its last use, over all sequences
    uint64_t last_pass;  // forward pass of its last use
};

struct policy_context {
    const records * rec;
    int      layer;    // the layer being served
    int      n_layers;
    uint64_t pass;     // number of the running forward pass
    float    weights[4];
    float    cost_low; // B_low / B_high of the group
};

// Layers to go until the candidate's layer is served again: 1 for the next layer, n for the layer
// being served. (The paper's formula gives that one 0, "needed soonest"; it is needed last.)
inline int layer_distance(const policy_context & ctx, int layer) {
    return layer > ctx.layer ? layer - ctx.layer : layer - ctx.layer + ctx.n_layers;
}

class policy {
  public:
    virtual ~policy() = default;
    virtual void priorities(const candidate * c, size_t n, const policy_context & ctx, double * out) const = 0;

    // When ctx.layer is served: may copies of that other layer come in another order among themselves than before? (Those of
    // ctx.layer may, and in a new forward pass all.)
    virtual bool reorders(const policy_context & ctx, int layer) const { (void) ctx; (void) layer; return true; }
};

// A policy that has double priority(const candidate &, const policy_context &) const. KEEPS_ORDER: what it says of two
// copies of one layer depends on uses of that layer alone.
template <class P, bool KEEPS_ORDER = false> class each_policy : public policy {
    bool reorders(const policy_context &, int) const final { return !KEEPS_ORDER; }
    void priorities(const candidate * c, size_t n, const policy_context & ctx, double * out) const final {
        for (size_t i = 0; i < n; ++i) {
            out[i] = static_cast<const P *>(this)->priority(c[i], ctx);
        }
    }
};

std::unique_ptr<policy> make_policy_lru();
std::unique_ptr<policy> make_policy_lfu();
std::unique_ptr<policy> make_policy_hobbit();
std::unique_ptr<policy> make_policy_lcu();
std::unique_ptr<policy> make_policy_follow();

std::unique_ptr<policy> make_policy(int32_t kind); // enum hobbit_policy; null if unknown

} // namespace hob
