#include "lean.h"

#include <algorithm>
#include <cmath>

namespace hob {

double leaning::spread(int layer, const float * logits, int n_expert) {
    mean & m = layers_[layer];
    const auto ends = std::minmax_element(logits, logits + n_expert);
    const double range = (double) *ends.second - *ends.first;
    if (std::isfinite(range) && std::none_of(logits, logits + n_expert, [](float x) { return std::isnan(x); })) {
        m.n = std::min(m.n + 1, TOKENS);
        m.value += (range - m.value) / m.n;
    }
    return m.value;
}

} // namespace hob
