// hobbit-pinned.h - host memory that a device copies from by itself.

#pragma once

#include "ggml-cpp.h"

#include <cstddef>
#include <cstdint>

// Zeroed, aligned for direct I/O, in large pages where the system has them: pinning goes page by page, and 10 GiB take
// 0.4 s so, 3 to 10 s in the pages of cudaMallocHost. Pinned if device says so: null is none; it may refuse, and then the
// memory is as good as any for the CPU.
class hobbit_pinned {
  public:
    hobbit_pinned(size_t n, ggml_backend_dev_t device); // throws std::runtime_error
    ~hobbit_pinned();
    hobbit_pinned(const hobbit_pinned &) = delete;

    uint8_t * data() const { return data_; }
    bool      pinned() const { return pinned_; }
    ggml_backend_buffer_t buffer() const { return buffer_.get(); } // over all of it
    ggml_backend_buffer_ptr seen_by(ggml_backend_dev_t device) const; // the same, for it to compute with; null: it cannot

  private:
    uint8_t * data_   = nullptr;
    size_t    size_   = 0;
    bool      pinned_ = false;
    void *    map_    = nullptr;
    size_t    mapped_ = 0;
    void (*unpin_)(void *) = nullptr;
    ggml_backend_buffer_ptr buffer_;
};
