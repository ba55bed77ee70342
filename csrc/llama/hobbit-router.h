// hobbit-router.h - what the engine needs of the routers themselves: the next layers' applied to the running layer's input, and the
// bonus of resident experts.
//
// The products are the host's: with one token a gate is small, and they run while the layer's misses are on their way, which a product
// in the graph would wait for. Nothing of a graph without prediction changes.

#pragma once

#include "hobbit-model.h"

#include "llama-hparams.h"

// The router of one layer as build_moe_ffn has it.
struct hobbit_router {
    const ggml_tensor * gate    = nullptr; // [n_in, n_expert]; null: it has no such matrix, or not on the layer's input
    const ggml_tensor * gate_b  = nullptr; // [n_expert], of the logits; may be null
    const ggml_tensor * probs_b = nullptr; // [n_expert], for selection only; may be null
    llama_expert_gating_func_type gating = LLAMA_EXPERT_GATING_FUNC_TYPE_SOFTMAX;
    bool by_logits = false;                // selects by logits, whatever the gating
    int  n_groups  = 1;                    // of experts; the best n_group_used of them are chosen first
    int  n_group_used = 1;
};

// Copies of gates that are not in host memory, and conversions; one for each model.
class hobbit_gates {
  public:
    // Its bytes where the CPU can read them; null if they cannot be had. The first call may copy from a device.
    const uint8_t * data(const ggml_tensor * t);

  private:
    std::mutex mutex_;
    std::map<const ggml_tensor *, std::vector<uint8_t>> copies_;
};

// Predictions for one step.
class hobbit_next_routers : public hob::next_routers {
  public:
    // routers: [layer]; x: [n_tokens] rows of n_in values, stride bytes apart
    hobbit_next_routers(hobbit & h, const std::vector<hobbit_router> & routers, const float * x, size_t stride, int64_t n_in, int n_tokens)
        : h_(h), routers_(routers), x_(x), stride_(stride), n_in_(n_in), n_tokens_(n_tokens) {}

    bool choose(int layer, int32_t * experts, float * weights) override;

  private:
    hobbit & h_;
    const std::vector<hobbit_router> & routers_;
    const float * x_;
    size_t  stride_;
    int64_t n_in_;
    int     n_tokens_;
};

// The bonus operation's userdata.
struct hobbit_lean_op {
    hob::engine * engine;
    int layer;
    int n_used;
    bool by_logits;
    llama_expert_gating_func_type gating;
};

// Selection scores [n_expert, n_tokens] with the residents' bonus, of the same shape: each score becomes what the router would have given for
// that much more of a logit. A token's best expert stays its best.
ggml_tensor * hobbit_lean(ggml_context * ctx, hobbit_lean_op & op, ggml_tensor * selection, ggml_tensor * logits, ggml_tensor * probs);
