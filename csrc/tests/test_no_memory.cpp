// Memory that runs out in the middle of a step: the graph fails, and the same one succeeds when there is memory again, with every slot
// holding what it should. One allocation after another is refused, until a graph has none left.

#include "check.h"
#include "world.h"

#include <algorithm>

using namespace hob;

namespace {

// Predicts experts that are half right.
struct some_routers : next_routers {
    const fake_model & model;
    explicit some_routers(const fake_model & m) : model(m) {}
    bool choose(int layer, int32_t * experts, float * weights) override {
        const layer_layout & l = model.layout.layers[layer];
        for (int r = 0; r < l.n_used; ++r) {
            experts[r] = (layer + 3 * r) % l.n_expert;
            weights[r] = 1.0f / (float) (r + 1);
        }
        return true;
    }
};

// Refuses the k-th allocation of one graph; false if it has fewer.
bool refuse(const group_spec & kind, const hobbit_params & params, int n_tokens, long k, int & n_failed) {
    fake_model m({ kind }, { 0, 0, 0 });
    const int all = 3 * kind.n_expert;
    m.place_slots(kind.link ? all - 2 : std::min(all, 3 * kind.n_used), 2 * kind.n_used);
    some_routers next(m);
    random_router r(7);
    driver d(m, params);
    d.may_fail = true;
    if (!kind.link) { // as llama.cpp's route operation for a few tokens
        d.next = &next;
    }
    std::vector<int32_t> at(1, 0);
    CHECK(random_graph(d, r, { 1, 1 }, at));
    const random_router same = r;
    const std::vector<int32_t> here = at;
    d.refuse = k;
    const bool ok  = random_graph(d, r, { n_tokens, 1 }, at);
    const bool met = d.refuse == 0;
    d.refuse = 0;
    CHECK(ok || (met && d.last_error == "no memory left"));
    n_failed += !ok;
    for (int i = 0; i < 2; ++i) { // what was on its way has arrived, and a sequence goes on
        r  = same;
        at = here;
        CHECK(random_graph(d, r, { n_tokens, 1 }, at));
    }
    CHECK(random_graph(d, r, { 3, 1 }, at));
    CHECK(d.engine->consistent());
    return met;
}

} // namespace

TEST(no_memory_at_any_allocation) {
    const group_spec kinds[] = { { 8, 2, 3, { { 96, 96, 128 }, { 24, 24, 32 } } },
                                 { 8, 2, 3, { { 96, 96, 128 }, { 24, 24, 32 } }, false, true } };
    const struct { int n_tokens; int policy; } cases[] = { { 1, HOBBIT_POLICY_HOBBIT }, { 1, HOBBIT_POLICY_FOLLOW }, { 40, HOBBIT_POLICY_HOBBIT } };
    for (const group_spec & kind : kinds) {
        for (const auto & c : cases) {
            hobbit_params p = test_params(0.6f, 0.95f, c.policy);
            p.skip_mass    = 0.1f;
            p.prefetch     = 2;
            p.n_io_threads = 1;
            p.prefetch_prompts = 1;
            int n_failed = 0;
            long k = 1;
            while (refuse(kind, p, c.n_tokens, k, n_failed)) {
                k++;
            }
            CHECK(n_failed > 10); // of k
        }
    }
}
