#include "hobbit-graph.h"

#include "llama-graph.h"
#include "llama-model.h"

#include <algorithm>
#include <cstring>
#include <deque>

// What the route operations of one graph need beside their tensors: the sequences of the ubatch. Lives as
// long as the graph, and is filled in before every run of it.
class hobbit_graph_input : public llm_graph_input_i {
  public:
    struct node {
        hob::engine * engine;
        hobbit_graph_input * input;
        int layer;
        int wave;
        int n_waves;
    };

    hobbit_graph_input(const void * context, uint32_t n_tokens) : context(context), n_tokens(n_tokens) {}

    void set_input(const llama_ubatch * ubatch) override {
        seq.resize(ubatch->n_tokens);
        pos.resize(ubatch->n_tokens);
        for (uint32_t i = 0; i < ubatch->n_tokens; ++i) {
            seq[i] = ubatch->n_seq_id && ubatch->n_seq_id[i] > 0 ? ubatch->seq_id[i][0] : 0;
            pos[i] = ubatch->pos ? ubatch->pos[i] : 0;
        }
        fresh = true;
    }

    // the number of waves follows from the number of tokens
    bool can_reuse(const llm_graph_params & params) override { return params.ubatch.n_tokens == n_tokens; }

    const void * context;
    uint32_t n_tokens;
    bool fresh = false;
    std::vector<int32_t> seq;
    std::vector<int32_t> pos;
    std::deque<node> nodes; // userdata of the operations: addresses must not move

    // scratch of the running operation
    std::vector<int32_t> experts;
    std::vector<float>   weights;
};

namespace {

void compute_route(ggml_tensor * dst, int ith, int, void * userdata) {
    if (ith != 0) {
        return;
    }
    const auto & node = *(const hobbit_graph_input::node *) userdata;
    hobbit_graph_input & in = *node.input;
    const int n_used   = (int) dst->ne[0];
    const int n_tokens = (int) dst->ne[1];
    const size_t n = (size_t) n_used * n_tokens;

    hob::route_request req = {};
    req.layer    = node.layer;
    req.n_tokens = n_tokens;
    req.n_used   = n_used;
    req.n_waves  = node.n_waves;
    if (node.wave == 0) {
        const ggml_tensor * ids = dst->src[0]; // [n_used, n_tokens], a view into the sorted experts
        const ggml_tensor * w   = dst->src[1]; // n_used*n_tokens values, contiguous
        in.experts.resize(n);
        in.weights.resize(n);
        for (int t = 0; t < n_tokens; ++t) {
            for (int r = 0; r < n_used; ++r) {
                in.experts[(size_t) t * n_used + r] = *(const int32_t *) ((const char *) ids->data + t * ids->nb[1] + r * ids->nb[0]);
            }
        }
        std::copy_n((const float *) w->data, n, in.weights.begin());
        in.seq.resize(n_tokens, 0);
        in.pos.resize(n_tokens, 0);
        req.experts = in.experts.data();
        req.weights = in.weights.data();
        req.context = in.context;
        req.seq     = in.seq.data();
        req.pos     = in.pos.data();
        req.first   = in.fresh;
        in.fresh    = false;
    }
    int32_t * out = (int32_t *) dst->data;
    node.engine->route(req, node.wave, { out, out + n, out + 2 * n, { out + 3 * n, out + 4 * n } });
}

// The layer's input, for the CPU's part: copied with the router's choice, before the device is given more work.
void compute_input(ggml_tensor * dst, int ith, int nth, void *) {
    const size_t n = ggml_nbytes(dst);
    const size_t begin = n * ith / nth;
    const size_t end   = n * (ith + 1) / nth;
    memcpy((char *) dst->data + begin, (const char *) dst->src[0]->data + begin, end - begin);
}

void compute_late(ggml_tensor * dst, int ith, int, void * userdata) {
    if (ith != 0) {
        return;
    }
    const auto & node = *(const hobbit_graph_input::node *) userdata;
    const int n = (int) (dst->ne[0] * dst->ne[1]);
    const int32_t * from = (const int32_t *) dst->src[0]->data;
    int32_t * out = (int32_t *) dst->data;
    node.engine->wait_late(node.wave, from, from + n, out, out + n, n);
}

hobbit * offloaded_by(const ggml_tensor * exps) {
    if (!exps || !exps->buffer) {
        return nullptr;
    }
    auto * h = (hobbit *) exps->buffer->buft->context;
    return exps->buffer->buft->iface.get_name && strcmp(ggml_backend_buft_name(exps->buffer->buft), "hobbit_virtual") == 0 && h->engine ? h : nullptr;
}

} // namespace

hobbit_moe::hobbit_moe(const llm_graph_context & g, const ggml_tensor * exps, ggml_tensor * ids, ggml_tensor * weights)
    : g_(g), h_(offloaded_by(exps)), ids_(ids), weights_(weights) {
    if (!h_) {
        return;
    }
    layer_   = h_->find(exps).layer;
    n_waves_ = h_->engine->waves(layer_, (int) ids->ne[1], (int) ids->ne[0]);
    has_cpu_ = h_->engine->has_cpu_part((int) ids->ne[1]);
    for (const auto & i : g.res->inputs) {
        if (auto * found = dynamic_cast<hobbit_graph_input *>(i.get())) {
            input_ = found;
        }
    }
    if (!input_) {
        // the CPU back end is the context's own: it tells contexts with the same sequence numbers apart
        input_ = (hobbit_graph_input *) g.res->add_input(std::make_unique<hobbit_graph_input>(g.backend_cpu, g.ubatch.n_tokens));
    }
}

ggml_tensor * hobbit_moe::begin_pass(int pass, ggml_tensor * x) {
    if (!h_) {
        return x;
    }
    last_   = pass + 1 == n_passes();
    on_cpu_ = has_cpu_ && pass == 1;
    if (on_cpu_) {
        return cpu_x_;
    }
    wave_ = has_cpu_ && pass > 1 ? pass - 1 : pass;

    ggml_context * ctx = g_.ctx0;
    input_->nodes.push_back({ h_->engine.get(), input_, layer_, wave_, n_waves_ });
    auto * node = &input_->nodes.back();

    ggml_tensor * args[2] = { ids_, weights_ };
    if (wave_ > 0) {
        // after the rows of the wave before: its slots are free then
        args[0] = route0_;
        args[1] = ggml_view_1d(ctx, out_, 1, 0);
    } else if (!ggml_is_contiguous(weights_)) {
        args[1] = ggml_cont(ctx, weights_);
    }
    route_ = ggml_custom_4d(ctx, GGML_TYPE_I32, ids_->ne[0], ids_->ne[1], 5, 1, args, 2, compute_route, 1, node);
    late_  = ggml_custom_4d(ctx, GGML_TYPE_I32, ids_->ne[0], ids_->ne[1], 2, 1, &route_, 1, compute_late, 1, node);
    // plan before anything else of the layer
    ggml_build_forward_expand(g_.gf, route_);
    if (wave_ == 0) {
        route0_ = route_;
        if (has_cpu_) {
            ggml_tensor * from = ggml_is_contiguous(x) ? x : ggml_cont(ctx, x);
            cpu_x_ = ggml_custom_4d(ctx, GGML_TYPE_F32, x->ne[0], x->ne[1], x->ne[2], 1, &from, 1, compute_input, GGML_N_TASKS_MAX, nullptr);
            ggml_build_forward_expand(g_.gf, cpu_x_);
        }
    }
    return x;
}

ggml_tensor * hobbit_moe::mul_mat_id(const ggml_tensor * w, ggml_tensor * x, ggml_tensor * scale) {
    ggml_context * ctx = g_.ctx0;
    const int proj = h_->find(w).proj;
    const int group = h_->engine->layout().layers[layer_].group;
    const bool down = proj + 1 == h_->engine->layout().groups[group].n_proj;

    ggml_tensor * ids = on_cpu_ ? route0_ : down ? late_ : route_;
    ggml_tensor * y   = down && !on_cpu_ ? out_ : nullptr;
    if (down) {
        ggml_build_forward_expand(g_.gf, x); // gate and up compute while down still loads
    }
    for (int c = 0; c < hob::N_COPIES; ++c) {
        ggml_tensor * bank = on_cpu_ ? h_->host[layer_].tensor[c][proj] : h_->banks[group].tensor[c][proj];
        if (!bank) {
            continue;
        }
        ggml_tensor * plane = ggml_view_2d(ctx, ids, ids->ne[0], ids->ne[1], ids->nb[1], (on_cpu_ ? 3 + c : c) * ids->nb[2]);
        ggml_tensor * r = ggml_mul_mat_id(ctx, bank, x, plane);
        ggml_mul_mat_id_set_skip(r, y);
        if (g_.prec_policy) {
            const auto it = g_.prec_policy->prec_src1.find(w);
            if (it != g_.prec_policy->prec_src1.end()) {
                ggml_prec_set_src(r, it->second, 1);
            }
        }
        if (down && g_.arch == LLM_ARCH_MISTRAL4) {
            ggml_prec_set_src(r, GGML_PREC_F32, 1); // as build_moe_ffn does
        }
        y = r;
    }
    if (down) {
        (on_cpu_ ? cpu_out_ : out_) = y;
        ggml_build_forward_expand(g_.gf, y);
        if (!last_) {
            return y;
        }
        if (has_cpu_) {
            y = ggml_add(ctx, out_, cpu_out_);
        }
    }
    if (scale) {
        ggml_tensor * s = ggml_reshape_3d(ctx, scale, 1, scale->ne[0], 1);
        s = ggml_repeat_4d(ctx, s, 1, scale->ne[0], x->ne[2], 1);
        y = ggml_mul(ctx, y, ggml_get_rows(ctx, s, ids_));
    }
    return y;
}

ggml_tensor * hobbit_moe::kept_ids() const {
    return ggml_view_2d(g_.ctx0, route0_, route0_->ne[0], route0_->ne[1], route0_->nb[1], 2 * route0_->nb[2]);
}
