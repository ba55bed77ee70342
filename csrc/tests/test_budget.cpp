// From bytes to slots.

#include "budget.h"
#include "check.h"
#include "fake_model.h"

#include <random>

using namespace hob;

namespace {

const group_spec BIG   = { 8, 2, 3, { { 40000, 40000, 40000 }, { 10000, 10000, 10000 } } };
const group_spec WIDE  = { 64, 8, 3, { { 9000, 9000, 9100 }, { 2500, 2500, 2700 } } };
const group_spec ALONE = { 16, 1, 2, { { 30000, 20000, 0 }, { 15000, 5000, 0 } } }; // top-1

struct result {
    fake_model  model;
    budget      b;
    std::string err;
};

result divided(const std::vector<group_spec> & groups, const std::vector<int> & group_of, const hobbit_params & p) {
    result r{ fake_model(groups, group_of), {}, "" };
    r.b   = measure(r.model.layout, p, 5000);
    r.err = divide(r.model.layout, p, r.b);
    return r;
}

hobbit_params bytes_params(uint64_t bytes, float low_fraction = 0.0f) {
    hobbit_params p = test_params();
    p.budget_kind  = HOBBIT_BUDGET_BYTES;
    p.cache_bytes  = bytes;
    p.low_fraction = low_fraction;
    return p;
}

// What must hold for every budget that was not refused.
void check_division(const result & r) {
    CHECK_EQ(r.err, "");
    uint64_t slots = 0;
    bool     full  = true;
    uint64_t cheapest = ~0ull;
    for (const group_layout & g : r.model.layout.groups) {
        CHECK(g.n_slots[COPY_HIGH] >= g.n_used);
        CHECK(g.n_slots[COPY_HIGH] <= g.n_experts_total());
        CHECK(g.n_slots[COPY_LOW] >= low_floor(g));
        CHECK(g.n_slots[COPY_LOW] <= g.n_experts_total());
        for (int c = 0; c < N_COPIES; ++c) {
            slots += (uint64_t) g.n_slots[c] * g.expert_bytes(c);
        }
        if (g.n_slots[COPY_HIGH] < g.n_experts_total()) {
            full     = false;
            cheapest = std::min<uint64_t>(cheapest, g.expert_bytes(COPY_HIGH));
        }
    }
    CHECK_EQ(r.b.slots, slots);
    CHECK(r.b.slots + r.b.staging + r.b.records <= r.b.total);
    if (!full) { // nothing that could have been a slot is left over
        CHECK(r.b.total - (r.b.slots + r.b.staging + r.b.records) < cheapest);
    }
}

} // namespace

TEST(budget_floor_is_exact) {
    const std::vector<std::pair<std::vector<group_spec>, std::vector<int>>> models = {
        { { BIG }, { 0, 0, 0 } }, { { WIDE, BIG }, { 0, 1, 0 } }, { { ALONE }, { 0, 0 } }, { { ALONE, WIDE, BIG }, { 2, 1, 0 } } };
    for (const auto & [groups, layers] : models) {
        const uint64_t floor = measure(fake_model(groups, layers).layout, test_params(), 5000).floor;
        const result at = divided(groups, layers, bytes_params(floor));
        check_division(at);
        for (const group_layout & g : at.model.layout.groups) {
            CHECK_EQ(g.n_slots[COPY_HIGH], g.n_used);
            CHECK_EQ(g.n_slots[COPY_LOW], low_floor(g));
        }
        CHECK_EQ(at.b.slots + at.b.staging + at.b.records, floor);
        const result below = divided(groups, layers, bytes_params(floor - 1));
        CHECK(below.err.find(std::to_string(floor)) != std::string::npos);
        CHECK(below.err.find(std::to_string(floor - 1)) != std::string::npos);
        CHECK(!divided(groups, layers, bytes_params(0)).err.empty());

        hobbit_params p = bytes_params(1);
        p.budget_kind = HOBBIT_BUDGET_AT_LEAST;
        CHECK_EQ(divided(groups, layers, p).b.total, floor);
        p.cache_bytes = floor + 1000000;
        CHECK_EQ(divided(groups, layers, p).b.total, floor + 1000000);
        p.budget_kind = HOBBIT_BUDGET_MIN;
        CHECK_EQ(divided(groups, layers, p).b.total, floor);
    }
}

TEST(budget_by_hand) {
    // BIG: floor 2*120000 + 30000, staging 2*(40000 + 8192 + 40000), records 5000
    const budget b = measure(fake_model({ BIG }, { 0, 0, 0 }).layout, test_params(), 5000);
    CHECK_EQ(b.staging, 2u * 88192);
    CHECK_EQ(b.floor, 270000u + 176384 + 5000);
    CHECK_EQ(b.high, 24u * 120000);
    CHECK_EQ(b.low, 24u * 30000);
    // ten more high slots and a bit
    const result r = divided({ BIG }, { 0, 0, 0 }, bytes_params(b.floor + 10 * 120000 + 119999));
    CHECK_EQ(r.model.layout.groups[0].n_slots[COPY_HIGH], 12);
    CHECK_EQ(r.model.layout.groups[0].n_slots[COPY_LOW], 1);
    // half of that for low copies: 20 low slots, 5 high ones, and the rest one more
    const result half = divided({ BIG }, { 0, 0, 0 }, bytes_params(b.floor + 10 * 120000 + 119999, 0.5f));
    CHECK_EQ(half.model.layout.groups[0].n_slots[COPY_LOW], 1 + 21);
    CHECK_EQ(half.model.layout.groups[0].n_slots[COPY_HIGH], 2 + 5);
}

TEST(budget_fractions) {
    for (double f : { 0.0, 0.05, 0.3, 0.5, 0.9, 1.0 }) {
        hobbit_params p = test_params();
        p.budget_kind    = HOBBIT_BUDGET_FRACTION;
        p.cache_fraction = f;
        const result r = divided({ WIDE, BIG }, { 0, 0, 1, 1, 0 }, p);
        CHECK_EQ(r.b.total, (uint64_t) (f * (double) r.b.high + 0.5));
        if (r.b.total < r.b.floor) {
            CHECK(!r.err.empty());
        } else {
            check_division(r);
        }
    }
}

TEST(budget_top_1_needs_no_low_slots) {
    const result r = divided({ ALONE }, { 0, 0 }, bytes_params(measure(fake_model({ ALONE }, { 0, 0 }).layout, test_params(), 5000).floor));
    CHECK_EQ(r.model.layout.groups[0].n_slots[COPY_HIGH], 1);
    CHECK_EQ(r.model.layout.groups[0].n_slots[COPY_LOW], 0);
}

TEST(budget_beyond_everything) {
    for (float low : { 0.0f, 0.3f, 1.0f }) {
        const result r = divided({ BIG, ALONE }, { 0, 1, 0 }, bytes_params(1ull << 40, low));
        check_division(r);
        for (const group_layout & g : r.model.layout.groups) {
            CHECK_EQ(g.n_slots[COPY_HIGH], g.n_experts_total());
            CHECK_EQ(g.n_slots[COPY_LOW], low > 0 ? g.n_experts_total() : low_floor(g));
        }
    }
}

TEST(budget_random) {
    std::mt19937 rng(check::seed);
    for (int round = 0; round < 300; ++round) {
        std::vector<group_spec> groups;
        std::vector<int> layers;
        const int n_groups = 1 + rng() % 4;
        for (int g = 0; g < n_groups; ++g) {
            const int n_expert = 1 + rng() % 60;
            group_spec s = { n_expert, 1 + (int) (rng() % std::min(n_expert, 8)), 1 + (int) (rng() % 3), {} };
            for (int p = 0; p < s.n_proj; ++p) {
                s.bytes[COPY_HIGH][p] = 2 + rng() % 300000;
                s.bytes[COPY_LOW][p]  = 1 + rng() % (s.bytes[COPY_HIGH][p] - 1);
            }
            groups.push_back(s);
        }
        for (int l = 0; l < n_groups + (int) (rng() % 6); ++l) {
            layers.push_back(l < n_groups ? l : rng() % n_groups);
        }
        // layouts alone: no bytes behind them
        model_layout layout;
        for (const group_spec & s : groups) {
            group_layout g;
            g.n_expert = s.n_expert;
            g.n_used   = s.n_used;
            g.n_proj   = s.n_proj;
            for (int c = 0; c < N_COPIES; ++c) {
                std::copy(s.bytes[c], s.bytes[c] + MAX_PROJ, g.proj_bytes[c]);
            }
            layout.groups.push_back(g);
        }
        for (int l : layers) {
            layout.groups[l].n_layers++;
        }
        hobbit_params p = bytes_params(0, (float) (rng() % 5) / 4.0f);
        budget b = measure(layout, p, rng() % 100000);
        p.cache_bytes = b.floor + rng() % (b.high + 1);
        result r{ fake_model({}, {}), b, "" };
        r.err = divide(layout, p, r.b);
        r.model.layout = layout;
        check_division(r);
        // with a budget that is many experts large, at least 90 % of it are in use
        size_t largest = 0;
        bool   full    = true;
        for (const group_layout & g : layout.groups) {
            largest = std::max(largest, g.expert_bytes(COPY_HIGH));
            full    = full && g.n_slots[COPY_HIGH] == g.n_experts_total();
        }
        if (!full && r.b.total > 10 * (uint64_t) largest) {
            CHECK((double) (r.b.slots + r.b.staging + r.b.records) >= 0.9 * (double) r.b.total);
        }
    }
}
