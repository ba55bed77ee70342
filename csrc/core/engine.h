// engine.h - one model's experts: the step from what the router chose to slots that hold it.
//
// For each layer and ubatch the computing thread calls route() once per wave. The first call selects,
// looks up, plans and queues the loads; every call waits for the loads of its wave. A wave is a part of
// the layer's experts small enough that the next wave's can load while it computes; a plan's slots are
// pinned until the wave that uses them has been computed.
//
//   begin_graph()  route(layer, wave 0)  [wait_late]  route(layer, wave 1) ...  next layer ...  end_graph()
//
// Where a link brings the misses of a few tokens (at_once()), all waves are handed out together and the device
// waits for the loads of each, not the host. Misses that the CPU computes, whole or in part, are handed out with
// wave 0; cpu_begins() and cpu_done() tell how fast it was.

#pragma once

#include "ahead.h"
#include "budget.h"
#include "host_cache.h"
#include "lean.h"
#include "pool.h"
#include "select.h"
#include "share.h"
#include "trace.h"

#include <exception>
#include <mutex>
#include <new>
#include <string>
#include <vector>

namespace hob {

// What the route operation hands over for one layer of one ubatch.
struct route_request {
    int layer;
    int n_tokens;
    int n_used;
    int n_waves;             // as waves() said for these sizes
    const int32_t * experts; // [n_tokens][n_used], the router's order
    const float *   weights; // [n_tokens][n_used]
    const void *    context; // who runs: names its sequences
    const int32_t * seq;     // [n_tokens]
    const int32_t * pos;     // [n_tokens]
    bool            first;   // first layer of this ubatch
    const int32_t * tokens = nullptr; // [n_tokens]: which of the first layer's tokens, where these are fewer; null: the same
    bool            normalised = false; // weights: those of a trace
    void *          compute = nullptr; // the device's compute queue, for the link; null where slots are host memory
    next_routers *  next = nullptr;    // where the next layers' experts are predicted (predicts())
};

// What one (token, rank) gets, [n_tokens][n_used] each, or what each expert gets, [n_expert]. Slot ids are -1 where it
// is not in the wave; the others are those of the whole layer, and may be null.
struct route_result {
    int32_t * high;
    int32_t * low;
    int32_t * kept;          // expert, -1 if skipped
    int32_t * cpu[N_COPIES] = {}; // expert that the CPU computes, whole or in part; -1 if it does not
    int32_t * units = nullptr; // of the inner width that the slot has; the group's n_units where it has all
    int32_t * tail  = nullptr; // first index of the inner width that the CPU computes
    bool by_expert = false;    // then there is no CPU's part
};

// In so few letters that a std::string holds them without memory of its own.
inline const char * reason(const std::exception & e) { return dynamic_cast<const std::bad_alloc *>(&e) ? "no memory left" : e.what(); }

class engine {
  public:
    // layout: slots divided, banks set. Throws std::runtime_error on settings that make no sense.
    // host: the second level, or null.
    engine(model_layout layout, const hobbit_params & params, const budget & b, std::unique_ptr<storage> files,
           std::unique_ptr<host_cache> host = nullptr);
    ~engine();

    // Waves that a batch of this size is computed in; the same for every call with these arguments.
    int waves(int layer, int n_tokens, int n_used) const;

    // Does a batch of this size have a part that the CPU computes? Misses are divided where a link brings the others, or as
    // somebody wants it.
    bool has_cpu_part(int layer, int n_tokens) const {
        const bool divides = params_.link_speed > 0.0 || layout_.groups[layout_.layers[layer].group].has_link();
        return (budget_.miss == HOBBIT_MISS_CPU || (budget_.miss == HOBBIT_MISS_AUTO && divides)) && n_tokens <= params_.cpu_batch;
    }

    // Are all waves of a batch of this size handed out together?
    bool at_once(int layer, int n_tokens, int n_used) const;

    // Can a batch of this size be served by low copies? Where a link brings loads, a prompt that uses every expert
    // several times is not: hardly an expert stays that nobody leans on, and products with the low ones would cost more.
    bool uses_low(int layer, int n_tokens, int n_used) const;

    // Has every expert of the layer's group a slot? Then each is loaded once, at high precision: a low copy would save bytes once, and
    // a skipped one would never come.
    bool holds_all(int layer) const;

    // Are the next layers' experts predicted for a batch of this size?
    bool predicts(int n_tokens) const;

    // Do residents get a bonus when the router of a batch of this size chooses?
    bool leans(int n_tokens) const { return params_.lean > 0.0f && n_tokens <= PREDICT_TOKENS && !params_.force_miss; }

    // The bonus of each expert, [n_expert], on one token's router logits [n_expert]. changed(): experts that were chosen because of it.
    void lean(int layer, const float * logits, float * bonus);
    void leaned(int layer, int changed);

    // Read all experts of the groups whose slots hold them all. Such a group needs no routing (resident()) unless
    // somebody listens to it. Throws std::runtime_error.
    void fill_whole_groups();
    bool resident(int layer);
    void count_resident(int layer, int n_tokens, int n_used);

    // The computing thread owns the engine from begin_graph() to end_graph(); other contexts wait.
    void begin_graph();
    std::string end_graph(); // "" or why the results of this graph are worthless

    // Throws nothing: where memory runs out the graph has failed, and out has no experts.
    void route(const route_request & req, int wave, const route_result & out);
    void arrive(int wave, void * compute); // at_once(): compute waits for the loads of that wave
    void cpu_begins();
    void rank_ahead(); // while the CPU computes
    void cpu_done();
    void fail(const std::string & why); // the running graph
    void fail(const std::exception & e); // and nothing more of it is served
    void wait_late(int wave, const int32_t * high_in, const int32_t * low_in, int32_t * high, int32_t * low, int n);

    // Whether to end the running graph is asked on the computing thread, every ASK_US at most and before hooks. Set while no
    // graph runs. aborted() is also for what computes between two route()s.
    void set_abort(hobbit_abort_fn ask, void * user);
    bool aborted(bool ask_now = false);

    int  prefetch(int layer, int expert, int copy);
    void set_thresholds(float t1, float t2);
    bool learns() const { return records_.learns(); } // what HOBBIT_POLICY_FOLLOW needs
    void set_policy(int32_t kind, const float * weights);
    void set_policy(std::unique_ptr<policy> own); // one that is not in enum hobbit_policy
    void set_hooks(const hobbit_hooks & hooks, hobbit * handle);

    hobbit_params params();
    hobbit_info   info();
    bool          group_info(int group, hobbit_group_info & out);
    hobbit_stats  stats();
    bool          layer_stats(int layer, hobbit_stats & out);
    void          reset_stats();
    std::string   trace_start(const std::string & path);
    std::string   trace_stop();
    const char *  decode_error() const { return error_.c_str(); } // for tests, while no graph runs

    const model_layout & layout() const { return layout_; }
    bool consistent(); // pools' invariants; for tests

  private:
    // How one expert of the running layer is served.
    struct expert_plan {
        int     expert;
        int32_t wanted; // strongest wish of all tokens
        int     copy = -1; // copy_kind, -1: skipped
        int     slot = -1; // -1: not there and not queued yet
        int     wave = 0;
        bool    miss = false;
        bool    ahead = false; // of a large batch: a high hit that was loaded ahead and not used yet
        int     pins = 0;
        bool    cpu  = false; // a miss that the CPU computes, whole or in part
        int     units = 0;    // of the inner width that are loaded into the slot; 0: all, or none where there is no load
        bool    load = false; // a miss that is loaded, whole or in part
    };

    // An expert that a layer is predicted to use. Of one that is not there: the copy that would be loaded.
    struct guess {
        int      ahead;
        int      expert;
        int      copy;           // -1: the rule would skip it
        int      slot  = -1;
        uint64_t bytes = 0;      // of the copy that was missing, or what was read of it; 0: it was there, or no candidate
        bool     loaded = false; // into the slot, because of this prediction
    };

    // Ubatches of at least this many tokens are prompt processing: they want nearly every expert once.
    static constexpr int BULK_TOKENS = 32;

    static constexpr int64_t ASK_US = 50000;

    void serve(const route_request & req, int wave, const route_result & out);
    void plan(const route_request & req);
    void select(const route_request & req);
    void bound_skips();
    void look_up();
    void share_with_cpu();
    void divide_into_waves();
    void count(const route_request & req);
    void admit();
    uint32_t uses(int layer, int expert) const;
    uint64_t part_bytes(const expert_plan & p) const;
    uint64_t cpu_bytes(const expert_plan & p) const;
    bool place(int wave, bool must, std::vector<load_request> & loads);
    bool issue(int wave, bool must);
    int  find_victim(pool & p, int layer, int copy, bool must);
    slot & occupy(pool & p, int s, int layer, int expert, int copy);
    bool window_is_full(const pool & p) const;
    bool has_share(const pool & p, int layer) const;
    bool load_ahead(int layer, int expert, int copy, bool same_layer, std::vector<load_request> & loads);
    slot & queue_ahead(load_priority priority, pool & pl, int s, int layer, int expert, std::vector<load_request> & by_link);
    void predict(next_routers & routers);
    void follow_up(int next, int ahead);
    int  room(const pool & pl, int layer, int most) const;
    void hold(int layer, const guess & x, int * left); // left [N_COPIES]: slots that can be set aside
    void load_guess(int layer, guess & x, int * left, std::vector<load_request> & by_link);
    slot * slot_of(int layer, const guess & x);
    void release_failed(pool & pl, int s);
    void give_up(int layer, guess & x);
    void settle(int layer, bool served);
    int  take_held(pool & p);
    void submit_ahead(const std::vector<load_request> & loads);
    void look_ahead();
    bool wait(int wave, load_part part);
    void before(int wave, void * compute);
    void fill(int wave, const route_result & out);
    void fill_none(const route_request & req, const route_result & out);
    void finish_wave(int wave);
    void finish_step();
    void from_host(load_request & r);
    void event(int kind, int layer, int expert, int copy, int slot);
    policy_context context_for(int group) const;
    pool & pool_of(int layer, int copy) { return pools_[layout_.layers[layer].group * N_COPIES + copy]; }

    model_layout layout_;
    hobbit_params params_;
    budget budget_;
    std::unique_ptr<storage> files_;
    records records_;
    std::unique_ptr<policy> policy_;
    std::deque<pool> pools_; // [group][copy]
    std::unique_ptr<host_cache> host_; // may be null
    trace trace_;
    hobbit_hooks hooks_ = {};
    hobbit * handle_ = nullptr;
    hobbit_abort_fn    abort_ = nullptr;
    void *             abort_user_ = nullptr;
    int64_t            asked_us_ = 0;
    bool               aborted_  = false; // the running graph; changed by its thread
    loader::give_up_fn give_up_ = [this] { return aborted(); };

    std::vector<hobbit_stats> stats_; // [layer]
    std::vector<int> n_tokens_of_;    // [layer]: of the last large batch
    int  pass_tokens_  = 0;     // of the pass's first layer
    bool queued_ahead_ = false; // on a link, since the step's plan
    bool behind_ahead_ = false; // the same before it: the step's loads came after them
    speeds speeds_;
    leaning    leaning_;
    usefulness usefulness_;
    std::vector<std::vector<guess>> guesses_; // [layer]: of layers to come
    std::vector<int32_t> next_experts_;       // scratch of predict()
    std::vector<float>   next_weights_;
    std::vector<bool>     whole_;  // [group]: all experts are in slots at high precision, for good
    std::vector<uint64_t> waited_; // [group]: ticket of the link that compute has been told to wait for

    uint64_t graphs_     = 0;
    int64_t  graph_us_   = 0;
    int64_t  graph_t0_   = 0;
    int64_t  read_base_  = 0; // loader's busy time at the last reset
    std::string error_;
    bool lost_ = false; // an exception left the running step's records or plan unfinished: nothing more of this graph is served

    // the running step
    int layer_ = -1;
    int n_tokens_ = 0;
    int n_used_ = 0;
    int n_waves_ = 0;
    bool at_once_ = false;
    int64_t issued_us_ = 0; // the step's loads were queued; 0: none
    int64_t cpu_us_    = 0; // the CPU's part began
    bool bulk_ = false; // a large batch: may not wash out the slots of the small ones
    uint64_t clock_ = 0;
    uint64_t pass_  = 0;
    std::vector<int32_t> experts_;     // [n_tokens][n_used]
    std::vector<float>   weights_;     // normalised
    std::vector<int32_t> wanted_;
    std::vector<int>     plan_of_;     // [n_expert]: index into plans_, -1
    std::vector<expert_plan> plans_;

    std::mutex           graph_mutex_; // held while a graph runs
    std::recursive_mutex mutex_;       // everything above; hooks may read statistics
    loader loader_;                    // last: its threads write into slots
};

} // namespace hob
