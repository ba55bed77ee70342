// Dividing a layer's misses between link and CPU, and the speeds that this goes by.

#include "check.h"
#include "share.h"

#include <algorithm>
#include <random>

using namespace hob;

namespace {

double finish(const std::vector<missed> & misses, double link_speed, double cpu_speed) {
    double link = 0.0, cpu = 0.0;
    for (const missed & m : misses) {
        link += m.bytes * m.link / m.units;
        cpu  += m.bytes * (m.units - m.link) / m.units;
    }
    return std::max(link / link_speed, cpu / cpu_speed);
}

} // namespace

TEST(share_divides_one_miss) {
    std::vector<missed> one = { { 300.0, 30 } };
    share(one, 100.0, 200.0);
    CHECK_EQ(one[0].link, 10);
    CHECK(finish(one, 100.0, 200.0) == 1.0);
}

TEST(share_keeps_experts_whole_where_it_can) {
    std::vector<missed> m = { { 100.0, 10 }, { 100.0, 10 }, { 100.0, 10 } };
    share(m, 50.0, 100.0);
    CHECK_EQ(m[0].link, 10);
    CHECK_EQ(m[1].link + m[2].link, 0);
}

TEST(share_knows_what_a_start_costs) {
    std::vector<missed> m = { { 300.0, 30 } };
    share(m, 100.0, 200.0, 1.5); // half a second's head start for the link
    CHECK_EQ(m[0].link, 20);
    share(m, 100.0, 200.0, 9.0); // not worth starting
    CHECK_EQ(m[0].link, 30);
}

TEST(share_without_division_takes_the_better_side) {
    std::vector<missed> m = { { 100.0, 1 } };
    share(m, 300.0, 100.0);
    CHECK_EQ(m[0].link, 1);
    share(m, 100.0, 300.0);
    CHECK_EQ(m[0].link, 0);
    std::vector<missed> none;
    share(none, 1.0, 1.0);
    CHECK(none.empty());
}

TEST(share_is_within_a_unit_of_the_best) {
    std::mt19937 rng(check::seed);
    for (int round = 0; round < 2000; ++round) {
        const double link = 1.0 + rng() % 100, cpu = 1.0 + rng() % 100;
        std::vector<missed> m;
        double total = 0.0, coarsest = 0.0;
        for (int i = 1 + (int) (rng() % 8); i > 0; --i) {
            m.push_back({ (double) (1 + rng() % 1000), 2 + (int) (rng() % 60) });
            total += m.back().bytes;
            coarsest = std::max(coarsest, m.back().bytes / m.back().units);
        }
        share(m, link, cpu);
        for (const missed & x : m) {
            CHECK(x.link >= 0 && x.link <= x.units);
        }
        CHECK(std::count_if(m.begin(), m.end(), [](const missed & x) { return x.link > 0 && x.link < x.units; }) <= 1);
        CHECK(finish(m, link, cpu) <= total / (link + cpu) + coarsest / std::min(link, cpu) + 1e-9);
    }
}

TEST(speeds_follow_what_is_seen) {
    speeds s(100.0, 100.0);
    CHECK(s.link() > 99.0 && s.link() < 101.0 && s.cpu() > 99.0 && s.cpu() < 101.0);
    for (int i = 0; i < 300; ++i) { // a link of 50 and a CPU of 200, the link always last
        s.observe(5.0, 0.1, true, 10.0, 0.05);
    }
    CHECK(s.link() > 49.5 && s.link() < 50.5);
    CHECK(s.cpu() > 198.0 && s.cpu() < 202.0);
    const double before = s.link();
    for (int i = 0; i < 100; ++i) { // done before the CPU: at least this fast, so it is given more
        s.observe(5.0, 0.1, false, 10.0, 0.05);
    }
    CHECK(s.link() > before);
    CHECK(s.link() <= 110.01); // but not more than it can
    for (int i = 0; i < 200; ++i) {
        s.observe(5.0, 0.1, true, 0.0, 0.02); // what the CPU's part takes when it has nothing to do
    }
    CHECK(s.cpu() > 198.0 && s.cpu() < 202.0);
    CHECK(s.cpu_start() > 0.0199 && s.cpu_start() < 0.0201);
    for (int i = 0; i < 300; ++i) {
        s.observe(0.0, 0.0, false, 10.0, 0.07);
    }
    CHECK(s.cpu() > 198.0 && s.cpu() < 202.0);
}
