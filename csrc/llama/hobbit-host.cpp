#include "hobbit-host.h"

#include "free_memory.h"
#include "hobbit-threads.h"
#include "loader.h"

#include "ggml-backend.h"
#include "llama-impl.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <stdexcept>
#include <thread>

uint64_t hobbit_free_memory(ggml_backend_dev_t dev) {
    if (dev && ggml_backend_dev_type(dev) != GGML_BACKEND_DEVICE_TYPE_CPU) {
        size_t free = 0, total = 0;
        ggml_backend_dev_memory(dev, &free, &total);
        return free;
    }
    return hob::available_memory();
}

static constexpr uint64_t HOST_RESERVE = 2ull << 30; // left to the rest of the system

// Of the system's memory, what is left when the slots that are to be there have been made.
static uint64_t free_for_copies(const hob::budget & b) {
    const uint64_t have = hobbit_free_memory(nullptr);
    return have == 0 ? 0 : std::max<uint64_t>(1, have - std::min(have, b.slots_on_host));
}

bool hobbit_wants_host_copies(const hobbit & h, const hob::budget & b, ggml_backend_dev_t device) {
    const uint64_t need = b.high + b.low;
    const uint64_t have = free_for_copies(b);
    const bool fits = have == 0 || need + HOST_RESERVE <= have;
    // who asks the CPU to compute misses asks for the copies, too
    const bool on = h.params.host_copies == HOBBIT_HOST_ON || (h.params.host_copies == HOBBIT_HOST_AUTO && h.params.miss == HOBBIT_MISS_CPU);
    if (on && !fits) {
        throw std::runtime_error("host_copies: both copies of all experts need " + std::to_string(need) + " bytes and " + std::to_string(HOST_RESERVE) +
                                 " for the rest, but only " + std::to_string(have) + " are available: leave them on storage (host_copies off, miss fetch)");
    }
    return on || (h.params.host_copies == HOBBIT_HOST_AUTO && device && fits && !b.slots_hold_all);
}

static hobbit_pinned & allocate(hobbit & h, hob::budget & b, size_t n, ggml_backend_dev_t device) {
    h.host_memory.push_back(std::make_unique<hobbit_pinned>(n, device));
    b.host_pinned = b.host_pinned && h.host_memory.back()->pinned();
    return *h.host_memory.back();
}

static void warn_if_not_pinned(const hob::budget & b, ggml_backend_dev_t device) {
    if (device && !b.host_pinned) {
        LLAMA_LOG_WARN("%s: pinned memory was refused for the experts' host copies: they are in ordinary memory, from which copies to %s "
                       "are several times slower (raise the limit on locked memory, ulimit -l, or unset GGML_CUDA_NO_PINNED)\n", __func__, ggml_backend_dev_name(device));
    }
}

std::unique_ptr<hob::host_cache> hobbit_host_level(hobbit & h, const hob::model_layout & layout, hob::budget & b, ggml_backend_dev_t device) {
    const bool asked = h.params.host_copies == HOBBIT_HOST_SOME;
    if (!asked && !device) {
        return nullptr;
    }
    uint64_t bytes = 0, least = 0;
    hob::host_cache::divide(layout, 0, least);
    const uint64_t have = free_for_copies(b);
    if (asked) {
        bytes = h.params.host_bytes;
        if (bytes < least) {
            throw std::runtime_error("host_copies is " + std::to_string(bytes) + " bytes, but the buffers for reads take " + std::to_string(least) + ": give at least that");
        }
        if (have > 0 && bytes + HOST_RESERVE > have) {
            throw std::runtime_error("host_copies is " + std::to_string(bytes) + " bytes, but only " + std::to_string(have) + " are available, and " +
                                     std::to_string(HOST_RESERVE) + " are left to the rest of the system: give less");
        }
    } else if (h.params.host_copies == HOBBIT_HOST_AUTO && have > HOST_RESERVE && !b.slots_hold_all) {
        bytes = have - std::max(HOST_RESERVE, have / 4); // pinned memory cannot be taken back
    }
    std::vector<hob::host_cache::block> blocks = hob::host_cache::divide(layout, bytes, b.host);
    b.host_pinned = device != nullptr;
    for (hob::host_cache::block & x : blocks) {
        x.base = allocate(h, b, x.n * x.stride, device).data();
    }
    warn_if_not_pinned(b, device);
    LLAMA_LOG_INFO("%s: %.1f MiB of host memory for %.1f MiB of copies of experts\n", __func__, b.host / 1048576.0, (b.high + b.low) / 1048576.0);
    return std::make_unique<hob::host_cache>(layout, std::move(blocks));
}

void hobbit_load_host_copies(hobbit & h, hob::model_layout & layout, hob::budget & b, hob::storage & files, ggml_backend_dev_t device) {
    b.host_pinned = device != nullptr;
    const size_t n_tensors = layout.layers.size() * hob::N_COPIES * hob::MAX_PROJ;
    h.host_ctx.reset(ggml_init({ ggml_tensor_overhead() * n_tensors, nullptr, /*.no_alloc =*/ true }));

    const int64_t t0 = hob::now_us();
    struct part { const hob::slab * from; uint8_t * to; uint64_t at; size_t n; };
    std::vector<part> parts;
    for (size_t l = 0; l < layout.layers.size(); ++l) {
        hob::layer_layout & layer = layout.layers[l];
        const hobbit_sidecar_layer & sl = h.sidecar.layers[l];
        h.host.emplace_back();
        for (int c = 0; c < hob::N_COPIES; ++c) {
            size_t total = 0;
            const auto pad = [](size_t x) { return (x + hob::IO_ALIGN - 1) / hob::IO_ALIGN * hob::IO_ALIGN; };
            for (int p = 0; p < sl.n_proj; ++p) {
                const hobbit_expert_tensor & t = h.sidecar.tensors[sl.tensors[p]];
                ggml_tensor * x = ggml_new_tensor(h.host_ctx.get(), t.type[c], 3, t.ne);
                ggml_format_name(x, "hobbit.host.%zu.%d.%d", l, c, p);
                h.host.back().tensor[c][p] = x;
                total += pad(ggml_nbytes(x));
            }
            hobbit_pinned & memory = allocate(h, b, total, device);
            ggml_backend_buffer_set_usage(memory.buffer(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
            uint8_t * at = memory.data();
            for (int p = 0; p < sl.n_proj; ++p) {
                ggml_tensor * x = h.host.back().tensor[c][p];
                ggml_backend_tensor_alloc(memory.buffer(), x, at);
                hob::slab & s = layer.src[c][p];
                s.host = at;
                b.host += ggml_nbytes(x);
                for (uint64_t first = 0; first < ggml_nbytes(x); first += s.bytes) {
                    for (uint64_t o = 0; o < s.bytes; o += hob::IO_CHUNK) { // as the loader cuts
                        parts.push_back({ &s, at + first + o, first + o, (size_t) std::min<uint64_t>(hob::IO_CHUNK, s.bytes - o) });
                    }
                }
                at += pad(ggml_nbytes(x));
            }
        }
    }

    const int64_t t1 = hob::now_us();
    std::atomic<size_t> next{ 0 };
    std::mutex mutex;
    std::string error;
    hobbit_on_threads(std::max<int>(8, h.params.n_io_threads), [&] {
        hob::aligned_buffer scratch(hob::storage::scratch_bytes(hob::IO_CHUNK));
        for (size_t k = next++; k < parts.size(); k = next++) {
            const part & x = parts[k];
            const std::string err = files.read(x.from->file, x.from->offset + x.at, x.n, x.to, scratch.data());
            if (!err.empty()) {
                std::lock_guard<std::mutex> lock(mutex);
                error = err;
                next = parts.size();
            }
        }
    });
    if (!error.empty()) {
        throw std::runtime_error(error);
    }
    warn_if_not_pinned(b, device);
    LLAMA_LOG_INFO("%s: %.1f MiB of expert copies in %smemory: %.1f s to get it, %.1f s to read them\n", __func__, b.host / 1048576.0,
                   b.host_pinned ? "pinned " : "", (t1 - t0) / 1e6, (hob::now_us() - t1) / 1e6);
}

void hobbit_measure_speeds(hobbit & h, const hob::model_layout & layout, hob::budget & b) {
    constexpr double SECONDS = 0.1;
    const auto linked = [&](const hob::layer_layout & x) { return layout.groups[x.group].has_link(); }; // others may be on the CPU
    const auto found  = std::find_if(layout.layers.begin(), layout.layers.end(), linked);
    const hob::layer_layout & l = found == layout.layers.end() ? layout.layers[0] : *found;
    const hob::group_layout & g = layout.groups[l.group];
    const hob::bank & bank = g.banks[hob::COPY_HIGH][0];
    const hob::slab & slab = l.src[hob::COPY_HIGH][0];
    b.miss       = h.params.miss;
    b.link_speed = h.params.link_speed;
    b.cpu_speed  = h.params.cpu_speed;
    const bool given = b.link_speed > 0.0;
    if (!given && !bank.base) {
        // as misses are brought: whole matrices into slots, from one copy after another
        uint64_t bytes = 0;
        const int64_t t0 = hob::now_us();
        for (int e = 0; hob::now_us() - t0 < (int64_t) (SECONDS * 1e6); ++e) {
            const size_t   to   = (size_t) (e % g.n_slots[hob::COPY_HIGH]) * bank.stride;
            const uint8_t * from = slab.host + (size_t) (e % l.n_expert) * slab.bytes;
            if (bank.link) {
                bank.link->copy(bank, to, from, slab.bytes, 1, 0, 0);
                bank.link->wait(bank.link->mark());
            } else {
                bank.write(to, from, slab.bytes);
            }
            bytes += slab.bytes;
        }
        b.link_speed = (double) bytes / ((hob::now_us() - t0) / 1e6);
    }
    if (!given) {
        // CPU: reading experts from memory bounds its products
        std::atomic<uint64_t> bytes{ 0 };
        std::atomic<uint64_t> sink{ 0 };
        std::atomic<uint64_t> cursor{ 0 };
        const uint64_t total = slab.bytes * l.n_expert;
        const size_t n = (size_t) std::min<uint64_t>(4 << 20, total);
        const int64_t t0 = hob::now_us();
        hobbit_on_threads((int) std::max(1u, std::thread::hardware_concurrency()), [&] {
            while (hob::now_us() - t0 < (int64_t) (SECONDS * 1e6)) {
                const uint64_t * x = (const uint64_t *) (slab.host + (cursor += n) % (total - n + 1) / 8 * 8);
                uint64_t sum = 0;
                for (size_t k = 0; k < n / 8; ++k) {
                    sum += x[k];
                }
                sink  += sum;
                bytes += n;
            }
        });
        b.cpu_speed = 0.75 * (double) bytes / ((hob::now_us() - t0) / 1e6);
    }
    LLAMA_LOG_INFO("%s: link %.1f GB/s, CPU %.1f GB/s%s; misses: %s\n", __func__, b.link_speed / 1e9, b.cpu_speed / 1e9, given ? " (given)" : "",
        b.miss == HOBBIT_MISS_FETCH ? "fetch" : b.miss == HOBBIT_MISS_CPU ? "cpu" : "auto");
}
