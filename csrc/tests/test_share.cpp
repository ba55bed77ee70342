// Dividing a layer's misses between link and CPU, and the speeds that this goes by.

#include "check.h"
#include "share.h"

#include <algorithm>
#include <random>

using namespace hob;

namespace {

double finish(const std::vector<missed> & misses) {
    double link = 0.0, cpu = 0.0;
    for (const missed & m : misses) {
        link += m.link_s * m.link / m.units;
        cpu  += m.cpu_s * (m.units - m.link) / m.units;
    }
    return std::max(link, cpu);
}

} // namespace

TEST(share_divides_one_miss) {
    std::vector<missed> one = { { 3.0, 1.5, 30 } };
    share(one);
    CHECK_EQ(one[0].link, 10);
    CHECK(finish(one) == 1.0);
}

TEST(share_keeps_experts_whole_where_it_can) {
    std::vector<missed> m = { { 2.0, 1.0, 10 }, { 2.0, 1.0, 10 }, { 2.0, 1.0, 10 } };
    share(m);
    CHECK_EQ(m[0].link, 10);
    CHECK_EQ(m[1].link + m[2].link, 0);
}

TEST(share_knows_what_a_start_costs) {
    std::vector<missed> m = { { 3.0, 1.5, 30 } };
    share(m, 1.5); // a head start for the link
    CHECK_EQ(m[0].link, 20);
    share(m, 9.0); // not worth starting
    CHECK_EQ(m[0].link, 30);
}

TEST(share_goes_by_what_each_copy_takes) {
    std::vector<missed> m = { { 1.0, 0.5, 100 }, { 1.0, 2.0, 100 } };
    share(m);
    CHECK_EQ(m[0].link, 100);
    CHECK_EQ(m[1].link, 33); // 1.33 s of link, 1.34 of the CPU
}

TEST(share_without_division_takes_the_better_side) {
    std::vector<missed> m = { { 1.0, 3.0, 1 } };
    share(m);
    CHECK_EQ(m[0].link, 1);
    m = { { 3.0, 1.0, 1 } };
    share(m);
    CHECK_EQ(m[0].link, 0);
    std::vector<missed> none;
    share(none);
    CHECK(none.empty());
}

TEST(share_is_within_a_unit_of_the_best) {
    std::mt19937 rng(check::seed);
    for (int round = 0; round < 2000; ++round) {
        const double link = 1.0 + rng() % 100, cpu = 1.0 + rng() % 100;
        std::vector<missed> m;
        double total = 0.0, coarsest = 0.0;
        for (int i = 1 + (int) (rng() % 8); i > 0; --i) {
            const double bytes = 1 + rng() % 1000;
            m.push_back({ bytes / link, bytes / cpu, 2 + (int) (rng() % 60) });
            total += bytes;
            coarsest = std::max(coarsest, bytes / m.back().units);
        }
        share(m);
        for (const missed & x : m) {
            CHECK(x.link >= 0 && x.link <= x.units);
        }
        CHECK(std::count_if(m.begin(), m.end(), [](const missed & x) { return x.link > 0 && x.link < x.units; }) <= 1);
        CHECK(finish(m) <= total / (link + cpu) + coarsest / std::min(link, cpu) + 1e-9);
    }
}

// a link and a CPU with a speed for each copy, working on what share() gives them
TEST(speeds_find_the_balance) {
    std::mt19937 rng(check::seed);
    std::normal_distribution<double> noise(1.0, 0.08);
    const double link = 50.0, cpu[N_COPIES] = { 90.0, 45.0 }, delay = 0.04, idle = 0.01;
    speeds s(60.0, 60.0);
    double late = 0.0, total = 0.0;
    int link_last = 0, rounds = 0;
    for (int i = 0; i < 6000; ++i) {
        std::vector<missed> m;
        std::vector<int> copy;
        double bytes[N_COPIES] = {};
        for (int k = (int) (rng() % 3); k >= 0; --k) {
            const int c = (int) (rng() % N_COPIES);
            const double b = c == COPY_HIGH ? 100.0 : 50.0;
            copy.push_back(c);
            bytes[c] += b;
            m.push_back({ b / s.link(), b / s.cpu(c), 64 });
        }
        share(m, s.cpu_start());
        served x;
        double cpu_s = 0.0;
        for (size_t k = 0; k < m.size(); ++k) {
            const double b = copy[k] == COPY_HIGH ? 100.0 : 50.0, part = (double) m[k].link / m[k].units;
            x.link_bytes += part * b;
            x.cpu_bytes[copy[k]] += (1.0 - part) * b;
            cpu_s += (1.0 - part) * b / cpu[copy[k]];
        }
        x.cpu_s   = idle + cpu_s * noise(rng);
        x.delay_s = delay;
        const double link_s = x.link_bytes / link * noise(rng), done = delay + x.cpu_s;
        x.link_last = link_s > done;
        x.link_s    = std::max(link_s, done);
        if (i >= 1000) {
            rounds++;
            link_last += x.link_last;
            late  += x.link_s - done;
            total += x.link_s;
        }
        s.observe(x);
    }
    CHECK(link_last > rounds / 4 && link_last < rounds * 3 / 4);
    CHECK(late < 0.06 * total);
    CHECK(s.cpu(COPY_HIGH) > 81.0 && s.cpu(COPY_HIGH) < 99.0);
    CHECK(s.cpu(COPY_LOW) > 40.0 && s.cpu(COPY_LOW) < 50.0);
}

TEST(speeds_follow_what_is_seen) {
    speeds s(100.0, 100.0);
    CHECK(s.link() > 99.0 && s.link() < 101.0 && s.cpu(COPY_HIGH) > 99.0 && s.cpu(COPY_LOW) < 101.0);
    for (int i = 0; i < 300; ++i) { // a link of 50 and a CPU of 200, the link always last
        s.observe({ 5.0, 0.1, true, { 10.0, 0.0 }, 0.05 });
    }
    CHECK(s.link() > 49.5 && s.link() < 50.5);
    CHECK(s.cpu(COPY_HIGH) > 198.0 && s.cpu(COPY_HIGH) < 202.0);
    CHECK(s.cpu(COPY_LOW) > 99.0 && s.cpu(COPY_LOW) < 101.0);
    const double before = s.link();
    for (int i = 0; i < 500; ++i) { // done before the CPU: at least this fast, so it is given more
        s.observe({ 5.0, 0.1, false, { 10.0, 0.0 }, 0.05 });
    }
    CHECK(s.link() > before);
    CHECK(s.link() <= 110.01); // but not more than it can
    for (int i = 0; i < 200; ++i) {
        s.observe({ 5.0, 0.1, true, {}, 0.02, 0.01 }); // what the CPU's part takes when it has nothing to do
    }
    CHECK(s.cpu(COPY_HIGH) > 198.0 && s.cpu(COPY_HIGH) < 202.0);
    CHECK(s.cpu_start() > 0.0299 && s.cpu_start() < 0.0301);
    for (int i = 0; i < 300; ++i) {
        s.observe({ 0.0, 0.0, false, { 5.0, 5.0 }, 0.095 });
    }
    CHECK(s.cpu(COPY_HIGH) > 190.0 && s.cpu(COPY_LOW) > 95.0);
}

// The machine stalls for 50 ms: neither is left without work for long.
TEST(speeds_recover_from_a_stall) {
    for (bool link_stalls : { false, true }) {
        speeds s(50e9, 80e9);
        const double link = 45e9, cpu = 70e9, bytes = 20e6;
        int idle = 0;
        for (int i = 0; i < 1000; ++i) {
            std::vector<missed> m = { { bytes / s.link(), bytes / s.cpu(COPY_HIGH), 32 } };
            share(m, s.cpu_start());
            served x;
            x.link_bytes   = bytes * m[0].link / 32;
            x.cpu_bytes[0] = bytes - x.link_bytes;
            const double link_s = x.link_bytes / link + (i == 100 && link_stalls ? 0.05 : 0.0);
            x.cpu_s     = 2e-5 + x.cpu_bytes[0] / cpu + (i == 100 && !link_stalls ? 0.05 : 0.0);
            x.delay_s   = 5e-5;
            x.link_last = link_s > x.cpu_s + x.delay_s;
            x.link_s    = std::max(link_s, x.cpu_s + x.delay_s);
            s.observe(x);
            idle += m[0].link == 0 || m[0].link == 32;
        }
        CHECK_EQ(idle, 0);
        CHECK(s.link() > 0.9 * link && s.link() < 1.1 * link);
        CHECK(s.cpu(COPY_HIGH) > 0.85 * cpu && s.cpu(COPY_HIGH) < 1.1 * cpu);
    }
    speeds s(50e9, 80e9); // believed far too slow, as it may come: the way back
    for (int i = 0; i < 200; ++i) {
        s.observe({ 1e6, 1e6 / 50e9, false, { 1e6, 0.0 }, 1e6 / 1e9 });
    }
    CHECK(s.cpu(COPY_HIGH) < 2e9);
    for (int i = 0; i < 3000; ++i) {
        s.observe({ 1e6, 1e6 / 50e9, true, {}, 1e-5 });
    }
    CHECK(s.cpu(COPY_HIGH) > 79e9 && s.cpu(COPY_HIGH) < 81e9);
}
