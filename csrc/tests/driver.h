// driver.h - plays the part of llama.cpp: routes tokens through the engine and checks everything that the
// engine promises while it does so.
//
// Checked at every step, whatever the sizes, budgets, policies and failures:
//   - a slot id that is handed out points at memory that holds exactly that expert, projection by
//     projection as they are promised (all but the last after route(), the last after wait_late()), and
//     still does just before the next route(), when the computation of that wave is over;
//   - every (token, rank) is served in exactly one wave by one copy, or skipped as a whole;
//   - the copy is at least as good as the most demanding token wants; what wants nothing costs no load;
//   - an expert is loaded at most once a step, and never while a copy that would do is resident;
//   - no copy that the running step still needs is given up;
//   - the counters equal what was seen.

#pragma once

#include "engine.h"
#include "fake_model.h"

#include <map>
#include <mutex>
#include <random>
#include <set>
#include <vector>

struct driver {
    fake_model &         model;
    fake_storage *       files; // the engine's
    hobbit_params        params;
    std::unique_ptr<hob::engine> engine;

    bool may_fail          = false; // reads fail now and then: graphs may, too
    bool settings_change   = false; // by another thread: the wish of a token is not known
    long refuse            = 0;     // the allocation of the engine, from 1 on, that the next route()s are refused; 0: none
    int  leave_at          = -1;    // the next layer is left after the route() of this wave, as where a program ends a graph
    std::function<void()> computing; // called where the graph would compute
    std::function<void(int layer)> prefetch; // the prefetch hook
    hob::next_routers * next = nullptr;           // predicts; what it queues may be given up again

    driver(fake_model & model, const hobbit_params & params, std::unique_ptr<hob::host_cache> host = nullptr, const hob::budget * budget = nullptr);

    void begin();
    // Runs one layer of a ubatch. experts, weights [n_tokens][n_used]
    void layer(int layer, int n_tokens, int n_used, const std::vector<int32_t> & experts, const std::vector<float> & weights,
               const std::vector<int32_t> & seq, const std::vector<int32_t> & pos, bool first, const void * context = nullptr);
    bool end(); // false: the graph failed

    // Compares the engine's statistics with what was seen. Not while anything runs.
    void check_stats();

    hobbit_stats seen = {}; // what check_stats() expects
    int n_failed = 0;       // graphs
    std::string last_error;

  private:
    static void on_event(void * user, int32_t kind, int32_t layer, int32_t expert, int32_t precision, int32_t slot);
    static void on_prefetch(void * user, hobbit * h, int32_t layer, int32_t n_tokens, int32_t n_used, const int32_t * experts, const float * weights);

    void route(const hob::route_request & req, int wave, const hob::route_result & out);

    struct served { int kind; int copy; int slot; };

    void check_wave(int layer, int n, const std::vector<int32_t> & experts, const std::vector<int32_t> & high, const std::vector<int32_t> & low,
                    int first_proj, int end_proj);

    std::mutex mutex_; // events may come from a thread that prefetches
    std::map<std::tuple<int, int, int>, int> resident_; // (layer, expert, copy): slot, as the events tell
    std::map<int, served> step_; // of the running layer: expert -> its HIT, LOAD or SKIP
    std::set<int> computed_;     // of those, the ones whose wave is over
    int  running_ = -1;          // layer
    bool incomplete_ = false;    // something of this graph was not served
    bool left_       = false;    // it was left
    bool refused_    = false;    // it may have ended before what force_miss gives up was given up
};

// The rule once more, independent of select.cpp.
std::vector<int32_t> rule_of_token(const float * weights, int n_used, float t1, float t2);

// Random routing: some experts are chosen more often than others, by layer.
struct random_router {
    std::mt19937 rng;
    bool odd_weights = true; // ties, sums that are not 1, now and then NaN

    explicit random_router(uint32_t seed) : rng(seed) {}
    int  below(int n) { return (int) (rng() % (uint32_t) n); }
    void token(int layer, int n_expert, int n_used, int32_t * experts, float * weights);
};
