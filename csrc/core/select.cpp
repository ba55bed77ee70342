#include "select.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace hob {

void select_token(const float * weights, int n_used, float t1, float t2, float * g, int32_t * wanted) {
    double sum = 0.0;
    for (int r = 0; r < n_used; ++r) {
        sum += weights[r];
    }
    if (!std::isfinite(sum) || sum <= 0.0) {
        for (int r = 0; r < n_used; ++r) {
            g[r]      = 1.0f / n_used;
            wanted[r] = HOBBIT_HIGH;
        }
        return;
    }
    for (int r = 0; r < n_used; ++r) {
        g[r] = (float) (weights[r] / sum);
    }
    select_normalised(g, n_used, t1, t2, wanted);
}

void select_normalised(const float * g, int n_used, float t1, float t2, int32_t * wanted) {
    constexpr int N_STACK = 64;
    int  order_stack[N_STACK];
    std::vector<int> order_heap;
    int * order = order_stack;
    if (n_used > N_STACK) {
        order_heap.resize(n_used);
        order = order_heap.data();
    }
    std::iota(order, order + n_used, 0);
    std::stable_sort(order, order + n_used, [&](int a, int b) { return g[a] > g[b]; });

    double s = 0.0;
    for (int i = 0; i < n_used; ++i) {
        const int r = order[i];
        // t1 >= 1 is "off": rounding of the sum must not turn the last ranks low
        wanted[r] = i == 0 || t1 >= 1.0f || s <= t1 ? HOBBIT_HIGH : t2 >= 1.0f || s <= t2 ? HOBBIT_LOW : HOBBIT_SKIP;
        s += g[r];
    }
}

} // namespace hob
