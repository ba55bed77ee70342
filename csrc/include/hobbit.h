// hobbit.h - the whole C API of hobbit-cpp: mixed-precision expert offloading for llama.cpp.
//
// The functions live in libllama itself. A dual GGUF (a main file without expert data and a sidecar
// that holds two copies of every routed expert) is loaded with llama_model_load_from_file() as any
// other; the engine that serves its experts is then found with hobbit_from_model().
//
// Plain C, no dependency but the standard headers. Every struct is passed by pointer and holds only
// fixed-width members, so that ctypes and cffi see the layout that is written here.
//
// Errors: functions that return int give 0 on success and a negative number on failure, with one
// sentence in hobbit_last_error(). No function aborts the process.

#ifndef HOBBIT_H
#define HOBBIT_H

#include <stdint.h>

#if defined(_WIN32)
#    define HOBBIT_API __declspec(dllexport)
#else
#    define HOBBIT_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define HOBBIT_API_VERSION 5

struct hobbit;      // the engine of one model: its pools, records, loader threads, statistics
struct llama_model; // llama.h
struct llama_context;

// What the rule wants for one (token, rank), and what a copy is.
enum hobbit_precision {
    HOBBIT_SKIP = 0,
    HOBBIT_LOW  = 1,
    HOBBIT_HIGH = 2,
};

// Eviction policies; the formulas stand beside each in csrc/core/policy_*.cpp.
enum hobbit_policy {
    HOBBIT_POLICY_LRU    = 0,
    HOBBIT_POLICY_LFU    = 1,
    HOBBIT_POLICY_HOBBIT = 2, // four weighted terms: recency, frequency, high-precision uses, layer distance
    HOBBIT_POLICY_LCU    = 3, // least cost of use
    HOBBIT_POLICY_FOLLOW = 4, // expected uses, learned from which experts follow which; only from the load on
};

// Where a missed expert is computed, for a model on a GPU whose copies are held in host memory.
enum hobbit_miss {
    HOBBIT_MISS_FETCH = 0, // brought into a slot
    HOBBIT_MISS_CPU   = 1, // computed by the CPU from host memory
    HOBBIT_MISS_AUTO  = 2, // divided so that link and CPU finish together; an expert may be divided, too
};

// Does an expert that the CPU computed, whole or in part, also get a slot?
enum hobbit_admit {
    HOBBIT_ADMIT_NEVER = 0,
    HOBBIT_ADMIT_FREE  = 1, // while slots are free
    HOBBIT_ADMIT_OFTEN = 2, // and where it was used more than twice as often as the expert it would push out
};

// Are the copies held in host memory (pinned, where there is a GPU)? Only if all are can the CPU compute misses.
enum hobbit_host_copies {
    HOBBIT_HOST_OFF  = 0, // no: read from the files, on a GPU through a few pinned buffers
    HOBBIT_HOST_ON   = 1,
    HOBBIT_HOST_AUTO = 2, // where the slots are on a GPU: if they fit in free memory, else as many as do
    HOBBIT_HOST_SOME = 3, // host_bytes of them: a second level between the files and the slots
};

// Are experts read into their slots at load, where the slots of a group of layers hold them all? Those layers run
// without routing on the host then.
enum hobbit_preload {
    HOBBIT_PRELOAD_OFF  = 0,
    HOBBIT_PRELOAD_ON   = 1,
    HOBBIT_PRELOAD_AUTO = 2, // where the slots are on a GPU
};

// Is the memory of the GPU the CPU's, too? Then there is one level: slots are host memory that both see, read into from the files.
enum hobbit_unified {
    HOBBIT_UNIFIED_OFF  = 0,
    HOBBIT_UNIFIED_ON   = 1, // taken for granted: on a GPU with memory of its own each product reads its weights over the bus
    HOBBIT_UNIFIED_AUTO = 2, // where the device says so
};

// Prediction of the next layers' experts, for batches of a few tokens: their routers are applied to the running layer's input.
enum hobbit_prefetch_layers {
    HOBBIT_PREFETCH_AUTO = -1, // as many layers ahead as pay, by what was right and wrong lately
};

// Which copies of predicted experts are loaded. None is for one that the rule would skip.
enum hobbit_prefetch_copy {
    HOBBIT_PREFETCH_RULE = 0, // what the rule wants, as on a miss; low copies first
    HOBBIT_PREFETCH_LOW  = 1, // low copies, of those that the rule wants low; none of the others
    HOBBIT_PREFETCH_HIGH = 2, // high copies, of those that the rule wants low, too
};

// How the memory budget is given.
enum hobbit_budget {
    HOBBIT_BUDGET_BYTES    = 0, // exactly cache_bytes; refused below the floor
    HOBBIT_BUDGET_AT_LEAST = 1, // cache_bytes, raised to the floor where it is smaller
    HOBBIT_BUDGET_FRACTION = 2, // cache_fraction of all experts at high precision; refused below the floor
    HOBBIT_BUDGET_MIN      = 3, // the floor: what one step can need
    HOBBIT_BUDGET_DEVICE   = 4, // what the devices of the slots have free, less cache_bytes on each; refused below the floor
};

struct hobbit_params {
    float    t1;                // s <= t1 -> high; t1 >= 1 turns mixed precision off, as slots for all experts of a group of layers do there
    float    t2;                // t1 < s <= t2 -> low; s > t2 -> skip
    int32_t  policy;            // enum hobbit_policy
    float    policy_weights[4]; // HOBBIT_POLICY_HOBBIT: recency, frequency, high uses, layer distance; >= 0, sum > 0
    int32_t  budget_kind;       // enum hobbit_budget
    int32_t  n_io_threads;      // reads in flight, 1..64
    uint64_t cache_bytes;       // slots + staging + bookkeeping, in bytes
    double   cache_fraction;    // 0..1
    float    low_fraction;      // share of the budget for slots of low copies, 0..1; never less than the floor's
    int32_t  direct_io;         // 1: bypass the page cache where the file system allows; 0: buffered reads
    int32_t  force_miss;        // 1: treat every request as a miss (for measuring the worst case)
    int32_t  miss;              // enum hobbit_miss
    int32_t  host_copies;       // enum hobbit_host_copies
    int32_t  admit;             // enum hobbit_admit
    int32_t  preload;           // enum hobbit_preload
    int32_t  cpu_batch;         // tokens of the largest batch whose misses the CPU computes, 1..512; larger ones are fetched
    double   link_speed;        // bytes/s to divide misses by, together with cpu_speed; 0: measured and corrected
    double   cpu_speed;
    uint64_t host_bytes;        // HOBBIT_HOST_SOME: memory for copies, beside cache_bytes
    float    skip_mass;         // share of a token's gate weights in a layer that may be skipped, the lightest; what else
                                // is beyond t2 and missing is loaded low; >= 1: no bound
    float    lean;              // batches of up to 4 tokens: experts whose high copy is in a slot get so much of the spread of
                                // the router's logits as a bonus, for selection only; 0: off
    int32_t  prefetch;          // layers ahead whose experts are predicted and loaded, 0..3, or HOBBIT_PREFETCH_AUTO
    int32_t  prefetch_copy;     // enum hobbit_prefetch_copy
    int32_t  prefetch_ranks;    // of a predicted token, load at most so many experts, the heaviest; 0: all
    int32_t  prefetch_prompts;  // 1: a prompt's next layers are loaded ahead
    int32_t  unified;           // enum hobbit_unified
    int32_t  verify;            // 1: compare what is read from the files with their checksums; a difference fails the forward pass
};

// What was set up. Sizes in bytes.
struct hobbit_info {
    uint64_t budget_bytes;    // the budget in force
    uint64_t floor_bytes;     // the smallest legal budget
    uint64_t slot_bytes;      // in slots
    uint64_t staging_bytes;   // in staging buffers
    uint64_t record_bytes;    // bookkeeping
    uint64_t high_bytes;      // all experts at high precision
    uint64_t low_bytes;       // all experts at low precision
    int32_t  n_layers;        // layers with routed experts
    int32_t  n_groups;        // sets of layers with the same expert shapes and types
    int32_t  n_expert;        // largest number of experts in a layer
    int32_t  n_expert_used;   // largest number of experts used per token
    int32_t  direct_io;       // 1 where the page cache is really bypassed
    int32_t  miss;            // enum hobbit_miss in force
    uint64_t host_bytes;      // copies held in host memory
    double   link_speed;      // bytes/s from host memory to the slots, as misses are divided now; 0: not measured
    double   cpu_speed;       // bytes/s at which the CPU computes experts
    int32_t  host_pinned;     // 1: the copies are in pinned memory, which the device reads by itself
    int32_t  unified;         // 1: the slots are host memory that a device computes with
};

struct hobbit_group_info {
    uint64_t high_expert_bytes; // one expert, all projections
    uint64_t low_expert_bytes;
    int32_t  n_layers;
    int32_t  n_expert;
    int32_t  n_expert_used;
    int32_t  high_slots;
    int32_t  low_slots;
    int32_t  high_resident;     // slots that hold a copy now
    int32_t  low_resident;
    char     high_types[64];    // per projection, "gate q8_0, up q8_0, down q8_0"
    char     low_types[64];
    char     buffer_type[32];   // the ggml buffer type that the slots are in
};

// A layer with routed experts, as traces and simulations have it. Bytes are those of one expert, per projection in the
// order in which they are stored (gate, up, down), 0 after the last.
struct hobbit_layer {
    int32_t  block;         // its number in the model
    int32_t  group;         // layers of a group share slots; numbered in the order of their first layers
    int32_t  n_expert;
    int32_t  n_expert_used;
    uint64_t high_bytes[3];
    uint64_t low_bytes[3];
};

// Counters since the load or the last reset. A request is one (token, rank) pair of the router.
// requests == wanted_high + wanted_low + wanted_skip
//          == hits_high + hits_low + misses_high + misses_low + skips
struct hobbit_stats {
    uint64_t tokens;       // tokens routed (whole model: tokens x layers)
    uint64_t requests;
    uint64_t wanted_high;  // what the rule said, whatever was resident
    uint64_t wanted_low;
    uint64_t wanted_skip;
    uint64_t hits_high;    // served by a high copy that was resident
    uint64_t hits_low;
    uint64_t misses_high;  // served by a high copy that was loaded for it
    uint64_t misses_low;
    uint64_t cpu_high;     // of the misses: computed by the CPU from the high copy, whole or in part
    uint64_t cpu_low;
    uint64_t skips;        // not served
    uint64_t upgrades;     // of the hits: served by a better copy than wanted
    uint64_t loads_high;   // experts loaded on demand
    uint64_t loads_low;
    uint64_t evictions;    // of the layer's experts, from their slots
    uint64_t prefetches;   // experts loaded ahead: by hobbit_prefetch(), of a prompt's next layers, because of a prediction, and what the CPU computed (admission)
    uint64_t prefetch_hits;// of those, requested while still resident (counted once each)
    uint64_t bytes_read;   // into slots, all reasons
    uint64_t bytes_prefetch;
    uint64_t bytes_cpu;    // of experts that the CPU computed
    uint64_t bytes_storage;// of bytes_read: read from files
    uint64_t host_hits;    // loads that the second level in host memory served
    uint64_t predicted_1;  // experts that the router one layer ahead was predicted to choose
    uint64_t predicted_2;  // two layers
    uint64_t predicted_3;
    uint64_t correct_1;    // of those, chosen
    uint64_t correct_2;
    uint64_t correct_3;
    uint64_t predicted_loads; // of prefetches: queued because of a prediction
    uint64_t useful;       // of those, the copy that served its layer's request
    uint64_t late;         // of the useful ones, still on their way when they were asked for
    uint64_t bytes_predicted; // of bytes_prefetch: because of a prediction
    uint64_t bytes_wasted; // of those, not useful (yet: what stays in its slot can serve later)
    uint64_t leaned;       // requests for an expert that the router alone would not have chosen
    int64_t  cpu_us;       // the CPU computing them
    int64_t  wait_us;      // computing thread waiting for loads
    int64_t  plan_us;      // computing thread planning
    int64_t  compute_us;   // graph time without the two above, the CPU's part included (whole model only)
    int64_t  read_us;      // wall time during which a loader thread had a read or a copy in flight (whole model only)
    uint64_t graphs;       // forward passes (whole model only)
};

// Selection hook. Called once per layer and ubatch on the computing thread, before the lookup.
//   experts [n_tokens * n_used] and weights [n_tokens * n_used] (normalised over the ranks) in the
//   router's order; wanted [n_tokens * n_used] holds the rule's choice (enum hobbit_precision) and
//   may be changed. Must not call back into the engine.
typedef void (*hobbit_select_fn)(void * user, int32_t layer, int32_t n_tokens, int32_t n_used,
                                 const int32_t * experts, const float * weights, int32_t * wanted);

// Prefetch hook. Called once per layer and ubatch after the on-demand loads were queued; may call
// hobbit_prefetch() for later layers.
typedef void (*hobbit_prefetch_fn)(void * user, struct hobbit * h, int32_t layer, int32_t n_tokens, int32_t n_used,
                                   const int32_t * experts, const float * weights);

enum hobbit_event_kind {
    HOBBIT_EVENT_HIT      = 0,
    HOBBIT_EVENT_LOAD     = 1, // an on-demand load was queued into a slot
    HOBBIT_EVENT_EVICT    = 2, // a copy gave up its slot
    HOBBIT_EVENT_SKIP     = 3,
    HOBBIT_EVENT_PREFETCH = 4,
    HOBBIT_EVENT_CPU      = 5, // a miss that the CPU computes, whole or in part; slot -1
};

// Cache hook. One call per expert and step, on the computing thread; must not call back into the engine.
typedef void (*hobbit_event_fn)(void * user, int32_t kind, int32_t layer, int32_t expert, int32_t precision, int32_t slot);

struct hobbit_hooks {
    hobbit_select_fn   select;
    hobbit_prefetch_fn prefetch;
    hobbit_event_fn    event;
    void *             user;
};

// Asked on the computing thread while a forward pass computes or waits for loads, twenty times a second at most, and before
// hooks are called. Other than 0: the pass ends.
typedef int32_t (*hobbit_abort_fn)(void * user);

// --- library ---------------------------------------------------------------------------------

HOBBIT_API uint32_t     hobbit_api_version(void);
HOBBIT_API const char * hobbit_build_info(void); // "hobbit-cpp X.Y.Z, llama.cpp COMMIT"
HOBBIT_API const char * hobbit_last_error(void); // of the calling thread; "" if none

// --- loading ---------------------------------------------------------------------------------

HOBBIT_API void hobbit_default_params(struct hobbit_params * params);
HOBBIT_API int  hobbit_check_params(const struct hobbit_params * params);

// Settings for the dual GGUFs that the calling thread loads next; NULL: back to the defaults, with what variables of the
// environment say (docs/tools.md). Those have no effect on what is set here.
HOBBIT_API int  hobbit_set_load_params(const struct hobbit_params * params);

// Sizes of a dual GGUF without loading it; n_expert_used <= 0: as the file says. budget_bytes and the sizes in use are 0.
HOBBIT_API int  hobbit_probe(const char * path, int32_t n_expert_used, struct hobbit_info * info);

// The engine of a loaded model; NULL for a model whose experts are not offloaded.
HOBBIT_API struct hobbit * hobbit_from_model(const struct llama_model * model);

// --- run time --------------------------------------------------------------------------------

HOBBIT_API int  hobbit_set_thresholds(struct hobbit * h, float t1, float t2);
HOBBIT_API int  hobbit_set_policy(struct hobbit * h, int32_t policy, const float * weights /* [4], NULL: keep */);
HOBBIT_API void hobbit_set_hooks(struct hobbit * h, const struct hobbit_hooks * hooks /* NULL: none */);
HOBBIT_API void hobbit_get_params(struct hobbit * h, struct hobbit_params * params);

// Not while a forward pass runs. NULL: a pass runs to its end. ctx: a context of the model whose graphs are to end between any
// two operations on the CPU (it sets llama.cpp's abort callback); without it they end at the next layer with offloaded experts.
HOBBIT_API void hobbit_set_abort(struct hobbit * h, struct llama_context * ctx, hobbit_abort_fn ask, void * user);

// Ask for a copy of an expert to be loaded when the storage is idle, or behind what a GPU's link has to do. 1: queued, 0: nothing to do
// (already there, being served right now, no slot to spare), < 0: bad arguments.
HOBBIT_API int  hobbit_prefetch(struct hobbit * h, int32_t layer, int32_t expert, int32_t precision);

// --- reports ---------------------------------------------------------------------------------

HOBBIT_API void hobbit_get_info(struct hobbit * h, struct hobbit_info * info);
HOBBIT_API int  hobbit_get_group(struct hobbit * h, int32_t group, struct hobbit_group_info * info);
HOBBIT_API void hobbit_get_stats(struct hobbit * h, struct hobbit_stats * stats);
HOBBIT_API int  hobbit_get_layer_stats(struct hobbit * h, int32_t layer /* 0..n_layers-1 */, struct hobbit_stats * stats);
HOBBIT_API int  hobbit_get_layer_block(struct hobbit * h, int32_t layer); // its block number in the model, < 0: no such layer
HOBBIT_API void hobbit_reset_stats(struct hobbit * h);

// Write the routing of everything decoded from now on to a NumPy .npy file (docs/trace.md). The file
// appears under its name when the trace is stopped or the model freed.
HOBBIT_API int  hobbit_trace_start(struct hobbit * h, const char * path);
HOBBIT_API int  hobbit_trace_stop(struct hobbit * h);

// Why this thread's last forward pass failed, "" if it succeeded or was one of another model. Valid until the thread's next.
HOBBIT_API const char * hobbit_decode_error(struct hobbit * h);

// --- simulation ------------------------------------------------------------------------------

// The layers of a dual GGUF without loading it: fills in n_max of them at most and gives how many there are.
HOBBIT_API int  hobbit_probe_layers(const char * path, int32_t n_expert_used, struct hobbit_layer * layers, int32_t n_max);

// An engine without a model, for playing recorded routings: what would be loaded and given up. All functions above that
// take an engine work. slots: [n_groups][2] of high and low copies; NULL: as the budget in params divides. NULL on failure.
HOBBIT_API struct hobbit * hobbit_simulate(const struct hobbit_layer * layers, int32_t n_layers, const struct hobbit_params * params, const int32_t * slots);
HOBBIT_API void hobbit_simulate_free(struct hobbit * h);

// Play rows of a trace (docs/trace.md), one token at a time: whole tokens, a token's layers one after another.
HOBBIT_API int  hobbit_simulate_run(struct hobbit * h, const void * rows, int64_t n_rows, int32_t n_used);

// Evict by what these rows will ask for from now on, a reference for the policies. They must be played next, with the
// thresholds in force now.
HOBBIT_API int  hobbit_simulate_foresee(struct hobbit * h, const void * rows, int64_t n_rows, int32_t n_used);

#ifdef __cplusplus
}
#endif

#endif // HOBBIT_H
