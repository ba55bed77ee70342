// lru - the copy whose last use is longest ago.

#include "policy.h"

namespace hob {

namespace {
class policy_lru : public policy {
    double priority(const candidate & c, const policy_context &) const override { return (double) c.last_clock; }
};
} // namespace

std::unique_ptr<policy> make_policy_lru() { return std::make_unique<policy_lru>(); }

} // namespace hob
