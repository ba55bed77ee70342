// lru - the copy whose last use is longest ago.

#include "policy.h"

namespace hob {

namespace {
struct policy_lru : each_policy<policy_lru, true> {
    double priority(const candidate & c, const policy_context &) const { return (double) c.last_clock; }
};
} // namespace

std::unique_ptr<policy> make_policy_lru() { return std::make_unique<policy_lru>(); }

} // namespace hob
