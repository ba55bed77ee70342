// hobbit-simulate.cpp - the C API of simulations (hobbit.h) over core/simulate.

#include "hobbit.h"

#include "hobbit-model.h"

#include "shape.h"

#include <algorithm>
#include <stdexcept>

std::vector<hobbit_layer> hobbit_layers_of_file(const std::string & path, int n_used_override); // hobbit-model.cpp

namespace {

int fail(const std::string & why) {
    hobbit_set_last_error(why);
    return -1;
}

int checked(const hobbit * h, int64_t n_rows, int32_t n_used) {
    if (!h->replay) {
        return fail("this engine serves a model: only one of hobbit_simulate() can play rows");
    }
    return n_rows < 0 || n_used < 1 || n_used > INT16_MAX ? fail("n_rows or n_used is out of range") : 0;
}

} // namespace

extern "C" {

int hobbit_probe_layers(const char * path, int32_t n_expert_used, struct hobbit_layer * layers, int32_t n_max) {
    try {
        const std::vector<hobbit_layer> found = hobbit_layers_of_file(path, n_expert_used);
        std::copy_n(found.begin(), std::min<size_t>(found.size(), std::max(n_max, 0)), layers);
        return (int) found.size();
    } catch (const std::exception & e) {
        return fail(e.what());
    }
}

struct hobbit * hobbit_simulate(const struct hobbit_layer * layers, int32_t n_layers, const struct hobbit_params * params, const int32_t * slots) {
    try {
        if (hobbit_check_params(params) != 0) {
            return nullptr;
        }
        if (!slots && params->budget_kind == HOBBIT_BUDGET_DEVICE) {
            throw std::runtime_error("a simulation has no device: give a budget");
        }
        auto h = std::make_unique<hobbit>();
        h->params = *params;
        h->engine = hob::make_simulated_engine(hob::layout_of(layers, n_layers), *params, slots);
        h->banks.resize(h->engine->layout().groups.size());
        h->replay = std::make_unique<hob::replay>(*h->engine);
        return h.release();
    } catch (const std::exception & e) {
        fail(e.what());
        return nullptr;
    }
}

void hobbit_simulate_free(struct hobbit * h) {
    if (h && h->replay) {
        delete h;
    }
}

int hobbit_simulate_run(struct hobbit * h, const void * rows, int64_t n_rows, int32_t n_used) {
    if (checked(h, n_rows, n_used) != 0) {
        return -1;
    }
    try {
        const std::string err = h->replay->run((const char *) rows, n_rows, n_used);
        return err.empty() ? 0 : fail(err);
    } catch (const std::exception & e) {
        return fail(e.what());
    }
}

int hobbit_simulate_foresee(struct hobbit * h, const void * rows, int64_t n_rows, int32_t n_used) {
    if (checked(h, n_rows, n_used) != 0) {
        return -1;
    }
    try {
        const std::string err = h->replay->foresee((const char *) rows, n_rows, n_used);
        return err.empty() ? 0 : fail(err);
    } catch (const std::exception & e) {
        return fail(e.what());
    }
}

} // extern "C"
