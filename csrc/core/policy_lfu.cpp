// lfu - the copy with the fewest uses: p = F/T, the mean over the sequences of the ubatch.

#include "policy.h"

namespace hob {

namespace {
struct policy_lfu : each_policy<policy_lfu, true> {
    double priority(const candidate & c, const policy_context & ctx) const {
        double p = 0.0;
        for (const sequence_records * s : ctx.rec->active()) {
            p += (double) ctx.rec->at(*s, c.layer, c.expert).uses / s->tokens;
        }
        return p / ctx.rec->active().size();
    }
};
} // namespace

std::unique_ptr<policy> make_policy_lfu() { return std::make_unique<policy_lfu>(); }

} // namespace hob
