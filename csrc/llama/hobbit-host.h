// hobbit-host.h - copies of a model's experts in host memory, all or some of them.

#pragma once

#include "budget.h"
#include "host_cache.h"
#include "hobbit-model.h"
#include "storage.h"

// What a device can still give, in bytes; null or the CPU's: what the system can. 0: unknown.
uint64_t hobbit_free_memory(ggml_backend_dev_t dev);

// Are all copies to be held in host memory? Throws std::runtime_error if they must and there is no room.
bool hobbit_wants_host_copies(const hobbit & h, const hob::budget & b, ggml_backend_dev_t device);

// Read them, into pinned memory where device is one that copies from there, and point the slabs at them.
void hobbit_load_host_copies(hobbit & h, hob::model_layout & layout, hob::budget & b, hob::storage & files, ggml_backend_dev_t device);

// Memory for some of the copies, where not all are held: what was asked for, what there is, or a few buffers; null where
// slots are host memory and nothing was asked for. Throws std::runtime_error.
std::unique_ptr<hob::host_cache> hobbit_host_level(hobbit & h, const hob::model_layout & layout, hob::budget & b, ggml_backend_dev_t device);

// Speeds of the link and of the CPU, by which misses are divided; and how they are served.
void hobbit_measure_speeds(hobbit & h, const hob::model_layout & layout, hob::budget & b);
