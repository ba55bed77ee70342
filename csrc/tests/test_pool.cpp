// The slots: random use against a naive model of it.

#include "check.h"
#include "fake_model.h"
#include "pool.h"

#include <algorithm>
#include <map>
#include <random>
#include <set>

using namespace hob;

namespace {

const group_spec SMALL = { 6, 2, 3, { { 8, 8, 8 }, { 4, 4, 4 } } };
const group_spec WIDE  = { 60, 2, 3, { { 8, 8, 8 }, { 4, 4, 4 } } }; // a layer has more than what is put in order

// Priority by a table: ties on purpose.
struct table_policy : each_policy<table_policy> {
    std::map<std::pair<int, int>, double> p;
    double priority(const candidate & c, const policy_context &) const {
        const auto it = p.find({ c.layer, c.expert });
        return it == p.end() ? 0.0 : it->second;
    }
};

} // namespace

TEST(pool_hands_out_free_slots_first) {
    fake_model m({ SMALL }, { 0, 0 });
    m.place_slots(3, 0);
    pool p(m.layout, 0, COPY_HIGH);
    pool none(m.layout, 0, COPY_LOW);
    table_policy pol;
    std::set<int> seen;
    for (int i = 0; i < 3; ++i) {
        const int s = p.victim(pol, {}, false);
        CHECK(s >= 0);
        p.assign(s, 0, i);
        seen.insert(s);
        CHECK(p.consistent());
    }
    CHECK_EQ(seen.size(), 3u);
    CHECK_EQ(p.n_resident(), 3);
    CHECK_EQ(none.victim(pol, {}, false), -1);
    CHECK_EQ(none.find(0, 0), -1);
    CHECK(none.consistent());
}

TEST(pool_ties_go_by_clock_then_layer_then_expert) {
    fake_model m({ SMALL }, { 0, 0 });
    m.place_slots(4, 0);
    pool p(m.layout, 0, COPY_HIGH);
    table_policy pol;
    const int owners[4][2] = { { 1, 2 }, { 0, 5 }, { 0, 3 }, { 1, 1 } };
    int slot_of[4];
    for (int i = 0; i < 4; ++i) {
        slot_of[i] = p.victim(pol, {}, false);
        p.assign(slot_of[i], owners[i][0], owners[i][1]);
        p.at(slot_of[i]).last_clock = 7;
    }
    CHECK_EQ(p.victim(pol, {}, false), slot_of[2]); // (0, 3) before (0, 5), (1, 1), (1, 2)
    p.at(slot_of[0]).last_clock = 6;                // older
    p.reorder();
    CHECK_EQ(p.victim(pol, {}, false), slot_of[0]);
    pol.p[{ 0, 5 }] = -1.0; // priority goes before all
    p.reorder();
    CHECK_EQ(p.victim(pol, {}, false), slot_of[1]);
}

TEST(pool_pinned_and_loading_slots_stay) {
    fake_model m({ SMALL }, { 0, 0 });
    m.place_slots(2, 0);
    pool p(m.layout, 0, COPY_HIGH);
    table_policy pol;
    for (int i = 0; i < 2; ++i) {
        p.assign(p.victim(pol, {}, false), 0, i);
    }
    const int a = p.find(0, 0);
    const int b = p.find(0, 1);
    p.at(a).pins = 1;
    CHECK_EQ(p.victim(pol, {}, false), b);
    p.at(b).load.pending[PART_LATE] = 1;
    CHECK_EQ(p.victim(pol, {}, false), -1);
    p.at(b).load.pending[PART_LATE] = 0;
    CHECK_EQ(p.victim(pol, {}, true), -1); // nothing was streamed
    p.set_streamed(b, true);
    CHECK_EQ(p.victim(pol, {}, true), b);
    CHECK_EQ(p.n_streamed(), 1);
    p.release(b);
    CHECK_EQ(p.n_streamed(), 0);
    CHECK(p.consistent());
}

TEST(pool_random_against_a_naive_model) {
    std::mt19937 rng(check::seed);
    for (int round = 0; round < 20; ++round) {
        const bool wide = round % 2 == 1;
        fake_model m({ SMALL, wide ? WIDE : SMALL }, { 1, 0, 1, 0, 0 }); // group 1: layers 0 and 2
        const int most = wide ? 90 : 9;
        m.place_slots(1 + rng() % most, 1 + rng() % most);
        const int copy = rng() % 2;
        pool p(m.layout, 1, copy);
        const int n = p.n_slots();
        struct entry { int layer = -1, expert = -1, pins = 0; bool streamed = false; uint64_t clock = 0; double pr = 0; };
        std::vector<entry> naive(n);
        table_policy pol;
        bool changed = false;
        for (int step = 0; step < (wide ? 2000 : 300); ++step) {
            const int layer  = rng() % 2 ? 0 : 2;
            const int expert = rng() % (wide ? 60 : 6);
            int where = -1;
            for (int s = 0; s < n; ++s) {
                if (naive[s].layer == layer && naive[s].expert == expert) {
                    where = s;
                }
            }
            CHECK_EQ(p.find(layer, expert), where);
            const int s = rng() % n;
            switch (rng() % 6) {
                case 0: // release
                    if (naive[s].pins == 0) {
                        p.release(s);
                        naive[s] = entry();
                    }
                    break;
                case 1: // pin, unpin
                    if (naive[s].layer >= 0) {
                        naive[s].pins = p.at(s).pins = rng() % 2;
                        changed = true;
                    }
                    break;
                case 2: // streamed
                    if (naive[s].layer >= 0) {
                        naive[s].streamed = rng() % 2;
                        p.set_streamed(s, naive[s].streamed);
                        changed = true;
                    }
                    break;
                default: { // take a slot
                    if (where >= 0) {
                        break;
                    }
                    const bool only = rng() % 4 == 0;
                    if (changed) { // more may be given up than when the order was made
                        p.forget_order();
                        changed = false;
                    }
                    const int v = p.victim(pol, {}, only);
                    const bool any_free = std::any_of(naive.begin(), naive.end(), [](const entry & e) { return e.layer < 0; });
                    if (any_free) {
                        CHECK(v >= 0 && naive[v].layer < 0);
                    } else {
                        int best = -1;
                        for (int i = 0; i < n; ++i) {
                            const entry & e = naive[i];
                            if (e.pins || (only && !e.streamed)) {
                                continue;
                            }
                            const auto key = [&](int j) { return std::make_tuple(naive[j].pr, naive[j].clock, naive[j].layer, naive[j].expert); };
                            if (best < 0 || key(i) < key(best)) {
                                best = i;
                            }
                        }
                        CHECK_EQ(v, best);
                    }
                    if (v >= 0) {
                        entry & e = naive[v];
                        pol.p.erase({ e.layer, e.expert });
                        e = { layer, expert, 0, false, rng() % 4, (double) (rng() % 3) }; // ties on purpose
                        p.assign(v, layer, expert);
                        p.at(v).last_clock = e.clock;
                        pol.p[{ layer, expert }] = e.pr;
                        e.pins = p.at(v).pins = rng() % 2; // as a plan does
                        changed = changed || e.pins == 0;
                    }
                }
            }
            CHECK_EQ(p.n_resident(), (int) std::count_if(naive.begin(), naive.end(), [](const entry & e) { return e.layer >= 0; }));
            CHECK_EQ(p.n_streamed(), (int) std::count_if(naive.begin(), naive.end(), [](const entry & e) { return e.streamed; }));
            CHECK(p.consistent());
        }
    }
}
