// The second level: what was read once comes from host memory the next time, whatever is lost in between.

#include "check.h"
#include "driver.h"

#include <algorithm>
#include <condition_variable>
#include <mutex>

using namespace hob;

namespace {

struct level {
    std::vector<std::vector<uint8_t>> memory;
    std::unique_ptr<host_cache> cache;

    level(const fake_model & m, uint64_t bytes) {
        uint64_t total = 0;
        std::vector<host_cache::block> blocks = host_cache::divide(m.layout, bytes, total);
        uint64_t sum = 0;
        for (host_cache::block & b : blocks) {
            memory.emplace_back(b.n * b.stride, (uint8_t) 0xdd);
            b.base = memory.back().data();
            sum += b.n * b.stride;
        }
        CHECK_EQ(sum, total);
        cache = std::make_unique<host_cache>(m.layout, std::move(blocks));
    }
};

group_spec two(bool host) {
    group_spec s = { 8, 2, 3, { { 64, 48, 80 }, { 16, 16, 32 } } };
    s.host = host;
    return s;
}

} // namespace

TEST(host_cache_divides_its_memory) {
    fake_model m({ two(true), two(true) }, { 0, 1, 0 });
    uint64_t all = 0, none = 0, half = 0;
    for (const host_cache::block & b : host_cache::divide(m.layout, UINT64_MAX / 2, all)) {
        CHECK(b.n == 16 || b.n == 8);
    }
    for (const host_cache::block & b : host_cache::divide(m.layout, 0, none)) {
        CHECK_EQ(b.n, host_cache::MIN_ENTRIES);
    }
    host_cache::divide(m.layout, all / 2, half);
    CHECK(none < half && half <= all / 2);
}

TEST(host_cache_serves_what_it_has) {
    random_router r(check::seed);
    const uint64_t ALL = (uint64_t) 1 << 30;
    for (bool host : { true, false }) {
        // with 7 slots more is loaded at once than a level of MIN_ENTRIES has entries
        for (const auto & [bytes, slots] : std::vector<std::pair<uint64_t, int>>{ { 0, 3 }, { 60000, 3 }, { ALL, 3 }, { 0, 7 } }) {
            fake_model m({ two(host) }, { 0, 0, 0 });
            m.place_slots(slots, 2);
            level l(m, bytes);
            const host_cache & cache = *l.cache;
            driver d(m, test_params(0.5f, 0.9f), std::move(l.cache));
            const int n_used = 2;
            int32_t next = 0;
            for (int step = 0; step < 150; ++step) {
                const int n_tokens = step % 11 == 0 ? 33 : 1 + r.below(3);
                std::vector<int32_t> e(n_tokens * n_used), seq(n_tokens, 0), pos;
                std::vector<float> w(n_tokens * n_used);
                for (int t = 0; t < n_tokens; ++t) {
                    pos.push_back(next++);
                }
                d.begin();
                for (int layer = 0; layer < 3; ++layer) {
                    for (int t = 0; t < n_tokens; ++t) {
                        r.token(layer, 8, n_used, &e[t * n_used], &w[t * n_used]);
                    }
                    d.layer(layer, n_tokens, n_used, e, w, seq, pos, layer == 0);
                }
                CHECK(d.end());
                CHECK(cache.consistent());
            }
            d.check_stats();
            const hobbit_stats s = d.engine->stats();
            CHECK_EQ(s.bytes_storage, d.files->n_bytes.load());
            CHECK(s.host_hits > 0);
            if (bytes == ALL) { // everything was read at most once
                CHECK(s.bytes_storage <= 3 * 8 * (m.layout.groups[0].expert_bytes(COPY_HIGH) + m.layout.groups[0].expert_bytes(COPY_LOW)));
                CHECK(s.bytes_read > 2 * s.bytes_storage);
            }
        }
    }
}

TEST(host_cache_keeps_nothing_of_a_failed_read) {
    random_router r(check::seed + 1);
    fake_model m({ two(false) }, { 0, 0 });
    m.place_slots(2, 1);
    level l(m, 1 << 30);
    driver d(m, test_params(1.0f, 1.0f), std::move(l.cache));
    d.may_fail = true;
    std::atomic<int> countdown{ 0 };
    d.files->before = [&](const fake_model::place &) { return ++countdown % 13 == 0 ? std::string("no luck") : std::string(); };
    for (int step = 0; step < 200; ++step) {
        int32_t e[2], zero = 0, at = step;
        float w[2];
        d.begin();
        for (int layer = 0; layer < 2; ++layer) {
            r.token(layer, 8, 2, e, w);
            d.layer(layer, 1, 2, { e[0], e[1] }, { w[0], w[1] }, { zero }, { at }, layer == 0);
        }
        d.end(); // what was handed out is right even so: the driver compares bytes
    }
    CHECK(d.n_failed > 0 && d.n_failed < 200);
    CHECK(d.engine->stats().host_hits > 0);
}

TEST(host_cache_gives_no_entry_twice_before_loads_are_submitted) {
    fake_model m({ two(false) }, { 0 });
    level l(m, 0);
    std::vector<const uint8_t *> places;
    for (int e = 0; e <= host_cache::MIN_ENTRIES; ++e) {
        load_request r = { &m.layout.layers[0], &m.layout.groups[0], COPY_HIGH, e, e, nullptr, 0, 0 };
        CHECK(!l.cache->serve(r));
        CHECK((r.stage != nullptr) == (e < host_cache::MIN_ENTRIES));
        CHECK(!r.stage || std::count(places.begin(), places.end(), r.stage) == 0);
        places.push_back(r.stage);
    }
    load_request again = { &m.layout.layers[0], &m.layout.groups[0], COPY_HIGH, 0, 7, nullptr, 0, 0 };
    CHECK(!l.cache->serve(again)); // its bytes are not there yet
    CHECK(!again.host && !again.stage && !again.host_busy);
}

// A guess that the level serves may be given up before it was copied: what it would have been copied from stays good.
TEST(host_cache_keeps_what_a_dropped_guess_would_have_read) {
    group_spec s = { 8, 1, 2, { { 64, 64, 0 }, { 16, 16, 0 } }, false };
    fake_model m({ s }, { 0 });
    m.place_slots(4, 1);
    level l(m, 1 << 20);
    fake_storage files(m);
    std::mutex mutex;
    std::condition_variable changed;
    bool hold = false, held = false;
    files.before = [&](const fake_model::place &) {
        std::unique_lock<std::mutex> lock(mutex);
        held = hold;
        changed.notify_all();
        changed.wait(lock, [&] { return !hold; });
        return std::string();
    };
    loader loads(files, 1, m.layout.piece_bytes());
    load_state a, b;
    const auto request = [&](int expert, int slot, load_state & state) { return load_request{ &m.layout.layers[0], &m.layout.groups[0], COPY_HIGH, expert, slot, &state, 0, 0 }; };
    const auto load = [&](load_priority priority, load_request r) {
        const bool there = l.cache->serve(r);
        loads.submit(priority, { r });
        return there;
    };
    CHECK(!load(PRIORITY_DEMAND, request(3, 0, a)));
    loads.wait_done(a);
    hold = true;
    CHECK(!load(PRIORITY_DEMAND, request(5, 2, b))); // the only thread reads, and the guess stays queued
    {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [&] { return held; });
    }
    CHECK(load(PRIORITY_GUESS, request(3, 1, a)));
    CHECK_EQ(loads.drop(a).bytes, 128u);
    {
        std::lock_guard<std::mutex> lock(mutex);
        hold = false;
    }
    changed.notify_all();
    loads.wait_done(b);
    CHECK(load(PRIORITY_DEMAND, request(3, 1, a)));
    loads.wait_done(a);
}

TEST(host_cache_takes_no_more_than_it_is_given) {
    group_spec s = { 8, 2, 3, { { 4096, 4096, 4096 }, { 4096, 4096, 4096 } } };
    std::vector<int> layers(32, 2);
    layers[0] = 0; // two groups of one layer each, which the least already fills to a half
    layers[1] = 1;
    fake_model m({ s, s, s }, layers);
    uint64_t least = 0, all = 0, total = 0;
    host_cache::divide(m.layout, 0, least);
    host_cache::divide(m.layout, UINT64_MAX / 2, all);
    for (uint64_t bytes = least; bytes < all; bytes += least / 3) {
        host_cache::divide(m.layout, bytes, total);
        CHECK(total <= bytes && total + 32 * 4096 * 3 > bytes);
    }
}
