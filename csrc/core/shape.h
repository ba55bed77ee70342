// shape.h - a model's layers as the C API and traces tell them (struct hobbit_layer), and back.

#pragma once

#include "layout.h"

#include <vector>

namespace hob {

std::vector<hobbit_layer> shape_of(const model_layout & layout);

// Layers and groups without files, banks and slots. Throws std::runtime_error where layers make no sense.
model_layout layout_of(const hobbit_layer * layers, int n_layers);

} // namespace hob
