// A simulation against the engine that really loads: the same events in the same order, the same counters. And the
// shapes, which go out as struct hobbit_layer and come back.

#include "check.h"
#include "driver.h"
#include "shape.h"
#include "simulate.h"

#include <array>
#include <cstring>
#include <stdexcept>

using namespace hob;

namespace {

using event = std::array<int, 5>; // kind, layer, expert, precision, slot

void record(void * user, int32_t kind, int32_t layer, int32_t expert, int32_t precision, int32_t slot) {
    ((std::vector<event> *) user)->push_back({ kind, layer, expert, precision, slot });
}

void listen(engine & e, std::vector<event> & to) {
    hobbit_hooks hooks = {};
    hooks.event = record;
    hooks.user  = &to;
    e.set_hooks(hooks, nullptr);
}

// Two groups, one whose experts are large enough for several waves, with files read by threads.
fake_model two_groups() {
    return fake_model({ { 12, 3, 3, { { 40, 40, 48 }, { 12, 12, 16 } } }, { 6, 2, 2, { { 3 << 20, 2 << 20, 0 }, { 1 << 20, 1 << 20, 0 } } } }, { 0, 1, 0 });
}

void append(std::string & rows, int seq, int pos, int layer, const int32_t * experts, const float * weights, int n_used, int room) {
    const auto put = [&rows](auto v) { rows.append((const char *) &v, sizeof(v)); };
    put((int16_t) seq);
    put((int32_t) pos);
    put((int16_t) layer);
    for (int i = 0; i < room; ++i) {
        put((int16_t) (i < n_used ? experts[i] : -1));
    }
    for (int i = 0; i < room; ++i) {
        put(i < n_used ? weights[i] : 0.0f);
    }
}

// Tokens of two sequences in turn, which start anew every 20 tokens; played through both.
void compare(int policy, float t1, float t2) {
    constexpr int ROOM = 3;
    fake_model m = two_groups();
    for (group_layout & g : m.layout.groups) {
        g.n_slots[COPY_HIGH] = g.n_used + 2;
        g.n_slots[COPY_LOW]  = g.n_used - 1;
    }
    m.place_slots();
    const hobbit_params p = test_params(t1, t2, policy);
    std::vector<event> real, simulated;
    std::string rows;
    engine e(m.layout, p, measure(m.layout, p, 0), std::make_unique<fake_storage>(m));
    listen(e, real);
    random_router router(check::seed);
    router.odd_weights = false;
    std::vector<int32_t> high(ROOM), low(ROOM);
    const int context = 0;
    for (int token = 0; token < check::steps; ++token) {
        const int32_t seq = token % 2, pos = token / 2 % 20;
        e.begin_graph();
        for (int l = 0; l < (int) m.layout.layers.size(); ++l) {
            const layer_layout & x = m.layout.layers[l];
            int32_t experts[ROOM];
            float   weights[ROOM], g[ROOM];
            int32_t wanted[ROOM];
            router.token(l, x.n_expert, x.n_used, experts, weights);
            select_token(weights, x.n_used, t1, t2, g, wanted);
            append(rows, seq, pos, l, experts, g, x.n_used, ROOM);
            const int waves = e.waves(l, 1, x.n_used);
            CHECK_EQ(waves > 1, x.group == 1);
            for (int w = 0; w < waves; ++w) {
                e.route({ l, 1, x.n_used, waves, experts, weights, &context, &seq, &pos, l == 0 }, w, { high.data(), low.data(), nullptr });
                e.wait_late(w, high.data(), low.data(), high.data(), low.data(), x.n_used);
            }
        }
        CHECK_EQ(e.end_graph(), "");
    }
    const std::vector<hobbit_layer> shape = shape_of(m.layout);
    int32_t slots[2 * N_COPIES];
    for (int i = 0; i < 2 * N_COPIES; ++i) {
        slots[i] = m.layout.groups[i / N_COPIES].n_slots[i % N_COPIES];
    }
    auto s = make_simulated_engine(layout_of(shape.data(), (int) shape.size()), p, slots);
    listen(*s, simulated);
    replay r(*s);
    const size_t half = rows.size() / trace_row_bytes(ROOM) / 2 / 3 * 3; // whole tokens
    CHECK_EQ(r.run(rows.data(), (int64_t) half, ROOM), "");
    CHECK_EQ(r.run(rows.data() + half * trace_row_bytes(ROOM), (int64_t) (rows.size() / trace_row_bytes(ROOM) - half), ROOM), "");
    CHECK(s->consistent());
    CHECK(real.size() > 100 && real == simulated);
    const hobbit_stats a = e.stats(), b = s->stats();
    CHECK(a.evictions > 0 && a.misses_low + a.hits_low > 0);
    CHECK_EQ(a.requests, b.requests);
    CHECK_EQ(a.misses_high, b.misses_high);
    CHECK_EQ(a.misses_low, b.misses_low);
    CHECK_EQ(a.skips, b.skips);
    CHECK_EQ(a.evictions, b.evictions);
    CHECK_EQ(a.bytes_read, b.bytes_read);
    CHECK_EQ(a.graphs, b.graphs);
}

std::string thrown(const std::vector<hobbit_layer> & layers) {
    try {
        layout_of(layers.data(), (int) layers.size());
    } catch (const std::runtime_error & e) {
        return e.what();
    }
    return "";
}

// Misses of one layer with two slots of either kind over the given experts, one a token.
uint64_t misses(const std::vector<int> & experts, int policy, bool foresee) {
    const hobbit_layer layer = { 0, 0, 8, 1, { 100, 0, 0 }, { 25, 0, 0 } };
    const int32_t slots[2] = { 2, 0 };
    auto e = make_simulated_engine(layout_of(&layer, 1), test_params(1.0f, 1.0f, policy), slots);
    std::string rows;
    const float one = 1.0f;
    for (size_t i = 0; i < experts.size(); ++i) {
        append(rows, 0, (int) i, 0, &experts[i], &one, 1, 1);
    }
    replay r(*e);
    if (foresee) {
        CHECK_EQ(r.foresee(rows.data(), (int64_t) experts.size(), 1), "");
        CHECK(!r.foresee(rows.data(), (int64_t) experts.size(), 1).empty());
    }
    CHECK_EQ(r.run(rows.data(), (int64_t) experts.size(), 1), "");
    return e->stats().misses_high;
}

} // namespace

TEST(simulation_equals_the_engine) {
    for (int policy : { HOBBIT_POLICY_LRU, HOBBIT_POLICY_LFU, HOBBIT_POLICY_HOBBIT, HOBBIT_POLICY_LCU, HOBBIT_POLICY_FOLLOW }) {
        compare(policy, 0.5f, 0.8f);
    }
    compare(HOBBIT_POLICY_HOBBIT, 0.6f, 1.0f);
}

TEST(simulation_with_one_precision_and_foresight_is_belady) {
    const std::vector<int> loop = { 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3 };
    CHECK_EQ(misses(loop, HOBBIT_POLICY_LRU, false), 12u);
    CHECK_EQ(misses(loop, HOBBIT_POLICY_LRU, true), 7u); // 3 to begin with, then every second token
}

TEST(simulation_refuses_rows_of_another_model) {
    const hobbit_layer layer = { 0, 0, 4, 2, { 100, 0, 0 }, { 25, 0, 0 } };
    const int32_t slots[2] = { 2, 1 };
    const auto run = [&](int l, std::vector<int32_t> experts, int n) {
        auto e = make_simulated_engine(layout_of(&layer, 1), test_params(), slots);
        std::string rows;
        const float g[3] = { 0.5f, 0.25f, 0.25f };
        append(rows, 0, 0, 0, experts.data(), g, 2, n); // twice: the first may be played
        append(rows, 0, 1, l, experts.data(), g, n, n);
        const std::string err = replay(*e).run(rows.data(), 2, n);
        CHECK(e->consistent());
        return err;
    };
    CHECK_EQ(run(0, { 1, 2 }, 2), "");
    CHECK(run(1, { 1, 2 }, 2).find("row 1 of the trace: layer 1") == 0);
    CHECK(run(-1, { 1, 2 }, 2).find("row 1 of the trace: layer -1") == 0);
    CHECK(run(0, { 1, 4 }, 2).find("expert 4") != std::string::npos);
    CHECK(run(0, { 1, -2 }, 2).find("expert -2") != std::string::npos);
    CHECK(run(0, { 1, 1 }, 2).find("twice") != std::string::npos);
    CHECK(run(0, { 1, 2, 3 }, 3).find("3 experts, but the layer uses 2") != std::string::npos);
}

TEST(simulation_slots_and_budget) {
    const hobbit_layer layer = { 0, 0, 4, 2, { 100, 0, 0 }, { 25, 0, 0 } };
    hobbit_params p = test_params();
    p.budget_kind = HOBBIT_BUDGET_MIN;
    CHECK_EQ(make_simulated_engine(layout_of(&layer, 1), p, nullptr)->layout().groups[0].n_slots[COPY_HIGH], 2);
    p.budget_kind = HOBBIT_BUDGET_BYTES;
    for (const std::array<int32_t, 2> & slots : { std::array<int32_t, 2>{ 1, 1 }, { 5, 1 }, { 2, 0 }, { 2, 5 } }) {
        bool refused = false;
        try {
            make_simulated_engine(layout_of(&layer, 1), p, slots.data());
        } catch (const std::runtime_error &) {
            refused = true;
        }
        CHECK(refused);
    }
}

TEST(shapes_go_out_and_come_back) {
    const fake_model m = two_groups();
    const std::vector<hobbit_layer> shape = shape_of(m.layout);
    const model_layout again = layout_of(shape.data(), (int) shape.size());
    const std::vector<hobbit_layer> shape2 = shape_of(again);
    CHECK_EQ(shape2.size(), shape.size());
    CHECK(memcmp(shape.data(), shape2.data(), shape.size() * sizeof(hobbit_layer)) == 0);
    CHECK_EQ(again.groups[0].n_layers, 2);
    CHECK_EQ(again.layers[2].in_group, 1);
    CHECK_EQ(again.piece_bytes(), m.layout.piece_bytes());

    CHECK(!thrown({}).empty());
    const auto with = [&](auto change) { std::vector<hobbit_layer> x = shape; change(x); return thrown(x); };
    CHECK_EQ(with([](auto &) {}), "");
    CHECK(with([](auto & x) { x[0].group = 1; }).find("layer 0: groups") == 0);
    CHECK(with([](auto & x) { x[2].group = -1; }).find("layer 2: groups") == 0);
    CHECK(with([](auto & x) { x[2].n_expert = 13; }).find("differs") != std::string::npos);
    CHECK(with([](auto & x) { x[1].n_expert = 0; }).find("1 to 32767") != std::string::npos);
    CHECK(with([](auto & x) { x[1].n_expert_used = 7; }).find("1 to all") != std::string::npos);
    CHECK(with([](auto & x) { x[1].low_bytes[0] = 0; }).find("bytes") != std::string::npos);
    CHECK(with([](auto & x) { x[1].high_bytes[1] = 0; x[1].high_bytes[2] = 9; }).find("bytes") != std::string::npos);
    CHECK(with([](auto & x) { x[1].high_bytes[0] = UINT64_MAX; }).find("bytes") != std::string::npos);
}

TEST(shapes_whose_sums_would_wrap_are_refused) {
    const auto refused = [](hobbit_layer x, int n) {
        const std::vector<hobbit_layer> layers(n, x);
        try {
            layout_of(layers.data(), n);
            return false;
        } catch (const std::runtime_error &) {
            return true;
        }
    };
    const hobbit_layer most = { 0, 0, 32767, 1, { 1ull << 35, 1ull << 35, 1ull << 35 }, { 1ull << 35, 1ull << 35, 1ull << 35 } };
    CHECK(!refused(most, 1) && !refused({ 0, 0, 32767, 1, { 1, 0, 0 }, { 1, 0, 0 } }, 2048));
    CHECK(refused(most, 2049) && refused({ 0, 0, 8, 1, { (1ull << 35) + 1, 0, 0 }, { 1, 0, 0 } }, 1));
}
