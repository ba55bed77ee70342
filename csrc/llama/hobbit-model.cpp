#include "hobbit-model.h"

#include "gguf.h"
#include "llama-impl.h"
#include "llama-model.h"

#include "checksum.h"
#include "hobbit-host.h"
#include "hobbit-router.h"
#include "hobbit-link.h"
#include "shape.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <stdexcept>
#include <tuple>

const hobbit_params & hobbit_load_params(); // hobbit-api.cpp; throws std::runtime_error for a wrong variable of the environment

namespace {

std::string folder_of(const std::string & path) {
    const size_t slash = path.rfind('/');
    return slash == std::string::npos ? "" : path.substr(0, slash + 1);
}

std::string string_key(const gguf_context * g, const char * key) {
    const int64_t id = gguf_find_key(g, key);
    return id >= 0 && gguf_get_kv_type(g, id) == GGUF_TYPE_STRING ? gguf_get_val_str(g, id) : "";
}

// Has the file one of the keys that only half of a pair has, of whatever type?
bool is_half(const gguf_context * g) {
    for (const char * key : { "hobbit.format_version", "hobbit.role", "hobbit.sidecar", "hobbit.pair_id" }) {
        if (gguf_find_key(g, key) >= 0) {
            return true;
        }
    }
    return false;
}

// --- the buffer type of expert tensors: they have shapes and no memory. No graph uses them, the hook
//     puts the banks in their place; the base only has to be non-null. ---

void * const VIRTUAL_BASE = (void *) 0x1000;

const char * virtual_name(ggml_backend_buffer_type_t) { return "hobbit_virtual"; }
size_t virtual_alignment(ggml_backend_buffer_type_t) { return 64; }
void virtual_free(ggml_backend_buffer_t) {}
void * virtual_base(ggml_backend_buffer_t) { return VIRTUAL_BASE; }
void virtual_memset(ggml_backend_buffer_t, ggml_tensor *, uint8_t, size_t, size_t) {}
void virtual_set(ggml_backend_buffer_t, ggml_tensor *, const void *, size_t, size_t) {}
void virtual_get(ggml_backend_buffer_t, const ggml_tensor *, void * data, size_t, size_t n) { memset(data, 0, n); }
void virtual_clear(ggml_backend_buffer_t, uint8_t) {}

ggml_backend_buffer_t virtual_alloc(ggml_backend_buffer_type_t buft, size_t size) {
    ggml_backend_buffer_i iface = {};
    iface.free_buffer   = virtual_free;
    iface.get_base      = virtual_base;
    iface.memset_tensor = virtual_memset;
    iface.set_tensor    = virtual_set;
    iface.get_tensor    = virtual_get;
    iface.clear         = virtual_clear;
    return ggml_backend_buffer_init(buft, iface, buft->context, size);
}

// Layers that can share banks: same device, same numbers, same shapes and types of every copy.
using group_key = std::tuple<ggml_backend_buffer_type_t, int, int, std::vector<int64_t>>;

struct group_plan {
    ggml_backend_buffer_type_t buft;
    const hobbit_sidecar_layer * example;
};

// Units of the inner width that an expert can be divided in: whole blocks of every type that meets there; rows of
// down are copied one by one then, and links are slow with short ones.
void divide_experts(const hobbit_sidecar & sc, const hobbit_sidecar_layer & sl, hob::group_layout & g) {
    constexpr int64_t MIN_UNIT       = 64;
    constexpr size_t  MIN_UNIT_BYTES = 512;  // of a row, at high precision
    constexpr size_t  MIN_ROW_BYTES  = 4096;
    constexpr int     MAX_UNITS      = 64;
    const hobbit_expert_tensor & down = sc.tensors[sl.tensors[sl.n_proj - 1]];
    const int64_t n_ff = down.ne[0];
    int64_t unit = MIN_UNIT;
    for (int c = 0; c < hob::N_COPIES; ++c) {
        unit = std::max(unit, ggml_blck_size(down.type[c]));
        for (int p = 0; p < sl.n_proj; ++p) {
            const hobbit_expert_tensor & t = sc.tensors[sl.tensors[p]];
            g.row_bytes[c][p] = ggml_row_size(t.type[c], t.ne[0]);
        }
    }
    if (g.row_bytes[hob::COPY_HIGH][sl.n_proj - 1] < MIN_ROW_BYTES) {
        return;
    }
    while (ggml_row_size(down.type[hob::COPY_HIGH], unit) < MIN_UNIT_BYTES) {
        unit *= 2;
    }
    while (n_ff / unit > MAX_UNITS) {
        unit *= 2;
    }
    if (n_ff % unit != 0 || n_ff / unit < 2) {
        return;
    }
    for (int p = 0; p + 1 < sl.n_proj; ++p) {
        const hobbit_expert_tensor & t = sc.tensors[sl.tensors[p]];
        if (t.ne[1] % n_ff != 0) {
            return;
        }
        g.n_parts[p] = (int) (t.ne[1] / n_ff);
    }
    g.unit    = (int) unit;
    g.n_units = (int) (n_ff / unit);
}

// Layers and groups without slots. n_used, buft per layer; buft null: not known yet.
hob::model_layout lay_out(const hobbit_sidecar & sc, const std::vector<int> & n_used, const std::vector<ggml_backend_buffer_type_t> & buft,
                          std::vector<group_plan> & plans) {
    hob::model_layout out;
    out.files = sc.files;
    std::map<group_key, int> groups;
    for (size_t i = 0; i < sc.layers.size(); ++i) {
        const hobbit_sidecar_layer & sl = sc.layers[i];
        hob::layer_layout l;
        l.block    = sl.block;
        l.n_expert = (int) sc.tensors[sl.tensors[0]].ne[2];
        l.n_used   = std::min(n_used[i], l.n_expert);
        if (n_used[i] < 1) {
            throw std::runtime_error(sc.path + ": block " + std::to_string(l.block) + " would use " + std::to_string(n_used[i]) + " of its experts: the main file's expert_used_count is wrong");
        }

        std::vector<int64_t> shape;
        size_t bytes[hob::N_COPIES][hob::MAX_PROJ] = {};
        for (int p = 0; p < sl.n_proj; ++p) {
            const hobbit_expert_tensor & t = sc.tensors[sl.tensors[p]];
            shape.insert(shape.end(), { t.ne[0], t.ne[1] });
            for (int c = 0; c < hob::N_COPIES; ++c) {
                bytes[c][p] = ggml_row_size(t.type[c], t.ne[0]) * t.ne[1];
                l.src[c][p] = { t.file[c], t.offset[c], bytes[c][p] };
                shape.push_back(t.type[c]);
            }
        }
        const auto [it, added] = groups.insert({ { buft[i], l.n_expert, l.n_used, shape }, (int) out.groups.size() });
        if (added) {
            hob::group_layout g;
            g.n_expert = l.n_expert;
            g.n_used   = l.n_used;
            g.n_proj   = sl.n_proj;
            memcpy(g.proj_bytes, bytes, sizeof(bytes));
            divide_experts(sc, sl, g);
            out.groups.push_back(g);
            plans.push_back({ buft[i], &sl });
        }
        l.group    = it->second;
        l.in_group = out.groups[l.group].n_layers++;
        out.layers.push_back(l);
    }
    return out;
}

// Products of CUDA's quantized kernels read a little beyond the last expert.
constexpr size_t READ_BEYOND = 1u << 20;

// Of group_banks::heads.
size_t heads_bytes(const hob::group_layout & g) {
    return g.n_units > 1 ? sizeof(float) * g.n_units * g.unit * (g.n_units + 1) : 0;
}

// Experts are skipped by negative ids in matrix products. Back ends that do not know them would read what lies before the bank.
void check_skips(ggml_backend_dev_t dev) {
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(dev);
    if (!reg || !ggml_backend_reg_get_proc_address(reg, "ggml_mul_mat_id_may_skip")) {
        throw std::runtime_error(std::string(ggml_backend_dev_name(dev)) + ": its back end cannot leave experts out of a product, which takes a patch that there is for CUDA "
                                 "and the CPU only: load with n_gpu_layers=0");
    }
}

// Bytes for expert slots and what goes with them, if each device keeps so many free. Experts are divided among the
// devices as llama.cpp divided the layers: the one with the least room for its part decides.
uint64_t room_on_devices(const hob::model_layout & layout, const std::vector<group_plan> & plans, uint64_t keep, const hob::budget & b) {
    struct share { uint64_t experts = 0; uint64_t beside = 0; }; // bytes of all at high precision, and beside the slots
    std::map<ggml_backend_dev_t, share> shares;
    for (size_t i = 0; i < layout.groups.size(); ++i) {
        const hob::group_layout & g = layout.groups[i];
        share & s = shares[ggml_backend_buft_get_device(plans[i].buft)];
        s.experts += (uint64_t) g.n_experts_total() * g.expert_bytes(hob::COPY_HIGH);
        s.beside  += READ_BEYOND + heads_bytes(g);
    }
    double room = 2.0 * (double) b.high + (double) b.floor; // all experts, and more
    for (const auto & [dev, s] : shares) {
        const uint64_t free = b.unified ? std::min(hobbit_free_memory(dev), hobbit_free_memory(nullptr)) : hobbit_free_memory(dev);
        const double left = free > keep + s.beside ? (double) (free - keep - s.beside) : 0.0;
        LLAMA_LOG_INFO("%s: %s: %.1f MiB free, %.1f MiB of them kept for contexts\n", __func__, dev ? ggml_backend_dev_name(dev) : "CPU", free / 1048576.0, keep / 1048576.0);
        room = std::min(room, left * ((double) b.high / (double) s.experts));
    }
    return (uint64_t) room;
}

void check_pair(const hobbit_sidecar & sc, const gguf_context * main_meta, const std::string & main_path) {
    if (string_key(main_meta, "hobbit.pair_id") != sc.pair_id) {
        throw std::runtime_error(sc.path + ": belongs to another conversion than " + main_path + " (hobbit.pair_id differs)");
    }
}

// "" for an ordinary GGUF.
std::string sidecar_path(const std::string & main_path, const gguf_context * main_meta) {
    if (!is_half(main_meta)) {
        return "";
    }
    const std::string role = string_key(main_meta, "hobbit.role"), name = string_key(main_meta, "hobbit.sidecar");
    if (role == "experts") {
        throw std::runtime_error(main_path + ": is a sidecar: name the main file that belongs to it");
    }
    const int64_t version = gguf_find_key(main_meta, "hobbit.format_version");
    if (role != "main" || name.empty() || version < 0 || gguf_get_kv_type(main_meta, version) != GGUF_TYPE_UINT32) {
        throw std::runtime_error(main_path + ": damaged: of hobbit.role, hobbit.sidecar and hobbit.format_version one is missing, or of the wrong type");
    }
    if (gguf_get_val_u32(main_meta, version) != 1) {
        throw std::runtime_error(main_path + ": format version " + std::to_string(gguf_get_val_u32(main_meta, version)) + " is unknown to this build (it reads 1)");
    }
    if (name.find('/') != std::string::npos || name.find('\\') != std::string::npos || name.size() > 255) {
        throw std::runtime_error(main_path + ": hobbit.sidecar must be a file name without a folder, found \"" + name.substr(0, 80) + "\"");
    }
    return folder_of(main_path) + name;
}

// What is read from the files, compared with their checksums.
std::unique_ptr<hob::storage> checked(std::unique_ptr<hob::storage> files, const hobbit_sidecar & sc) {
    if (sc.crc_chunk == 0) {
        throw std::runtime_error(sc.path + ": has no checksums (it was made before they came): convert again, or load it without verify");
    }
    if (sc.crc_chunk != hob::IO_CHUNK) {
        throw std::runtime_error(sc.path + ": its checksums are of pieces of " + std::to_string(sc.crc_chunk) + " bytes, this build compares " +
                                 std::to_string(hob::IO_CHUNK) + ": convert again, or load it without verify");
    }
    std::vector<hob::checked_range> ranges;
    for (const hobbit_sidecar_layer & l : sc.layers) {
        for (int p = 0; p < l.n_proj; ++p) {
            const hobbit_expert_tensor & t = sc.tensors[l.tensors[p]];
            for (int c = 0; c < hob::N_COPIES; ++c) {
                ranges.push_back({ t.name + (c == hob::COPY_HIGH ? ".high" : ".low"), t.file[c], t.offset[c],
                                   ggml_row_size(t.type[c], t.ne[0]) * (uint64_t) t.ne[1], t.crc[c] });
            }
        }
    }
    return hob::check_reads(std::move(files), sc.files, std::move(ranges));
}

} // namespace

hobbit::place hobbit::find(const ggml_tensor * t) const {
    const auto it = meta.find(ggml_get_name(t));
    if (it == meta.end()) {
        return { -1, -1 };
    }
    // meta tensors carry the index of their description
    const hobbit_expert_tensor & x = sidecar.tensors[(size_t) (uintptr_t) it->second->extra];
    return { x.layer, x.proj };
}

std::shared_ptr<hobbit> hobbit_open(const std::string & main_path, const gguf_context * main_meta) {
    const std::string path = sidecar_path(main_path, main_meta);
    if (path.empty()) {
        return nullptr;
    }
    auto h = std::make_shared<hobbit>();
    h->params  = hobbit_load_params();
    h->sidecar = hobbit_read_sidecar(path);
    check_pair(h->sidecar, main_meta, main_path);

    h->meta_ctx.reset(ggml_init({ ggml_tensor_overhead() * h->sidecar.tensors.size(), nullptr, /*.no_alloc =*/ true }));
    for (size_t i = 0; i < h->sidecar.tensors.size(); ++i) {
        const hobbit_expert_tensor & t = h->sidecar.tensors[i];
        ggml_tensor * m = ggml_new_tensor(h->meta_ctx.get(), t.type[hob::COPY_HIGH], 3, t.ne);
        ggml_set_name(m, t.name.c_str());
        m->extra = (void *) (uintptr_t) i;
        h->meta[t.name] = m;
        h->n_elements += ggml_nelements(m);
        h->n_bytes    += ggml_nbytes(m);
    }

    h->virtual_buft = {};
    h->virtual_buft.iface.get_name      = virtual_name;
    h->virtual_buft.iface.alloc_buffer  = virtual_alloc;
    h->virtual_buft.iface.get_alignment = virtual_alignment;
    h->virtual_buft.context             = h.get();
    return h;
}

ggml_tensor * hobbit_tensor_meta(const hobbit * h, const char * name) {
    if (!h) {
        return nullptr;
    }
    const auto it = h->meta.find(name);
    return it == h->meta.end() ? nullptr : it->second;
}

bool hobbit_has_expert_tensor(const hobbit * h, const std::string & name) { return h && h->meta.count(name) > 0; }

// Memory for the slots of group gi, and how they are written; with measure, how much that would be. Throws std::runtime_error.
static void place_banks(hobbit & h, size_t gi, hob::group_layout & g, const group_plan & plan, bool unified, bool measure) {
    h.banks.emplace_back();
    hobbit::group_banks & gb = h.banks.back();
    gb.buft_name = ggml_backend_buft_name(plan.buft);
    gb.dev       = ggml_backend_buft_get_device(plan.buft);

    // one buffer a group: tensors on page boundaries, so that aligned slots can be read into directly
    const size_t align = std::max(hob::IO_ALIGN, ggml_backend_buft_get_alignment(plan.buft));
    const auto pad = [&](size_t x) { return (x + align - 1) / align * align; };
    size_t total = align;
    for (int c = 0; c < hob::N_COPIES; ++c) {
        for (int p = 0; p < g.n_proj; ++p) {
            const hobbit_expert_tensor & t = h.sidecar.tensors[plan.example->tensors[p]];
            const std::string kind = t.name.substr(t.name.find("ffn_") + 4, t.name.rfind('_') - t.name.find("ffn_") - 4);
            gb.types[c] += (p ? ", " : "") + kind + " " + ggml_type_name(t.type[c]);
            if (g.n_slots[c] == 0) {
                continue;
            }
            gb.tensor[c][p] = ggml_new_tensor_3d(h.bank_ctx.get(), t.type[c], t.ne[0], t.ne[1], g.n_slots[c]);
            ggml_format_name(gb.tensor[c][p], "hobbit.%zu.%s.%s", gi, c == hob::COPY_HIGH ? "high" : "low", kind.c_str());
            total += pad(ggml_backend_buft_get_alloc_size(plan.buft, gb.tensor[c][p]));
        }
    }
    if (h.host.empty()) {
        g.n_units = 1; // what is read from files is read whole
    } else if (g.n_units > 1) {
        gb.heads = ggml_new_tensor_2d(h.bank_ctx.get(), GGML_TYPE_F32, (int64_t) g.n_units * g.unit, g.n_units + 1);
        total += pad(ggml_nbytes(gb.heads));
    }
    if (!ggml_backend_buft_is_host(plan.buft)) {
        total += READ_BEYOND;
    }
    h.bank_bytes[plan.buft] += total;
    ggml_backend_buffer_t buf = nullptr;
    uint8_t * shared = nullptr; // the slots as the CPU sees them, where device and CPU share them
    if (unified && !measure && !ggml_backend_buft_is_host(plan.buft)) { // layers on the CPU have slots there anyway
        h.host_memory.push_back(std::make_unique<hobbit_pinned>(total, gb.dev));
        shared = h.host_memory.back()->data();
        buf = h.host_memory.back()->seen_by(gb.dev).release();
        if (!buf) {
            throw std::runtime_error(std::string(ggml_backend_dev_name(gb.dev)) + " cannot compute with host memory: turn unified memory off");
        }
    } else {
        buf = ggml_backend_buft_alloc_buffer(plan.buft, measure ? 0 : total);
    }
    if (!buf) {
        throw std::runtime_error("out of memory: " + std::to_string(total) + " bytes for expert slots in " + gb.buft_name);
    }
    h.bank_bufs.emplace_back(buf);
    if (measure) { // as llama.cpp does it with weights: a buffer without memory says where they would be
        for (ggml_tensor * t = ggml_get_first_tensor(h.bank_ctx.get()); t; t = ggml_get_next_tensor(h.bank_ctx.get(), t)) {
            t->buffer = t->buffer ? t->buffer : buf;
        }
        return;
    }
    ggml_backend_buffer_set_usage(buf, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    if (gb.heads) {
        ggml_backend_buffer_clear(buf, 0); // products with the part of a divided expert read the whole slot: no NaN may be there
    }
    const bool host = ggml_backend_buffer_is_host(buf);
    g.on_device = !host;
    uint8_t * const base = (uint8_t *) ggml_backend_buffer_get_base(buf);
    uint8_t * at = base + (pad((size_t) base) - (size_t) base);
    for (int c = 0; c < hob::N_COPIES; ++c) {
        for (int p = 0; p < g.n_proj; ++p) {
            ggml_tensor * t = gb.tensor[c][p];
            if (!t) {
                continue;
            }
            if (ggml_backend_tensor_alloc(buf, t, at) != GGML_STATUS_SUCCESS) {
                throw std::runtime_error("cannot place expert slots in " + gb.buft_name);
            }
            at += pad(ggml_backend_buft_get_alloc_size(plan.buft, t));
            hob::bank & bank = g.banks[c][p];
            bank.stride = t->nb[2];
            if (host || shared) {
                bank.base = host ? (uint8_t *) t->data : shared + ((uint8_t *) t->data - base);
                continue;
            }
            bank.write = hobbit_uploader(t);
            if (h.links.count(gb.dev) == 0) {
                h.links[gb.dev] = h.host.empty() ? nullptr : hobbit_make_link(gb.dev);
            }
            bank.link   = h.links[gb.dev].get();
            bank.memory = t;
        }
    }
    if (!host && !g.has_link()) {
        g.n_units = 1;
    }
    if (gb.heads) {
        ggml_backend_tensor_alloc(buf, gb.heads, at);
        const int64_t n_ff = gb.heads->ne[0];
        std::vector<float> heads(n_ff * (g.n_units + 1));
        for (int u = 0; u <= g.n_units; ++u) {
            std::fill_n(heads.begin() + u * n_ff, u * g.unit, 1.0f);
        }
        ggml_backend_tensor_set(gb.heads, heads.data(), 0, heads.size() * sizeof(float));
    }
}

// Layers that this load leaves out, such as draft heads (load_mtp), get no slots.
static void drop_layers(hobbit_sidecar & sc, const std::function<bool(const hobbit_sidecar_layer &)> & used) {
    std::vector<hobbit_sidecar_layer> kept;
    for (const hobbit_sidecar_layer & l : sc.layers) {
        const bool keep = used(l);
        for (int p = 0; p < l.n_proj; ++p) {
            sc.tensors[l.tensors[p]].layer = keep ? (int) kept.size() : -1;
        }
        if (keep) {
            kept.push_back(l);
        }
    }
    if (kept.empty()) {
        throw std::runtime_error(sc.path + ": none of its layers is loaded");
    }
    sc.layers = std::move(kept);
}

void hobbit_start(hobbit & h, const llama_model & model, bool measure) {
    drop_layers(h.sidecar, [&](const hobbit_sidecar_layer & l) { return model.get_tensor(h.sidecar.tensors[l.tensors[0]].name.c_str()) != nullptr; });
    std::vector<int> n_used;
    std::vector<ggml_backend_buffer_type_t> bufts;
    for (const hobbit_sidecar_layer & l : h.sidecar.layers) {
        n_used.push_back((int) model.hparams.n_expert_used(l.block));
        bufts.push_back(ggml_backend_dev_buffer_type(model.dev_layer(l.block)));
    }
    std::vector<group_plan> plans;
    hob::model_layout layout = lay_out(h.sidecar, n_used, bufts, plans);

    ggml_backend_dev_t device = nullptr; // of the slots, if not the CPU
    bool all_share = true;               // memory with the CPU
    for (ggml_backend_buffer_type_t buft : bufts) {
        ggml_backend_dev_t dev = ggml_backend_buft_get_device(buft);
        if (dev && ggml_backend_dev_type(dev) != GGML_BACKEND_DEVICE_TYPE_CPU) {
            check_skips(dev);
            device = dev;
            all_share = all_share && ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_IGPU;
        }
    }
    hob::budget b = hob::measure(layout, h.params, hob::records::bytes(layout, h.params.policy));
    b.unified = device && (h.params.unified == HOBBIT_UNIFIED_ON || (h.params.unified == HOBBIT_UNIFIED_AUTO && all_share));
    if (h.params.budget_kind == HOBBIT_BUDGET_DEVICE) {
        b.total = room_on_devices(layout, plans, h.params.cache_bytes, b);
    }
    const std::string err = hob::divide(layout, h.params, b);
    if (!err.empty()) {
        throw std::runtime_error(err);
    }
    b.slots_hold_all = device && !b.unified && h.params.preload != HOBBIT_PRELOAD_OFF && h.params.miss != HOBBIT_MISS_CPU && !h.params.force_miss;
    for (size_t gi = 0; gi < layout.groups.size(); ++gi) {
        const hob::group_layout & g = layout.groups[gi];
        const bool on_host = ggml_backend_buft_is_host(plans[gi].buft);
        b.slots_hold_all = b.slots_hold_all && !on_host && g.n_slots[hob::COPY_HIGH] == g.n_experts_total();
        for (int c = 0; c < hob::N_COPIES; ++c) {
            b.slots_on_host += on_host ? g.n_slots[c] * g.expert_bytes(c) : 0;
        }
    }
    auto files = hob::open_files(layout.files, h.params.direct_io != 0);
    if (h.params.verify) {
        files = checked(std::move(files), h.sidecar);
    }
    std::unique_ptr<hob::host_cache> some; // of the copies
    if (b.unified) {
        if (h.params.host_copies == HOBBIT_HOST_ON || h.params.host_copies == HOBBIT_HOST_SOME || h.params.miss == HOBBIT_MISS_CPU) {
            throw std::runtime_error(std::string(ggml_backend_dev_name(device)) + " shares its memory with the CPU: there are no host copies beside the slots, and none to "
                                     "compute from (leave host_copies and miss out)");
        }
    } else if (measure) {
        // copies in host memory are not what a measured load is asked about
    } else if (hobbit_wants_host_copies(h, b, device)) {
        hobbit_load_host_copies(h, layout, b, *files, device);
    } else {
        some = hobbit_host_level(h, layout, b, device);
    }

    h.bank_ctx.reset(ggml_init({ ggml_tensor_overhead() * layout.groups.size() * (hob::N_COPIES * hob::MAX_PROJ + 1), nullptr, /*.no_alloc =*/ true }));
    for (size_t gi = 0; gi < layout.groups.size(); ++gi) {
        place_banks(h, gi, layout.groups[gi], plans[gi], b.unified, measure);
    }
    if (!h.host.empty() && (device || h.params.miss == HOBBIT_MISS_CPU || h.params.link_speed > 0.0)) {
        hobbit_measure_speeds(h, layout, b);
    }
    h.engine = std::make_unique<hob::engine>(std::move(layout), h.params, b, std::move(files), std::move(some));
    h.gates = std::make_shared<hobbit_gates>();
    if (measure) {
        return;
    }
    h.engine->fill_whole_groups();

    const hobbit_info info = h.engine->info();
    LLAMA_LOG_INFO("%s: expert offloading: budget %.1f MiB of %.1f MiB (floor %.1f MiB), %d layers in %d group(s), T1 %.3f, T2 %.3f, %s reads\n", __func__,
        info.budget_bytes / 1048576.0, info.high_bytes / 1048576.0, info.floor_bytes / 1048576.0, info.n_layers, info.n_groups,
        h.params.t1, h.params.t2, info.direct_io ? "direct" : "buffered");
}

void hobbit_add_memory(const hobbit * h, std::map<ggml_backend_buffer_type_t, size_t> & bytes) {
    if (h) {
        bytes.erase(const_cast<ggml_backend_buffer_type_t>(&h->virtual_buft));
        for (const auto & [buft, n] : h->bank_bytes) {
            bytes[buft] += n;
        }
    }
}

size_t hobbit_extra_nodes(const hobbit * h, uint32_t n_tokens) {
    if (!h || !h->engine) {
        return 0;
    }
    // a wave, or the CPU's part: pack, route and what waits, their views, products (2 a projection), the activation between them
    constexpr size_t NODES_PER_WAVE = 40;
    constexpr size_t NODES_LEAN = 4; // the bonus operation, and what makes its sources contiguous
    size_t n = h->engine->layout().layers.size() * NODES_LEAN;
    for (size_t l = 0; l < h->engine->layout().layers.size(); ++l) {
        const auto & layer = h->engine->layout().layers[l];
        int waves = h->engine->waves((int) l, 1, layer.n_expert); // a warm-up run uses all experts at once
        for (uint32_t t = n_tokens; t > 0; t /= 2) { // smaller batches may have more
            waves = std::max(waves, h->engine->waves((int) l, (int) t, layer.n_used));
        }
        n += NODES_PER_WAVE * (1 + waves);
    }
    return n;
}

// Of each thread: another one may compute with a context of its own as soon as the graph has ended.
static thread_local struct { const hobbit * of; std::string text; } decode_error;

const char * hobbit_graph_scope::error(const hobbit * h) { return decode_error.of == h ? decode_error.text.c_str() : ""; }

hobbit_graph_scope::hobbit_graph_scope(hobbit * h) : h_(h && h->engine ? h : nullptr) {
    if (h_) {
        h_->engine->begin_graph();
    }
}

hobbit_graph_scope::~hobbit_graph_scope() { end(); }

bool hobbit_graph_scope::end() {
    if (!h_) {
        return true;
    }
    hobbit * h = h_;
    h_ = nullptr;
    decode_error = { h, h->engine->end_graph() };
    if (!decode_error.text.empty()) {
        LLAMA_LOG_ERROR("%s: %s\n", __func__, decode_error.text.c_str());
    }
    return decode_error.text.empty();
}

// --- sizes without loading ---

static hob::model_layout probe(const std::string & path, int n_used_override) {
    gguf_context_ptr g(gguf_init_from_file(path.c_str(), { /*.no_alloc =*/ true, /*.ctx =*/ nullptr }));
    if (!g) {
        throw std::runtime_error(path + ": " + hobbit_why_not_gguf(path));
    }
    const std::string side = sidecar_path(path, g.get());
    if (side.empty()) {
        throw std::runtime_error(path + ": is an ordinary GGUF: convert it first");
    }
    hobbit_sidecar sc = hobbit_read_sidecar(side);
    check_pair(sc, g.get(), path);

    const std::string arch = string_key(g.get(), "general.architecture");
    const auto number = [&](const std::string & key, uint32_t otherwise) {
        const int64_t id = gguf_find_key(g.get(), (arch + key).c_str());
        return id >= 0 && gguf_get_kv_type(g.get(), id) == GGUF_TYPE_UINT32 ? gguf_get_val_u32(g.get(), id) : otherwise;
    };
    // the last blocks are draft heads, which are not loaded unless asked for
    const uint32_t n_blocks = number(".block_count", UINT32_MAX), n_heads = number(".nextn_predict_layers", 0);
    drop_layers(sc, [&](const hobbit_sidecar_layer & l) { return n_heads >= n_blocks || (uint32_t) l.block < n_blocks - n_heads; });

    std::vector<int> n_used;
    const std::string key = arch + ".expert_used_count";
    const int64_t id = gguf_find_key(g.get(), key.c_str());
    for (const hobbit_sidecar_layer & l : sc.layers) {
        uint32_t n = 0;
        if (n_used_override > 0) {
            n = (uint32_t) n_used_override;
        } else if (id >= 0 && gguf_get_kv_type(g.get(), id) == GGUF_TYPE_UINT32) {
            n = gguf_get_val_u32(g.get(), id);
        } else if (id >= 0 && gguf_get_kv_type(g.get(), id) == GGUF_TYPE_ARRAY && gguf_get_arr_n(g.get(), id) > (size_t) l.block &&
                   (gguf_get_arr_type(g.get(), id) == GGUF_TYPE_UINT32 || gguf_get_arr_type(g.get(), id) == GGUF_TYPE_INT32)) {
            n = ((const uint32_t *) gguf_get_arr_data(g.get(), id))[l.block];
        } else {
            throw std::runtime_error(path + ": key " + key + " is missing");
        }
        n_used.push_back((int) n);
    }
    std::vector<group_plan> plans;
    return lay_out(sc, n_used, std::vector<ggml_backend_buffer_type_t>(sc.layers.size(), nullptr), plans);
}

std::vector<hobbit_layer> hobbit_layers_of_file(const std::string & path, int n_used_override) { return hob::shape_of(probe(path, n_used_override)); }

int hobbit_measure_file(const std::string & path, int n_used_override, hobbit_info & out) {
    const hob::model_layout layout = probe(path, n_used_override);
    const hobbit_params & params = hobbit_load_params();
    const hob::budget b = hob::measure(layout, params, hob::records::bytes(layout, params.policy));
    out = {};
    out.floor_bytes   = b.floor;
    out.staging_bytes = b.staging;
    out.record_bytes  = b.records;
    out.high_bytes    = b.high;
    out.low_bytes     = b.low;
    out.n_layers      = (int32_t) layout.layers.size();
    out.n_groups      = (int32_t) layout.groups.size();
    for (const hob::group_layout & gl : layout.groups) {
        out.n_expert      = std::max(out.n_expert, gl.n_expert);
        out.n_expert_used = std::max(out.n_expert_used, gl.n_used);
    }
    return 0;
}
