#include "hobbit-router.h"

#include "hobbit-cpu.h"

#include "ggml-cpu.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <exception>
#include <numeric>

const uint8_t * hobbit_gates::data(const ggml_tensor * t) {
    if (!t->buffer) {
        return nullptr;
    }
    if (ggml_backend_buffer_is_host(t->buffer)) {
        return (const uint8_t *) t->data;
    }
    ggml_backend_dev_t dev = ggml_backend_buft_get_device(ggml_backend_buffer_get_type(t->buffer));
    if (!dev || ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_CPU) {
        return nullptr; // repacked weights: their bytes are nobody else's business
    }
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<uint8_t> & copy = copies_[t];
    if (copy.empty()) {
        copy.resize(ggml_nbytes(t));
        ggml_backend_tensor_get(t, copy.data(), 0, copy.size());
    }
    return copy.data();
}

static float gated(llama_expert_gating_func_type gating, float logit) {
    switch (gating) {
        case LLAMA_EXPERT_GATING_FUNC_TYPE_SIGMOID:       return 1.0f / (1.0f + std::exp(-logit));
        case LLAMA_EXPERT_GATING_FUNC_TYPE_SQRT_SOFTPLUS: return std::sqrt(logit > 20.0f ? logit : std::log1p(std::exp(logit)));
        default:                                          return logit;
    }
}

// Sum to 1 over n values.
static void soft_max(float * x, int n) {
    const float most = *std::max_element(x, x + n);
    float sum = 0.0f;
    for (int i = 0; i < n; ++i) {
        sum += x[i] = std::exp(x[i] - most);
    }
    for (int i = 0; i < n; ++i) {
        x[i] /= sum;
    }
}

// As build_moe_ffn: a group is as good as its two best experts together.
static void mask_groups(std::vector<float> & selection, int n_groups, int n_group_used) {
    const int size = (int) selection.size() / n_groups;
    std::vector<float> best(n_groups);
    for (int g = 0; g < n_groups; ++g) {
        std::vector<float> mine(selection.begin() + g * size, selection.begin() + (g + 1) * size);
        std::partial_sort(mine.begin(), mine.begin() + std::min(2, size), mine.end(), std::greater<float>());
        best[g] = mine[0] + (size > 1 ? mine[1] : 0.0f);
    }
    std::vector<int> order(n_groups);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return best[a] > best[b]; });
    for (int i = n_group_used; i < n_groups; ++i) {
        std::fill_n(selection.begin() + order[i] * size, size, -INFINITY);
    }
}

bool hobbit_next_routers::choose(int layer, int32_t * experts, float * weights) {
    const hobbit_router & r = routers_[layer];
    const int n_used = h_.engine->layout().layers[layer].n_used;
    if (!r.gate || r.gate->ne[0] != n_in_ || r.gate->ne[1] < n_used) {
        return false;
    }
    const uint8_t * gate = h_.gates->data(r.gate);
    const auto floats = [&](const ggml_tensor * t) { return t && t->type == GGML_TYPE_F32 ? (const float *) h_.gates->data(t) : nullptr; };
    const float * gate_b  = floats(r.gate_b);
    const float * probs_b = floats(r.probs_b);
    if (!gate || (r.gate_b && !gate_b) || (r.probs_b && !probs_b)) {
        return false;
    }
    const int n_expert = (int) r.gate->ne[1];
    const ggml_type_traits_cpu * traits = hobbit_cpu_traits(r.gate->type);
    const ggml_type_traits_cpu * to     = hobbit_cpu_traits(traits->vec_dot_type);
    std::vector<uint8_t> row(traits->vec_dot_type == GGML_TYPE_F32 ? 0 : ggml_row_size(traits->vec_dot_type, n_in_));
    std::vector<float> probs(n_expert), selection(n_expert);
    std::vector<int>   order(n_expert);
    for (int t = 0; t < n_tokens_; ++t) {
        const float * x = (const float *) ((const char *) x_ + t * stride_);
        const void * from = x;
        if (!row.empty()) {
            to->from_float(x, row.data(), n_in_);
            from = row.data();
        }
        for (int e = 0; e < n_expert; ++e) {
            traits->vec_dot((int) n_in_, &probs[e], 0, gate + e * r.gate->nb[1], 0, from, 0, 1);
            probs[e] += gate_b ? gate_b[e] : 0.0f;
        }
        if (std::any_of(probs.begin(), probs.end(), [](float p) { return !std::isfinite(p); })) {
            return false;
        }
        selection = probs; // logits so far
        if (r.gating == LLAMA_EXPERT_GATING_FUNC_TYPE_SOFTMAX) {
            soft_max(probs.data(), n_expert);
        } else {
            std::transform(probs.begin(), probs.end(), probs.begin(), [&](float p) { return gated(r.gating, p); });
        }
        if (!r.by_logits) {
            selection = probs;
        }
        for (int e = 0; probs_b && e < n_expert; ++e) {
            selection[e] += probs_b[e];
        }
        if (r.n_groups > 1) {
            mask_groups(selection, r.n_groups, r.n_group_used);
        }
        std::iota(order.begin(), order.end(), 0);
        std::partial_sort(order.begin(), order.begin() + n_used, order.end(),
                          [&](int a, int b) { return selection[a] != selection[b] ? selection[a] > selection[b] : a < b; });
        for (int i = 0; i < n_used; ++i) {
            experts[(size_t) t * n_used + i] = order[i];
            weights[(size_t) t * n_used + i] = probs[order[i]];
        }
        if (r.gating == LLAMA_EXPERT_GATING_FUNC_TYPE_SOFTMAX_WEIGHT) {
            soft_max(weights + (size_t) t * n_used, n_used);
        }
    }
    return true;
}

static void lean(ggml_tensor * dst, const hobbit_lean_op & op) {
    const int n = (int) dst->ne[0];
    std::vector<float> bonus(n);
    std::vector<int> before(n), after(n);
    for (int64_t t = 0; t < dst->ne[1]; ++t) {
        const auto row = [&](const ggml_tensor * x) { return (const float *) ((const char *) x->data + t * x->nb[1]); };
        const float * selection = row(dst->src[0]);
        const float * logits    = row(dst->src[1]);
        const float * probs     = row(dst->src[2]);
        float * out = (float *) ((char *) dst->data + t * dst->nb[1]);
        if (std::any_of(selection, selection + n, [](float s) { return std::isnan(s); })) {
            std::copy_n(selection, n, out); // nothing can be put in order
            continue;
        }
        op.engine->lean(op.layer, logits, bonus.data());
        const int best = (int) (std::max_element(selection, selection + n) - selection);
        for (int e = 0; e < n; ++e) {
            const float more = bonus[e] == 0.0f || e == best ? 0.0f
                             : op.by_logits ? bonus[e]
                             : op.gating == LLAMA_EXPERT_GATING_FUNC_TYPE_SOFTMAX ? probs[e] * std::expm1(bonus[e])
                             : gated(op.gating, logits[e] + bonus[e]) - gated(op.gating, logits[e]);
            out[e] = selection[e] + more;
        }
        const float most = *std::max_element(out, out + n);
        if (most > out[best]) {
            out[best] = std::nextafter(most, INFINITY);
        }
        const auto choose = [&](const float * score, std::vector<int> & order) {
            std::iota(order.begin(), order.end(), 0);
            std::partial_sort(order.begin(), order.begin() + op.n_used, order.end(), [&](int a, int b) { return score[a] != score[b] ? score[a] > score[b] : a < b; });
            std::sort(order.begin(), order.begin() + op.n_used);
        };
        choose(selection, before);
        choose(out, after);
        const auto end = after.begin() + op.n_used;
        op.engine->leaned(op.layer, (int) std::count_if(after.begin(), end, [&](int e) { return !std::binary_search(before.begin(), before.begin() + op.n_used, e); }));
    }
}

// An exception (there is no memory, say) must not pass through ggml.
static void compute_lean(ggml_tensor * dst, int ith, int, void * userdata) {
    if (ith != 0) {
        return;
    }
    const auto & op = *(const hobbit_lean_op *) userdata;
    try {
        lean(dst, op);
    } catch (const std::exception & e) {
        op.engine->fail(e);
        memcpy(dst->data, dst->src[0]->data, ggml_nbytes(dst)); // both are contiguous
    }
}

ggml_tensor * hobbit_lean(ggml_context * ctx, hobbit_lean_op & op, ggml_tensor * selection, ggml_tensor * logits, ggml_tensor * probs) {
    ggml_tensor * args[3] = { selection, logits, probs };
    for (ggml_tensor *& t : args) {
        t = ggml_is_contiguous(t) ? t : ggml_cont(ctx, t);
    }
    return ggml_custom_4d(ctx, GGML_TYPE_F32, selection->ne[0], selection->ne[1], 1, 1, args, 3, compute_lean, 1, &op);
}
