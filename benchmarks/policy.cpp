// What the eviction policies cost: time to plan one layer of one token, without weights and without loads.
//
//     g++ -std=c++17 -O3 -Icsrc/include -Icsrc/core benchmarks/policy.cpp csrc/core/*.cpp -o policy -lpthread
//     ./policy 48x128x8 0.25          layers x experts x used, share of the experts that have slots
//
// The engine of a simulation (csrc/core/simulate.h) decodes random tokens, some experts more often than others. Of all
// tokens the fastest counts: the rest is what else the machine did. "learning" is a part of follow's.

#include "shape.h"
#include "simulate.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>

using namespace hob;

static double now() { return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

int main(int argc, char ** argv) {
    int n_layers = 0, n_expert = 0, n_used = 0;
    if (argc != 3 || sscanf(argv[1], "%dx%dx%d", &n_layers, &n_expert, &n_used) != 3) {
        fprintf(stderr, "usage: policy LAYERSxEXPERTSxUSED SHARE\n");
        return 2;
    }
    std::vector<hobbit_layer> layers(n_layers);
    for (int i = 0; i < n_layers; ++i) {
        layers[i] = { i, 0, n_expert, n_used, { 3 << 20, 0, 0 }, { 1 << 20, 0, 0 } };
    }
    const model_layout layout = layout_of(layers.data(), n_layers);
    const int32_t slots[2] = { std::max(n_used, (int) (atof(argv[2]) * n_layers * n_expert)), n_used - 1 };

    constexpr int TOKENS = 600, WARM = 200;
    std::mt19937 rng(1);
    std::vector<int32_t> experts((size_t) TOKENS * n_layers * n_used);
    for (size_t i = 0; i < experts.size(); ++i) {
        const auto first = experts.begin() + i / n_used * n_used;
        do {
            experts[i] = (int32_t) std::min(rng() % n_expert, rng() % n_expert);
        } while (std::find(first, experts.begin() + i, experts[i]) != experts.begin() + i);
    }
    const std::vector<float> weights(n_used, 1.0f / n_used);
    const int32_t zero = 0;

    printf("%d layers of %d experts, %d used, %d + %d slots; us a layer:", n_layers, n_expert, n_used, slots[0], slots[1]);
    const char * names[] = { "lru", "lfu", "hobbit", "lcu", "follow" };
    for (int kind = HOBBIT_POLICY_LRU; kind <= HOBBIT_POLICY_FOLLOW; ++kind) {
        hobbit_params p = {};
        p.t1 = 0.6f;
        p.t2 = p.skip_mass = 1.0f;
        p.policy = kind;
        std::fill(p.policy_weights, p.policy_weights + 4, 0.25f);
        p.cpu_batch = 1;
        auto e = make_simulated_engine(layout, p, slots);
        std::vector<int32_t> high(n_used), low(n_used);
        double best = 1e9;
        for (int t = 0; t < TOKENS; ++t) {
            const int32_t pos = t;
            e->begin_graph();
            const double t0 = now();
            for (int l = 0; l < n_layers; ++l) {
                route_request r = {};
                r.layer      = l;
                r.n_tokens   = 1;
                r.n_used     = n_used;
                r.n_waves    = e->waves(l, 1, n_used);
                r.experts    = &experts[((size_t) t * n_layers + l) * n_used];
                r.weights    = weights.data();
                r.context    = &p;
                r.seq        = &zero;
                r.pos        = &pos;
                r.first      = l == 0;
                r.normalised = true;
                for (int w = 0; w < r.n_waves; ++w) {
                    e->route(r, w, { high.data(), low.data(), nullptr });
                }
            }
            const double us = (now() - t0) / n_layers;
            best = t < WARM ? best : std::min(best, us);
            const std::string err = e->end_graph();
            if (!err.empty()) {
                fprintf(stderr, "%s\n", err.c_str());
                return 1;
            }
        }
        printf(" %s %.1f", names[kind], best);
    }

    succession learned(layout);
    succession_state state;
    learned.start(state);
    double best = 1e9;
    for (int t = 0; t < TOKENS; ++t) {
        const double t0 = now();
        learned.begin({ { &state, (uint32_t) t + 1 } });
        for (int l = 0; l < n_layers; ++l) {
            learned.serve(l, &experts[((size_t) t * n_layers + l) * n_used], 1, n_used);
        }
        best = t < WARM ? best : std::min(best, (now() - t0) / n_layers);
    }
    printf("; learning %.1f, %.1f MiB\n", best, succession::bytes(layout, records::MAX_SEQUENCES) / 1048576.0);
    return 0;
}
