// lcu - least cost of use, the policy of the paper's published form (MoE-APEX), the mean over the
// sequences of the ubatch:
//
//   p = (H + (B_low/B_high)*L)/T + [used in this or the last forward pass] / (distance + 0.1)

#include "policy.h"

namespace hob {

namespace {
struct policy_lcu : each_policy<policy_lcu> {
    double priority(const candidate & c, const policy_context & ctx) const {
        double p = 0.0;
        for (const sequence_records * s : ctx.rec->active()) {
            const use_record & r = ctx.rec->at(*s, c.layer, c.expert);
            p += (r.high + (double) ctx.cost_low * r.low) / s->tokens;
        }
        p /= ctx.rec->active().size();
        if (c.last_pass + 1 >= ctx.pass) {
            p += 1.0 / (layer_distance(ctx, c.layer) + 0.1);
        }
        return p;
    }
};
} // namespace

std::unique_ptr<policy> make_policy_lcu() { return std::make_unique<policy_lcu>(); }

} // namespace hob
