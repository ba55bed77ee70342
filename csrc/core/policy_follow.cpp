// follow - the uses to be expected, each worth half as much a token later:
//
//   p = value * 2^(-distance/n) * (next + later)
//
// next    the chance that the expert is used when its layer runs next (succession.h)
// later   its uses per token in the sequence, (F + S*k/E)/(T + S): that of the times after. S = 20 tokens count as
//         used k/E times each, k of E experts being used
// value   what a use saves by the wishes so far: for a high copy (1 + H + B_low/B_high*L)/(1 + F), for a low one
//         B_low/B_high*L/(1 + F), F uses, H and L of them at high and low precision
// distance as layer_distance(); next and later are means over the sequences of the ubatch, F, H and L sums.

#include "policy.h"

#include <cmath>

namespace hob {

namespace {
constexpr double S = 20.0;

class policy_follow : public policy {
    bool reorders(const policy_context & ctx, int layer) const final { return ctx.rec->forecasts(ctx.layer, layer); }

    void priorities(const candidate * c, size_t n, const policy_context & ctx, double * out) const final {
        const auto & active = ctx.rec->active();
        if (nearness_.size() != (size_t) ctx.n_layers + 1) {
            nearness_.resize(ctx.n_layers + 1);
            for (int d = 0; d <= ctx.n_layers; ++d) {
                nearness_[d] = std::exp2(-(double) d / ctx.n_layers);
            }
        }
        for (size_t i = 0; i < n; ++i) {
            const int layer = c[i].layer;
            const double base = S * ctx.rec->share_used(layer);
            double expected = 0.0;
            double uses = 0.0, high = 0.0, low = 0.0;
            for (const sequence_records * s : active) {
                const use_record & r = ctx.rec->at(*s, layer, c[i].expert);
                expected += ctx.rec->chance(*s, layer, c[i].expert) + (r.uses + base) / (s->tokens + S);
                uses += r.uses;
                high += r.high;
                low  += r.low;
            }
            const double saved = (double) ctx.cost_low * low;
            out[i] = (c[i].copy == COPY_HIGH ? 1.0 + high + saved : saved) / (1.0 + uses) * (nearness_[layer_distance(ctx, layer)] / active.size()) * expected;
        }
    }

    mutable std::vector<double> nearness_; // [distance]
};
} // namespace

std::unique_ptr<policy> make_policy_follow() { return std::make_unique<policy_follow>(); }

} // namespace hob
