// hobbit - four weighted terms (arXiv 2411.01433v2, section 4.3), the mean over the sequences of the ubatch:
//
//   p = w_lru*R/T + w_lfu*F/T + w_lhu*H/T + w_fld*(1 - distance/n)        weights scaled to sum to 1
//
// R last use, F uses, H high-precision uses, all in the sequence; T its tokens; distance as layer_distance().

#include "policy.h"

namespace hob {

namespace {
struct policy_hobbit : each_policy<policy_hobbit, true> {
    double priority(const candidate & c, const policy_context & ctx) const {
        const float * w = ctx.weights;
        const double sum = (double) w[0] + w[1] + w[2] + w[3];
        double p = 0.0;
        for (const sequence_records * s : ctx.rec->active()) {
            const use_record & r = ctx.rec->at(*s, c.layer, c.expert);
            p += ((double) w[0] * r.last + (double) w[1] * r.uses + (double) w[2] * r.high) / s->tokens;
        }
        p /= ctx.rec->active().size();
        p += (double) w[3] * (1.0 - (double) layer_distance(ctx, c.layer) / ctx.n_layers);
        return p / sum;
    }
};
} // namespace

std::unique_ptr<policy> make_policy_hobbit() { return std::make_unique<policy_hobbit>(); }

} // namespace hob
