// Every policy's priority on cases worked out by hand. The smallest is evicted first.

#include "check.h"
#include "fake_model.h"
#include "policy.h"

#include <cmath>

using namespace hob;

namespace {

const group_spec SMALL = { 4, 2, 3, { { 8, 8, 8 }, { 2, 2, 2 } } };

struct fixture {
    fake_model model{ { SMALL }, { 0, 0, 0, 0 } };
    records    rec{ model.layout };
    policy_context ctx{ &rec, 1, 4, 10, { 0.25f, 0.25f, 0.25f, 0.25f }, 0.25f };

    // Sequence 0 after four tokens: expert 2 of layer 3 used at 1 (high), 2 (low), 3 (skip); T = 4.
    fixture() {
        const int32_t wishes[4] = { HOBBIT_HIGH, HOBBIT_LOW, HOBBIT_SKIP, -1 };
        for (int32_t t = 0; t < 4; ++t) {
            const int32_t seq = 0;
            rec.begin(this, &seq, &t, 1);
            if (wishes[t] >= 0) {
                rec.use(3, 0, 2, wishes[t]);
            }
        }
    }

    double p(int kind, int layer, int expert, uint64_t clock = 0, uint64_t pass = 0) {
        const candidate c = { layer, expert, COPY_HIGH, clock, pass };
        double out;
        make_policy(kind)->priorities(&c, 1, ctx, &out);
        return out;
    }
};

bool close(double a, double b) { return std::fabs(a - b) < 1e-12; }

} // namespace

TEST(policy_distance_is_n_for_the_layer_being_served) {
    policy_context ctx{};
    ctx.layer    = 1;
    ctx.n_layers = 4;
    CHECK_EQ(layer_distance(ctx, 2), 1);
    CHECK_EQ(layer_distance(ctx, 3), 2);
    CHECK_EQ(layer_distance(ctx, 0), 3);
    CHECK_EQ(layer_distance(ctx, 1), 4); // needed last, not soonest
    ctx.n_layers = 1;
    ctx.layer    = 0;
    CHECK_EQ(layer_distance(ctx, 0), 1);
}

TEST(policy_lru_is_the_clock) {
    fixture f;
    CHECK(f.p(HOBBIT_POLICY_LRU, 3, 2, 5) < f.p(HOBBIT_POLICY_LRU, 0, 0, 6));
}

TEST(policy_lfu_is_uses_per_token) {
    fixture f;
    CHECK(close(f.p(HOBBIT_POLICY_LFU, 3, 2), 3.0 / 4));
    CHECK(close(f.p(HOBBIT_POLICY_LFU, 3, 1), 0.0));
}

TEST(policy_hobbit_terms) {
    fixture f;
    const float * w = f.ctx.weights;
    CHECK_EQ(w[0], 0.25f);
    // R = 3, F = 3, H = 1, T = 4; distance 2 of 4
    CHECK(close(f.p(HOBBIT_POLICY_HOBBIT, 3, 2), 0.25 * (3.0 / 4 + 3.0 / 4 + 1.0 / 4 + 0.5)));
    // never used; distances 1, 3 and, being served, 4
    CHECK(close(f.p(HOBBIT_POLICY_HOBBIT, 2, 0), 0.25 * 0.75));
    CHECK(close(f.p(HOBBIT_POLICY_HOBBIT, 0, 0), 0.25 * 0.25));
    CHECK(close(f.p(HOBBIT_POLICY_HOBBIT, 1, 0), 0.0));
    // one term at a time; weights need not sum to 1
    const double alone[4] = { 3.0 / 4, 3.0 / 4, 1.0 / 4, 0.5 };
    for (int i = 0; i < 4; ++i) {
        for (int j = 0; j < 4; ++j) {
            f.ctx.weights[j] = i == j ? 3.0f : 0.0f;
        }
        CHECK(close(f.p(HOBBIT_POLICY_HOBBIT, 3, 2), alone[i]));
    }
}

TEST(policy_lcu_terms) {
    fixture f;
    // H = 1, L = 1 at a quarter of the cost, T = 4; distance 2. Pass 10 is running.
    const double uses = (1.0 + 0.25) / 4;
    CHECK(close(f.p(HOBBIT_POLICY_LCU, 3, 2, 0, 8), uses));
    CHECK(close(f.p(HOBBIT_POLICY_LCU, 3, 2, 0, 9), uses + 1 / 2.1));
    CHECK(close(f.p(HOBBIT_POLICY_LCU, 3, 2, 0, 10), uses + 1 / 2.1));
    CHECK(close(f.p(HOBBIT_POLICY_LCU, 1, 0, 0, 10), 1 / 4.1));
}

TEST(policy_follow_terms) {
    fixture f;
    records learning(f.model.layout, true);
    f.ctx.rec = &learning;
    const int32_t seq = 0, pos = 0, expert = 2;
    learning.begin(&f, &seq, &pos, 1);
    learning.use(3, 0, expert, HOBBIT_LOW);
    // F = 1, L = 1 at a quarter of the cost, T = 1, 2 of 4 experts used; distance 2 of 4
    const double later = (1.0 + 20 * 0.5) / 21;
    CHECK(std::fabs(learning.chance(*learning.active()[0], 3, 2) - 0.5) < 0.01); // nothing learned yet
    const double next = learning.chance(*learning.active()[0], 3, 2);
    CHECK(close(f.p(HOBBIT_POLICY_FOLLOW, 3, 2), (1 + 0.25) / 2 * std::exp2(-0.5) * (next + later)));
    CHECK(close(f.p(HOBBIT_POLICY_FOLLOW, 1, 0), std::exp2(-1.0) * (next + 10.0 / 21))); // never used, needed last
    const candidate low = { 3, 2, COPY_LOW, 0, 0 };
    double out;
    make_policy(HOBBIT_POLICY_FOLLOW)->priorities(&low, 1, f.ctx, &out);
    CHECK(close(out, 0.25 / 2 * std::exp2(-0.5) * (next + later)));
    for (int32_t t = 1; t < 20; ++t) {
        learning.served(3, &expert, 1, 1);
        learning.begin(&f, &seq, &t, 1);
    }
    CHECK(learning.chance(*learning.active()[0], 3, 2) > next);
}

TEST(policy_several_sequences_take_the_mean) {
    fixture f;
    // sequence 0 has its fifth token, sequence 1 its first: uses 3/5 and 1/1
    const int32_t seq[2] = { 0, 1 };
    const int32_t pos[2] = { 4, 0 };
    f.rec.begin(&f, seq, pos, 2);
    f.rec.use(3, 1, 2, HOBBIT_HIGH);
    CHECK(close(f.p(HOBBIT_POLICY_LFU, 3, 2), (3.0 / 5 + 1.0) / 2));
    CHECK(close(f.p(HOBBIT_POLICY_HOBBIT, 3, 2), 0.25 * ((7.0 / 5 + 3.0) / 2 + 0.5)));
    CHECK(close(f.p(HOBBIT_POLICY_LCU, 3, 2), (1.25 / 5 + 1.0) / 2));
}

TEST(policy_unknown_kinds_are_null) {
    CHECK(make_policy(-1) == nullptr);
    CHECK(make_policy(5) == nullptr);
    for (int k = 0; k < 5; ++k) {
        CHECK(make_policy(k) != nullptr);
    }
}
