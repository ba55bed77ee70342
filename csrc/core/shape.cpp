#include "shape.h"

#include <algorithm>
#include <stdexcept>

namespace hob {

static_assert(MAX_PROJ == 3, "struct hobbit_layer has three projections");

std::vector<hobbit_layer> shape_of(const model_layout & layout) {
    std::vector<hobbit_layer> out;
    for (const layer_layout & l : layout.layers) {
        const group_layout & g = layout.groups[l.group];
        hobbit_layer x = {};
        x.block         = l.block;
        x.group         = l.group;
        x.n_expert      = l.n_expert;
        x.n_expert_used = l.n_used;
        for (int p = 0; p < g.n_proj; ++p) {
            x.high_bytes[p] = g.proj_bytes[COPY_HIGH][p];
            x.low_bytes[p]  = g.proj_bytes[COPY_LOW][p];
        }
        out.push_back(x);
    }
    return out;
}

static constexpr int MAX_LAYERS = 2048;

static void check_layer(const hobbit_layer & x, int index, int n_groups) {
    constexpr uint64_t MOST = uint64_t(1) << 35; // of a projection
    const auto usable = [](const uint64_t * bytes) {
        bool zero = false;
        for (int p = 0; p < MAX_PROJ; ++p) {
            if (bytes[p] > MOST || (zero && bytes[p] > 0)) {
                return false;
            }
            zero = bytes[p] == 0;
        }
        return bytes[0] > 0;
    };
    const char * wrong = x.group < 0 || x.group > n_groups ? "groups must be numbered in the order of their first layers"
        : x.n_expert < 1 || x.n_expert > INT16_MAX ? "it must have 1 to 32767 experts"
        : x.n_expert_used < 1 || x.n_expert_used > x.n_expert ? "it must use 1 to all of its experts"
        : !usable(x.high_bytes) || !usable(x.low_bytes) ? "bytes of its experts are missing or too many" : nullptr;
    if (wrong) {
        throw std::runtime_error("layer " + std::to_string(index) + ": " + wrong);
    }
}

model_layout layout_of(const hobbit_layer * layers, int n_layers) {
    if (n_layers < 1) {
        throw std::runtime_error("a model needs at least one layer with routed experts");
    }
    if (n_layers > MAX_LAYERS) { // sums stay below 2^64, numbers of experts below 2^31
        throw std::runtime_error("a model has " + std::to_string(MAX_LAYERS) + " layers at most");
    }
    model_layout out;
    for (int i = 0; i < n_layers; ++i) {
        const hobbit_layer & x = layers[i];
        check_layer(x, i, (int) out.groups.size());
        if (x.group == (int) out.groups.size()) {
            group_layout g;
            g.n_expert = x.n_expert;
            g.n_used   = x.n_expert_used;
            for (int p = 0; p < MAX_PROJ; ++p) {
                g.proj_bytes[COPY_HIGH][p] = x.high_bytes[p];
                g.proj_bytes[COPY_LOW][p]  = x.low_bytes[p];
                g.n_proj += x.high_bytes[p] > 0 || x.low_bytes[p] > 0;
            }
            out.groups.push_back(g);
        }
        group_layout & g = out.groups[x.group];
        if (x.n_expert != g.n_expert || x.n_expert_used != g.n_used || !std::equal(x.high_bytes, x.high_bytes + MAX_PROJ, g.proj_bytes[COPY_HIGH]) ||
            !std::equal(x.low_bytes, x.low_bytes + MAX_PROJ, g.proj_bytes[COPY_LOW])) {
            throw std::runtime_error("layer " + std::to_string(i) + ": it differs from the other layers of group " + std::to_string(x.group));
        }
        layer_layout l;
        l.block    = x.block;
        l.group    = x.group;
        l.in_group = g.n_layers++;
        l.n_expert = x.n_expert;
        l.n_used   = x.n_expert_used;
        out.layers.push_back(l);
    }
    return out;
}

} // namespace hob
