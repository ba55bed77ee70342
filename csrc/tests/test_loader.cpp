// The loader's threads, on files in memory.

#include "check.h"
#include "fake_model.h"
#include "loader.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <random>
#include <sys/resource.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

using namespace hob;

namespace {

const group_spec SMALL  = { 6, 2, 3, { { 700, 701, 900 }, { 100, 101, 333 } } };
const group_spec MERGED = { 6, 2, 2, { { 1000, 500, 0 }, { 90, 70, 0 } } };
const group_spec REMOTE = { 6, 2, 3, { { 700, 701, 900 }, { 100, 101, 333 } }, false };
const group_spec SINGLE = { 6, 2, 1, { { 512, 0, 0 }, { 64, 0, 0 } } };

struct fixture {
    fake_model   model;
    fake_storage files{ model };
    std::deque<load_state> states;

    explicit fixture(const group_spec & spec) : model({ spec }, { 0, 0 }) { model.place_slots(12, 12); }

    load_request request(int layer, int expert, int copy, int slot) {
        states.emplace_back();
        return { &model.layout.layers[layer], &model.layout.groups[0], copy, expert, slot, &states.back() };
    }
    bool holds(const load_request & r, int proj) {
        return model.holds((int) (r.layer - model.layout.layers.data()), r.expert, r.copy, r.slot, proj);
    }
};

// A gate that reads wait at until it is opened.
struct gate {
    std::mutex m;
    std::condition_variable cv;
    bool open = false;
    void pass() {
        std::unique_lock<std::mutex> lock(m);
        cv.wait(lock, [&] { return open; });
    }
    void lift() {
        std::lock_guard<std::mutex> lock(m);
        open = true;
        cv.notify_all();
    }
};

void load_everything(const group_spec & spec, int n_threads, size_t max_piece) {
    fixture f(spec);
    loader l(f.files, n_threads, max_piece);
    std::vector<load_request> all;
    for (int copy = 0; copy < N_COPIES; ++copy) {
        for (int i = 0; i < 12; ++i) {
            all.push_back(f.request(i / 6, i % 6, copy, 11 - i));
        }
    }
    l.submit(PRIORITY_DEMAND, all);
    const int n_proj = spec.n_proj;
    for (const load_request & r : all) {
        CHECK(l.wait(*r.state, PART_EARLY));
        for (int p = 0; p + 1 < n_proj; ++p) {
            CHECK(f.holds(r, p));
        }
        CHECK(l.wait(*r.state, PART_LATE));
        CHECK(f.holds(r, n_proj - 1));
        CHECK(r.state->done());
    }
    CHECK_EQ(f.files.n_bytes.load(), 12 * (f.model.layout.groups[0].expert_bytes(0) + f.model.layout.groups[0].expert_bytes(1)));
    CHECK_EQ(l.error(), "");
}

} // namespace

TEST(loader_fills_slots) {
    for (const group_spec & spec : { SMALL, MERGED, REMOTE, SINGLE }) {
        for (int n_threads : { 1, 3 }) {
            for (size_t max_piece : { 100, 701, 4096 }) {
                load_everything(spec, n_threads, max_piece);
            }
        }
    }
}

TEST(loader_reads_what_is_needed_first_first) {
    // one thread: its reads are in the order of the queue
    fixture f(SMALL);
    gate g;
    std::vector<fake_model::place> order;
    f.files.before = [&](const fake_model::place & p) {
        g.pass();
        order.push_back(p);
        return std::string();
    };
    loader l(f.files, 1, 4096);
    std::vector<load_request> first = { f.request(0, 0, COPY_HIGH, 0) }; // holds the thread
    std::vector<load_request> ahead = { f.request(1, 4, COPY_HIGH, 1), f.request(1, 5, COPY_HIGH, 2) };
    std::vector<load_request> both  = { f.request(0, 1, COPY_HIGH, 3), f.request(0, 2, COPY_LOW, 4) };
    l.submit(PRIORITY_DEMAND, first);
    l.submit(PRIORITY_PREFETCH, ahead);
    l.submit(PRIORITY_DEMAND, both);
    l.promote(*ahead[1].state);
    g.lift();
    for (const auto & r : { first[0], ahead[0], ahead[1], both[0], both[1] }) {
        l.wait_done(*r.state);
        for (int p = 0; p < 3; ++p) {
            CHECK(f.holds(r, p));
        }
    }
    std::string got;
    for (const auto & p : order) {
        got += std::to_string(p.expert) + "gud"[p.proj] + ' ';
    }
    // gates and ups of the pair, then their downs; the promoted prefetch; the other prefetch last
    CHECK_EQ(got, "0g 0u 0d 1g 1u 2g 2u 1d 2d 5g 5u 5d 4g 4u 4d ");
}

TEST(loader_failures_are_told_and_do_not_stick) {
    fixture f(SMALL);
    std::atomic<bool> bad{ true };
    f.files.before = [&](const fake_model::place & p) { return std::string(bad && p.expert == 3 && p.proj == 1 ? "disk on fire" : ""); };
    loader l(f.files, 2, 256);
    std::vector<load_request> r = { f.request(0, 2, COPY_HIGH, 0), f.request(0, 3, COPY_HIGH, 1) };
    l.submit(PRIORITY_DEMAND, r);
    CHECK(l.wait(*r[0].state, PART_EARLY));
    CHECK(!l.wait(*r[1].state, PART_EARLY));
    CHECK(!l.wait(*r[1].state, PART_LATE));
    CHECK(l.wait(*r[0].state, PART_LATE));
    CHECK_EQ(l.error(), "disk on fire");
    l.clear_error();
    CHECK_EQ(l.error(), "");
    bad = false;
    l.submit(PRIORITY_DEMAND, { r[1] }); // the same state again
    CHECK(l.wait(*r[1].state, PART_EARLY));
    CHECK(l.wait(*r[1].state, PART_LATE));
    for (int p = 0; p < 3; ++p) {
        CHECK(f.holds(r[1], p));
    }
}

TEST(loader_a_throwing_storage_is_a_failure) {
    fixture f(REMOTE);
    f.files.before = [&](const fake_model::place & p) -> std::string {
        if (p.proj == 2) {
            throw std::runtime_error("thrown");
        }
        return "";
    };
    loader l(f.files, 2, 4096);
    std::vector<load_request> r = { f.request(0, 2, COPY_HIGH, 0) };
    l.submit(PRIORITY_DEMAND, r);
    l.wait_done(*r[0].state);
    CHECK(r[0].state->failed);
    CHECK_EQ(l.error(), "thrown");
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) && defined(__linux__) // those need address space of their own
TEST(loader_threads_that_cannot_start_are_an_error) {
    const pid_t child = fork();
    if (child == 0) {
        alarm(60); // it waited for ever once
        fixture f(SMALL);
        long pages = 0;
        FILE * statm = fopen("/proc/self/statm", "r");
        const bool known = statm && fscanf(statm, "%ld", &pages) == 1;
        const rlim_t most = (rlim_t) pages * (rlim_t) sysconf(_SC_PAGESIZE) + ((rlim_t) 32 << 20); // stacks of a few
        const rlimit limit = { most, most };
        rlimit taken = {};
        std::string what;
        try {
            if (known && setrlimit(RLIMIT_AS, &limit) == 0 && getrlimit(RLIMIT_AS, &taken) == 0) {
                if (taken.rlim_cur != most) {
                    _exit(2); // qemu-user says yes and does nothing
                }
                loader l(f.files, 64, 4096);
            }
        } catch (const std::exception & e) {
            what = e.what();
        }
        _exit(what.find("cannot start 64 threads to load experts") == 0 ? 0 : 1);
    }
    int status = -1;
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 2) {
        fprintf(stderr, "loader_threads_that_cannot_start_are_an_error: not tested, address space has no limit here\n");
    } else {
        CHECK_EQ(status, 0);
    }
}
#endif

TEST(loader_giving_up_waits_for_nothing) {
    fixture f(SMALL);
    gate g;
    f.files.before = [&](const fake_model::place &) {
        g.pass();
        return std::string();
    };
    loader l(f.files, 2, 4096);
    std::vector<load_request> r = { f.request(0, 2, COPY_HIGH, 0) };
    l.submit(PRIORITY_DEMAND, r);
    int asked = 0;
    CHECK(!l.wait(*r[0].state, PART_EARLY, [&] { return ++asked == 3; }));
    CHECK_EQ(asked, 3);
    CHECK(!l.wait_done(*r[0].state, [] { return true; }));
    CHECK(!r[0].state->failed && !r[0].state->done());
    g.lift(); // what was queued arrives all the same
    CHECK(l.wait_done(*r[0].state, [] { return false; }));
    CHECK(f.holds(r[0], 0) && f.holds(r[0], 1) && f.holds(r[0], 2));
}

TEST(loader_destruction_with_loads_in_flight) {
    for (int i = 0; i < 20; ++i) {
        fixture f(SMALL);
        std::mt19937 rng(i);
        const int us = rng() % 300;
        f.files.before = [&](const fake_model::place &) {
            std::this_thread::sleep_for(std::chrono::microseconds(50));
            return std::string();
        };
        loader l(f.files, 1 + i % 4, 128);
        std::vector<load_request> all;
        for (int e = 0; e < 6; ++e) {
            all.push_back(f.request(0, e, COPY_HIGH, e));
        }
        l.submit(i % 2 ? PRIORITY_DEMAND : PRIORITY_PREFETCH, all);
        std::this_thread::sleep_for(std::chrono::microseconds(us));
    }
}

TEST(loader_busy_time_is_wall_time) {
    fixture f(SMALL);
    f.files.before = [&](const fake_model::place &) {
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
        return std::string();
    };
    loader l(f.files, 3, 4096);
    CHECK_EQ(l.busy_us(), 0);
    std::vector<load_request> r = { f.request(0, 0, COPY_HIGH, 0), f.request(0, 1, COPY_HIGH, 1) };
    const int64_t t0 = now_us();
    l.submit(PRIORITY_DEMAND, r);
    l.wait_done(*r[0].state);
    l.wait_done(*r[1].state);
    const int64_t busy = l.busy_us();
    CHECK(busy >= 3500); // six reads of 2 ms by three threads
    CHECK(busy <= now_us() - t0 + 1000);
    std::this_thread::sleep_for(std::chrono::milliseconds(3));
    CHECK_EQ(l.busy_us(), busy);
}
