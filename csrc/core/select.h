// select.h - the rule: which precision a (token, rank) wants.

#pragma once

#include "hobbit.h"

#include <vector>

namespace hob {

// Scores of one token's experts, and what the rule wants of each (DESIGN: Selection).
//   weights [n_used]  gate weights in the router's order, any scale
//   g       [n_used]  out: weights normalised over the chosen experts so that they sum to 1
//   wanted  [n_used]  out: enum hobbit_precision
// Ranks are taken by weight, largest first, ties in the router's order. With g sorted,
//   s_0 = 0, s_i = g_0 + ... + g_(i-1);  s <= t1 -> high, t1 < s <= t2 -> low, s > t2 -> skip.
// Weights without a usable sum (NaN, infinite, not positive) make everything high: no decision is
// built on rubbish.
void select_token(const float * weights, int n_used, float t1, float t2, float * g, int32_t * wanted);

// The same for weights that are normalised already, as a trace has them: once more would move them by a rounding.
void select_normalised(const float * g, int n_used, float t1, float t2, int32_t * wanted);

} // namespace hob
