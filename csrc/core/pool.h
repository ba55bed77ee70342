// pool.h - the slots of one group and one precision: who owns which, and which may be given up.

#pragma once

#include "loader.h"
#include "policy.h"

#include <vector>

namespace hob {

struct slot {
    int      layer      = -1;    // owner, -1: free
    int      expert     = -1;
    int      pins       = 0;     // plans that use it: must not be given up
    bool     prefetched = false; // loaded ahead and not requested yet
    bool     guessed    = false; // loaded because of a prediction for a layer that has not been served yet
    bool     held       = false; // predicted for such a layer: stays until it has
    bool     streamed   = false; // loaded by a large batch and not requested by a small one since
    uint64_t last_clock = 0;
    uint64_t last_pass  = 0;
    load_state load;

    bool free() const { return layer < 0; }
};

class pool {
  public:
    pool(const model_layout & layout, int group, int copy);

    int group() const { return group_; }
    int copy() const { return copy_; }
    int n_slots() const { return (int) slots_.size(); }
    int n_kept(int layer) const { return kept_[in_group_[layer]]; } // of its slots, those that are not streamed
    int n_resident() const { return n_resident_; }
    int n_streamed() const { return n_streamed_; }
    int  n_free() const { return (int) free_.size(); }
    int  n_idle(int most, bool not_held) const; // slots that are neither pinned nor loading, nor held; counted up to most

    slot &       at(int s)       { return slots_[s]; }
    const slot & at(int s) const { return slots_[s]; }

    // The slot that holds (or is loading) this expert, -1 if none does.
    int find(int layer, int expert) const { return where_[index(layer, expert)]; }

    // A slot that can be loaded into: a free one, or the candidate of least priority; -1 if all are
    // pinned or loading. only_streamed: take no other's slot than one of a large batch's, and of these none that was
    // loaded ahead for a layer still to come.
    int victim(const policy & pol, const policy_context & ctx, bool only_streamed);

    // The occupied slot of least priority that may be given up, -1 if none (pool_order.cpp). What one search finds
    // serves until more slots may go, for one: forget_order() then. A slot whose load has ended since is not looked for.
    int weakest(const policy & pol, const policy_context & ctx, bool only_streamed = false);
    void forget_order();

    // Priorities have changed: those that the turn of ctx.layer changes, or all of them.
    void begin(const policy & pol, const policy_context & ctx);
    void reorder();

    // A search for ctx.layer before its turn: what is forgotten until then does not concern it.
    void rank_ahead(const policy & pol, const policy_context & ctx);
    void forget_ahead();

    void assign(int s, int layer, int expert);
    void release(int s);
    void set_streamed(int s, bool on);

    // slot_of(layer, expert) and the slots' owners agree, counts are right; for tests.
    bool consistent() const;

  private:
    // A layer's copies, in no order.
    struct listed { double priority; uint64_t last_clock; int expert; int slot; uint64_t passed; };
    struct layer_list {
        int  layer    = -1;   // of the model
        int  resident = 0;
        int  n        = 0;    // listed
        int  first    = -1;   // the one of least priority; -1: not known
        bool stale    = true; // to be made anew by the next search
    };
    struct head { double priority; uint64_t last_clock; int list; int at; };

    bool may_go(const slot & x, const policy_context & ctx) const;
    void search(const policy & pol, const policy_context & ctx, bool only_streamed);
    void fill(int list, const policy & pol, const policy_context & ctx);
    int  first_of(int list) const;
    bool is_first(const head & h, const policy & pol, const policy_context & ctx) const;
    void pass_over(int list, int at);
    int  next_of(int list, int at, const policy_context & ctx);
    bool owned(int list, const listed & e) const { return slots_[e.slot].layer == lists_[list].layer && slots_[e.slot].expert == e.expert; }
    bool usable(int list, const listed & e, const policy_context & ctx) const { return owned(list, e) && may_go(slots_[e.slot], ctx); }
    listed * listed_in(int list) { return &listed_[(size_t) list * n_expert_]; }
    candidate candidate_of(int list, const listed & e) const { return { lists_[list].layer, e.expert, copy_, e.last_clock, slots_[e.slot].last_pass }; }
    size_t index(int layer, int expert) const { return (size_t) in_group_[layer] * n_expert_ + expert; }

    int group_;
    int copy_;
    int n_expert_;
    int n_resident_ = 0;
    int n_streamed_ = 0;
    std::vector<int> in_group_; // [n_layers of the model]
    std::vector<int> where_;    // [n_layers of the group][n_expert]
    std::vector<int> kept_;     // [n_layers of the group]
    std::vector<slot> slots_;   // never grows: loads point into it
    std::vector<int> free_;

    std::vector<layer_list> lists_;  // [n_layers of the group]
    std::vector<listed>     listed_; // [n_layers of the group][n_expert]
    std::vector<head>       heads_;  // of the running search: of each list the first that may go
    uint64_t searches_     = 0;      // what is passed over has the number of the search
    int  least_            = -1;     // of the heads, the first; -1: not known
    bool searching_        = false;
    bool search_streamed_  = false;
    int  order_ahead_     = -1;      // the layer that was searched for ahead
    std::vector<candidate> candidates_; // scratch
    std::vector<double>    priorities_;
};

} // namespace hob
