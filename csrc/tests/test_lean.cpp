// Routing that leans to residents: the spread, and who gets the bonus.

#include "check.h"
#include "driver.h"
#include "lean.h"

#include <cmath>

using namespace hob;

TEST(lean_spread_is_a_running_mean_of_the_range) {
    leaning l(2);
    const float a[] = { -1.0f, 0.0f, 3.0f };
    const float b[] = { 2.0f, 2.0f, 4.0f };
    const float bad[] = { 1.0f, NAN, 2.0f };
    const float inf[] = { 1.0f, INFINITY, 2.0f };
    CHECK_EQ(l.spread(0, bad, 3), 0.0);
    CHECK_EQ(l.spread(0, a, 3), 4.0);
    CHECK_EQ(l.spread(0, b, 3), 3.0);
    CHECK_EQ(l.spread(0, bad, 3), 3.0);
    CHECK_EQ(l.spread(0, inf, 3), 3.0);
    CHECK_EQ(l.spread(1, b, 3), 2.0); // each layer its own
}

TEST(lean_the_bonus_is_for_high_copies_in_slots) {
    fake_model m({ { 8, 2, 3, { { 96, 96, 128 }, { 24, 24, 32 } } } }, { 0, 0 });
    m.place_slots(8, 4);
    hobbit_params p = test_params(0.5f, 1.0f);
    p.lean = 0.25f;
    driver d(m, p);
    CHECK(d.engine->leans(1));
    CHECK(!d.engine->leans(PREDICT_TOKENS + 1));
    const float logits[] = { 0, 1, 2, 3, 4, 5, 6, 8 };
    float bonus[8];
    d.engine->lean(0, logits, bonus);
    for (float b : bonus) {
        CHECK_EQ(b, 0.0f);
    }
    d.begin();
    d.layer(0, 1, 2, { 3, 6 }, { 2, 1 }, { 0 }, { 0 }, true); // 3 high, 6 low
    CHECK(d.end());
    d.engine->lean(0, logits, bonus);
    for (int e = 0; e < 8; ++e) {
        CHECK_EQ(bonus[e], e == 3 ? 2.0f : 0.0f);
    }
    d.engine->leaned(1, 3);
    CHECK_EQ(d.engine->stats().leaned, 3u);
    p.force_miss = 1;
    CHECK(!driver(m, p).engine->leans(1)); // nothing counts as resident
}
