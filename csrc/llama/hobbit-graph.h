// hobbit-graph.h - the hook in llm_graph_context::build_moe_ffn.
//
// One object per call. It is inert for experts that are resident in the main file. For offloaded ones it puts, in
// place of one product with all experts, one or more passes of
//
//   y = mul_mat_id(bank_high, x, ids_high)          rows of the wave's high copies, the others zero
//   y = mul_mat_id(bank_low,  x, ids_low) -> y      rows of its low copies, the others untouched
//
// where the ids come from a custom operation on the host. For down all passes write into one tensor; rows of skipped
// experts stay zero.
//
// Slots in host memory, or large batches: a route operation before each wave plans, waits for gate and up and
// gives the ids; a second one (late) waits for down.
//
//   route 0 | products 0 | [CPU's part] | route 1 | products 1 | ...
//
// If the slots are on a device, a large batch's operation gives a table of the experts' slots, which the device looks
// up: what crosses must be small, or it waits behind all loads that have been queued.
//
// A few tokens with slots on a device: one route operation gives the ids of all waves, and the device waits.
// Everything crosses once: router's choice and layer's input to the host in one tensor, all ids back in another.
//
//   pack -> route | products 0 (hits) | arrive: device waits for loads | products 1 | CPU's part | sum
//
// One to four tokens with slots in host memory, and the CPU's part, take hobbit-cpu.h's operations in place of the products.
// The CPU's part is with the copies in host memory. A divided expert is in both: the device has the first
// units of its inner width (what it computes of the others is multiplied by zero), the CPU the tail.
//
// A group of layers whose slots hold all experts needs none of this: its bank is the model's tensor.

#pragma once

#include "hobbit-router.h"

struct llm_graph_context;

class hobbit_moe {
  public:
    // exps: any expert tensor of the layer; ids [n_used, n_tokens]; weights [1, n_used, n_tokens]
    hobbit_moe(const llm_graph_context & g, const ggml_tensor * exps, ggml_tensor * ids, ggml_tensor * weights);

    // What the layer's router is, for the prediction of its choice by the layers before.
    void set_router(const ggml_tensor * gate, const ggml_tensor * gate_b, const ggml_tensor * probs_b, llama_expert_gating_func_type gating);

    // The selection scores [n_expert, n_tokens] of the layer that exps belong to, with the bonus of residents where that is asked for; else
    // selection itself.
    static ggml_tensor * lean(const llm_graph_context & g, const ggml_tensor * exps, ggml_tensor * selection, ggml_tensor * logits, ggml_tensor * probs,
                              llama_expert_gating_func_type gating, int64_t n_used);

    bool active() const { return h_ != nullptr; }
    int  n_passes() const { return n_waves_ + has_cpu_; }

    // Returns the layer's input for this pass.
    ggml_tensor * begin_pass(int pass, ggml_tensor * x);

    // w: an expert tensor of this layer; x [n_in, 1 or n_used, n_tokens]; scale [n_expert] or null
    ggml_tensor * mul_mat_id(const ggml_tensor * w, ggml_tensor * x, ggml_tensor * scale);

    // expert ids, -1 where an expert was skipped: for biases of down
    ggml_tensor * kept_ids() const;

  private:
    void begin_wave(ggml_tensor * x);
    ggml_tensor * cpu_product(int proj, ggml_tensor * x, bool down);
    ggml_tensor * slot_products(const ggml_tensor * w, int proj, ggml_tensor * x, bool down);
    ggml_tensor * plane(ggml_tensor * t, int i) const; // [n_used, n_tokens]
    ggml_tensor * looked_up(ggml_tensor * table, int i) const; // the same
    ggml_tensor * product(const ggml_tensor * w, ggml_tensor * bank, ggml_tensor * x, ggml_tensor * ids, ggml_tensor * onto, bool down) const;
    ggml_tensor * scaled(ggml_tensor * y, ggml_tensor * scale, int64_t n_tokens) const;

    const llm_graph_context & g_;
    hobbit * h_ = nullptr;
    const hobbit::group_banks * banks_ = nullptr;
    int layer_    = -1;
    int n_waves_  = 1;
    int wave_     = 0;
    int pass_     = 0;
    int cpu_pass_ = -1;         // the pass that is the CPU's part
    bool has_cpu_  = false;
    bool resident_ = false;
    bool at_once_  = false;
    bool by_expert_ = false;    // route operations give tables
    bool divided_  = false;     // experts may be
    bool uses_low_ = true;
    int64_t x_rows_ = 1;        // of the layer's input for one token
    void * compute_ = nullptr;  // the back end that computes with the slots, where they are on a device
    ggml_tensor * ids_;
    ggml_tensor * weights_;
    ggml_tensor * route0_ = nullptr; // I32 [n_used, n_tokens, N_PLANES] or [n_expert, N_TABLES], see hobbit-route.h
    ggml_tensor * dev0_   = nullptr; // the same where the slots are
    ggml_tensor * route_  = nullptr; // the running wave's
    ggml_tensor * dev_    = nullptr;
    ggml_tensor * wave_ids_[hob::N_COPIES] = {}; // of the running wave, where there are tables
    ggml_tensor * flat_ids_ = nullptr; // I32 [n_used*n_tokens]
    ggml_tensor * late_   = nullptr; // I32 [n_used, n_tokens, 2]
    ggml_tensor * out_    = nullptr; // the layer's rows so far
    ggml_tensor * early_   = nullptr; // the pass's gate and up, where one operation computes them
    ggml_tensor * cpu_out_ = nullptr;
    ggml_tensor * pack_    = nullptr; // F32 [n_in + 2*n_used, n_tokens]
    ggml_tensor * cpu_x_   = nullptr; // the layer's input on the host
    class hobbit_graph_input * input_ = nullptr;
    struct hobbit_graph_node * node_  = nullptr; // of the running wave
};
