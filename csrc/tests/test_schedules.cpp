// Random schedules, as long as --steps says: one model, budget and storage after another, and what a program may do with
// them. Every step is checked by the driver; what is checked here is what lies between the steps.

#include "check.h"
#include "world.h"

#include <atomic>
#include <chrono>
#include <cstdio>
#include <thread>

using namespace hob;

namespace {

// Storage that works, is slow now and then, fails now and then, or is gone.
struct weather {
    std::atomic<uint32_t> n{ 0 };
    std::atomic<uint32_t> bad_in_64k{ 0 };
    std::atomic<uint32_t> slow_in_64k{ 0 };

    std::string read() {
        const uint32_t x = (n++ * 2654435761u) >> 16;
        if (x < slow_in_64k) {
            std::this_thread::sleep_for(std::chrono::microseconds(1 + x % 200));
        }
        if (x % 32768 * 2 < bad_in_64k) {
            if (x & 1) {
                throw std::runtime_error("thrown");
            }
            return "read error";
        }
        return "";
    }
};

struct counts {
    int64_t steps = 0; // calls of driver::layer()
    int rounds = 0, graphs = 0, failed = 0, left = 0, aborted = 0, refused = 0, settings = 0, shutdowns = 0;
};

// A second level, where the world has none of its own: slots behind write(), or in memory.
struct second_level {
    std::vector<std::vector<uint8_t>> memory;
    std::unique_ptr<host_cache> cache;
    host_cache * seen = nullptr;

    second_level(const fake_model & m, uint64_t bytes) {
        uint64_t total = 0;
        std::vector<host_cache::block> blocks = host_cache::divide(m.layout, bytes, total);
        for (host_cache::block & b : blocks) {
            memory.emplace_back(b.n * b.stride, (uint8_t) 0xdd);
            b.base = memory.back().data();
        }
        cache = std::make_unique<host_cache>(m.layout, std::move(blocks));
        seen  = cache.get();
    }
};

class round_of {
  public:
    round_of(random_router & r, int number, counts & c)
        : r_(r), c_(c), w_(r, number, true), level_(*w_.model, (uint64_t) r.below(20000)),
          d_(*w_.model, w_.params, r.below(3) == 0 ? std::move(level_.cache) : nullptr, &w_.budget) {
        d_.may_fail = true;
        sky_.n = (uint32_t) r.below(1 << 20);
        sky_.slow_in_64k = r.below(3) ? 0 : 50;
        usual_ = r.below(2) ? 0 : r.below(800);
        sky_.bad_in_64k = usual_;
        d_.files->before = [this](const fake_model::place &) { return sky_.read(); };
        const bool ahead = r.below(2);
        d_.prefetch = [this, ahead](int layer) {
            if (ahead) {
                prefetch((layer + 1) % (int) w_.layers.size());
            }
        };
        d_.engine->set_abort([](void * me) -> int32_t { return ((round_of *) me)->asked(); }, this);
        const hobbit_info i = d_.engine->info();
        CHECK(i.slot_bytes + i.staging_bytes + i.record_bytes <= i.budget_bytes);
    }

    void run(int n) {
        if (r_.below(8) == 0) { // another thread looks, prefetches and changes settings meanwhile
            d_.settings_change = true;
            std::atomic<bool> stop{ false };
            std::thread other([&] { watch(stop); });
            for (int i = 0; i < n; ++i) {
                step();
            }
            stop = true;
            other.join();
        } else {
            for (int i = 0; i < n; ++i) {
                step();
            }
        }
        rest();
        shut_down();
    }

  private:
    int32_t asked() { return countdown_ > 0 && --countdown_ == 0; }

    void prefetch(int layer) {
        const int queued = d_.engine->prefetch(layer, r_.below(d_.model.layout.layers[layer].n_expert), r_.below(2));
        CHECK(queued == 0 || queued == 1);
    }

    bool graph(sizes n) {
        c_.graphs++;
        c_.steps += (int64_t) w_.layers.size();
        const bool ok = random_graph(d_, r_, n, next_, r_.below(40) == 0);
        c_.failed += !ok;
        return ok;
    }

    // A graph that fails runs once more when the storage is well again, with the same experts: then it must succeed. What was
    // prefetched may still be on its way into a failure, so the storage rests before.
    void retry(const random_router & same, const std::vector<int32_t> & at, sizes n) {
        rest();
        const random_router now = r_;
        r_    = same;
        next_ = at;
        CHECK(graph(n));
        r_ = now;
        sky_.bad_in_64k = usual_;
    }

    // The storage is well, and nothing is on its way that failed before.
    void rest() {
        sky_.bad_in_64k = 0;
        for (int i = 0; i < 3 && !graph({ 1, 1 }); ++i) {
        }
    }

    void step() {
        const sizes n = random_sizes(r_);
        const random_router before = r_;
        const std::vector<int32_t> at = next_;
        switch (r_.below(24)) {
            case 0: // the storage is gone for a while
                sky_.bad_in_64k = 65536;
                graph(n);
                sky_.bad_in_64k = usual_;
                break;
            case 1:
                c_.left++;
                d_.leave_at = r_.below(3);
                graph(n);
                d_.leave_at = -1;
                break;
            case 2:
                c_.aborted++;
                countdown_ = 1 + r_.below(12);
                graph(n);
                if (countdown_ == 0) {
                    CHECK(d_.last_error == "the forward pass was aborted" || d_.last_error == "read error" || d_.last_error == "thrown");
                }
                countdown_ = 0;
                break;
            case 3:
                for (int i = r_.below(8); i > 0; --i) {
                    prefetch(r_.below((int) w_.layers.size()));
                }
                break;
            case 4:
                c_.settings++;
                if (r_.below(2)) {
                    w_.params.t1 = (float) r_.below(5) / 4.0f;
                    w_.params.t2 = std::max(w_.params.t1, (float) r_.below(5) / 4.0f);
                    d_.params.t1 = w_.params.t1;
                    d_.params.t2 = w_.params.t2;
                    d_.engine->set_thresholds(w_.params.t1, w_.params.t2);
                } else {
                    d_.engine->set_policy(r_.below(4), w_.params.policy_weights);
                }
                break;
            case 5:
                next_[r_.below(3)] = 0; // a new sequence under an old number
                break;
            case 6:
                if (!d_.settings_change) { // the second thread prefetches between two looks at the counters; it is checked when that has ended
                    check();
                }
                break;
            case 7: // memory runs out
                d_.refuse = 1 + c_.refused++ % 50;
                if (!graph(n)) {
                    d_.refuse = 0;
                    retry_graph(before, at, n);
                }
                d_.refuse = 0;
                break;
            default:
                if (!graph(n) && r_.below(2)) {
                    retry_graph(before, at, n);
                }
        }
    }

    void retry_graph(random_router same, const std::vector<int32_t> & at, sizes n) {
        same.below(24); // as step() did
        retry(same, at, n);
    }

    void check() {
        d_.check_stats();
        CHECK(d_.engine->consistent());
        for (int g = 0; g < (int) w_.groups.size(); ++g) {
            hobbit_group_info i;
            CHECK(d_.engine->group_info(g, i));
            CHECK(i.high_resident <= i.high_slots && i.low_resident <= i.low_slots);
        }
    }

    void watch(const std::atomic<bool> & stop) {
        random_router r(check::seed + 99);
        while (!stop) {
            switch (r.below(5)) {
                case 0: CHECK(d_.engine->consistent()); break;
                case 1: d_.engine->set_policy(r.below(4), nullptr); break;
                case 2: d_.engine->set_thresholds((float) r.below(3) / 2.0f, 1.0f); break;
                case 3: d_.engine->stats(); break;
                default: {
                    const int layer = r.below((int) w_.layers.size());
                    d_.engine->prefetch(layer, r.below(d_.model.layout.layers[layer].n_expert), r.below(2));
                }
            }
            std::this_thread::sleep_for(std::chrono::microseconds(50));
        }
    }

    // The engine is taken down with loads in flight, sometimes in a graph that was left.
    void shut_down() {
        check();
        if (level_.cache == nullptr) {
            CHECK(level_.seen->consistent());
        }
        c_.shutdowns++;
        sky_.slow_in_64k = 65536;
        sky_.bad_in_64k  = r_.below(2) ? 0 : 20000;
        for (int i = r_.below(20); i > 0; --i) {
            prefetch(r_.below((int) w_.layers.size()));
        }
        if (r_.below(2)) {
            d_.leave_at = 0;
            graph(random_sizes(r_));
        }
    }

    random_router & r_;
    counts & c_;
    weather sky_; // before the driver: loader threads use it
    uint32_t usual_ = 0;
    int countdown_ = 0;
    std::vector<int32_t> next_ = std::vector<int32_t>(3, 0);
    world w_;
    second_level level_;
    driver d_;
};

} // namespace

TEST(stress_random_schedules) {
    random_router r(check::seed + 5);
    counts c;
    while (c.steps < (int64_t) check::steps * 20 && check::failed_checks == 0) {
        round_of one(r, c.rounds++, c);
        one.run(1 + r.below(120));
    }
    CHECK(c.failed > 0 && c.left > 0 && c.aborted > 0 && c.refused > 0);
    if (check::steps > 1000) {
        printf("%lld steps in %d forward passes of %d engines: %d passes failed, left %d, aborted %d, %d without memory, %d changes of settings, %d shutdowns\n",
               (long long) c.steps, c.graphs, c.rounds, c.failed, c.left, c.aborted, c.refused, c.settings, c.shutdowns);
    }
}
