// hobbit-graph.h - the hook in llm_graph_context::build_moe_ffn.
//
// One object per call. It is inert for experts that are resident. For offloaded ones it puts, for each
// wave (csrc/core/engine.h), in place of one product with all experts
//
//   route = custom(selected_experts, weights)       on the host: plans, waits for gate and up, gives slot ids
//   y     = mul_mat_id(bank_high, x, ids_high)      rows of the wave's high copies, the others zero
//   y     = mul_mat_id(bank_low,  x, ids_low) -> y  rows of its low copies, the others untouched
//   late  = custom(route)                           waits for down
//
// and the same for down, where all waves write into one tensor. Rows of skipped experts stay zero. Misses that
// the CPU computes are products with the copies in host memory, rows added to the others.

#pragma once

#include "hobbit-model.h"

struct llm_graph_context;

class hobbit_moe {
  public:
    // exps: any expert tensor of the layer; ids [n_used, n_tokens]; weights [1, n_used, n_tokens]
    hobbit_moe(const llm_graph_context & g, const ggml_tensor * exps, ggml_tensor * ids, ggml_tensor * weights);

    bool active() const { return h_ != nullptr; }
    int  n_passes() const { return n_waves_ + has_cpu_; }

    // The first pass is wave 0, the last ones are the other waves; between them the CPU's part, if there is one:
    // it runs while the device computes wave 0 and the others load. Returns the layer's input for this pass.
    ggml_tensor * begin_pass(int pass, ggml_tensor * x);

    // w: an expert tensor of this layer; x [n_in, 1 or n_used, n_tokens]; scale [n_expert] or null
    ggml_tensor * mul_mat_id(const ggml_tensor * w, ggml_tensor * x, ggml_tensor * scale);

    // expert ids, -1 where an expert was skipped: for biases of down
    ggml_tensor * kept_ids() const;

  private:
    const llm_graph_context & g_;
    hobbit * h_ = nullptr;
    int layer_   = -1;
    int n_waves_ = 1;
    int wave_    = 0;
    bool has_cpu_ = false;
    bool on_cpu_  = false;  // this pass is the CPU's part
    bool last_    = false;
    ggml_tensor * ids_;
    ggml_tensor * weights_;
    ggml_tensor * route0_ = nullptr; // I32 [n_used, n_tokens, 5]: slots of high copies, of low copies, kept experts, the CPU's high and low ones
    ggml_tensor * route_  = nullptr; // the running wave's
    ggml_tensor * late_   = nullptr; // I32 [n_used, n_tokens, 2]
    ggml_tensor * out_    = nullptr; // the layer's rows so far
    ggml_tensor * cpu_out_ = nullptr;
    ggml_tensor * cpu_x_   = nullptr; // the layer's input on the host
    class hobbit_graph_input * input_ = nullptr;
};
