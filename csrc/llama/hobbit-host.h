// hobbit-host.h - all copies of a model's experts in host memory, and the way from there to the slots.

#pragma once

#include "budget.h"
#include "hobbit-model.h"
#include "storage.h"

// What a device can still give, in bytes; null or the CPU's: what the system can. 0: unknown.
uint64_t hobbit_free_memory(ggml_backend_dev_t dev);

// Are the copies to be held in host memory? Throws std::runtime_error if they must and there is no room.
bool hobbit_wants_host_copies(const hobbit & h, const hob::budget & b, ggml_backend_dev_t device);

// Read them, into pinned memory where device is one that copies from there, and point the slabs at them.
void hobbit_load_host_copies(hobbit & h, hob::model_layout & layout, hob::budget & b, hob::storage & files, ggml_backend_dev_t device);

// Speeds of the link and of the CPU, by which misses are divided; and how they are served.
void hobbit_measure_speeds(hobbit & h, const hob::model_layout & layout, hob::budget & b);
