// Prediction of the next layers' experts: what is loaded, held, given up and counted; and that nothing that the engine promises
// depends on whether a prediction was right.

#include "check.h"
#include "driver.h"

#include <algorithm>
#include <chrono>
#include <thread>

using namespace hob;

namespace {

const group_spec SMALL = { 8, 2, 3, { { 96, 96, 128 }, { 24, 24, 32 } } };
const std::vector<float> W = { 2, 1 };

struct fixed_routers : next_routers {
    std::map<int, std::vector<int32_t>> experts; // layer: of one token
    bool choose(int layer, int32_t * e, float * w) override {
        const auto it = experts.find(layer);
        if (it == experts.end()) {
            return false;
        }
        std::copy(it->second.begin(), it->second.end(), e);
        std::copy(W.begin(), W.end(), w);
        return true;
    }
};

hobbit_params ahead_params(int layers, int copy, float t1 = 1.0f, int ranks = 0) {
    hobbit_params p = test_params(t1, 1.0f);
    p.prefetch       = layers;
    p.prefetch_copy  = copy;
    p.prefetch_ranks = ranks;
    return p;
}

void token(driver & d, int pos, const std::vector<std::vector<int32_t>> & experts) {
    d.begin();
    for (int l = 0; l < (int) experts.size(); ++l) {
        d.layer(l, 1, (int) experts[l].size(), experts[l], W, { 0 }, { pos }, l == 0);
    }
    CHECK(d.end());
}

} // namespace

TEST(ahead_right_predictions_are_hits) {
    fake_model m({ SMALL }, { 0, 0, 0 });
    m.place_slots(12, 4);
    fixed_routers next;
    next.experts = { { 1, { 4, 5 } }, { 2, { 6, 7 } } };
    driver d(m, ahead_params(1, HOBBIT_PREFETCH_HIGH));
    d.next = &next;
    token(d, 0, { { 0, 1 }, { 4, 5 }, { 6, 3 } });
    const hobbit_stats st = d.engine->stats();
    CHECK_EQ(st.predicted_1, 4u);
    CHECK_EQ(st.correct_1, 3u);
    CHECK_EQ(st.predicted_2, 0u);
    CHECK_EQ(st.predicted_loads, 4u);
    CHECK_EQ(st.useful, 3u);
    CHECK_EQ(st.prefetch_hits, 3u);
    CHECK_EQ(st.hits_high, 3u);
    CHECK_EQ(st.misses_high, 3u); // of layer 0, and expert 3
    CHECK(st.bytes_wasted <= 320u); // expert 7, or what of it was read
    CHECK_EQ(st.bytes_predicted, 3 * 320 + st.bytes_wasted);
    d.check_stats();
}

TEST(ahead_ranks_copies_and_the_rule) {
    struct { int copy; float t1; int ranks; uint64_t high, low; } cases[] = {
        { HOBBIT_PREFETCH_HIGH, 0.5f, 0, 2, 0 }, // gate weights 2/3 and 1/3: high and low by the rule
        { HOBBIT_PREFETCH_RULE, 0.5f, 0, 1, 1 },
        { HOBBIT_PREFETCH_LOW,  0.5f, 0, 0, 1 },
        { HOBBIT_PREFETCH_RULE, 0.5f, 1, 1, 0 },
        { HOBBIT_PREFETCH_RULE, 1.0f, 0, 2, 0 },
    };
    for (const auto & c : cases) {
        fake_model m({ SMALL }, { 0, 0 });
        m.place_slots(12, 4);
        fixed_routers next;
        next.experts = { { 1, { 4, 5 } } };
        driver d(m, ahead_params(1, c.copy, c.t1, c.ranks));
        d.next = &next;
        uint64_t loaded[N_COPIES] = { 0, 0 };
        token(d, 0, { { 0, 1 }, { 4, 5 } });
        hobbit_stats st = d.engine->stats();
        loaded[COPY_HIGH] = (st.bytes_predicted - (c.low ? 80 : 0)) / 320;
        loaded[COPY_LOW]  = st.bytes_predicted % 320 / 80;
        CHECK_EQ(loaded[COPY_HIGH], c.high);
        CHECK_EQ(loaded[COPY_LOW], c.low);
        CHECK_EQ(st.predicted_1, 2u); // told whatever is loaded
        CHECK_EQ(st.useful, c.high + c.low);
        CHECK_EQ(st.bytes_wasted, 0u);
        d.check_stats();
    }
}

// What is wrong and not begun is not read.
TEST(ahead_wrong_predictions_are_given_up) {
    fake_model m({ SMALL }, { 0, 0 });
    m.place_slots(12, 4);
    fixed_routers next;
    next.experts = { { 1, { 4, 5 } } };
    hobbit_params p = ahead_params(1, HOBBIT_PREFETCH_HIGH);
    p.n_io_threads = 2;
    driver d(m, p);
    d.next = &next;
    std::atomic<bool> held{ true };
    d.files->before = [&](const fake_model::place & at) { // one guess at a time: a single thread of the two takes them
        while (held && at.layer == 1 && at.expert >= 4) {
            std::this_thread::yield();
        }
        return std::string();
    };
    d.begin();
    d.layer(0, 1, 2, { 0, 1 }, W, { 0 }, { 0 }, true);
    d.layer(1, 1, 2, { 2, 3 }, W, { 0 }, { 0 }, false); // loads past the guess that is stuck
    held = false;
    CHECK(d.end());
    const hobbit_stats st = d.engine->stats();
    CHECK_EQ(st.predicted_loads, 2u);
    CHECK_EQ(st.useful, 0u);
    CHECK_EQ(st.bytes_wasted, st.bytes_predicted);
    CHECK(st.bytes_wasted <= 128u); // one piece at most had been begun
    CHECK_EQ(st.misses_high, 4u);
    d.check_stats();
    token(d, 1, { { 0, 1 }, { 4, 5 } }); // they can be loaded again
}

// A prediction for the nearer layer takes the place of the one from farther.
TEST(ahead_late_is_told_and_waits_for_the_rest_only) {
    fake_model m({ SMALL }, { 0, 0, 0 });
    m.place_slots(12, 4);
    fixed_routers next;
    next.experts = { { 1, { 4, 5 } }, { 2, { 6, 7 } } };
    driver d(m, ahead_params(2, HOBBIT_PREFETCH_HIGH));
    d.next = &next;
    d.files->before = [&](const fake_model::place & at) {
        std::this_thread::sleep_for(std::chrono::milliseconds(at.layer == 1 && at.expert == 5 && at.proj == 2 ? 20 : 0));
        return std::string();
    };
    token(d, 0, { { 0, 1 }, { 4, 5 }, { 6, 7 } });
    const hobbit_stats st = d.engine->stats();
    CHECK_EQ(st.useful, 4u);
    CHECK(st.late >= 1u);
    CHECK_EQ(st.predicted_2, 2u);
    CHECK_EQ(st.predicted_1, 4u);
    CHECK_EQ(st.predicted_loads, 4u); // once each
    CHECK_EQ(st.bytes_wasted, 0u);
    d.check_stats();
}

// Held experts stay while others could go, and no layer is left without slots.
TEST(ahead_residents_that_are_predicted_stay) {
    fake_model m({ SMALL }, { 0, 0 });
    m.place_slots(6, 1);
    fixed_routers next;
    driver d(m, ahead_params(1, HOBBIT_PREFETCH_HIGH, 1.0f, 1));
    d.next = &next;
    token(d, 0, { { 0, 1 }, { 4, 5 } });
    next.experts = { { 1, { 4, 5 } } };
    for (int t = 1; t < 6; ++t) {
        token(d, t, { { 2 * t % 8, 2 * t % 8 + 1 }, { 4, 5 } });
    }
    const hobbit_stats st = d.engine->stats();
    CHECK_EQ(st.predicted_1, 10u);
    CHECK_EQ(st.correct_1, 10u);
    hobbit_stats one = {};
    CHECK(d.engine->layer_stats(1, one));
    CHECK_EQ(one.hits_high, 10u);
    CHECK_EQ(st.predicted_loads, 0u);
    d.check_stats();
}

TEST(ahead_depth_follows_what_was_useful) {
    usefulness u;
    CHECK_EQ(u.depth(), 0); // nothing is known
    for (int i = 0; i < 100; ++i) {
        u.observe(1, 100, i % 10 != 0); // 9 of 10
        u.observe(2, 100, i % 5 != 0);
        u.observe(3, 100, true);
    }
    CHECK_EQ(u.depth(), 1); // 3 is of no use where 2 does not pay
    for (int i = 0; i < 600; ++i) {
        u.observe(2, 100, true);
    }
    CHECK_EQ(u.depth(), 3);
    for (int i = 0; i < 600; ++i) {
        u.observe(1, 100, false);
    }
    CHECK_EQ(u.depth(), 0);
}

TEST(ahead_auto_learns_without_loading) {
    fake_model m({ SMALL }, { 0, 0 });
    m.place_slots(8, 2);
    fixed_routers next;
    driver d(m, ahead_params(HOBBIT_PREFETCH_AUTO, HOBBIT_PREFETCH_HIGH));
    d.next = &next;
    for (int t = 0; t < 40; ++t) { // wrong all the time
        next.experts[1] = { (t + 2) % 8, (t + 3) % 8 };
        token(d, t, { { 0, 1 }, { t % 8, (t + 1) % 8 } });
    }
    CHECK_EQ(d.engine->stats().predicted_loads, 0u);
    for (int t = 40; t < 1400; ++t) {
        next.experts[1] = { 3 * t % 8, (3 * t + 1) % 8 };
        token(d, t, { { 0, 1 }, next.experts[1] });
    }
    CHECK(d.engine->stats().predicted_loads > 0u);
    CHECK(d.engine->stats().useful > d.engine->stats().predicted_loads / 2);
    d.check_stats();
}

// Random predictions of random models, right and wrong, in batches of all sizes, with and without failing reads.
TEST(ahead_random) {
    struct noisy : next_routers {
        random_router & r;
        const model_layout & layout;
        const int & n_tokens;
        noisy(random_router & r, const model_layout & l, const int & n) : r(r), layout(l), n_tokens(n) {}
        bool choose(int layer, int32_t * e, float * w) override {
            const layer_layout & l = layout.layers[layer];
            for (int t = 0; t < n_tokens; ++t) {
                r.token(layer, l.n_expert, l.n_used, e + (size_t) t * l.n_used, w + (size_t) t * l.n_used);
            }
            return r.below(8) > 0;
        }
    };
    for (uint32_t seed = 0; seed < 60; ++seed) {
        random_router r(seed);
        const bool two = r.below(2);
        const group_spec other = { 16, 4, 2, { { 200, 100, 0 }, { 50, 25, 0 } }, r.below(2) == 0 };
        fake_model m(two ? std::vector<group_spec>{ SMALL, other } : std::vector<group_spec>{ SMALL }, two ? std::vector<int>{ 0, 1, 0, 1 } : std::vector<int>{ 0, 0, 0 });
        m.place_slots(4 + r.below(10), 3 + r.below(5));
        hobbit_params p = test_params(0.2f * r.below(6), 1.0f, r.below(5));
        p.prefetch       = r.below(5) - 1;
        p.prefetch_copy  = r.below(3);
        p.prefetch_ranks = r.below(3);
        p.n_io_threads   = 1 + r.below(4);
        driver d(m, p);
        int n_tokens = 1;
        noisy next(r, m.layout, n_tokens);
        d.next = &next;
        d.may_fail = seed % 3 == 2;
        if (d.may_fail) {
            d.files->before = [](const fake_model::place & at) { return std::string(at.expert == 5 && at.layer == 1 ? "worn out" : ""); };
        }
        int pos = 0;
        for (int graph = 0; graph < 40; ++graph) {
            n_tokens = r.below(6) ? 1 : 1 + r.below(40);
            d.begin();
            for (int layer = 0; layer < (int) m.layout.layers.size(); ++layer) {
                const layer_layout & l = m.layout.layers[layer];
                std::vector<int32_t> experts(n_tokens * l.n_used), seq(n_tokens, 0), at(n_tokens);
                std::vector<float> weights(n_tokens * l.n_used);
                for (int t = 0; t < n_tokens; ++t) {
                    r.token(layer, l.n_expert, l.n_used, &experts[t * l.n_used], &weights[t * l.n_used]);
                    at[t] = pos + t;
                }
                d.layer(layer, n_tokens, l.n_used, experts, weights, seq, at, layer == 0);
            }
            d.end();
            pos += n_tokens;
        }
        d.check_stats();
    }
}
