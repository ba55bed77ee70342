// A second thread uses the API while the first computes, and everything is taken down while loads are in
// flight. Meant for the thread sanitizer; --steps makes it long.

#include "check.h"
#include "driver.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <thread>
#include <unistd.h>

using namespace hob;

namespace {

std::string temporary_path() {
    const char * dir = getenv("TMPDIR");
    return std::string(dir ? dir : "/tmp") + "/hobbit-core-test-" + std::to_string(getpid()) + ".npy";
}

bool graph(driver & d, random_router & r, int n_tokens, int32_t & next) {
    std::vector<int32_t> seq(n_tokens, 0), pos;
    for (int i = 0; i < n_tokens; ++i) {
        pos.push_back(next++);
    }
    d.begin();
    for (int layer = 0; layer < (int) d.model.layout.layers.size(); ++layer) {
        const layer_layout & l = d.model.layout.layers[layer];
        std::vector<int32_t> experts(n_tokens * l.n_used);
        std::vector<float>   weights(n_tokens * l.n_used);
        for (int t = 0; t < n_tokens; ++t) {
            r.token(layer, l.n_expert, l.n_used, &experts[t * l.n_used], &weights[t * l.n_used]);
        }
        d.layer(layer, n_tokens, l.n_used, experts, weights, seq, pos, layer == 0);
    }
    return d.end();
}

} // namespace

TEST(stress_the_api_while_decoding) {
    for (int round = 0; round < 4; ++round) {
        fake_model m({ { 16, 4, 3, { { 96, 96, 128 }, { 24, 24, 32 } } }, { 8, 2, 2, { { 64, 64, 0 }, { 32, 32, 0 } }, false } }, { 0, 1, 0, 1 });
        const int slots = round % 2 ? 5 : 14;
        m.place_slots(slots, 4);
        hobbit_params p = test_params();
        p.n_io_threads = 1 + round;
        std::atomic<uint32_t> n{ 0 };
        std::atomic<bool> stop{ false };
        driver d(m, p);
        d.settings_change = true;
        d.may_fail        = round >= 2;
        d.files->before = [&](const fake_model::place &) {
            const uint32_t x = n++ * 2654435761u;
            return std::string(round >= 2 && (x >> 16) % 256 == 0 ? "read error" : "");
        };
        std::thread api([&] {
            random_router r(check::seed + 77);
            const std::string path = temporary_path();
            while (!stop) {
                switch (r.below(10)) {
                    case 0: {
                        const hobbit_stats st = d.engine->stats();
                        CHECK_EQ(st.requests, st.wanted_high + st.wanted_low + st.wanted_skip);
                        CHECK_EQ(st.requests, st.hits_high + st.hits_low + st.misses_high + st.misses_low + st.skips);
                        break;
                    }
                    case 1: {
                        hobbit_group_info g;
                        CHECK(d.engine->group_info(r.below(2), g));
                        CHECK(g.high_resident <= g.high_slots && g.low_resident <= g.low_slots);
                        break;
                    }
                    case 2: {
                        const float t1 = (float) r.below(5) / 4.0f;
                        d.engine->set_thresholds(t1, std::max(t1, (float) r.below(5) / 4.0f));
                        break;
                    }
                    case 3: {
                        const float w[4] = { 1.0f, (float) r.below(3), (float) r.below(3), (float) r.below(3) };
                        d.engine->set_policy(r.below(4), w);
                        break;
                    }
                    case 4: CHECK(d.engine->consistent()); break;
                    case 5: d.engine->params(); d.engine->info(); break;
                    case 6: d.engine->trace_start(path); break;
                    case 7: d.engine->trace_stop(); break;
                    default: {
                        const int layer = r.below(4);
                        const int queued = d.engine->prefetch(layer, r.below(m.layout.layers[layer].n_expert), r.below(2));
                        CHECK(queued == 0 || queued == 1);
                    }
                }
                std::this_thread::yield();
            }
            d.engine->trace_stop();
            unlink(path.c_str());
        });
        random_router r(check::seed + round);
        int32_t next = 0;
        for (int step = 0; step < check::steps; ++step) {
            const int n_tokens = r.below(4) ? 1 : r.below(4) ? 2 + r.below(4) : 40;
            graph(d, r, n_tokens, next);
        }
        stop = true;
        api.join();
        d.check_stats();
        CHECK(d.engine->consistent());
    }
}

TEST(stress_settings_of_hooks_while_decoding) {
    fake_model m({ { 16, 4, 3, { { 96, 96, 128 }, { 24, 24, 32 } } } }, { 0, 0 });
    m.place_slots(8, 4);
    static std::atomic<int> calls;
    calls = 0;
    std::atomic<bool> stop{ false };
    hob::engine e(m.layout, test_params(), {}, std::make_unique<fake_storage>(m));
    hobbit_hooks h = {};
    h.select   = [](void *, int32_t, int32_t, int32_t, const int32_t *, const float *, int32_t *) { calls++; };
    h.prefetch = [](void *, hobbit *, int32_t, int32_t, int32_t, const int32_t *, const float *) { calls++; };
    h.event    = [](void *, int32_t, int32_t, int32_t, int32_t, int32_t) { calls++; };
    std::thread api([&] {
        while (!stop) {
            e.set_hooks(h, nullptr);
            std::this_thread::yield();
            e.set_hooks({}, nullptr);
        }
    });
    random_router r(check::seed);
    for (int step = 0; step < check::steps; ++step) {
        const int32_t zero = 0;
        std::vector<int32_t> experts(4), high(4), low(4), kept(4);
        std::vector<float>   weights(4);
        e.begin_graph();
        for (int layer = 0; layer < 2; ++layer) {
            r.token(layer, 16, 4, experts.data(), weights.data());
            e.route({ layer, 1, 4, 1, experts.data(), weights.data(), &e, &zero, &step, layer == 0 }, 0, { high.data(), low.data(), kept.data() });
            e.wait_late(0, high.data(), low.data(), high.data(), low.data(), 4);
        }
        CHECK_EQ(e.end_graph(), "");
    }
    stop = true;
    api.join();
}

TEST(stress_shutdown_with_loads_in_flight) {
    for (int round = 0; round < std::max(10, check::steps / 10); ++round) {
        fake_model m({ { 16, 4, 3, { { 96, 96, 128 }, { 24, 24, 32 } } } }, { 0, 0, 0 });
        m.place_slots(24, 6);
        hobbit_params p = test_params(0.6f, 0.9f, round % 4);
        p.n_io_threads = 1 + round % 4;
        driver d(m, p);
        d.files->before = [](const fake_model::place &) {
            std::this_thread::sleep_for(std::chrono::microseconds(20));
            return std::string();
        };
        random_router r(check::seed + round);
        int32_t next = 0;
        for (int step = 0; step < 2; ++step) {
            CHECK(graph(d, r, 1 + r.below(2) * 40, next));
        }
        for (int i = 0; i < 20; ++i) {
            d.engine->prefetch(r.below(3), r.below(16), r.below(2));
        }
        if (round % 2) { // a graph that is left after its first route: the next wave's loads are queued
            std::vector<int32_t> e(40 * 4), zero(40, 0), out(3 * 160);
            std::vector<float>   w(40 * 4);
            for (int t = 0; t < 40; ++t) {
                r.token(0, 16, 4, &e[t * 4], &w[t * 4]);
            }
            d.engine->set_hooks({}, nullptr);
            d.engine->begin_graph();
            d.engine->route({ 0, 40, 4, d.engine->waves(0, 40, 4), e.data(), w.data(), &d, zero.data(), zero.data(), true }, 0,
                            { out.data(), out.data() + 160, out.data() + 320 });
            CHECK_EQ(d.engine->end_graph(), "");
            CHECK(d.engine->consistent());
        }
    }
}
