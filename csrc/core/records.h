// records.h - what the eviction policies know of the past: uses of every expert, per sequence.

#pragma once

#include "layout.h"
#include "succession.h"

#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

namespace hob {

// Uses of one expert in one sequence. Token numbers start at 1; 0 is "never".
struct use_record {
    uint32_t last = 0; // R: token number of the last use
    uint32_t uses = 0; // F: times the router chose it
    uint32_t high = 0; // H: of those, wanted at high precision
    uint32_t low  = 0; // L: of those, wanted at low precision
};

// A sequence is named by its context and its number in it.
using sequence_key = std::pair<const void *, int32_t>;

struct sequence_records {
    uint32_t tokens    = 0; // T
    uint64_t last_pass = 0;
    std::vector<use_record> experts; // [layer][expert], rows at layer_offset
    succession_state succession;     // where that is learned
};

// Records of all sequences, the ones of the running ubatch marked active. Sequences beyond
// MAX_SEQUENCES push out the one that ran longest ago.
class records {
  public:
    static constexpr size_t MAX_SEQUENCES = 16;

    // learn: which experts follow which, too (succession.h).
    explicit records(const model_layout & layout, bool learn = false);

    static bool learns(int32_t policy) { return policy == HOBBIT_POLICY_FOLLOW; }

    // A ubatch begins. seq, pos [n_tokens]; position 0 starts its sequence anew.
    void begin(const void * context, const int32_t * seq, const int32_t * pos, int n_tokens);

    // The router of layer chose experts for token t: wanted as enum hobbit_precision.
    void use(int layer, int token, int expert, int32_t wanted);

    // All that the router chose in that layer, [n_tokens][n_used], after use() of each.
    void served(int layer, const int32_t * experts, int n_tokens, int n_used);

    // Sequences of the running ubatch; never empty after begin().
    const std::vector<const sequence_records *> & active() const { return active_; }

    const use_record & at(const sequence_records & s, int layer, int expert) const {
        return s.experts[offset_[layer] + expert];
    }

    // The chance that the expert is used when its layer runs next; 0 where that is not learned.
    double chance(const sequence_records & s, int layer, int expert) const {
        return succession_ ? succession_->chance(s.succession, layer, expert) : 0.0;
    }

    // Does the chance of an expert of that layer change when layer served is?
    bool forecasts(int served, int layer) const { return succession_ && succession_->forecasts(served, layer); }

    double share_used(int layer) const { return share_used_[layer]; } // n_used / n_expert
    bool   learns() const { return succession_ != nullptr; }

    // What they take at most, unless one ubatch has more than MAX_SEQUENCES.
    static uint64_t bytes(const model_layout & layout, int32_t policy);

  private:
    std::vector<size_t> offset_; // [n_layers + 1]
    std::vector<double> share_used_;
    std::unique_ptr<succession> succession_;
    std::vector<succession_token> running_; // scratch
    std::map<sequence_key, sequence_records> sequences_;
    std::vector<const sequence_records *> active_;
    std::vector<std::pair<sequence_records *, uint32_t>> token_; // per token of the ubatch: its sequence, its number
    uint64_t pass_ = 0;
};

} // namespace hob
