#include "hobbit-pinned.h"

#include "hobbit-threads.h"
#include "layout.h"

#include "ggml-backend-impl.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string>
#include <thread>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace {

[[noreturn]] void no_memory(size_t n) {
    throw std::runtime_error("out of memory: " + std::to_string(n) + " bytes of host memory for copies of experts");
}

uint8_t * aligned(void * p, size_t to) {
    return (uint8_t *) (((size_t) p + to - 1) / to * to);
}

#ifdef __linux__
constexpr size_t LARGE_PAGE = 2u << 20;
constexpr size_t PAGE       = 4096;
constexpr size_t TOUCHED_AT_ONCE = 16 * LARGE_PAGE;

// The system clears a page when it is first touched, on the thread that does.
void touch(uint8_t * data, size_t n) {
    std::atomic<size_t> next{ 0 };
    hobbit_on_threads((int) std::max(1u, std::thread::hardware_concurrency()), [&] {
        for (size_t from = next.fetch_add(TOUCHED_AT_ONCE); from < n; from = next.fetch_add(TOUCHED_AT_ONCE)) {
            for (size_t i = from; i < std::min(n, from + TOUCHED_AT_ONCE); i += PAGE) {
                *(volatile uint8_t *) (data + i) = 0;
            }
        }
    });
}
#endif

} // namespace

hobbit_pinned::hobbit_pinned(size_t n, ggml_backend_dev_t device) : size_(n) {
    ggml_backend_reg_t reg = device ? ggml_backend_dev_backend_reg(device) : nullptr;
    const auto pin = reg ? (bool (*)(void *, size_t)) ggml_backend_reg_get_proc_address(reg, "ggml_backend_register_host_buffer") : nullptr;
#ifdef __linux__
    if (!device || pin) {
        mapped_ = n + LARGE_PAGE;
        map_    = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (map_ == MAP_FAILED) {
            no_memory(n);
        }
        data_ = aligned(map_, LARGE_PAGE);
        madvise(data_, n, MADV_HUGEPAGE); // a wish
        touch(data_, n);
        pinned_ = pin && pin(data_, n);
        if (pinned_) {
            unpin_ = (void (*)(void *)) ggml_backend_reg_get_proc_address(reg, "ggml_backend_unregister_host_buffer");
        }
        buffer_.reset(ggml_backend_cpu_buffer_from_ptr(data_, n));
        return;
    }
#endif
    ggml_backend_buffer_type_t buft = device ? ggml_backend_dev_host_buffer_type(device) : nullptr;
    buffer_.reset(ggml_backend_buft_alloc_buffer(buft ? buft : ggml_backend_cpu_buffer_type(), n + hob::IO_ALIGN));
    if (!buffer_) {
        no_memory(n);
    }
    data_   = aligned(ggml_backend_buffer_get_base(buffer_.get()), hob::IO_ALIGN);
    pinned_ = ggml_backend_buffer_get_type(buffer_.get()) != ggml_backend_cpu_buffer_type();
}

ggml_backend_buffer_ptr hobbit_pinned::seen_by(ggml_backend_dev_t device) const {
    const bool can = pinned_ && device->iface.buffer_from_host_ptr;
    return ggml_backend_buffer_ptr(can ? ggml_backend_dev_buffer_from_host_ptr(device, data_, size_, size_) : nullptr);
}

hobbit_pinned::~hobbit_pinned() {
    buffer_.reset();
    if (unpin_) {
        unpin_(data_);
    }
#ifdef __linux__
    if (map_) {
        munmap(map_, mapped_);
    }
#endif
}
