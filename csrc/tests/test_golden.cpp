// Golden numbers: every policy on one fixed pseudo-random trace. A change here is a change of a policy,
// of the rule or of the order in which they work, and must be wanted. tests/test_policies.py computes the
// same table with its own implementation.

#include "check.h"
#include "driver.h"

#include <string>

using namespace hob;

namespace {

constexpr int N_LAYERS = 4, N_EXPERT = 16, N_USED = 4, N_TOKENS = 500;
constexpr int HIGH_SLOTS = 20, LOW_SLOTS = 6;

// xorshift32: the same everywhere, in any language
struct generator {
    uint32_t x = 2463534242u;
    int below(int n) {
        x ^= x << 13;
        x ^= x >> 17;
        x ^= x << 5;
        return (int) (x % (uint32_t) n);
    }
};

struct golden {
    const char * name;
    int          policy;
    float        weights[4];
    uint64_t     hits_high, hits_low, misses_high, misses_low, skips, evictions;
};

const golden GOLDEN[] = {
    // clang-format off
    { "lru",          HOBBIT_POLICY_LRU,    { 1, 1, 1, 1 }, 3202, 379, 2468, 1325, 626, 3767 },
    { "lfu",          HOBBIT_POLICY_LFU,    { 1, 1, 1, 1 }, 2625, 79, 2788, 1773, 735, 4535 },
    { "hobbit 1 1 1 1", HOBBIT_POLICY_HOBBIT, { 1, 1, 1, 1 }, 3405, 362, 2379, 1267, 587, 3620 },
    { "hobbit 1 0 0 0", HOBBIT_POLICY_HOBBIT, { 1, 0, 0, 0 }, 3202, 330, 2468, 1363, 637, 3805 },
    { "hobbit 0 0 1 3", HOBBIT_POLICY_HOBBIT, { 0, 0, 1, 3 }, 3449, 374, 2366, 1257, 554, 3597 },
    { "lcu",          HOBBIT_POLICY_LCU,    { 1, 1, 1, 1 }, 3195, 373, 2463, 1355, 614, 3792 },
    { "follow",       HOBBIT_POLICY_FOLLOW, { 1, 1, 1, 1 }, 3471, 312, 2340, 1297, 580, 3611 },
    // clang-format on
};

} // namespace

TEST(golden_miss_counts) {
    for (const golden & want : GOLDEN) {
        fake_model m({ { N_EXPERT, N_USED, 2, { { 16, 16, 0 }, { 4, 4, 0 } } } }, std::vector<int>(N_LAYERS, 0));
        m.place_slots(HIGH_SLOTS, LOW_SLOTS);
        hobbit_params p = test_params(0.6f, 0.9f, want.policy);
        std::copy(want.weights, want.weights + 4, p.policy_weights);
        driver d(m, p);
        generator g;
        std::vector<std::vector<int32_t>> experts(N_LAYERS, std::vector<int32_t>(N_USED));
        for (int token = 0; token < N_TOKENS; ++token) {
            d.begin();
            for (int layer = 0; layer < N_LAYERS; ++layer) {
                std::vector<int32_t> & chosen = experts[layer];
                const int keep = token > 0 && g.below(3) == 0 ? 2 : 0; // a third of the time half of them stay
                for (int r = keep; r < N_USED; ++r) {
                    const int a = g.below(N_EXPERT);
                    const int b = g.below(N_EXPERT);
                    int e = ((a < b ? a : b) * 5 + layer * 3 + token / 100) % N_EXPERT; // favourites, which drift
                    for (int i = 0; i < r; ++i) {
                        if (chosen[i] == e) {
                            e = (e + 1) % N_EXPERT;
                            i = -1;
                        }
                    }
                    chosen[r] = e;
                }
                std::vector<float> w(N_USED);
                for (float & x : w) {
                    x = (float) (1 + g.below(999)) / 1024.0f;
                }
                d.layer(layer, 1, N_USED, chosen, w, { 0 }, { token }, layer == 0);
            }
            CHECK(d.end());
        }
        const hobbit_stats st = d.engine->stats();
        const auto text = [](uint64_t a, uint64_t b, uint64_t c, uint64_t e, uint64_t f, uint64_t h) {
            std::string s;
            for (uint64_t x : { a, b, c, e, f, h }) {
                s += (s.empty() ? "" : ", ") + std::to_string(x);
            }
            return s;
        };
        CHECK_EQ(std::string(want.name) + ": " + text(st.hits_high, st.hits_low, st.misses_high, st.misses_low, st.skips, st.evictions),
                 std::string(want.name) + ": " + text(want.hits_high, want.hits_low, want.misses_high, want.misses_low, want.skips, want.evictions));
        d.check_stats();
    }
}
