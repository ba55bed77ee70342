// ahead.h - which experts the next layers will want: who predicts them, and how far ahead that pays.

#pragma once

#include <cstdint>

namespace hob {

constexpr int MAX_AHEAD = 3; // layers

// Predictions for batches of up to so many tokens; larger ones want most of the experts anyway.
constexpr int PREDICT_TOKENS = 4;

// The routers of the layers to come, applied to the running layer's input. Implemented where they are.
class next_routers {
  public:
    virtual ~next_routers() = default;

    // What the router of that layer would choose, [n_tokens][n_used of the layer]. False: nothing is known of it.
    virtual bool choose(int layer, int32_t * experts, float * weights) = 0;
};

// Does it pay to load what is predicted? By the bytes of predictions of experts that were not there, right and wrong, loaded or
// not, depth by depth; the last few hundred count most.
class usefulness {
  public:
    void observe(int ahead, double bytes, bool right);

    // Layers ahead: as many as waste, each of them, at most an eighth of what is useful. A prefetch can only win the time in which the
    // storage would be idle, and that is seldom more than a tenth of a step.
    int depth() const;

  private:
    static constexpr double KEEP = 1.0 - 1.0 / 256;
    struct sum { double right = 0.0, wrong = 0.0; };
    sum sums_[MAX_AHEAD];
};

} // namespace hob
