#include "policy.h"

namespace hob {

std::unique_ptr<policy> make_policy(int32_t kind) {
    switch (kind) {
        case HOBBIT_POLICY_LRU:    return make_policy_lru();
        case HOBBIT_POLICY_LFU:    return make_policy_lfu();
        case HOBBIT_POLICY_HOBBIT: return make_policy_hobbit();
        case HOBBIT_POLICY_LCU:    return make_policy_lcu();
        case HOBBIT_POLICY_FOLLOW: return make_policy_follow();
        default:                   return nullptr;
    }
}

} // namespace hob
