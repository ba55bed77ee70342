#include "clairvoyant.h"

#include <algorithm>

namespace hob {

namespace {
class policy_clairvoyant : public each_policy<policy_clairvoyant> {
  public:
    explicit policy_clairvoyant(const future & known) : known_(known) {}

    static constexpr int USES = 4; // more change the penalty by less than a per cent

    double priority(const candidate & c, const policy_context & ctx) const {
        const future::uses & u = known_.at(c.layer, c.expert);
        double p = 0.0;
        int left = USES;
        for (size_t i = u.next; i < u.list.size() && left > 0; ++i) {
            const future::use & x = u.list[i];
            if (x.wanted == HOBBIT_SKIP) {
                continue;
            }
            if (c.copy == COPY_LOW && x.wanted == HOBBIT_HIGH) {
                break; // a high copy is loaded then, and serves what follows
            }
            const double saved = x.wanted == HOBBIT_HIGH ? 1.0 : ctx.cost_low;
            p = std::max(p, saved / (double) (x.step - known_.now()));
            left--;
        }
        return p;
    }

  private:
    const future & known_;
};
} // namespace

std::unique_ptr<policy> make_policy_clairvoyant(const future & known) { return std::make_unique<policy_clairvoyant>(known); }

} // namespace hob
