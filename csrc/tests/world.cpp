#include "world.h"

#include "check.h"
#include "records.h"

using namespace hob;

const group_spec KINDS[6] = {
    { 8, 2, 3, { { 96, 96, 128 }, { 24, 24, 32 } } },
    { 16, 4, 2, { { 200, 100, 0 }, { 50, 25, 0 } } },
    { 24, 6, 3, { { 64, 64, 64 }, { 16, 16, 48 } }, false },
    { 8, 1, 3, { { 96, 96, 128 }, { 24, 24, 32 } } },
    { 6, 6, 3, { { 40, 40, 40 }, { 10, 10, 10 } } }, // dense: every expert every time
    { 8, 2, 1, { { 300, 0, 0 }, { 100, 0, 0 } } },
};

sizes random_sizes(random_router & r) {
    switch (r.below(10)) {
        case 0:  return { 32 + r.below(10), 1 };
        case 1:  return { 64 + r.below(100), 1 + r.below(2) };
        case 2:
        case 3:  return { 2 + r.below(6), 1 + r.below(3) };
        default: return { 1, 1 };
    }
}

bool random_graph(driver & d, random_router & r, sizes n, std::vector<int32_t> & next, bool warm_up) {
    std::vector<int32_t> seq, pos;
    const int first_seq = r.below((int) next.size());
    for (int t = 0; t < n.n_tokens; ++t) {
        const int s = (first_seq + t % n.n_seq) % (int) next.size();
        seq.push_back(s);
        pos.push_back(next[s]++);
    }
    d.begin();
    for (int layer = 0; layer < (int) d.model.layout.layers.size(); ++layer) {
        const layer_layout & l = d.model.layout.layers[layer];
        const int n_used = warm_up ? l.n_expert : l.n_used;
        std::vector<int32_t> experts(n.n_tokens * n_used);
        std::vector<float>   weights(n.n_tokens * n_used);
        for (int t = 0; t < n.n_tokens; ++t) {
            r.token(layer, l.n_expert, n_used, &experts[t * n_used], &weights[t * n_used]);
        }
        d.layer(layer, n.n_tokens, n_used, experts, weights, seq, pos, layer == 0);
    }
    return d.end();
}

world::world(random_router & r, int round, bool by_budget) {
    groups.push_back(KINDS[round % 6]);
    if (r.below(2)) {
        groups.push_back(KINDS[r.below(6)]);
    }
    const int n_layers = (int) groups.size() + r.below(3);
    for (int l = 0; l < n_layers; ++l) {
        layers.push_back(l < (int) groups.size() ? l : r.below((int) groups.size()));
    }
    model = std::make_unique<fake_model>(groups, layers);
    const float thresholds[][2] = { { 0.6f, 0.9f }, { 0.0f, 0.0f }, { 0.3f, 1.0f }, { 0.0f, 1.0f }, { 1.0f, 1.0f }, { 0.5f, 0.5f } };
    const float * t = thresholds[r.below(6)];
    params = test_params(t[0], t[1], r.below(5));
    params.n_io_threads = 1 + r.below(4);
    params.force_miss   = r.below(8) == 0;
    for (float & w : params.policy_weights) {
        w = (float) r.below(4);
    }
    params.policy_weights[r.below(4)] = 1.0f;
    budget = measure(model->layout, params, 0);
    if (by_budget) {
        divide_budget(r);
    } else {
        const int kind = r.below(3); // the floor, anything, everything
        for (group_layout & g : model->layout.groups) {
            const int all = g.n_experts_total();
            g.n_slots[COPY_HIGH] = kind == 0 ? g.n_used : kind == 1 ? g.n_used + r.below(all - g.n_used + 1) : all;
            g.n_slots[COPY_LOW]  = low_floor(g) + (kind == 0 ? 0 : r.below(all - low_floor(g) + 1));
        }
    }
    model->place_slots();
}

void world::divide_budget(random_router & r) {
    budget = measure(model->layout, params, records::bytes(model->layout, params.policy));
    params.budget_kind = r.below(2) ? HOBBIT_BUDGET_BYTES : HOBBIT_BUDGET_MIN;
    params.cache_bytes = budget.floor + budget.high * r.below(1000) / 800;
    params.low_fraction = (float) r.below(5) / 4.0f;
    CHECK_EQ(divide(model->layout, params, budget), "");
    uint64_t bytes = 0;
    for (const group_layout & g : model->layout.groups) {
        for (int c = 0; c < N_COPIES; ++c) {
            bytes += (uint64_t) g.n_slots[c] * g.expert_bytes(c);
        }
    }
    CHECK_EQ(bytes, budget.slots);
    CHECK(budget.slots + budget.staging + budget.records <= budget.total);
}
