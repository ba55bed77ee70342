// The selection rule.

#include "check.h"
#include "select.h"

#include <cmath>
#include <limits>
#include <random>

using hob::select_token;

namespace {

// wanted of one token as text: H, L, S in the router's order
std::string rule(const std::vector<float> & w, float t1, float t2, std::vector<float> * g_out = nullptr) {
    std::vector<float>   g(w.size());
    std::vector<int32_t> wanted(w.size(), -7);
    select_token(w.data(), (int) w.size(), t1, t2, g.data(), wanted.data());
    std::string s;
    for (int32_t x : wanted) {
        s += x == HOBBIT_HIGH ? 'H' : x == HOBBIT_LOW ? 'L' : x == HOBBIT_SKIP ? 'S' : '?';
    }
    if (g_out) {
        *g_out = g;
    }
    return s;
}

const float NaN = std::numeric_limits<float>::quiet_NaN();
const float INF = std::numeric_limits<float>::infinity();

} // namespace

TEST(select_by_what_the_ranks_before_sum_to) {
    // g = .5 .25 .125 .125, s = 0 .5 .75 .875: exact in binary, so that <= is tested on equality
    const std::vector<float> w = { 4, 2, 1, 1 };
    CHECK_EQ(rule(w, 0.5f, 0.75f), "HHLS");
    CHECK_EQ(rule(w, 0.49f, 0.74f), "HLSS");
    CHECK_EQ(rule(w, 0.75f, 0.8f), "HHHS");
    CHECK_EQ(rule(w, 0.0f, 1.0f), "HLLL");
    CHECK_EQ(rule(w, 0.0f, 0.0f), "HSSS"); // rank 0 is always high
    CHECK_EQ(rule(w, 0.875f, 0.875f), "HHHH");
}

TEST(select_ranks_by_weight_not_by_position) {
    CHECK_EQ(rule({ 1, 4, 1, 2 }, 0.5f, 0.75f), "LHSH");
    CHECK_EQ(rule({ 1, 1, 2, 4 }, 0.5f, 0.75f), "LSHH");
}

TEST(select_ties_keep_the_routers_order) {
    CHECK_EQ(rule({ 1, 1, 1, 1 }, 0.25f, 0.5f), "HHLS");
    CHECK_EQ(rule({ 1, 2, 1, 2 }, 0.0f, 0.5f), "SHSL"); // s: 0 for the first 2, 1/3 for the second, 2/3 and more
}

TEST(select_does_not_depend_on_the_scale) {
    // F28: unnormalised or scaled gate weights. Powers of two scale without rounding.
    std::mt19937 rng(7);
    for (int i = 0; i < 200; ++i) {
        std::vector<float> w(8);
        for (float & x : w) {
            x = (float) (1 + rng() % 1000) / 1000.0f;
        }
        const std::string one = rule(w, 0.6f, 0.9f);
        for (float scale : { 0.125f, 0.5f, 4.0f, 1024.0f }) {
            std::vector<float> v = w;
            for (float & x : v) {
                x *= scale;
            }
            CHECK_EQ(rule(v, 0.6f, 0.9f), one);
        }
    }
}

TEST(select_normalises) {
    std::vector<float> g;
    rule({ 3, 1 }, 0.6f, 0.9f, &g);
    CHECK_EQ(g[0], 0.75f);
    CHECK_EQ(g[1], 0.25f);
}

TEST(select_one_expert_is_always_high) {
    CHECK_EQ(rule({ 0.001f }, 0.0f, 0.0f), "H");
    CHECK_EQ(rule({ 1000.0f }, 0.0f, 0.0f), "H");
    CHECK_EQ(rule({ 0.0f }, 0.0f, 0.0f), "H");
    CHECK_EQ(rule({ NaN }, 0.0f, 0.0f), "H");
}

TEST(select_everything_high_without_a_usable_sum) {
    std::vector<float> g;
    CHECK_EQ(rule({ NaN, 1, 2, 3 }, 0.0f, 0.0f, &g), "HHHH");
    CHECK_EQ(g[0], 0.25f);
    CHECK_EQ(g[3], 0.25f);
    CHECK_EQ(rule({ INF, 1 }, 0.0f, 0.0f), "HH");
    CHECK_EQ(rule({ INF, -INF }, 0.0f, 0.0f), "HH");
    CHECK_EQ(rule({ 0, 0, 0 }, 0.0f, 0.0f), "HHH");
    CHECK_EQ(rule({ -1, -2 }, 0.0f, 0.0f), "HH");
    CHECK_EQ(rule({ 3e38f, 3e38f }, 0.0f, 1.0f), "HL"); // the sum is larger than a float
    CHECK_EQ(rule({ 1e-45f, 1e-45f }, 0.0f, 1.0f), "HL"); // the smallest float
}

TEST(select_t1_of_one_is_all_high_whatever_the_rounding) {
    std::mt19937 rng(3);
    for (int i = 0; i < 2000; ++i) {
        std::vector<float> w(1 + rng() % 40);
        for (float & x : w) {
            x = std::exp((float) (rng() % 2000) / 100.0f - 10.0f);
        }
        CHECK_EQ(rule(w, 1.0f, 1.0f), std::string(w.size(), 'H'));
        CHECK_EQ(rule(w, 1.5f, 0.2f), std::string(w.size(), 'H'));
        CHECK(rule(w, 0.3f, 1.0f).find('S') == std::string::npos); // t2 = 1: no skip
    }
}

TEST(select_more_than_64_experts) {
    std::vector<float> w(130, 1.0f);
    w[129] = 129.0f; // half of all, and last
    const std::string r = rule(w, 0.5f, 1.0f);
    CHECK_EQ(r[129], 'H');
    CHECK_EQ(r[0], 'H'); // s is exactly 0.5
    CHECK_EQ(r.substr(1, 128), std::string(128, 'L'));
}
