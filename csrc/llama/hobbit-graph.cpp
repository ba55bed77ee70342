#include "hobbit-graph.h"

#include "hobbit-cpu.h"
#include "hobbit-route.h"

#include "llama-graph.h"
#include "llama-model.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <exception>

// One call of build_moe_ffn and one wave, for the custom operations. Lives as long as the graph.
struct hobbit_graph_node {
    hobbit * h;
    hob::engine * engine;
    class hobbit_graph_input * input;
    void * compute;
    int  layer;
    int  wave;
    int  n_waves;
    int  n_used;
    int  n_tokens;
    bool at_once;
    bool by_expert;
    bool predicts;
    int64_t n_in; // values of one token in the layer's input
};

// What the route operations of one graph need beside their tensors: the sequences of the ubatch. Filled in before
// every run.
class hobbit_graph_input : public llm_graph_input_i {
  public:
    hobbit_graph_input(const void * context, uint32_t n_tokens) : context(context), n_tokens(n_tokens) {}

    void set_input(const llama_ubatch * ubatch) override {
        seq.resize(ubatch->n_tokens);
        pos.resize(ubatch->n_tokens);
        for (uint32_t i = 0; i < ubatch->n_tokens; ++i) {
            seq[i] = ubatch->n_seq_id && ubatch->n_seq_id[i] > 0 ? ubatch->seq_id[i][0] : 0;
            pos[i] = ubatch->pos ? ubatch->pos[i] : 0;
        }
        outputs.clear();
        for (uint32_t i = 0; i < ubatch->n_tokens; ++i) {
            if (ubatch->output && ubatch->output[i]) {
                outputs.push_back((int32_t) i);
            }
        }
        fresh = true;
        for (const auto & r : resident) {
            r.engine->count_resident(r.layer, r.n_tokens, r.n_used);
        }
    }

    // the number of waves follows from the number of tokens; somebody may have begun to listen to the routing
    bool can_reuse(const llm_graph_params & params) override {
        for (const auto & r : routed) {
            if (r.engine->resident(r.layer)) {
                return false;
            }
        }
        for (const auto & r : resident) {
            if (!r.engine->resident(r.layer)) {
                return false;
            }
        }
        return params.ubatch.n_tokens == n_tokens;
    }

    struct place { hob::engine * engine; int layer; int n_used; int n_tokens; };

    const void * context;
    uint32_t n_tokens;
    bool fresh = false;
    int  n_first = 0; // tokens of the first layer
    std::vector<int32_t> seq;
    std::vector<int32_t> pos;
    std::vector<int32_t> outputs; // tokens that give logits: the last layer is often computed for these alone
    std::vector<place> routed;
    std::vector<place> resident;
    std::deque<hobbit_graph_node> nodes; // userdata of the operations: addresses must not move
    std::deque<hobbit_cpu_op>     cpu_ops;
    std::deque<hobbit_lean_op>    lean_ops;
    std::vector<hobbit_router>    routers; // [layer]

    // scratch of the running operation
    std::vector<int32_t> experts;
    std::vector<float>   weights;
    std::vector<int32_t> seq_here;
    std::vector<int32_t> pos_here;
};

namespace {

// Up to so many the CPU computes with slots in hobbit_cpu_product, whose bits are those of ggml's products: of experts with
// eight rows and more ggml has other kernels, faster ones.
constexpr int FEW_TOKENS = 4;

void route(ggml_tensor * dst, const hobbit_graph_node & node) {
    hobbit_graph_input & in = *node.input;
    const int n_used   = node.n_used;
    const int n_tokens = node.n_tokens;
    const size_t n = (size_t) n_used * n_tokens;

    hob::route_request req = {};
    req.layer    = node.layer;
    req.n_tokens = n_tokens;
    req.n_used   = n_used;
    req.n_waves  = node.n_waves;
    req.compute  = node.compute;
    if (node.wave == 0) {
        in.experts.resize(n);
        in.weights.resize(n);
        if (node.at_once) {
            for (int t = 0; t < n_tokens; ++t) { // src 0: [n_in | n_used experts | n_used weights] a token
                const float * x = (const float *) ((const char *) dst->src[0]->data + t * dst->src[0]->nb[1]) + node.n_in;
                for (int r = 0; r < n_used; ++r) {
                    in.experts[(size_t) t * n_used + r] = (int32_t) x[r];
                    in.weights[(size_t) t * n_used + r] = x[n_used + r];
                }
            }
        } else {
            const ggml_tensor * ids = dst->src[0]; // [n_used, n_tokens], a view into the sorted experts
            const ggml_tensor * w   = dst->src[1]; // n_used*n_tokens values, contiguous
            for (int t = 0; t < n_tokens; ++t) {
                for (int r = 0; r < n_used; ++r) {
                    in.experts[(size_t) t * n_used + r] = *(const int32_t *) ((const char *) ids->data + t * ids->nb[1] + r * ids->nb[0]);
                }
            }
            std::copy_n((const float *) w->data, n, in.weights.begin());
        }
        in.n_first  = in.fresh ? n_tokens : in.n_first;
        req.experts = in.experts.data();
        req.weights = in.weights.data();
        req.context = in.context;
        req.seq     = in.seq.data();
        req.pos     = in.pos.data();
        if ((size_t) n_tokens != in.seq.size()) {
            in.outputs.resize(n_tokens, in.outputs.empty() ? 0 : in.outputs.back()); // as many, in all graphs that are known
            in.seq_here.resize(n_tokens);
            in.pos_here.resize(n_tokens);
            for (int t = 0; t < n_tokens; ++t) {
                in.seq_here[t] = in.seq[in.outputs[t]];
                in.pos_here[t] = in.pos[in.outputs[t]];
            }
            req.seq    = in.seq_here.data();
            req.pos    = in.pos_here.data();
            req.tokens = n_tokens == in.n_first ? nullptr : in.outputs.data();
        }
        req.first   = in.fresh;
        in.fresh    = false;
    }
    const ggml_tensor * x = node.at_once ? dst->src[0] : dst->src[2]; // a row of n_in values and more a token
    hobbit_next_routers next(*node.h, in.routers, node.predicts ? (const float *) x->data : nullptr, node.predicts ? x->nb[node.at_once ? 1 : 2] : 0, node.n_in, n_tokens);
    if (node.predicts && node.wave == 0) {
        req.next = &next;
    }
    if (node.by_expert) {
        const auto table = [&](int i) { return (int32_t *) dst->data + i * dst->ne[0]; };
        hob::route_result out = { table(PLANE_HIGH), table(PLANE_LOW), table(PLANE_KEPT) };
        out.by_expert = true;
        node.engine->route(req, node.wave, out);
        return;
    }
    const auto at = [&](int i) { return (int32_t *) dst->data + i * n; };
    node.engine->route(req, node.wave, { at(PLANE_HIGH), at(PLANE_LOW), at(PLANE_KEPT), { at(PLANE_CPU_HIGH), at(PLANE_CPU_LOW) },
                                         at(PLANE_UNITS), at(PLANE_TAIL) });
    if (node.at_once) {
        for (int w = 1; w < node.n_waves; ++w) {
            node.engine->route(req, w, { at(PLANE_HIGH_1), at(PLANE_LOW_1), nullptr, { nullptr, nullptr }, nullptr, nullptr });
        }
    }
}

// An exception (there is no memory, say) must not pass through ggml.
void compute_route(ggml_tensor * dst, int ith, int, void * userdata) {
    if (ith != 0) {
        return;
    }
    const auto & node = *(const hobbit_graph_node *) userdata;
    try {
        route(dst, node);
    } catch (const std::exception & e) {
        node.engine->fail(e);
        int32_t * out = (int32_t *) dst->data;
        std::fill_n(out, ggml_nelements(dst), -1); // no expert
        if (!node.by_expert) {
            const int64_t n = (int64_t) node.n_used * node.n_tokens;
            std::fill_n(out + PLANE_UNITS * n, n, 0);
            std::fill_n(out + PLANE_TAIL * n, n, 0);
        }
    }
}

// The device's next work starts when the wave's experts are there.
void compute_arrive(ggml_tensor * dst, int ith, int, void * userdata) {
    if (ith == 0) {
        const auto & node = *(const hobbit_graph_node *) userdata;
        node.engine->arrive(node.wave, node.compute);
        *(int32_t *) dst->data = node.wave;
    }
}

// The layer's input, for the CPU's part.
void compute_input(ggml_tensor * dst, int ith, int, void *) {
    if (ith == 0) {
        memcpy(dst->data, dst->src[0]->data, ggml_nbytes(dst));
    }
}

void compute_late(ggml_tensor * dst, int ith, int, void * userdata) {
    if (ith != 0) {
        return;
    }
    const auto & node = *(const hobbit_graph_node *) userdata;
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

// Of the graph that is being built.
hobbit_graph_input & input_of(const llm_graph_context & g) {
    for (const auto & i : g.res->inputs) {
        if (auto * found = dynamic_cast<hobbit_graph_input *>(i.get())) {
            return *found;
        }
    }
    // the CPU back end is the context's own: it tells contexts with the same sequence numbers apart
    return *(hobbit_graph_input *) g.res->add_input(std::make_unique<hobbit_graph_input>(g.backend_cpu, g.ubatch.n_tokens));
}

} // namespace

hobbit_moe::hobbit_moe(const llm_graph_context & g, const ggml_tensor * exps, ggml_tensor * ids, ggml_tensor * weights)
    : g_(g), h_(offloaded_by(exps)), ids_(ids), weights_(weights) {
    if (!h_) {
        return;
    }
    hob::engine & e = *h_->engine;
    const int n_used   = (int) ids->ne[0];
    const int n_tokens = (int) ids->ne[1];
    layer_ = h_->find(exps).layer;
    const int gi = e.layout().layers[layer_].group;
    const hob::group_layout & group = e.layout().groups[gi];
    banks_    = &h_->banks[gi];
    resident_ = e.resident(layer_);
    input_ = &input_of(g);
    (resident_ ? input_->resident : input_->routed).push_back({ &e, layer_, n_used, n_tokens });
    if (resident_) {
        return;
    }
    n_waves_  = e.waves(layer_, n_tokens, n_used);
    at_once_  = e.at_once(layer_, n_tokens, n_used);
    has_cpu_  = e.has_cpu_part(layer_, n_tokens);
    uses_low_ = e.uses_low(layer_, n_tokens, n_used);
    divided_  = has_cpu_ && group.n_units > 1;
    by_expert_ = group.has_link() && !at_once_ && !has_cpu_;
    cpu_pass_ = !has_cpu_ ? -1 : at_once_ ? n_waves_ : 1;
    if (group.has_link()) {
        for (int i = 0; i < ggml_backend_sched_get_n_backends(g.sched); ++i) {
            ggml_backend_t b = ggml_backend_sched_get_backend(g.sched, i);
            if (ggml_backend_get_device(b) == banks_->dev) {
                compute_ = b;
            }
        }
        GGML_ASSERT(compute_ && "the context has no back end for the device of the expert slots");
    }
}

void hobbit_moe::set_router(const ggml_tensor * gate, const ggml_tensor * gate_b, const ggml_tensor * probs_b, llama_expert_gating_func_type gating) {
    // Llama 4 weighs the input first; GroveMoE routes to groups
    if (!h_ || resident_ || g_.arch == LLM_ARCH_LLAMA4 || g_.arch == LLM_ARCH_GROVEMOE) {
        return;
    }
    input_->routers.resize(h_->engine->layout().layers.size());
    input_->routers[layer_] = { gate, gate_b, probs_b, gating, false, (int) std::max(1u, g_.hparams.n_expert_groups), (int) g_.hparams.n_group_used };
}

ggml_tensor * hobbit_moe::lean(const llm_graph_context & g, const ggml_tensor * exps, ggml_tensor * selection, ggml_tensor * logits, ggml_tensor * probs,
                               llama_expert_gating_func_type gating, int64_t n_used) {
    hobbit * h = offloaded_by(exps);
    if (!h || !h->engine->leans((int) selection->ne[1])) {
        return selection;
    }
    const int layer = h->find(exps).layer;
    if (h->engine->resident(layer) || selection->ne[0] != h->engine->layout().layers[layer].n_expert) {
        return selection;
    }
    hobbit_lean_op & op = input_of(g).lean_ops.emplace_back();
    op = { h->engine.get(), layer, (int) n_used, g.arch == LLM_ARCH_LLAMA4 || gating == LLAMA_EXPERT_GATING_FUNC_TYPE_SOFTMAX_WEIGHT,
           g.arch == LLM_ARCH_GROVEMOE ? LLAMA_EXPERT_GATING_FUNC_TYPE_SIGMOID : gating };
    return hobbit_lean(g.ctx0, op, selection, logits, probs);
}

ggml_tensor * hobbit_moe::begin_pass(int pass, ggml_tensor * x) {
    if (!h_ || resident_) {
        return x;
    }
    pass_ = pass;
    early_ = nullptr;
    if (pass == cpu_pass_) {
        return x;
    }
    wave_ = cpu_pass_ >= 0 && pass > cpu_pass_ ? pass - 1 : pass;
    begin_wave(x);
    return x;
}

void hobbit_moe::begin_wave(ggml_tensor * x) {
    ggml_context * ctx = g_.ctx0;
    const int64_t n_used   = ids_->ne[0];
    const int64_t n_tokens = ids_->ne[1];
    const bool predicts = wave_ == 0 && h_->engine->predicts((int) n_tokens) && x->ne[1] == 1 && !input_->routers.empty();
    input_->nodes.push_back({ h_, h_->engine.get(), input_, compute_, layer_, wave_, n_waves_, (int) n_used, (int) n_tokens, at_once_, by_expert_, predicts,
                               x->ne[0] * x->ne[1] });
    node_ = &input_->nodes.back();

    if (at_once_ && wave_ > 0) {
        ggml_build_forward_expand(g_.gf, ggml_custom_4d(ctx, GGML_TYPE_I32, 1, 1, 1, 1, &route0_, 1, compute_arrive, 1, node_));
        return;
    }
    ggml_tensor * args[3] = { ids_, weights_, nullptr };
    int n_args = 2;
    if (predicts && !at_once_) {
        args[n_args++] = ggml_is_contiguous(x) ? x : ggml_cont(ctx, x); // [n_in, 1, n_tokens]
    }
    if (at_once_) {
        pack_ = ggml_reshape_2d(ctx, ggml_is_contiguous(x) ? x : ggml_cont(ctx, x), node_->n_in, n_tokens);
        pack_ = ggml_concat(ctx, pack_, ggml_cast(ctx, ids_, GGML_TYPE_F32), 0);
        pack_ = ggml_concat(ctx, pack_, ggml_reshape_2d(ctx, ggml_is_contiguous(weights_) ? weights_ : ggml_cont(ctx, weights_), n_used, n_tokens), 0);
        args[0] = pack_;
        n_args  = 1;
    } else if (wave_ > 0) {
        // after the rows of the wave before: its slots are free then
        args[0] = route0_;
        args[1] = ggml_view_1d(ctx, out_, 1, 0);
    } else {
        args[1] = ggml_is_contiguous(weights_) ? weights_ : ggml_cont(ctx, weights_);
    }
    if (by_expert_ && wave_ == 0) {
        flat_ids_ = ggml_reshape_1d(ctx, ggml_is_contiguous(ids_) ? ids_ : ggml_cont(ctx, ids_), n_used * n_tokens);
    }
    if (by_expert_) {
        const int64_t n_expert = h_->engine->layout().layers[layer_].n_expert;
        route_ = ggml_custom_4d(ctx, GGML_TYPE_I32, n_expert, N_TABLES, 1, 1, args, n_args, compute_route, 1, node_);
    } else {
        route_ = ggml_custom_4d(ctx, GGML_TYPE_I32, n_used, n_tokens, N_PLANES, 1, args, n_args, compute_route, 1, node_);
    }
    // plan before anything else of the layer
    ggml_build_forward_expand(g_.gf, route_);
    if (compute_) {
        dev_  = ggml_cont(ctx, route_); // crosses as a whole
        late_ = nullptr;
        if (by_expert_) {
            for (int c = 0; c < hob::N_COPIES; ++c) {
                wave_ids_[c] = looked_up(dev_, PLANE_HIGH + c);
            }
        }
        if (at_once_ && n_waves_ == 1) {
            // only now: the scheduler waits for all that the device has been given before it copies the ids
            ggml_build_forward_expand(g_.gf, dev_);
            ggml_build_forward_expand(g_.gf, ggml_custom_4d(ctx, GGML_TYPE_I32, 1, 1, 1, 1, &route_, 1, compute_arrive, 1, node_));
        }
    } else {
        dev_  = route_;
        late_ = ggml_custom_4d(ctx, GGML_TYPE_I32, n_used, n_tokens, 2, 1, &route_, 1, compute_late, 1, node_);
    }
    if (wave_ == 0) {
        route0_ = route_;
        dev0_   = dev_;
        x_rows_ = x->ne[1];
        if (has_cpu_ && !at_once_) { // copied with the router's choice, before the device is given more work
            ggml_tensor * from = ggml_is_contiguous(x) ? x : ggml_cont(ctx, x);
            cpu_x_ = ggml_custom_4d(ctx, GGML_TYPE_F32, x->ne[0], x->ne[1], x->ne[2], 1, &from, 1, compute_input, 1, node_);
            ggml_build_forward_expand(g_.gf, cpu_x_);
        }
    }
}

// The CPU's part, or few tokens with slots in host memory: gate and up (and both copies) in one operation, down in another.
ggml_tensor * hobbit_moe::cpu_product(int proj, ggml_tensor * x, bool down) {
    ggml_context * ctx = g_.ctx0;
    const hob::group_layout & group = h_->engine->layout().groups[h_->engine->layout().layers[layer_].group];
    const bool part = pass_ == cpu_pass_;
    if (down || !early_) {
        if (part && !down) { // brought over with the router's choice
            x = at_once_ ? pack_ : cpu_x_;
        }
        hobbit_cpu_op & op = input_->cpu_ops.emplace_back();
        op.engine   = h_->engine.get();
        op.timed    = part;
        op.down     = down;
        op.n_proj   = down ? 1 : group.n_proj - 1;
        op.inner    = part && divided_ ? group.n_units * group.unit : 0;
        op.plane    = part ? PLANE_CPU_HIGH : PLANE_HIGH;
        op.x_rows   = down ? x->ne[1] : x_rows_;
        op.x_stride = part && at_once_ && !down ? x->ne[0] : x->ne[0] * x->ne[1];
        for (int p = 0; p < op.n_proj; ++p) {
            for (int c = 0; c < hob::N_COPIES; ++c) {
                ggml_tensor * const * banks = part ? h_->host[layer_].tensor[c] : banks_->tensor[c];
                op.bank[p][c] = c == hob::COPY_LOW && !uses_low_ ? nullptr : banks[down ? group.n_proj - 1 : p];
            }
        }
        ggml_tensor * y = hobbit_cpu_product(ctx, op, ggml_is_contiguous(x) ? x : ggml_cont(ctx, x), part ? route0_ : down ? late_ : dev_,
                                             down && !part ? out_ : nullptr);
        // what is between the products follows them
        ggml_backend_sched_set_tensor_backend(g_.sched, y, g_.backend_cpu);
        ggml_build_forward_expand(g_.gf, y);
        if (down) {
            (part ? cpu_out_ : out_) = y;
            return y;
        }
        early_ = y;
    }
    return ggml_view_3d(ctx, early_, early_->ne[0], early_->ne[1], early_->ne[2], early_->nb[1], early_->nb[2], proj * early_->nb[3]);
}

ggml_tensor * hobbit_moe::plane(ggml_tensor * t, int i) const {
    return ggml_view_2d(g_.ctx0, t, t->ne[0], t->ne[1], t->nb[1], i * t->nb[2]);
}

ggml_tensor * hobbit_moe::looked_up(ggml_tensor * table, int i) const {
    ggml_context * ctx = g_.ctx0;
    ggml_tensor * rows = ggml_view_2d(ctx, table, 1, table->ne[0], table->nb[0], i * table->nb[1]);
    return ggml_reshape_2d(ctx, ggml_get_rows(ctx, rows, flat_ids_), ids_->ne[0], ids_->ne[1]);
}

ggml_tensor * hobbit_moe::product(const ggml_tensor * w, ggml_tensor * bank, ggml_tensor * x, ggml_tensor * ids, ggml_tensor * onto, bool down) const {
    ggml_tensor * r = ggml_mul_mat_id(g_.ctx0, bank, x, ids);
    if (!resident_) {
        ggml_mul_mat_id_set_skip(r, onto);
    }
    if (g_.prec_policy) {
        const auto it = g_.prec_policy->prec_src1.find(w);
        if (it != g_.prec_policy->prec_src1.end()) {
            ggml_prec_set_src(r, it->second, 1);
        }
    }
    if (down && g_.arch == LLM_ARCH_MISTRAL4) {
        ggml_prec_set_src(r, GGML_PREC_F32, 1); // as build_moe_ffn does
    }
    return r;
}

// As build_lora_mm_id does with a scale for each expert.
ggml_tensor * hobbit_moe::scaled(ggml_tensor * y, ggml_tensor * scale, int64_t n_tokens) const {
    ggml_context * ctx = g_.ctx0;
    ggml_tensor * s = ggml_reshape_3d(ctx, scale, 1, scale->ne[0], 1);
    s = ggml_repeat_4d(ctx, s, 1, scale->ne[0], n_tokens, 1);
    return ggml_mul(ctx, y, ggml_get_rows(ctx, s, ids_));
}

// With the slots of the running wave.
ggml_tensor * hobbit_moe::slot_products(const ggml_tensor * w, int proj, ggml_tensor * x, bool down) {
    ggml_context * ctx = g_.ctx0;
    if (down) {
        if (divided_) {
            ggml_tensor * u = plane(dev0_, PLANE_UNITS);
            ggml_tensor * heads = ggml_get_rows(ctx, banks_->heads, ggml_is_contiguous(u) ? ggml_reshape_1d(ctx, u, u->ne[0] * u->ne[1]) : u);
            x = ggml_mul(ctx, x, ggml_reshape_3d(ctx, heads, x->ne[0], x->ne[1], x->ne[2]));
        }
        ggml_build_forward_expand(g_.gf, x); // gate and up compute while down still loads
    }
    ggml_tensor * y = down ? out_ : nullptr;
    for (int c = 0; c < hob::N_COPIES; ++c) {
        ggml_tensor * bank = banks_->tensor[c][proj];
        if (!bank || (c == hob::COPY_LOW && !uses_low_)) {
            continue;
        }
        ggml_tensor * ids = by_expert_ ? wave_ids_[c] : at_once_ ? plane(dev0_, (wave_ == 0 ? PLANE_HIGH : PLANE_HIGH_1) + c)
                                   : plane(down && late_ ? late_ : dev_, PLANE_HIGH + c);
        y = product(w, bank, x, ids, y, down);
    }
    if (down) {
        out_ = y;
        ggml_build_forward_expand(g_.gf, y);
    }
    return y;
}

ggml_tensor * hobbit_moe::mul_mat_id(const ggml_tensor * w, ggml_tensor * x, ggml_tensor * scale) {
    ggml_context * ctx = g_.ctx0;
    const int proj = h_->find(w).proj;
    const hob::layer_layout & layer = h_->engine->layout().layers[layer_];
    const hob::group_layout & group = h_->engine->layout().groups[layer.group];
    const bool down   = proj + 1 == group.n_proj;
    const bool on_cpu = has_cpu_ && pass_ == cpu_pass_;

    if (resident_) {
        ggml_tensor * all = banks_->tensor[hob::COPY_HIGH][proj];
        ggml_tensor * mine = ggml_view_3d(ctx, all, all->ne[0], all->ne[1], layer.n_expert, all->nb[1], all->nb[2],
                                          (size_t) layer.in_group * layer.n_expert * all->nb[2]);
        ggml_tensor * y = product(w, mine, x, ids_, nullptr, down);
        return scale ? scaled(y, scale, x->ne[2]) : y;
    }

    ggml_tensor * y = nullptr;
    if (on_cpu || (!group.on_device && !has_cpu_ && x->ne[2] <= FEW_TOKENS)) {
        y = cpu_product(proj, x, down);
    } else {
        y = slot_products(w, proj, x, down);
    }
    if (down) {
        if (pass_ + 1 < n_passes()) {
            return y;
        }
        if (has_cpu_) {
            y = ggml_add(ctx, out_, cpu_out_);
        }
    }
    return scale ? scaled(y, scale, x->ne[2]) : y;
}

ggml_tensor * hobbit_moe::kept_ids() const { return resident_ ? ids_ : by_expert_ ? looked_up(dev0_, PLANE_KEPT) : plane(dev0_, PLANE_KEPT); }
