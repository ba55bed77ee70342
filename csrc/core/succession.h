// succession.h - which experts follow which: how likely each expert is used when its layer runs next, learned from
// the routing as it goes by.
//
// A logistic regression for each expert, over the experts that were chosen before: of the same token in the layers
// 1, 2, ... before its own, and of the token before in its own layer and those before it. Each distance has a table
// of weights [expert that was used][expert that follows]. The sum starts with what the token before says and grows as
// layers of the running token come nearer; each sum is a forecast of its own, and learning corrects each table by
// the error of the sum that ends with it:
//
//   base = bias + stay + sum of before[a]       z_a = z_(next farther) + sum of same[a]
//   weight += rate * (used - 1/(1 + exp(-z)))   for the weights that came into that sum
//
// stay is a weight of experts that the token before used, one for all of a layer.
// Integers throughout: the same everywhere.

#pragma once

#include "layout.h"

#include <algorithm>
#include <cstdint>
#include <vector>

namespace hob {

// What is known of one sequence.
struct succession_state {
    std::vector<int16_t> chosen[2];       // [layer][rank], -1: none; of token number n at n % 2
    uint32_t             number[2] = {};  // of these tokens
    std::vector<int32_t> sums;            // [layer][expert]: the forecasts now
};

struct succession_token {
    succession_state * state;
    uint32_t number; // in its sequence, from 1
};

class succession {
  public:
    static constexpr int ONE  = 1 << 13; // fixed point of weights and sums
    static constexpr int RATE = 128;     // of ONE: how far one error of 1 moves a weight
    static constexpr int LANES = 8;      // weights that are moved together
    static constexpr int MOST = 64;      // tokens of a batch that are learned from, its last

    // Takes at most 1/SHARE of the experts' bytes at high precision, or SMALL, whichever is more, for the tables.
    static constexpr uint64_t SHARE = 128;
    static constexpr uint64_t SMALL = 64 << 10;

    explicit succession(const model_layout & layout);

    static uint64_t bytes(const model_layout & layout, size_t n_states);

    void start(succession_state & s) const; // a sequence begins

    // A ubatch begins: its tokens.
    void begin(const std::vector<succession_token> & tokens);

    // A layer of it was routed, experts [n_tokens][n_used]. Layers come in their order; they may leave some out.
    void serve(int layer, const int32_t * experts, int n_tokens, int n_used);

    double chance(const succession_state & s, int layer, int expert) const { return chance_[place(s.sums[offset_[layer] + expert])]; }

    // Does serving that layer change chances in the other?
    bool forecasts(int served, int layer) const {
        return served == layer || std::find(ages_.same.begin(), ages_.same.end(), (layer - served + n_layers()) % n_layers()) != ages_.same.end();
    }

  private:
    struct ages { std::vector<int> same, before; }; // layers back; same: the farthest first
    using table = std::vector<std::vector<int16_t>>; // [layer]([expert of the layer that far back][expert])

    static ages choose(const model_layout & layout);
    static uint64_t table_bytes(const model_layout & layout, int age);

    int n_layers() const { return (int) n_expert_.size(); }
    int back(int layer, int age) const { return (layer - age + n_layers()) % n_layers(); }
    int16_t * weights(const table & t, int layer, int source) const { return const_cast<int16_t *>(&t[layer][(size_t) source * width_[layer]]); }

    // The logistic function in PLACES steps from -8 to 8.
    static constexpr int PLACES = 1024;
    static int place(int32_t sum) { return std::min(std::max((sum + 8 * ONE) >> 7, 0), PLACES - 1); }
    static_assert(16 * ONE / PLACES == 1 << 7, "steps of place()");

    const int16_t * chosen(int token, int layer, bool before) const;
    void add(const table & t, int layer, const int16_t * from, int32_t * sums, bool keep);
    void learn(int layer, int token, const int16_t * used);
    void correct(int layer, size_t first, const int16_t * used);
    void forecast(int layer, int token);
    void add_stay(int layer, const int16_t * from, int32_t * sums) const;

    std::vector<int>    n_expert_;
    std::vector<int>    width_;  // experts, to whole lanes
    std::vector<size_t> offset_; // rows of width_
    int  n_used_ = 0;
    ages ages_;
    std::vector<int32_t> bias_; // [layer][expert]
    std::vector<int32_t> stay_; // [layer]: for experts that the token before used, whichever they are
    std::vector<table> same_, before_; // [age]
    std::vector<double>  chance_;
    std::vector<int16_t> step_; // RATE * chance

    // the running ubatch
    struct token { succession_state * state; uint32_t number; int before; bool alone; bool last; };
    std::vector<token> tokens_;
    size_t n_tokens_ = 0;
    std::vector<std::vector<int16_t>> batch_; // [layer]([token][rank]), empty: not routed
    int layer_ = 0;
    std::vector<int32_t> sum_;
    std::vector<int16_t> error_;
    int16_t limit_ = 0; // of a weight
    std::vector<int16_t *> rows_;
};

} // namespace hob
