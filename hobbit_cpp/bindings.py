"""hobbit.h for ctypes: each prototype beside its C declaration, nothing else.

Importing this loads the libraries (ImportError if that cannot be). Functions give back what C gives back:
0 or a negative number with the reason in hobbit_last_error().
"""

import ctypes
from ctypes import CFUNCTYPE, POINTER, c_char, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_uint32, c_uint64, c_void_p

from . import _libs

_lib = _libs.ensure()

from llama_cpp._ctypes_extensions import ctypes_function_for_shared_library  # noqa: E402  after ensure()

ctypes_function = ctypes_function_for_shared_library(_lib)

# #define HOBBIT_API_VERSION 5
HOBBIT_API_VERSION = 5

# enum hobbit_precision
HOBBIT_SKIP = 0
HOBBIT_LOW = 1
HOBBIT_HIGH = 2

# enum hobbit_policy
HOBBIT_POLICY_LRU = 0
HOBBIT_POLICY_LFU = 1
HOBBIT_POLICY_HOBBIT = 2
HOBBIT_POLICY_LCU = 3
HOBBIT_POLICY_FOLLOW = 4

# enum hobbit_miss
HOBBIT_MISS_FETCH = 0
HOBBIT_MISS_CPU = 1
HOBBIT_MISS_AUTO = 2

# enum hobbit_admit
HOBBIT_ADMIT_NEVER = 0
HOBBIT_ADMIT_FREE = 1
HOBBIT_ADMIT_OFTEN = 2

# enum hobbit_host_copies
HOBBIT_HOST_OFF = 0
HOBBIT_HOST_ON = 1
HOBBIT_HOST_AUTO = 2
HOBBIT_HOST_SOME = 3

# enum hobbit_preload
HOBBIT_PRELOAD_OFF = 0
HOBBIT_PRELOAD_ON = 1
HOBBIT_PRELOAD_AUTO = 2

# enum hobbit_unified
HOBBIT_UNIFIED_OFF = 0
HOBBIT_UNIFIED_ON = 1
HOBBIT_UNIFIED_AUTO = 2

# enum hobbit_prefetch_layers { HOBBIT_PREFETCH_AUTO = -1 }
HOBBIT_PREFETCH_AUTO = -1

# enum hobbit_prefetch_copy
HOBBIT_PREFETCH_RULE = 0
HOBBIT_PREFETCH_LOW = 1
HOBBIT_PREFETCH_HIGH = 2

# enum hobbit_budget
HOBBIT_BUDGET_BYTES = 0
HOBBIT_BUDGET_AT_LEAST = 1
HOBBIT_BUDGET_FRACTION = 2
HOBBIT_BUDGET_MIN = 3
HOBBIT_BUDGET_DEVICE = 4

# enum hobbit_event_kind
HOBBIT_EVENT_HIT = 0
HOBBIT_EVENT_LOAD = 1
HOBBIT_EVENT_EVICT = 2
HOBBIT_EVENT_SKIP = 3
HOBBIT_EVENT_PREFETCH = 4
HOBBIT_EVENT_CPU = 5

# struct hobbit *, struct llama_model *, struct llama_context *: opaque
hobbit_p = c_void_p
llama_model_p = c_void_p
llama_context_p = c_void_p


# struct hobbit_params
class hobbit_params(ctypes.Structure):
    _fields_ = [
        ("t1", c_float),
        ("t2", c_float),
        ("policy", c_int32),
        ("policy_weights", c_float * 4),
        ("budget_kind", c_int32),
        ("n_io_threads", c_int32),
        ("cache_bytes", c_uint64),
        ("cache_fraction", c_double),
        ("low_fraction", c_float),
        ("direct_io", c_int32),
        ("force_miss", c_int32),
        ("miss", c_int32),
        ("host_copies", c_int32),
        ("admit", c_int32),
        ("preload", c_int32),
        ("cpu_batch", c_int32),
        ("link_speed", c_double),
        ("cpu_speed", c_double),
        ("host_bytes", c_uint64),
        ("skip_mass", c_float),
        ("lean", c_float),
        ("prefetch", c_int32),
        ("prefetch_copy", c_int32),
        ("prefetch_ranks", c_int32),
        ("prefetch_prompts", c_int32),
        ("unified", c_int32),
        ("verify", c_int32),
    ]


# struct hobbit_info
class hobbit_info(ctypes.Structure):
    _fields_ = [
        ("budget_bytes", c_uint64),
        ("floor_bytes", c_uint64),
        ("slot_bytes", c_uint64),
        ("staging_bytes", c_uint64),
        ("record_bytes", c_uint64),
        ("high_bytes", c_uint64),
        ("low_bytes", c_uint64),
        ("n_layers", c_int32),
        ("n_groups", c_int32),
        ("n_expert", c_int32),
        ("n_expert_used", c_int32),
        ("direct_io", c_int32),
        ("miss", c_int32),
        ("host_bytes", c_uint64),
        ("link_speed", c_double),
        ("cpu_speed", c_double),
        ("host_pinned", c_int32),
        ("unified", c_int32),
    ]


# struct hobbit_group_info
class hobbit_group_info(ctypes.Structure):
    _fields_ = [
        ("high_expert_bytes", c_uint64),
        ("low_expert_bytes", c_uint64),
        ("n_layers", c_int32),
        ("n_expert", c_int32),
        ("n_expert_used", c_int32),
        ("high_slots", c_int32),
        ("low_slots", c_int32),
        ("high_resident", c_int32),
        ("low_resident", c_int32),
        ("high_types", c_char * 64),
        ("low_types", c_char * 64),
        ("buffer_type", c_char * 32),
    ]


# struct hobbit_layer
class hobbit_layer(ctypes.Structure):
    _fields_ = [
        ("block", c_int32),
        ("group", c_int32),
        ("n_expert", c_int32),
        ("n_expert_used", c_int32),
        ("high_bytes", c_uint64 * 3),
        ("low_bytes", c_uint64 * 3),
    ]


# struct hobbit_stats
class hobbit_stats(ctypes.Structure):
    _fields_ = [
        ("tokens", c_uint64),
        ("requests", c_uint64),
        ("wanted_high", c_uint64),
        ("wanted_low", c_uint64),
        ("wanted_skip", c_uint64),
        ("hits_high", c_uint64),
        ("hits_low", c_uint64),
        ("misses_high", c_uint64),
        ("misses_low", c_uint64),
        ("cpu_high", c_uint64),
        ("cpu_low", c_uint64),
        ("skips", c_uint64),
        ("upgrades", c_uint64),
        ("loads_high", c_uint64),
        ("loads_low", c_uint64),
        ("evictions", c_uint64),
        ("prefetches", c_uint64),
        ("prefetch_hits", c_uint64),
        ("bytes_read", c_uint64),
        ("bytes_prefetch", c_uint64),
        ("bytes_cpu", c_uint64),
        ("bytes_storage", c_uint64),
        ("host_hits", c_uint64),
        ("predicted_1", c_uint64),
        ("predicted_2", c_uint64),
        ("predicted_3", c_uint64),
        ("correct_1", c_uint64),
        ("correct_2", c_uint64),
        ("correct_3", c_uint64),
        ("predicted_loads", c_uint64),
        ("useful", c_uint64),
        ("late", c_uint64),
        ("bytes_predicted", c_uint64),
        ("bytes_wasted", c_uint64),
        ("leaned", c_uint64),
        ("cpu_us", c_int64),
        ("wait_us", c_int64),
        ("plan_us", c_int64),
        ("compute_us", c_int64),
        ("read_us", c_int64),
        ("graphs", c_uint64),
    ]


# typedef void (*hobbit_select_fn)(void * user, int32_t layer, int32_t n_tokens, int32_t n_used,
#                                  const int32_t * experts, const float * weights, int32_t * wanted);
hobbit_select_fn = CFUNCTYPE(None, c_void_p, c_int32, c_int32, c_int32, POINTER(c_int32), POINTER(c_float), POINTER(c_int32))

# typedef void (*hobbit_prefetch_fn)(void * user, struct hobbit * h, int32_t layer, int32_t n_tokens, int32_t n_used,
#                                    const int32_t * experts, const float * weights);
hobbit_prefetch_fn = CFUNCTYPE(None, c_void_p, hobbit_p, c_int32, c_int32, c_int32, POINTER(c_int32), POINTER(c_float))

# typedef void (*hobbit_event_fn)(void * user, int32_t kind, int32_t layer, int32_t expert, int32_t precision, int32_t slot);
hobbit_event_fn = CFUNCTYPE(None, c_void_p, c_int32, c_int32, c_int32, c_int32, c_int32)


# struct hobbit_hooks
class hobbit_hooks(ctypes.Structure):
    _fields_ = [
        ("select", hobbit_select_fn),
        ("prefetch", hobbit_prefetch_fn),
        ("event", hobbit_event_fn),
        ("user", c_void_p),
    ]


# typedef int32_t (*hobbit_abort_fn)(void * user);
hobbit_abort_fn = CFUNCTYPE(c_int32, c_void_p)


# --- library ---


# HOBBIT_API uint32_t hobbit_api_version(void);
@ctypes_function("hobbit_api_version", [], c_uint32)
def hobbit_api_version(): ...


# HOBBIT_API const char * hobbit_build_info(void);
@ctypes_function("hobbit_build_info", [], c_char_p)
def hobbit_build_info(): ...


# HOBBIT_API const char * hobbit_last_error(void);
@ctypes_function("hobbit_last_error", [], c_char_p)
def hobbit_last_error(): ...


# --- loading ---


# HOBBIT_API void hobbit_default_params(struct hobbit_params * params);
@ctypes_function("hobbit_default_params", [POINTER(hobbit_params)], None)
def hobbit_default_params(params, /): ...


# HOBBIT_API int hobbit_check_params(const struct hobbit_params * params);
@ctypes_function("hobbit_check_params", [POINTER(hobbit_params)], c_int)
def hobbit_check_params(params, /): ...


# HOBBIT_API int hobbit_set_load_params(const struct hobbit_params * params);
@ctypes_function("hobbit_set_load_params", [POINTER(hobbit_params)], c_int)
def hobbit_set_load_params(params, /): ...


# HOBBIT_API int hobbit_probe(const char * path, int32_t n_expert_used, struct hobbit_info * info);
@ctypes_function("hobbit_probe", [c_char_p, c_int32, POINTER(hobbit_info)], c_int)
def hobbit_probe(path, n_expert_used, info, /): ...


# HOBBIT_API struct hobbit * hobbit_from_model(const struct llama_model * model);
@ctypes_function("hobbit_from_model", [llama_model_p], hobbit_p)
def hobbit_from_model(model, /): ...


# --- run time ---


# HOBBIT_API int hobbit_set_thresholds(struct hobbit * h, float t1, float t2);
@ctypes_function("hobbit_set_thresholds", [hobbit_p, c_float, c_float], c_int)
def hobbit_set_thresholds(h, t1, t2, /): ...


# HOBBIT_API int hobbit_set_policy(struct hobbit * h, int32_t policy, const float * weights);
@ctypes_function("hobbit_set_policy", [hobbit_p, c_int32, POINTER(c_float)], c_int)
def hobbit_set_policy(h, policy, weights, /): ...


# HOBBIT_API void hobbit_set_hooks(struct hobbit * h, const struct hobbit_hooks * hooks);
@ctypes_function("hobbit_set_hooks", [hobbit_p, POINTER(hobbit_hooks)], None)
def hobbit_set_hooks(h, hooks, /): ...


# HOBBIT_API void hobbit_get_params(struct hobbit * h, struct hobbit_params * params);
@ctypes_function("hobbit_get_params", [hobbit_p, POINTER(hobbit_params)], None)
def hobbit_get_params(h, params, /): ...


# HOBBIT_API void hobbit_set_abort(struct hobbit * h, struct llama_context * ctx, hobbit_abort_fn ask, void * user);
@ctypes_function("hobbit_set_abort", [hobbit_p, llama_context_p, hobbit_abort_fn, c_void_p], None)
def hobbit_set_abort(h, ctx, ask, user, /): ...


# HOBBIT_API int hobbit_prefetch(struct hobbit * h, int32_t layer, int32_t expert, int32_t precision);
@ctypes_function("hobbit_prefetch", [hobbit_p, c_int32, c_int32, c_int32], c_int)
def hobbit_prefetch(h, layer, expert, precision, /): ...


# --- reports ---


# HOBBIT_API void hobbit_get_info(struct hobbit * h, struct hobbit_info * info);
@ctypes_function("hobbit_get_info", [hobbit_p, POINTER(hobbit_info)], None)
def hobbit_get_info(h, info, /): ...


# HOBBIT_API int hobbit_get_group(struct hobbit * h, int32_t group, struct hobbit_group_info * info);
@ctypes_function("hobbit_get_group", [hobbit_p, c_int32, POINTER(hobbit_group_info)], c_int)
def hobbit_get_group(h, group, info, /): ...


# HOBBIT_API void hobbit_get_stats(struct hobbit * h, struct hobbit_stats * stats);
@ctypes_function("hobbit_get_stats", [hobbit_p, POINTER(hobbit_stats)], None)
def hobbit_get_stats(h, stats, /): ...


# HOBBIT_API int hobbit_get_layer_stats(struct hobbit * h, int32_t layer, struct hobbit_stats * stats);
@ctypes_function("hobbit_get_layer_stats", [hobbit_p, c_int32, POINTER(hobbit_stats)], c_int)
def hobbit_get_layer_stats(h, layer, stats, /): ...


# HOBBIT_API int hobbit_get_layer_block(struct hobbit * h, int32_t layer);
@ctypes_function("hobbit_get_layer_block", [hobbit_p, c_int32], c_int)
def hobbit_get_layer_block(h, layer, /): ...


# HOBBIT_API void hobbit_reset_stats(struct hobbit * h);
@ctypes_function("hobbit_reset_stats", [hobbit_p], None)
def hobbit_reset_stats(h, /): ...


# HOBBIT_API int hobbit_trace_start(struct hobbit * h, const char * path);
@ctypes_function("hobbit_trace_start", [hobbit_p, c_char_p], c_int)
def hobbit_trace_start(h, path, /): ...


# HOBBIT_API int hobbit_trace_stop(struct hobbit * h);
@ctypes_function("hobbit_trace_stop", [hobbit_p], c_int)
def hobbit_trace_stop(h, /): ...


# HOBBIT_API const char * hobbit_decode_error(struct hobbit * h);
@ctypes_function("hobbit_decode_error", [hobbit_p], c_char_p)
def hobbit_decode_error(h, /): ...


# --- simulation ---


# HOBBIT_API int hobbit_probe_layers(const char * path, int32_t n_expert_used, struct hobbit_layer * layers, int32_t n_max);
@ctypes_function("hobbit_probe_layers", [c_char_p, c_int32, POINTER(hobbit_layer), c_int32], c_int)
def hobbit_probe_layers(path, n_expert_used, layers, n_max, /): ...


# HOBBIT_API struct hobbit * hobbit_simulate(const struct hobbit_layer * layers, int32_t n_layers, const struct hobbit_params * params, const int32_t * slots);
@ctypes_function("hobbit_simulate", [POINTER(hobbit_layer), c_int32, POINTER(hobbit_params), POINTER(c_int32)], hobbit_p)
def hobbit_simulate(layers, n_layers, params, slots, /): ...


# HOBBIT_API void hobbit_simulate_free(struct hobbit * h);
@ctypes_function("hobbit_simulate_free", [hobbit_p], None)
def hobbit_simulate_free(h, /): ...


# HOBBIT_API int hobbit_simulate_run(struct hobbit * h, const void * rows, int64_t n_rows, int32_t n_used);
@ctypes_function("hobbit_simulate_run", [hobbit_p, c_void_p, c_int64, c_int32], c_int)
def hobbit_simulate_run(h, rows, n_rows, n_used, /): ...


# HOBBIT_API int hobbit_simulate_foresee(struct hobbit * h, const void * rows, int64_t n_rows, int32_t n_used);
@ctypes_function("hobbit_simulate_foresee", [hobbit_p, c_void_p, c_int64, c_int32], c_int)
def hobbit_simulate_foresee(h, rows, n_rows, n_used, /): ...
