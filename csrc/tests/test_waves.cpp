// Batches that need more experts than there are slots go in waves: there are enough of them for every
// combination of sizes, down to the smallest legal pools. (What each wave hands out: driver.h.)

#include "check.h"
#include "driver.h"

#include <algorithm>
#include <cstring>

using namespace hob;

namespace {

// n_tokens x n_used choices with as many distinct experts as can be, from a random one on.
std::vector<int32_t> spread(random_router & r, int n_expert, int n) {
    std::vector<int32_t> e(n);
    const int first = r.below(n_expert);
    for (int i = 0; i < n; ++i) {
        e[i] = (first + i) % n_expert;
    }
    return e;
}

} // namespace

TEST(waves_suffice_for_all_sizes) {
    random_router r(check::seed);
    const int n_expert = 12;
    const float thresholds[][2] = { { 1.0f, 1.0f }, { 0.0f, 1.0f }, { 0.3f, 0.6f } };
    for (int n_used : { 1, 2, 5, 12 }) {
        for (int slots = n_used; slots <= 2 * n_expert; slots += slots < n_expert + 2 ? 1 : 5) {
            for (const auto & t : thresholds) {
                fake_model m({ { n_expert, n_used, 2, { { 16, 16, 0 }, { 8, 8, 0 } } } }, { 0, 0 });
                m.place_slots(slots, std::max(n_used - 1, r.below(2) ? r.below(slots) : 0));
                driver d(m, test_params(t[0], t[1], r.below(4)));
                int32_t next = 0;
                for (int n_tokens : { 1, 2, 3, 31, 1, 32, 64, 5, 1, 33 }) {
                    const int n = n_tokens * n_used;
                    std::vector<int32_t> seq(n_tokens, 0), pos;
                    for (int i = 0; i < n_tokens; ++i) {
                        pos.push_back(next++);
                    }
                    std::vector<float> w(n);
                    for (float & x : w) {
                        x = 1.0f + (float) r.below(100);
                    }
                    d.begin();
                    for (int layer = 0; layer < 2; ++layer) {
                        CHECK_EQ(d.engine->waves(layer, n_tokens, n_used), d.engine->waves(layer, n_tokens, n_used));
                        d.layer(layer, n_tokens, n_used, spread(r, n_expert, n), w, seq, pos, layer == 0);
                    }
                    CHECK(d.end());
                }
                d.check_stats();
            }
        }
    }
}

TEST(waves_one_token_needs_one) {
    for (int n_used = 1; n_used <= 12; ++n_used) {
        fake_model m({ { 12, n_used, 2, { { 16, 16, 0 }, { 8, 8, 0 } } } }, { 0, 0 });
        m.place_slots(n_used, n_used - 1);
        driver d(m, test_params());
        CHECK_EQ(d.engine->waves(0, 1, n_used), 1);
        CHECK(d.engine->waves(0, 1, 12) * std::max(1, n_used / 2) >= 12 || n_used == 12); // a warm-up run
    }
}

// F25: a prompt reads each expert once per layer and ubatch, and leaves the slots of the decode alone.
TEST(waves_a_prompt_streams_through_a_few_slots) {
    for (int policy = 0; policy < 4; ++policy) {
        random_router r(check::seed);
        const int n_expert = 32, n_used = 2, n_layers = 4, slots = 40;
        fake_model m({ { n_expert, n_used, 2, { { 16, 16, 0 }, { 8, 8, 0 } } } }, { 0, 0, 0, 0 });
        m.place_slots(slots, 1);
        driver d(m, test_params(1.0f, 1.0f, policy));
        // decode: eight experts of each layer, again and again
        int32_t next = 0;
        const auto decode = [&] {
            const uint64_t before = d.engine->stats().hits_high;
            for (int step = 0; step < 12; ++step, ++next) {
                d.begin();
                for (int layer = 0; layer < n_layers; ++layer) {
                    const int e = (step % 4) * 2;
                    d.layer(layer, 1, n_used, { e, e + 1 }, { 2, 1 }, { 0 }, { next }, layer == 0);
                }
                CHECK(d.end());
            }
            return d.engine->stats().hits_high - before;
        };
        decode();
        CHECK_EQ(decode(), 12u * n_layers * n_used); // all there
        // a prompt of another sequence
        for (int ubatch = 0; ubatch < 3; ++ubatch) {
            const hobbit_stats before = d.engine->stats();
            const int n_tokens = 64;
            std::vector<int32_t> seq(n_tokens, 1), pos;
            for (int i = 0; i < n_tokens; ++i) {
                pos.push_back(ubatch * n_tokens + i);
            }
            d.begin();
            for (int layer = 0; layer < n_layers; ++layer) {
                std::vector<float> w(n_tokens * n_used, 1.0f);
                d.layer(layer, n_tokens, n_used, spread(r, n_expert, n_tokens * n_used), w, seq, pos, layer == 0);
            }
            CHECK(d.end());
            const hobbit_stats now = d.engine->stats();
            CHECK(now.loads_high + now.prefetches - before.loads_high - before.prefetches <= (uint64_t) n_expert * n_layers);
        }
        // The window of a prompt is a quarter of the slots: at least half of the working set is still there. With
        // lru what the prompt left is younger than all of that and drives it out in the rounds that follow.
        const uint64_t all   = 12u * n_layers * n_used;
        const uint64_t after = decode();
        if (after < (policy == HOBBIT_POLICY_LRU ? all / 2 : all - slots / 2)) {
            check::report(__FILE__, __LINE__, "policy " + std::to_string(policy) + ": " + std::to_string(after) + " hits of " + std::to_string(all) + " after the prompt");
        }
        d.check_stats();
    }
}
