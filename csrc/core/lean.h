// lean.h - routing that leans to what is resident (arXiv 2412.00099): its experts get lambda times the layer's spread of router
// logits as a bonus, for selection only.

#pragma once

#include <cstddef>
#include <vector>

namespace hob {

class leaning {
  public:
    explicit leaning(size_t n_layers) : layers_(n_layers) {}

    // The layer's spread so far, this token included: the mean, over its last thousand tokens or so, of the largest logit less the
    // smallest. 0 while there is none that is finite.
    double spread(int layer, const float * logits, int n_expert);

  private:
    static constexpr int TOKENS = 1024;
    struct mean { double value = 0.0; int n = 0; };
    std::vector<mean> layers_;
};

} // namespace hob
