// hobbit_pinned against a device that registers host memory up to a quota, as systems with a limit on pinned memory do.
// Prints what went wrong; the exit status is the number of such lines.

#include "hobbit-pinned.h"
#include "hobbit-threads.h"

#include "ggml-backend-impl.h"

#include <atomic>
#include <cstdio>
#include <cstring>
#include <map>
#include <stdexcept>
#include <string>

static size_t quota;
static std::map<void *, size_t> registered;
static int failures;

#define CHECK(x) ((x) ? (void) 0 : (void) (failures++, printf("line %d: %s\n", __LINE__, #x)))

static bool pin(void * p, size_t n) {
    size_t sum = n;
    for (const auto & [at, size] : registered) {
        sum += size;
    }
    if (sum > quota) {
        return false;
    }
    registered[p] = n;
    return true;
}

static void unpin(void * p) { CHECK(registered.erase(p) == 1); }

static void * no_address(ggml_backend_reg_t, const char *) { return nullptr; }

static void * address(ggml_backend_reg_t, const char * name) {
    return std::string(name) == "ggml_backend_register_host_buffer" ? (void *) pin : std::string(name) == "ggml_backend_unregister_host_buffer" ? (void *) unpin : nullptr;
}

static ggml_backend_buffer_t view(ggml_backend_dev_t, void * p, size_t n, size_t) {
    return registered.count(p) ? ggml_backend_cpu_buffer_from_ptr(p, n) : nullptr;
}

static ggml_backend_buffer_type_t no_host_buffers(ggml_backend_dev_t) { return nullptr; }

// Cleared, aligned for direct I/O, and to be written to the last byte.
static void check_memory(const hobbit_pinned & m, size_t n) {
    CHECK((size_t) m.data() % 4096 == 0);
    size_t sum = 0;
    for (size_t i = 0; i < n; ++i) {
        sum += m.data()[i];
    }
    CHECK(sum == 0);
    memset(m.data(), 1, n);
    CHECK(ggml_backend_buffer_get_size(m.buffer()) >= n);
    CHECK(ggml_backend_buffer_is_host(m.buffer()));
}

int main() {
    constexpr size_t MIB = 1 << 20;
    ggml_backend_reg reg = {};
    reg.iface.get_proc_address = address;
    ggml_backend_device dev = {};
    dev.reg = &reg;
    dev.iface.buffer_from_host_ptr = view;
    dev.iface.get_host_buffer_type = no_host_buffers;

    quota = 10 * MIB;
    {
        const size_t sizes[] = { 1, 5 * MIB + 123, 4 * MIB, 6 * MIB, MIB / 2 }; // the fourth is beyond the quota
        const bool want[]    = { true, true, true, false, true };
        std::unique_ptr<hobbit_pinned> m[5];
        for (int i = 0; i < 5; ++i) {
            m[i] = std::make_unique<hobbit_pinned>(sizes[i], &dev);
            CHECK(m[i]->pinned() == want[i]);
            check_memory(*m[i], sizes[i]);
            CHECK((m[i]->seen_by(&dev) != nullptr) == want[i]);
        }
        CHECK(registered.size() == 4);
    }
    CHECK(registered.empty());

    quota = 0; // GGML_CUDA_NO_PINNED
    {
        hobbit_pinned m(3 * MIB, &dev);
        CHECK(!m.pinned() && !m.seen_by(&dev));
        check_memory(m, 3 * MIB);
    }
    {
        hobbit_pinned m(3 * MIB, nullptr); // slots in host memory
        CHECK(!m.pinned());
        check_memory(m, 3 * MIB);
    }
    reg.iface.get_proc_address = no_address; // a device that registers nothing
    {
        hobbit_pinned m(3 * MIB, &dev);
        CHECK(!m.pinned());
        memset(m.data(), 1, 3 * MIB);
    }
    try {
        hobbit_pinned m((size_t) 1 << 60, nullptr);
        CHECK(!"an exabyte");
    } catch (const std::exception & e) {
        CHECK(std::string(e.what()).find("out of memory") == 0);
    }

    // what an exception of one thread does to the others: nothing, and it is thrown where they were started
    std::atomic<int> runs{ 0 };
    try {
        hobbit_on_threads(4, [&] {
            if (runs++ == 1) {
                throw std::runtime_error("one of four");
            }
        });
        CHECK(!"no exception");
    } catch (const std::runtime_error & e) {
        CHECK(std::string(e.what()) == "one of four");
    }
    CHECK(runs == 4);
    return failures;
}
