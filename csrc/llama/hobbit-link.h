// hobbit-link.h - the way from host memory to a device, by ggml's back ends: a stream of its own, and events
// that the device's compute stream waits for. Names no back end.

#pragma once

#include "link.h"

#include "ggml-backend.h"
#include "ggml-cpp.h"

#include <functional>
#include <memory>

// Null where the device has no events or cannot copy on its own.
std::unique_ptr<hob::device_link> hobbit_make_link(ggml_backend_dev_t dev);

// Writes into a bank that the CPU cannot write, and waits: each calling thread has a stream of its own.
std::function<void(size_t, const void *, size_t)> hobbit_uploader(ggml_tensor * bank);
