// What goes wrong in the middle of a pass: there is no memory, a read hangs, a slot is lost to two predictions at once.

#include "check.h"
#include "fake_model.h"
#include "refuse.h"

#include "engine.h"

#include <array>
#include <atomic>
#include <condition_variable>
#include <thread>

using namespace hob;

namespace {

// Reads that wait until they are let go.
class gate {
  public:
    void pass() {
        std::unique_lock<std::mutex> lock(mutex_);
        waiting_++;
        changed_.notify_all();
        changed_.wait(lock, [&] { return !shut_; });
        waiting_--;
    }
    void shut(bool on) {
        std::lock_guard<std::mutex> lock(mutex_);
        shut_ = on;
        changed_.notify_all();
    }
    void wait_for(int n) { // of them
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [&] { return waiting_ >= n; });
    }

  private:
    std::mutex mutex_;
    std::condition_variable changed_;
    int  waiting_ = 0;
    bool shut_    = false;
};

// One token with two experts a layer.
struct decoder {
    engine & e;
    int32_t at = 0;
    int32_t high[2] = {}, low[2] = {}, kept[2] = {};

    void layer(int l, int a, int b, next_routers * next = nullptr) {
        const int32_t ids[2] = { a, b }, zero = 0;
        const float   w[2]   = { 0.5f, 0.5f };
        route_request q = { l, 1, 2, e.waves(l, 1, 2), ids, w, &e, &zero, &at, l == 0 };
        q.next = next;
        for (int v = 0; v < q.n_waves; ++v) {
            e.route(q, v, { high, low, kept });
            e.wait_late(v, high, low, high, low, 2);
        }
    }
};

struct fixed_routers : next_routers {
    int layer, a, b;
    fixed_routers(int layer, int a, int b) : layer(layer), a(a), b(b) {}
    bool choose(int l, int32_t * experts, float * weights) override {
        experts[0] = a;
        experts[1] = b;
        weights[0] = weights[1] = 0.5f;
        return l == layer;
    }
};

} // namespace

// The first pass of a sequence, and experts in the second level; test_no_memory.cpp has the rest.
TEST(mishap_no_memory_while_planning) {
    for (int second_level = 0; second_level < 2; ++second_level) {
        for (int way = 0; way < 3; ++way) { // in the first layer of the first pass, or later
            const int failing_layer = way / 2;
            bool met = true;
            for (long k = 1; met; ++k) {
                CHECK(k < 1000);
                group_spec s = { 8, 2, 3, { { 64, 64, 64 }, { 16, 16, 16 } }, false };
                fake_model m({ s }, { 0, 0 });
                m.place_slots(4, 1);
                const hobbit_params p = test_params(1.0f, 1.0f);
                std::unique_ptr<host_cache> level;
                std::vector<std::vector<uint8_t>> memory;
                if (second_level) {
                    uint64_t total = 0;
                    auto blocks = host_cache::divide(m.layout, 1 << 20, total);
                    for (host_cache::block & b : blocks) {
                        memory.emplace_back(b.n * b.stride);
                        b.base = memory.back().data();
                    }
                    level = std::make_unique<host_cache>(m.layout, blocks);
                }
                engine e(m.layout, p, measure(m.layout, p, 0), std::make_unique<fake_storage>(m), std::move(level));
                decoder d{ e };
                const auto pass = [&](int a, int b, bool fails) {
                    e.begin_graph();
                    for (int l = 0; l < 2; ++l) {
                        const refused now(fails && l == failing_layer ? k : 0);
                        d.layer(l, a, b);
                        met = fails && l == failing_layer ? refused::left() == 0 : met;
                    }
                    d.at++;
                    const std::string error = e.end_graph();
                    CHECK(fails || error.empty());
                    CHECK(e.consistent());
                    for (int i = 0; i < 2 && error.empty(); ++i) {
                        for (int proj = 0; proj < 3; ++proj) {
                            CHECK(d.high[i] >= 0 && m.holds(1, i == 0 ? a : b, COPY_HIGH, d.high[i], proj));
                        }
                    }
                };
                if (way > 0) {
                    pass(0, 1, false);
                }
                pass(2, 3, true);
                pass(2, 3, false);
                pass(0, 4, false);
            }
        }
    }
}

TEST(mishap_a_pass_ends_though_a_read_hangs) {
    group_spec s = { 8, 2, 2, { { 64, 64, 0 }, { 16, 16, 0 } } };
    fake_model m({ s }, { 0 });
    m.place_slots(4, 1);
    gate g;
    std::atomic<bool> broken{ true };
    auto files = std::make_unique<fake_storage>(m);
    files->before = [&](const fake_model::place & x) -> std::string { // of one expert one piece fails and another one hangs
        if (broken && x.proj == 1) {
            return "input/output error";
        }
        g.pass();
        return "";
    };
    hobbit_params p = test_params(1.0f, 1.0f);
    p.n_io_threads = 4; // all pieces at once
    engine e(m.layout, p, measure(m.layout, p, 0), std::move(files));
    decoder d{ e };
    std::atomic<bool> end{ false };
    e.set_abort([](void * ask) -> int32_t { return ((std::atomic<bool> *) ask)->load(); }, &end);
    g.shut(true);
    std::thread other([&] {
        g.wait_for(1);
        end = true;
    });
    e.begin_graph();
    d.layer(0, 3, 5);
    CHECK(!e.end_graph().empty()); // and is not here for ever
    CHECK(e.stats().tokens == 1);
    other.join();
    e.begin_graph(); // the same again: what hangs is asked for
    d.layer(0, 3, 5);
    CHECK(!e.end_graph().empty());
    CHECK(e.consistent());
    end = false;
    broken = false;
    g.shut(false);
    e.begin_graph();
    d.layer(0, 3, 5);
    CHECK_EQ(e.end_graph(), std::string());
    CHECK(m.holds(0, 3, COPY_HIGH, d.high[0], 0) && m.holds(0, 5, COPY_HIGH, d.high[1], 1));
}

// A farther and a nearer prediction name the same slot, which the first of them gives up.
TEST(mishap_two_predictions_of_one_slot) {
    group_spec s = { 16, 2, 2, { { 64, 64, 0 }, { 16, 16, 0 } } };
    fake_model m({ s, s }, { 0, 1, 0, 0 });
    m.place_slots(10, 1);
    hobbit_params p = test_params(1.0f, 1.0f, HOBBIT_POLICY_LRU);
    p.prefetch = 3;
    gate g;
    auto files = std::make_unique<fake_storage>(m);
    files->before = [&](const fake_model::place &) {
        g.pass();
        return std::string();
    };
    engine e(m.layout, p, measure(m.layout, p, 0), std::move(files));
    decoder d{ e };
    const auto pass = [&](const std::vector<std::array<int, 3>> & layers) {
        e.begin_graph();
        for (const auto & [l, a, b] : layers) {
            d.layer(l, a, b);
        }
        CHECK_EQ(e.end_graph(), std::string());
        d.at++;
    };
    pass({ { 0, 0, 1 }, { 2, 8, 9 }, { 3, 6, 7 } });
    pass({ { 0, 0, 1 }, { 1, 0, 1 }, { 2, 10, 11 } });
    pass({ { 0, 2, 3 } });
    g.shut(true);
    fixed_routers next(3, 5, 6);
    e.begin_graph();
    d.layer(0, 2, 3);
    for (int x = 10; x < 10 + p.n_io_threads; ++x) { // no thread is left for what is predicted
        CHECK_EQ(e.prefetch(1, x, COPY_HIGH), 1);
    }
    g.wait_for(p.n_io_threads);
    d.layer(0, 2, 3, &next);
    d.layer(1, 0, 1, &next);
    for (int x = 12; x < 16; ++x) {
        for (int l : { 0, 2, 3 }) {
            e.prefetch(l, x, COPY_HIGH);
        }
    }
    std::thread later([&] { g.shut(false); });
    d.layer(2, 3, 4);
    later.join();
    CHECK_EQ(e.end_graph(), std::string());
    CHECK(m.holds(2, 3, COPY_HIGH, d.high[0], 0) && m.holds(2, 4, COPY_HIGH, d.high[1], 1));
    CHECK(e.consistent());
}
