// world.h - random models, settings and batches for the random tests.

#pragma once

#include "driver.h"

extern const group_spec KINDS[6];

struct sizes { int n_tokens; int n_seq; };

sizes random_sizes(random_router & r);

// One forward pass with random routing; false if it failed. next: next position of each sequence.
bool random_graph(driver & d, random_router & r, sizes n, std::vector<int32_t> & next, bool warm_up = false);

// A random model with random settings and slots.
struct world {
    std::vector<group_spec> groups;
    std::vector<int> layers;
    std::unique_ptr<fake_model> model;
    hobbit_params params;
    hob::budget budget; // total 0 unless the slots come from one

    // by_budget: the slots are what a random budget gives
    world(random_router & r, int round, bool by_budget = false);

  private:
    void divide_budget(random_router & r);
};
