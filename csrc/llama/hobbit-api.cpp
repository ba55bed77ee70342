// hobbit-api.cpp - the C API (hobbit.h) over hobbit-model and the engine.

#include "hobbit.h"

#include "environment.h"
#include "hobbit-model.h"

#include "llama-impl.h"
#include "llama-model.h"

#include <cmath>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <vector>

#if !defined(_WIN32)
extern char ** environ;
#endif

int hobbit_measure_file(const std::string & path, int n_used_override, hobbit_info & out); // hobbit-model.cpp

namespace {

thread_local std::string   last_error;
thread_local hobbit_params load_params;
thread_local bool          have_load_params = false;

int fail(const std::string & why) {
    last_error = why;
    return -1;
}

// An exception (there is no memory, say) must not pass through C. f gives why it failed, or "".
template <class F> int guarded(const F & f) {
    try {
        const std::string err = f();
        return err.empty() ? 0 : fail(err);
    } catch (const std::exception & e) {
        return fail(hob::reason(e));
    }
}

std::string number(double x) {
    char buf[32];
    snprintf(buf, sizeof(buf), "%g", x);
    return buf;
}

std::string check_thresholds(float t1, float t2) {
    if (!(t1 >= 0.0f) || !std::isfinite(t1)) {
        return "t1 is " + number(t1) + ": it must be a number of at least 0 (1 or more turns mixed precision off)";
    }
    if (!(t2 >= t1) && t1 < 1.0f) {
        return "t2 is " + number(t2) + ": it must be at least t1 (" + number(t1) + ")";
    }
    return "";
}

std::string check_policy(int32_t policy, const float * w) {
    if (policy < HOBBIT_POLICY_LRU || policy > HOBBIT_POLICY_FOLLOW) {
        return "policy is " + std::to_string(policy) + ": known are 0 (lru), 1 (lfu), 2 (hobbit), 3 (lcu), 4 (follow)";
    }
    if (w) {
        float sum = 0.0f;
        for (int i = 0; i < 4; ++i) {
            if (!(w[i] >= 0.0f) || !std::isfinite(w[i])) {
                return "policy_weights[" + std::to_string(i) + "] is " + number(w[i]) + ": weights must be numbers of at least 0";
            }
            sum += w[i];
        }
        if (!(sum > 0.0f)) {
            return "policy_weights are all 0: at least one must be larger";
        }
    }
    return "";
}

std::string check(const hobbit_params & p) {
    std::string err = check_thresholds(p.t1, p.t2);
    if (err.empty()) {
        err = check_policy(p.policy, p.policy_weights);
    }
    if (!err.empty()) {
        return err;
    }
    if (p.n_io_threads < 1 || p.n_io_threads > 64) {
        return "n_io_threads is " + std::to_string(p.n_io_threads) + ": it must be 1 to 64";
    }
    if (p.miss < HOBBIT_MISS_FETCH || p.miss > HOBBIT_MISS_AUTO) {
        return "miss is " + std::to_string(p.miss) + ": known are 0 (fetch), 1 (cpu), 2 (auto)";
    }
    if (p.host_copies < HOBBIT_HOST_OFF || p.host_copies > HOBBIT_HOST_SOME) {
        return "host_copies is " + std::to_string(p.host_copies) + ": known are 0 (off), 1 (on), 2 (auto), 3 (some)";
    }
    if (p.miss == HOBBIT_MISS_CPU && (p.host_copies == HOBBIT_HOST_OFF || p.host_copies == HOBBIT_HOST_SOME)) {
        return "miss is cpu, but host_copies is " + std::string(p.host_copies == HOBBIT_HOST_OFF ? "off" : "a part") +
               ": the CPU computes from copies in host memory and needs them all";
    }
    if (p.admit < HOBBIT_ADMIT_NEVER || p.admit > HOBBIT_ADMIT_OFTEN) {
        return "admit is " + std::to_string(p.admit) + ": known are 0 (never), 1 (free), 2 (often)";
    }
    if (p.preload < HOBBIT_PRELOAD_OFF || p.preload > HOBBIT_PRELOAD_AUTO) {
        return "preload is " + std::to_string(p.preload) + ": known are 0 (off), 1 (on), 2 (auto)";
    }
    if (p.unified < HOBBIT_UNIFIED_OFF || p.unified > HOBBIT_UNIFIED_AUTO) {
        return "unified is " + std::to_string(p.unified) + ": known are 0 (off), 1 (on), 2 (auto)";
    }
    if (p.unified == HOBBIT_UNIFIED_ON && (p.host_copies == HOBBIT_HOST_ON || p.host_copies == HOBBIT_HOST_SOME || p.miss == HOBBIT_MISS_CPU)) {
        return std::string("unified is on, but ") + (p.miss == HOBBIT_MISS_CPU ? "miss is cpu" : "host_copies is") +
               ": where CPU and GPU share their memory there are no copies beside the slots";
    }
    if (p.verify != 0 && p.verify != 1) {
        return "verify is " + std::to_string(p.verify) + ": known are 0 (off), 1 (on)";
    }
    if (p.cpu_batch < 1 || p.cpu_batch > 512) {
        return "cpu_batch is " + std::to_string(p.cpu_batch) + ": it must be 1 to 512";
    }
    if (!(p.link_speed >= 0.0) || !(p.cpu_speed >= 0.0) || std::isinf(p.link_speed) || std::isinf(p.cpu_speed) || (p.link_speed > 0.0) != (p.cpu_speed > 0.0)) {
        return "link_speed is " + number(p.link_speed) + " and cpu_speed " + number(p.cpu_speed) + ": give both in bytes/s, or 0 for both";
    }
    if (p.budget_kind < HOBBIT_BUDGET_BYTES || p.budget_kind > HOBBIT_BUDGET_DEVICE) {
        return "budget_kind is " + std::to_string(p.budget_kind) + ": known are 0 to 4";
    }
    if (p.budget_kind == HOBBIT_BUDGET_FRACTION && !(p.cache_fraction >= 0.0 && p.cache_fraction <= 1.0)) {
        return "cache_fraction is " + number(p.cache_fraction) + ": it must be 0 to 1";
    }
    if (!(p.skip_mass >= 0.0f)) {
        return "skip_mass is " + number(p.skip_mass) + ": it must be at least 0 (1 or more: no bound)";
    }
    if (!(p.lean >= 0.0f && p.lean <= 1.0f)) {
        return "lean is " + number(p.lean) + ": it must be 0 (off) to 1";
    }
    if (p.prefetch < HOBBIT_PREFETCH_AUTO || p.prefetch > hob::MAX_AHEAD) {
        return "prefetch is " + std::to_string(p.prefetch) + ": it must be 0 (off) to 3 layers, or -1 (auto)";
    }
    if (p.prefetch_copy < HOBBIT_PREFETCH_RULE || p.prefetch_copy > HOBBIT_PREFETCH_HIGH) {
        return "prefetch_copy is " + std::to_string(p.prefetch_copy) + ": known are 0 (rule), 1 (low), 2 (high)";
    }
    if (p.prefetch != 0 && p.prefetch_copy == HOBBIT_PREFETCH_LOW && p.t1 >= 1.0f) {
        return "prefetch_copy is low, but with t1 " + number(p.t1) + " every expert is wanted at high precision: nothing would be prefetched";
    }
    if (p.prefetch_ranks < 0) {
        return "prefetch_ranks is " + std::to_string(p.prefetch_ranks) + ": it must be at least 0 (all)";
    }
    if (!(p.low_fraction >= 0.0f && p.low_fraction <= 1.0f)) {
        return "low_fraction is " + number(p.low_fraction) + ": it must be 0 to 1";
    }
    return "";
}

const char * const * variables() {
#if defined(_WIN32)
    return _environ;
#else
    return environ;
#endif
}

} // namespace

const hobbit_params & hobbit_load_params() {
    if (!have_load_params) {
        hobbit_default_params(&load_params);
        std::vector<std::string> used, unknown;
        std::string err = hob::from_environment(variables(), load_params, used, unknown);
        if (err.empty() && !(err = check(load_params)).empty()) {
            err = "settings of the environment (HOBBIT_...): " + err;
        }
        if (!err.empty()) {
            throw std::runtime_error(err);
        }
        for (const std::string & name : unknown) {
            LLAMA_LOG_WARN("%s: %s has no effect: there is no such setting\n", __func__, name.c_str());
        }
        for (const std::string & x : used) {
            LLAMA_LOG_INFO("%s: %s\n", __func__, x.c_str());
        }
    }
    return load_params;
}

void hobbit_set_last_error(const std::string & why) { last_error = why; }

extern "C" {

uint32_t hobbit_api_version(void) { return HOBBIT_API_VERSION; }

const char * hobbit_build_info(void) { return "hobbit-cpp " HOBBIT_VERSION ", llama.cpp " HOBBIT_LLAMA_COMMIT; }

const char * hobbit_last_error(void) { return last_error.c_str(); }

void hobbit_default_params(struct hobbit_params * p) {
    *p = {};
    p->t1             = 0.6f;
    p->t2             = 1.0f; // skips cost more quality than bytes unless a profile says otherwise
    p->policy         = HOBBIT_POLICY_HOBBIT;
    for (float & w : p->policy_weights) {
        w = 0.25f;
    }
    p->budget_kind    = HOBBIT_BUDGET_FRACTION;
    p->cache_fraction = 0.25;
    p->n_io_threads   = 4;
    p->direct_io      = 1;
    p->miss           = HOBBIT_MISS_AUTO;
    p->host_copies    = HOBBIT_HOST_AUTO;
    p->admit          = HOBBIT_ADMIT_OFTEN;
    p->preload        = HOBBIT_PRELOAD_AUTO;
    p->cpu_batch      = 16;
    p->skip_mass      = 1.0f;
    p->prefetch_ranks   = 1;
    p->prefetch_prompts = 1;
    p->unified        = HOBBIT_UNIFIED_AUTO;
}

int hobbit_check_params(const struct hobbit_params * p) {
    const std::string err = check(*p);
    return err.empty() ? 0 : fail(err);
}

int hobbit_set_load_params(const struct hobbit_params * p) {
    last_error.clear();
    if (!p) {
        have_load_params = false;
        return 0;
    }
    const std::string err = check(*p);
    if (!err.empty()) {
        return fail(err);
    }
    load_params      = *p;
    have_load_params = true;
    return 0;
}

int hobbit_probe(const char * path, int32_t n_expert_used, struct hobbit_info * info) {
    try {
        return hobbit_measure_file(path, n_expert_used, *info);
    } catch (const std::exception & e) {
        return fail(e.what());
    }
}

struct hobbit * hobbit_from_model(const struct llama_model * model) { return model && model->offload && model->offload->engine ? model->offload.get() : nullptr; }

int hobbit_set_thresholds(struct hobbit * h, float t1, float t2) {
    const std::string err = check_thresholds(t1, t2);
    if (!err.empty()) {
        return fail(err);
    }
    h->engine->set_thresholds(t1, t2);
    return 0;
}

int hobbit_set_policy(struct hobbit * h, int32_t policy, const float * weights) {
    const std::string err = check_policy(policy, weights);
    if (!err.empty()) {
        return fail(err);
    }
    if (policy == HOBBIT_POLICY_FOLLOW && !h->engine->learns()) {
        return fail("policy follow learns from the load on, in memory that is part of the budget: load the model with it");
    }
    return guarded([&] {
        h->engine->set_policy(policy, weights);
        return std::string();
    });
}

void hobbit_set_hooks(struct hobbit * h, const struct hobbit_hooks * hooks) { h->engine->set_hooks(hooks ? *hooks : hobbit_hooks{}, h); }

void hobbit_get_params(struct hobbit * h, struct hobbit_params * params) { *params = h->engine->params(); }

void hobbit_set_abort(struct hobbit * h, struct llama_context * ctx, hobbit_abort_fn ask, void * user) {
    h->engine->set_abort(ask, user);
    if (ctx) {
        llama_set_abort_callback(ctx, ask ? [](void * engine) { return ((hob::engine *) engine)->aborted(); } : (ggml_abort_callback) nullptr, h->engine.get());
    }
}

int hobbit_prefetch(struct hobbit * h, int32_t layer, int32_t expert, int32_t precision) {
    if (precision != HOBBIT_LOW && precision != HOBBIT_HIGH) {
        return fail("precision is " + std::to_string(precision) + ": it must be 1 (low) or 2 (high)");
    }
    int r = 0;
    const int err = guarded([&] {
        r = h->engine->prefetch(layer, expert, precision == HOBBIT_HIGH ? hob::COPY_HIGH : hob::COPY_LOW);
        return std::string();
    });
    if (err < 0) {
        return err;
    }
    return r < 0 ? fail("layer " + std::to_string(layer) + ", expert " + std::to_string(expert) + ": no such expert") : r;
}

void hobbit_get_info(struct hobbit * h, struct hobbit_info * info) { *info = h->engine->info(); }

int hobbit_get_group(struct hobbit * h, int32_t group, struct hobbit_group_info * info) {
    if (!h->engine->group_info(group, *info)) {
        return fail("group " + std::to_string(group) + ": there are " + std::to_string(h->banks.size()));
    }
    const hobbit::group_banks & gb = h->banks[group];
    snprintf(info->high_types, sizeof(info->high_types), "%s", gb.types[hob::COPY_HIGH].c_str());
    snprintf(info->low_types, sizeof(info->low_types), "%s", gb.types[hob::COPY_LOW].c_str());
    snprintf(info->buffer_type, sizeof(info->buffer_type), "%s", gb.buft_name.c_str());
    return 0;
}

void hobbit_get_stats(struct hobbit * h, struct hobbit_stats * stats) { *stats = h->engine->stats(); }

int hobbit_get_layer_stats(struct hobbit * h, int32_t layer, struct hobbit_stats * stats) {
    return h->engine->layer_stats(layer, *stats) ? 0 : fail("layer " + std::to_string(layer) + ": there are " + std::to_string(h->engine->layout().layers.size()));
}

int hobbit_get_layer_block(struct hobbit * h, int32_t layer) {
    const auto & layers = h->engine->layout().layers;
    return layer >= 0 && layer < (int) layers.size() ? layers[layer].block : fail("layer " + std::to_string(layer) + ": there are " + std::to_string(layers.size()));
}

void hobbit_reset_stats(struct hobbit * h) { h->engine->reset_stats(); }

int hobbit_trace_start(struct hobbit * h, const char * path) {
    return guarded([&] { return h->engine->trace_start(path); });
}

int hobbit_trace_stop(struct hobbit * h) {
    return guarded([&] { return h->engine->trace_stop(); });
}

const char * hobbit_decode_error(struct hobbit * h) { return hobbit_graph_scope::error(h); }

} // extern "C"
