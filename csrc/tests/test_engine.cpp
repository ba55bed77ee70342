// The engine as a whole: random routing over every kind of batch, budget, rule and policy, with
// prefetches, several sequences and failing reads. driver.h says what is checked.

#include "check.h"
#include "driver.h"
#include "world.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

using namespace hob;

TEST(engine_serves_what_it_says) {
    random_router r(check::seed);
    for (int round = 0; round < 24; ++round) {
        world w(r, round);
        std::atomic<uint32_t> n{ 0 }; // lives longer than the loader's threads: before the driver
        driver d(*w.model, w.params);
        if (r.below(2)) {
            d.files->before = [&n](const fake_model::place &) { // reads end in another order than they began
                if (n++ % 3 == 0) {
                    std::this_thread::yield();
                }
                return std::string();
            };
        }
        const bool ahead = r.below(2);
        d.prefetch = [&](int layer) {
            for (int i = 0; ahead && i < 2; ++i) {
                const int l = (layer + 1 + r.below(2)) % (int) w.layers.size();
                const int p = d.engine->prefetch(l, r.below(d.model.layout.layers[l].n_expert), r.below(2));
                CHECK(p == 0 || p == 1);
            }
        };
        std::vector<int32_t> next(3, 0);
        for (int step = 0; step < check::steps / 5; ++step) {
            CHECK(random_graph(d, r, random_sizes(r), next, r.below(20) == 0));
            if (r.below(15) == 0) {
                next[r.below(3)] = 0; // a new sequence under an old number
            }
        }
        d.check_stats();
        if (d.seen.prefetches == 0) { // those may be on their way still
            CHECK_EQ(d.files->n_bytes.load(), d.seen.bytes_read);
        }
    }
}

TEST(engine_failing_reads_fail_the_graph_and_nothing_else) {
    random_router r(check::seed + 1);
    int failed = 0;
    for (int round = 0; round < 18; ++round) {
        world w(r, round);
        std::atomic<uint32_t> n{ check::seed };
        std::atomic<int>  n_bad{ 0 };
        std::atomic<bool> well{ false };
        driver d(*w.model, w.params);
        d.may_fail = true;
        d.files->before = [&](const fake_model::place &) {
            const uint32_t x = n++ * 2654435761u;
            if (!well && (x >> 16) % 64 == 0) {
                n_bad++;
                return std::string("read error");
            }
            return std::string();
        };
        const bool ahead = r.below(2);
        d.prefetch = [&](int layer) {
            if (ahead) {
                const int l = (layer + 1) % (int) w.layers.size();
                d.engine->prefetch(l, r.below(d.model.layout.layers[l].n_expert), r.below(2));
            }
        };
        std::vector<int32_t> next(3, 0);
        for (int step = 0; step < check::steps / 5; ++step) {
            const int bad = n_bad;
            if (!random_graph(d, r, random_sizes(r), next)) {
                CHECK_EQ(d.last_error, "read error");
                CHECK(n_bad > bad || ahead);
                failed++;
            }
        }
        // and when the disk is well again, so is everything
        well = true;
        random_graph(d, r, { 1, 1 }, next); // may still meet a prefetch that had failed on its way
        for (int step = 0; step < 5; ++step) {
            CHECK(random_graph(d, r, random_sizes(r), next));
        }
        d.check_stats();
    }
    CHECK(failed > 0);
}

// A prefetch fails between two graphs while one of its reads is still on its way. The next graph asks for
// that expert: it must load it or fail, but not compute with what is in the slot.
TEST(engine_a_prefetch_that_failed_and_still_loads) {
    fake_model m({ { 8, 1, 3, { { 96, 96, 128 }, { 24, 24, 32 } } } }, { 0 });
    m.place_slots(4, 0);
    hobbit_params p = test_params();
    p.n_io_threads = 2;
    std::atomic<bool> up_started{ false }, go{ false }, failed{ false };
    driver d(m, p);
    d.may_fail = true;
    d.files->before = [&](const fake_model::place & at) {
        const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(10);
        if (at.expert == 5 && at.proj == 0 && !failed) { // gate: fails once the other thread is at up
            while (!up_started && std::chrono::steady_clock::now() < until) {
                std::this_thread::yield();
            }
            failed = true;
            return std::string("read error");
        }
        if (at.expert == 5 && at.proj == 1 && !go) {
            up_started = true;
            while (!go && std::chrono::steady_clock::now() < until) {
                std::this_thread::yield();
            }
        }
        return std::string();
    };
    const std::vector<float> w = { 1.0f };
    d.begin();
    d.layer(0, 1, 1, { 1 }, w, { 0 }, { 0 }, true);
    CHECK(d.end());
    CHECK_EQ(d.engine->prefetch(0, 5, COPY_HIGH), 1);
    while (!failed) {
        std::this_thread::yield();
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20)); // for the loader to note it
    std::thread later([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        go = true;
    });
    d.begin();
    d.layer(0, 1, 1, { 5 }, w, { 0 }, { 1 }, true); // checks the slot, if one is handed out
    const bool ok = d.end();
    later.join();
    if (!ok) {
        CHECK(!d.last_error.empty());
    }
    d.begin();
    d.layer(0, 1, 1, { 5 }, w, { 0 }, { 2 }, true);
    CHECK(d.end());
}

TEST(engine_a_router_gone_mad_fails_the_graph) {
    fake_model m({ KINDS[0] }, { 0, 0 });
    m.place_slots(4, 2);
    driver d(m, test_params());
    for (int32_t bad : { -1, 8, 1 << 30 }) {
        std::vector<int32_t> experts = { 2, bad }, seq = { 0 }, pos = { 0 }, high(2, 9), low(2, 9), kept(2, 9);
        const std::vector<float> weights = { 1, 1 };
        d.engine->begin_graph();
        d.engine->route({ 0, 1, 2, d.engine->waves(0, 1, 2), experts.data(), weights.data(), &d, seq.data(), pos.data(), true }, 0,
                        { high.data(), low.data(), kept.data() });
        for (int i = 0; i < 2; ++i) {
            CHECK_EQ(high[i], -1);
            CHECK_EQ(low[i], -1);
            CHECK_EQ(kept[i], -1);
        }
        const std::string err = d.engine->end_graph();
        CHECK(err.find(std::to_string(bad)) != std::string::npos);
        CHECK(d.engine->consistent());
    }
}

TEST(engine_prefetch_serves_the_request) {
    fake_model m({ KINDS[0] }, { 0, 0 });
    m.place_slots(8, 4);
    driver d(m, test_params(1.0f, 1.0f));
    CHECK_EQ(d.engine->prefetch(0, 1, COPY_HIGH), 0); // nothing ran yet
    const std::vector<float> w = { 2, 1 };
    d.begin();
    d.layer(0, 1, 2, { 0, 1 }, w, { 0 }, { 0 }, true);
    CHECK_EQ(d.engine->prefetch(1, 4, COPY_HIGH), 1);
    CHECK_EQ(d.engine->prefetch(1, 4, COPY_HIGH), 0); // on its way
    CHECK_EQ(d.engine->prefetch(1, 4, COPY_LOW), 0);  // high is on its way
    CHECK_EQ(d.engine->prefetch(0, 0, COPY_HIGH), 0); // is there
    d.layer(1, 1, 2, { 4, 5 }, w, { 0 }, { 0 }, false);
    CHECK(d.end());
    d.begin();
    d.layer(0, 1, 2, { 0, 1 }, w, { 0 }, { 1 }, true);
    d.layer(1, 1, 2, { 4, 5 }, w, { 0 }, { 1 }, false);
    CHECK(d.end());
    const hobbit_stats st = d.engine->stats();
    CHECK_EQ(st.prefetches, 1u);
    CHECK_EQ(st.prefetch_hits, 1u); // once each
    CHECK_EQ(st.hits_high, 5u);
    CHECK_EQ(st.misses_high, 3u);
    d.check_stats();
    for (const auto & bad : { std::make_tuple(-1, 0, 0), std::make_tuple(2, 0, 0), std::make_tuple(0, 8, 0), std::make_tuple(0, -1, 0), std::make_tuple(0, 0, 2), std::make_tuple(0, 0, -1) }) {
        CHECK(d.engine->prefetch(std::get<0>(bad), std::get<1>(bad), std::get<2>(bad)) < 0);
    }
}

// A plan may need several waves. An expert of a later wave that is loaded ahead meanwhile has two owners
// if that wave loads it again.
TEST(engine_prefetch_of_an_expert_of_a_later_wave) {
    fake_model m({ KINDS[3] }, { 0, 0 });
    m.place_slots(7, 0);
    driver d(m, test_params(1.0f, 1.0f));
    const int n = 32;
    std::vector<int32_t> experts, seq(n, 0), pos;
    for (int i = 0; i < n; ++i) {
        experts.push_back(i % 8);
        pos.push_back(i);
    }
    CHECK_EQ(d.engine->waves(0, n, 1), 4); // two experts each
    d.prefetch = [&](int layer) {
        for (int e = 7; layer == 0 && e >= 0; --e) {
            CHECK(d.engine->prefetch(0, e, COPY_HIGH) >= 0);
        }
    };
    d.begin();
    d.layer(0, n, 1, experts, std::vector<float>(n, 1.0f), seq, pos, true);
    CHECK(d.engine->consistent());
    d.layer(1, n, 1, experts, std::vector<float>(n, 1.0f), seq, pos, false);
    CHECK(d.end());
    d.check_stats();
}

TEST(engine_prefetches_leave_room_for_a_token) {
    for (int slots = 2; slots < 10; ++slots) {
        fake_model m({ KINDS[0] }, { 0, 0, 0 });
        m.place_slots(slots, 1);
        std::atomic<bool> held{ false };
        driver d(m, test_params(1.0f, 1.0f));
        d.files->before = [&](const fake_model::place & p) {
            while (held && p.layer == 2) {
                std::this_thread::yield();
            }
            return std::string();
        };
        d.begin();
        d.layer(0, 1, 2, { 0, 1 }, { 2, 1 }, { 0 }, { 0 }, true);
        held = true;
        int queued = 0;
        for (int e = 0; e < 8; ++e) {
            queued += d.engine->prefetch(2, e, COPY_HIGH) == 1;
        }
        CHECK(queued <= slots - 2);
        std::thread opener([&] {
            std::this_thread::sleep_for(std::chrono::milliseconds(5));
            held = false;
        });
        d.layer(1, 1, 2, { 0, 1 }, { 2, 1 }, { 0 }, { 0 }, false);
        CHECK(d.end());
        opener.join();
        d.check_stats();
    }
}

TEST(engine_select_hook_decides) {
    fake_model m({ KINDS[1] }, { 0 });
    m.place_slots(8, 3);
    fake_storage * files = new fake_storage(m);
    hob::engine e(m.layout, test_params(), {}, std::unique_ptr<storage>(files));
    hobbit_hooks h = {};
    h.select = [](void *, int32_t, int32_t n_tokens, int32_t n_used, const int32_t * experts, const float * weights, int32_t * wanted) {
        float sum = 0;
        for (int i = 0; i < n_tokens * n_used; ++i) {
            sum += weights[i];
            wanted[i] = experts[i] == 3 ? 99 : experts[i] == 4 ? -5 : HOBBIT_LOW; // out of range: the nearest
        }
        CHECK(sum > 0.999f && sum < 1.001f);
    };
    e.set_hooks(h, nullptr);
    const std::vector<int32_t> experts = { 1, 3, 4, 2 }, zero = { 0 };
    const std::vector<float>   weights = { 8, 4, 2, 1 };
    std::vector<int32_t> high(4), low(4), kept(4);
    e.begin_graph();
    e.route({ 0, 1, 4, 1, experts.data(), weights.data(), &e, zero.data(), zero.data(), true }, 0, { high.data(), low.data(), kept.data() });
    CHECK(low[0] >= 0 && high[0] == -1);
    CHECK(high[1] >= 0 && low[1] == -1);
    CHECK(high[2] == -1 && low[2] == -1 && kept[2] == -1);
    CHECK(low[3] >= 0);
    CHECK_EQ(e.end_graph(), "");
    const hobbit_stats st = e.stats();
    CHECK_EQ(st.wanted_high, 1u);
    CHECK_EQ(st.wanted_low, 2u);
    CHECK_EQ(st.wanted_skip, 1u);
}

TEST(engine_reads_each_expert_once_where_all_have_slots) {
    fake_model m({ KINDS[0] }, { 0, 0 });
    m.place_slots(2 * KINDS[0].n_expert, 1);
    driver d(m, test_params(0.3f, 0.6f));
    random_router router(check::seed);
    std::vector<int32_t> ids(2);
    std::vector<float> w(2);
    for (int32_t pos = 0; pos < 100; ++pos) {
        d.begin();
        for (int layer = 0; layer < 2; ++layer) {
            router.token(layer, KINDS[0].n_expert, 2, ids.data(), w.data());
            d.layer(layer, 1, 2, ids, w, { 0 }, { pos }, layer == 0);
        }
        CHECK(d.end());
    }
    const hobbit_stats st = d.engine->stats();
    CHECK(st.wanted_low > 0 && st.wanted_skip > 0);
    CHECK_EQ(st.skips + st.misses_low + st.hits_low + st.evictions, 0u);
    CHECK(st.misses_high <= 2u * KINDS[0].n_expert);
}

TEST(engine_resident_copies_serve) {
    fake_model m({ KINDS[0] }, { 0 });
    m.place_slots(KINDS[0].n_expert - 1, 8);
    driver d(m, test_params(0.6f, 0.9f));
    const auto step = [&](int32_t pos, std::vector<int32_t> experts, std::vector<float> weights) {
        const hobbit_stats a = d.engine->stats();
        d.begin();
        d.layer(0, 1, 2, experts, weights, { 0 }, { pos }, true);
        CHECK(d.end());
        const hobbit_stats b = d.engine->stats();
        std::string s;
        for (uint64_t i = a.hits_high; i < b.hits_high; ++i) { s += "H"; }
        for (uint64_t i = a.hits_low; i < b.hits_low; ++i) { s += "L"; }
        for (uint64_t i = a.misses_high; i < b.misses_high; ++i) { s += "h"; }
        for (uint64_t i = a.misses_low; i < b.misses_low; ++i) { s += "l"; }
        for (uint64_t i = a.skips; i < b.skips; ++i) { s += "-"; }
        for (uint64_t i = a.upgrades; i < b.upgrades; ++i) { s += "^"; }
        return s;
    };
    CHECK_EQ(step(0, { 0, 1 }, { 0.95f, 0.05f }), "h-");  // s = 0.95: skip
    CHECK_EQ(step(1, { 0, 1 }, { 0.75f, 0.25f }), "Hl");
    CHECK_EQ(step(2, { 0, 1 }, { 0.95f, 0.05f }), "HL^"); // the low copy is there: no skip
    CHECK_EQ(step(3, { 1, 0 }, { 0.75f, 0.25f }), "Hh^"); // high wanted, low resident: a high miss; low wanted, high resident
    CHECK_EQ(step(4, { 1, 0 }, { 0.75f, 0.25f }), "HH^");
    d.check_stats();
}

TEST(engine_skips_the_lightest_of_what_is_missing) {
    fake_model m({ KINDS[1] }, { 0 });
    m.place_slots(4, 8);
    hobbit_params p = test_params(0.4f, 0.4f); // rank 0 high, the others to be skipped
    p.skip_mass = 0.1f;
    engine e(m.layout, p, {}, std::make_unique<fake_storage>(m));
    int32_t pos = 0;
    // kept as a text: the experts that are served
    const auto step = [&](const std::vector<int32_t> & experts, const std::vector<float> & weights) {
        const int n = (int) experts.size(), n_tokens = n / 4;
        const std::vector<int32_t> seq(n_tokens, 0);
        std::vector<int32_t> at(n_tokens), high(n), low(n), kept(n);
        for (int32_t & x : at) {
            x = pos++;
        }
        e.begin_graph();
        e.route({ 0, n_tokens, 4, 1, experts.data(), weights.data(), &e, seq.data(), at.data(), true }, 0, { high.data(), low.data(), kept.data() });
        CHECK_EQ(e.end_graph(), "");
        std::string s;
        for (int i = 0; i < n; ++i) {
            s += kept[i] < 0 ? "-" : high[i] >= 0 ? "H" : "L";
        }
        return s;
    };
    CHECK_EQ(step({ 0, 1, 2, 3 }, { 0.5f, 0.3f, 0.15f, 0.05f }), "HLL-"); // 0.05 and 0.15 together are too much
    CHECK_EQ(step({ 0, 1, 2, 4 }, { 0.5f, 0.2f, 0.2f, 0.1f }), "HLL-");   // what is there serves, and leaves the rest its room
    CHECK_EQ(step({ 0, 5, 6, 3 }, { 0.5f, 0.04f, 0.06f, 0.4f }), "H--L");
    CHECK_EQ(step({ 7, 8, 9, 10, 11, 7, 8, 9 }, { 0.8f, 0.11f, 0.05f, 0.04f, 0.7f, 0.1f, 0.15f, 0.05f }), "HL--HHL-"); // of two tokens, one needs 8
    const hobbit_stats st = e.stats();
    CHECK_EQ(st.skips, 7u);
    CHECK_EQ(st.requests, st.hits_high + st.hits_low + st.misses_high + st.misses_low + st.skips);
}

TEST(engine_two_contexts_take_turns) {
    fake_model m({ KINDS[0], KINDS[1] }, { 0, 1, 0 });
    m.place_slots(9, 5);
    driver d(m, test_params());
    d.settings_change = true; // two threads share the driver's books: only the engine's own sums are checked
    std::vector<std::thread> threads;
    std::atomic<int> inside{ 0 };
    for (int c = 0; c < 2; ++c) {
        threads.emplace_back([&, c] {
            random_router r(check::seed + 10 + c);
            for (int step = 0; step < check::steps / 5; ++step) {
                d.engine->begin_graph();
                CHECK_EQ(++inside, 1);
                for (int layer = 0; layer < 3; ++layer) {
                    const layer_layout & l = m.layout.layers[layer];
                    std::vector<int32_t> e(l.n_used), seq = { 0 }, pos = { step };
                    std::vector<float>   w(l.n_used);
                    r.token(layer, l.n_expert, l.n_used, e.data(), w.data());
                    d.layer(layer, 1, l.n_used, e, w, seq, pos, layer == 0, &threads + c);
                }
                inside--;
                CHECK_EQ(d.engine->end_graph(), "");
            }
        });
    }
    for (std::thread & t : threads) {
        t.join();
    }
    CHECK(d.engine->consistent());
    CHECK_EQ(d.engine->stats().graphs, (uint64_t) (check::steps / 5) * 2);
}

TEST(engine_bad_policy_throws) {
    fake_model m({ KINDS[0] }, { 0 });
    m.place_slots(2, 1);
    bool thrown = false;
    try {
        hob::engine e(m.layout, test_params(0.6f, 0.9f, 17), {}, std::make_unique<fake_storage>(m));
    } catch (const std::runtime_error &) {
        thrown = true;
    }
    CHECK(thrown);
}

TEST(engine_reports) {
    fake_model m({ KINDS[0], KINDS[1] }, { 0, 1, 0 });
    hobbit_params p = test_params();
    p.budget_kind = HOBBIT_BUDGET_BYTES;
    p.cache_bytes = 1 << 20;
    budget b = measure(m.layout, p, 777);
    CHECK_EQ(divide(m.layout, p, b), "");
    m.place_slots();
    hob::engine e(m.layout, p, b, std::make_unique<fake_storage>(m));
    const hobbit_info i = e.info();
    CHECK_EQ(i.budget_bytes, 1u << 20);
    CHECK_EQ(i.record_bytes, 777u);
    CHECK_EQ(i.n_layers, 3);
    CHECK_EQ(i.n_groups, 2);
    CHECK_EQ(i.n_expert, 16);
    CHECK_EQ(i.n_expert_used, 4);
    CHECK_EQ(i.high_bytes, 2u * 8 * 320 + 16 * 300);
    CHECK_EQ(i.low_bytes, 2u * 8 * 80 + 16 * 75);
    hobbit_group_info g = {};
    CHECK(e.group_info(1, g));
    CHECK_EQ(g.high_slots, 16);
    CHECK_EQ(g.n_layers, 1);
    CHECK_EQ(g.high_resident, 0);
    CHECK(!e.group_info(2, g));
    CHECK(!e.group_info(-1, g));
    hobbit_stats st = {};
    CHECK(!e.layer_stats(3, st));
    CHECK(!e.layer_stats(-1, st));
    e.set_thresholds(0.25f, 0.5f);
    const float w[4] = { 1, 2, 3, 4 };
    e.set_policy(HOBBIT_POLICY_LCU, w);
    CHECK_EQ(e.params().t1, 0.25f);
    CHECK_EQ(e.params().policy, (int32_t) HOBBIT_POLICY_LCU);
    CHECK_EQ(e.params().policy_weights[3], 4.0f);
    e.set_policy(HOBBIT_POLICY_LRU, nullptr); // keeps the weights
    CHECK_EQ(e.params().policy_weights[3], 4.0f);
}
