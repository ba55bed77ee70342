#include "hobbit-sidecar.h"

#include "checksum.h"

#include "ggml-cpp.h"
#include "gguf.h"

#include <algorithm>
#include <charconv>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <map>
#include <stdexcept>
#include <sys/stat.h>
#include <unistd.h>

namespace {

const char * const COPY_NAMES[hob::N_COPIES] = { ".high", ".low" };

[[noreturn]] void refuse(const std::string & path, const std::string & why) { throw std::runtime_error(path + ": " + why); }

uint64_t file_size(const std::string & path) {
    struct stat st;
    if (stat(path.c_str(), &st) != 0) {
        refuse(path, std::string("cannot open: ") + strerror(errno));
    }
    if (!S_ISREG(st.st_mode)) {
        refuse(path, "not a regular file");
    }
    return (uint64_t) st.st_size;
}

int64_t key_of(const gguf_context * g, const std::string & path, const char * key, gguf_type type) {
    const int64_t id = gguf_find_key(g, key);
    if (id < 0) {
        refuse(path, std::string("not a hobbit sidecar: key ") + key + " is missing");
    }
    if (gguf_get_kv_type(g, id) != type) {
        refuse(path, std::string("key ") + key + " has the wrong type");
    }
    return id;
}

int64_t array_of(const gguf_context * g, const std::string & path, const char * key, gguf_type type, size_t n) {
    const int64_t id = key_of(g, path, key, GGUF_TYPE_ARRAY);
    if (gguf_get_arr_type(g, id) != type) {
        refuse(path, std::string("array ") + key + " has the wrong element type");
    }
    if (n != SIZE_MAX && gguf_get_arr_n(g, id) != n) {
        refuse(path, std::string("array ") + key + " has " + std::to_string(gguf_get_arr_n(g, id)) + " entries, expected " + std::to_string(n));
    }
    return id;
}

// blk.N.ffn_{gate,up,gate_up,down}_{,ch}exps.weight
struct expert_name { int block; std::string kind; bool chunked; };

bool parse_name(const std::string & name, expert_name & out) {
    const std::string before = "blk.", between = ".ffn_", after = ".weight";
    const char * end = name.data() + name.size();
    if (name.compare(0, before.size(), before) != 0 || name.size() < after.size() || name.compare(name.size() - after.size(), after.size(), after) != 0) {
        return false;
    }
    const auto [p, ec] = std::from_chars(name.data() + before.size(), end, out.block);
    const size_t at = (size_t) (p - name.data());
    if (ec != std::errc() || out.block < 0 || name != before + std::to_string(out.block) + name.substr(at) ||
        name.compare(at, between.size(), between) != 0 || at + between.size() + after.size() > name.size()) {
        return false;
    }
    const std::string k = name.substr(at + between.size(), name.size() - after.size() - at - between.size());
    for (const char * suffix : { "_chexps", "_exps" }) {
        const size_t n = strlen(suffix);
        if (k.size() > n && k.compare(k.size() - n, n, suffix) == 0) {
            out.kind    = k.substr(0, k.size() - n);
            out.chunked = n == 7;
            return out.kind == "gate" || out.kind == "up" || out.kind == "gate_up" || out.kind == "down";
        }
    }
    return false;
}

struct link_entry { ggml_type type; int file; uint64_t offset; int64_t ne[GGML_MAX_DIMS]; };

std::string folder_of(const std::string & path) {
    const size_t slash = path.rfind('/');
    return slash == std::string::npos ? "" : path.substr(0, slash + 1);
}

// High copies that stayed in the source.
std::map<std::string, link_entry> read_links(const gguf_context * g, hobbit_sidecar & sc) {
    const std::string & path = sc.path;
    const int64_t files = array_of(g, path, "hobbit.link.files", GGUF_TYPE_STRING, SIZE_MAX);
    const size_t n_files = gguf_get_arr_n(g, files);
    const uint64_t * sizes = (const uint64_t *) gguf_get_arr_data(g, array_of(g, path, "hobbit.link.sizes", GGUF_TYPE_UINT64, n_files));
    const uint64_t * fnv   = (const uint64_t *) gguf_get_arr_data(g, array_of(g, path, "hobbit.link.header_fnv", GGUF_TYPE_UINT64, n_files));
    const int64_t names = array_of(g, path, "hobbit.link.tensors", GGUF_TYPE_STRING, SIZE_MAX);
    const size_t n = gguf_get_arr_n(g, names);
    const uint32_t * types   = (const uint32_t *) gguf_get_arr_data(g, array_of(g, path, "hobbit.link.types", GGUF_TYPE_UINT32, n));
    const uint64_t * offsets = (const uint64_t *) gguf_get_arr_data(g, array_of(g, path, "hobbit.link.offsets", GGUF_TYPE_UINT64, n));
    const uint32_t * index   = (const uint32_t *) gguf_get_arr_data(g, array_of(g, path, "hobbit.link.file_index", GGUF_TYPE_UINT32, n));

    std::vector<gguf_context_ptr> sources;
    for (size_t f = 0; f < n_files; ++f) {
        std::string name = gguf_get_arr_str(g, files, f);
        if (name.empty() || name[0] != '/') {
            name = folder_of(path) + name;
        }
        if (access(name.c_str(), R_OK) != 0) {
            refuse(path, "its experts are read from " + name + ", which cannot be opened: " + strerror(errno));
        }
        if (file_size(name) != sizes[f]) {
            refuse(name, "has another size than when " + path + " was made: convert again");
        }
        gguf_context_ptr src(gguf_init_from_file(name.c_str(), { /*.no_alloc =*/ true, /*.ctx =*/ nullptr }));
        if (!src || hobbit_header_fnv(name, gguf_get_data_offset(src.get())) != fnv[f]) {
            refuse(name, "has changed since " + path + " was made: convert again");
        }
        sc.files.push_back(name);
        sources.push_back(std::move(src));
    }
    std::map<std::string, link_entry> links;
    for (size_t i = 0; i < n; ++i) {
        const std::string name = gguf_get_arr_str(g, names, i);
        if (index[i] >= n_files) {
            refuse(path, "link of tensor " + name + " has a bad file index");
        }
        // the source is what it was (its header's checksum), so a link that differs from it is wrong
        const gguf_context * src = sources[index[i]].get();
        const int64_t id = gguf_find_tensor(src, name.c_str());
        if (id < 0 || types[i] != (uint32_t) gguf_get_tensor_type(src, id) || offsets[i] != gguf_get_data_offset(src) + gguf_get_tensor_offset(src, id)) {
            refuse(path, "link of tensor " + name + " leads to something else in " + sc.files[1 + index[i]]);
        }
        link_entry entry = { (ggml_type) types[i], 1 + (int) index[i], offsets[i], {} };
        std::copy_n(gguf_get_tensor_ne(src, id), GGML_MAX_DIMS, entry.ne);
        if (!links.insert({ name, entry }).second) {
            refuse(path, "tensor " + name + " is linked twice");
        }
    }
    return links;
}

// An open file of the sidecar.
struct part {
    gguf_context_ptr g;
    int file;
};

part open_part(const std::string & path, int file) {
    // without a ggml_context: making tensors in it has assertions that a file can fail
    part p = { gguf_context_ptr(gguf_init_from_file(path.c_str(), { /*.no_alloc =*/ true, /*.ctx =*/ nullptr })), file };
    if (!p.g) {
        refuse(path, hobbit_why_not_gguf(path));
    }
    return p;
}

// Parts after the first: NAME-00002-of-0000N.gguf and so on.
void open_other_parts(hobbit_sidecar & sc, std::vector<part> & parts) {
    const gguf_context * g = parts[0].g.get();
    const int64_t id = gguf_find_key(g, "split.count");
    const int n = id >= 0 && gguf_get_kv_type(g, id) == GGUF_TYPE_UINT16 ? gguf_get_val_u16(g, id) : 1;
    char ending[32];
    snprintf(ending, sizeof(ending), "-00001-of-%05d.gguf", n);
    const std::string & path = sc.path;
    const size_t stem = path.size() - std::min(path.size(), strlen(ending));
    if (n > 1 && path.compare(stem, std::string::npos, ending) != 0) {
        refuse(path, "part 1 of " + std::to_string(n) + " must be called NAME" + ending + ", or the others cannot be found");
    }
    for (int i = 1; i < n; ++i) {
        snprintf(ending, sizeof(ending), "-%05d-of-%05d.gguf", i + 1, n);
        const std::string name = path.substr(0, stem) + ending;
        file_size(name); // a missing part is told by its name
        sc.files.push_back(name);
        parts.push_back(open_part(name, (int) sc.files.size() - 1));
        const gguf_context * other = parts.back().g.get();
        if (gguf_get_val_str(other, key_of(other, name, "hobbit.pair_id", GGUF_TYPE_STRING)) != sc.pair_id) {
            refuse(name, "belongs to another conversion than " + path + " (hobbit.pair_id differs)");
        }
        const int64_t no = gguf_find_key(other, "split.no");
        if (no < 0 || gguf_get_kv_type(other, no) != GGUF_TYPE_UINT16 || gguf_get_val_u16(other, no) != i) {
            refuse(name, "is not part " + std::to_string(i + 1) + " of " + path + " (split.no)");
        }
    }
}

// Bytes of one expert; 0 if no file can be so large.
uint64_t expert_bytes(const hobbit_expert_tensor & t, int c) {
    uint64_t row, one, all; // ggml_row_size() would multiply first and wrap
    return __builtin_mul_overflow((uint64_t) (t.ne[0] / ggml_blck_size(t.type[c])), (uint64_t) ggml_type_size(t.type[c]), &row) || __builtin_mul_overflow(row, (uint64_t) t.ne[1], &one) || __builtin_mul_overflow(one, (uint64_t) t.ne[2], &all) || all > INT64_MAX ? 0 : one;
}

// Matrices of other types have no product.
bool holds_weights(ggml_type type) {
    return type >= 0 && type < GGML_TYPE_COUNT && ggml_type_size(type) > 0 && (type == GGML_TYPE_F32 || ggml_get_type_traits(type)->to_float);
}

void read_checksums(const gguf_context * g, hobbit_sidecar & sc) {
    if (gguf_find_key(g, "hobbit.crc32.values") < 0) {
        return;
    }
    const std::string & path = sc.path;
    sc.crc_chunk = gguf_get_val_u32(g, key_of(g, path, "hobbit.crc32.chunk", GGUF_TYPE_UINT32));
    if (sc.crc_chunk != hob::IO_CHUNK) {
        return; // of another build; asking for them is refused
    }
    const int64_t names = array_of(g, path, "hobbit.crc32.tensors", GGUF_TYPE_STRING, SIZE_MAX);
    const int64_t array = array_of(g, path, "hobbit.crc32.values", GGUF_TYPE_UINT32, SIZE_MAX);
    const uint32_t * values = (const uint32_t *) gguf_get_arr_data(g, array);
    const size_t n_values = gguf_get_arr_n(g, array);
    std::map<std::string, std::pair<hobbit_expert_tensor *, int>> copies;
    for (hobbit_expert_tensor & t : sc.tensors) {
        copies[t.name + ".high"] = { &t, hob::COPY_HIGH };
        copies[t.name + ".low"]  = { &t, hob::COPY_LOW };
    }
    size_t at = 0;
    for (size_t i = 0; i < gguf_get_arr_n(g, names); ++i) {
        const std::string name = gguf_get_arr_str(g, names, i);
        const auto it = copies.find(name);
        if (it == copies.end()) {
            refuse(path, "hobbit.crc32.tensors names " + name + ", which is not there or was named before");
        }
        const auto [t, c] = it->second;
        const uint64_t n = hob::chunks_of(expert_bytes(*t, c)) * (uint64_t) t->ne[2];
        if (n > n_values - at) {
            refuse(path, "hobbit.crc32.values ends within " + name);
        }
        t->crc[c].assign(values + at, values + at + n);
        at += n;
        copies.erase(it);
    }
    if (at != n_values || !copies.empty()) {
        refuse(path, "hobbit.crc32.values has " + std::to_string(n_values) + " entries for " + std::to_string(at) + " pieces" +
               (copies.empty() ? "" : ", and " + copies.begin()->first + " has none"));
    }
}

} // namespace

std::string hobbit_why_not_gguf(const std::string & path) {
    FILE * f = fopen(path.c_str(), "rb");
    if (!f) {
        return std::string("cannot open: ") + strerror(errno);
    }
    char head[4096];
    const bool failed = fread(head, 1, sizeof(head), f) < sizeof(head) && ferror(f);
    const std::string why = failed ? std::string("cannot read: ") + strerror(errno) : "not a GGUF file, or damaged";
    fclose(f);
    return why;
}

uint64_t hobbit_header_fnv(const std::string & path, uint64_t n) {
    FILE * f = fopen(path.c_str(), "rb");
    if (!f) {
        refuse(path, std::string("cannot open: ") + strerror(errno));
    }
    uint64_t h = 0xcbf29ce484222325ull;
    std::vector<uint8_t> buf(1 << 16);
    while (n > 0) {
        const size_t want = (size_t) std::min<uint64_t>(n, buf.size());
        if (fread(buf.data(), 1, want, f) != want) {
            fclose(f);
            refuse(path, "ends inside its header");
        }
        for (size_t i = 0; i < want; ++i) {
            h = (h ^ buf[i]) * 0x100000001b3ull;
        }
        n -= want;
    }
    fclose(f);
    return h;
}

hobbit_sidecar hobbit_read_sidecar(const std::string & path) {
    hobbit_sidecar sc;
    sc.path = path;
    sc.files.push_back(path);
    file_size(path); // what is no file is told as such
    std::vector<part> parts;
    parts.push_back(open_part(path, 0));
    const gguf_context * g = parts[0].g.get();
    const uint32_t version = gguf_get_val_u32(g, key_of(g, path, "hobbit.format_version", GGUF_TYPE_UINT32));
    if (version != 1) {
        refuse(path, "format version " + std::to_string(version) + " is unknown to this build (it reads 1)");
    }
    if (strcmp(gguf_get_val_str(g, key_of(g, path, "hobbit.role", GGUF_TYPE_STRING)), "experts") != 0) {
        refuse(path, "is no sidecar (hobbit.role is not \"experts\")");
    }
    sc.pair_id = gguf_get_val_str(g, key_of(g, path, "hobbit.pair_id", GGUF_TYPE_STRING));
    if (sc.pair_id.empty()) {
        refuse(path, "its hobbit.pair_id is empty");
    }
    const bool link = gguf_get_val_bool(g, key_of(g, path, "hobbit.link", GGUF_TYPE_BOOL));
    std::map<std::string, link_entry> links;
    if (link) {
        links = read_links(g, sc);
    }
    open_other_parts(sc, parts);
    std::vector<uint64_t> sizes;
    for (const std::string & file : sc.files) {
        sizes.push_back(file_size(file));
    }
    struct place { const part * in; int64_t id; };
    std::map<std::string, place> places;
    for (const part & p : parts) {
        for (int64_t i = 0; i < gguf_get_n_tensors(p.g.get()); ++i) {
            if (!places.insert({ gguf_get_tensor_name(p.g.get(), i), { &p, i } }).second) {
                refuse(sc.files[p.file], std::string("tensor ") + gguf_get_tensor_name(p.g.get(), i) + " is in another part, too");
            }
        }
    }
    const auto shape  = [](const place & at) { return gguf_get_tensor_ne(at.in->g.get(), at.id); };
    const auto type   = [](const place & at) { return gguf_get_tensor_type(at.in->g.get(), at.id); };
    const auto offset = [](const place & at) { return gguf_get_data_offset(at.in->g.get()) + gguf_get_tensor_offset(at.in->g.get(), at.id); };

    std::map<std::pair<int, bool>, std::map<std::string, int>> by_layer;
    for (const auto & [full, at] : places) {
        if (full.size() < 5 || full.compare(full.size() - 4, 4, ".low") != 0) {
            continue; // high copies are found from the low ones
        }
        hobbit_expert_tensor t;
        t.name = full.substr(0, full.size() - 4);
        expert_name en;
        if (!parse_name(t.name, en)) {
            refuse(path, "tensor " + full + " is no expert tensor");
        }
        const int64_t * ne = shape(at);
        std::copy_n(ne, 3, t.ne);
        if (ne[3] != 1) {
            refuse(path, "tensor " + full + " has more than three dimensions");
        }
        if (ne[0] < 1 || ne[1] < 1 || ne[2] < 1 || ne[1] > INT32_MAX || ne[2] > UINT16_MAX) {
            refuse(path, "tensor " + full + " has an impossible shape");
        }
        t.type[hob::COPY_LOW]   = type(at);
        t.file[hob::COPY_LOW]   = at.in->file;
        t.offset[hob::COPY_LOW] = offset(at);

        if (link) {
            const auto it = links.find(t.name);
            if (it == links.end()) {
                refuse(path, "no link to the high copy of tensor " + t.name);
            }
            if (!std::equal(ne, ne + GGML_MAX_DIMS, it->second.ne)) {
                refuse(path, "tensors " + t.name + " of the source and " + full + " have different shapes");
            }
            t.type[hob::COPY_HIGH]   = it->second.type;
            t.file[hob::COPY_HIGH]   = it->second.file;
            t.offset[hob::COPY_HIGH] = it->second.offset;
        } else {
            const std::string name = t.name + ".high";
            const auto it = places.find(name);
            if (it == places.end()) {
                refuse(path, "tensor " + name + " is missing");
            }
            if (!std::equal(ne, ne + GGML_MAX_DIMS, shape(it->second))) {
                refuse(path, "tensors " + name + " and " + full + " have different shapes");
            }
            t.type[hob::COPY_HIGH]   = type(it->second);
            t.file[hob::COPY_HIGH]   = it->second.in->file;
            t.offset[hob::COPY_HIGH] = offset(it->second);
        }
        for (int c = 0; c < hob::N_COPIES; ++c) {
            if (!holds_weights(t.type[c])) {
                refuse(path, "tensor " + t.name + COPY_NAMES[c] + " has type " + std::to_string((int) t.type[c]) + ", which is none of weights");
            }
            if (t.ne[0] % ggml_blck_size(t.type[c]) != 0) {
                refuse(path, "tensor " + t.name + ": rows of " + std::to_string(t.ne[0]) + " do not fit its type");
            }
            const uint64_t bytes = expert_bytes(t, c) * (uint64_t) t.ne[2];
            if (bytes == 0 || t.offset[c] > sizes[t.file[c]] || bytes > sizes[t.file[c]] - t.offset[c]) {
                refuse(sc.files[t.file[c]], "truncated: tensor " + t.name + " needs " + std::to_string(bytes) + " bytes at offset " +
                       std::to_string(t.offset[c]) + ", the file has " + std::to_string(sizes[t.file[c]]));
            }
        }
        if (expert_bytes(t, hob::COPY_LOW) > expert_bytes(t, hob::COPY_HIGH)) {
            refuse(path, "tensor " + t.name + ": its low copy (" + ggml_type_name(t.type[hob::COPY_LOW]) + ") is larger than its high copy (" +
                   ggml_type_name(t.type[hob::COPY_HIGH]) + "): the two were swapped");
        }
        by_layer[{ en.block, en.chunked }][en.kind] = (int) sc.tensors.size();
        sc.tensors.push_back(t);
    }
    if (sc.tensors.empty()) {
        refuse(path, "holds no experts");
    }

    read_checksums(g, sc);

    // layers in the order of their blocks; projections in the order they are needed
    for (const auto & [key, kinds] : by_layer) {
        hobbit_sidecar_layer layer = { key.first, {}, 0 };
        for (const char * kind : { "gate", "up", "gate_up", "down" }) {
            const auto it = kinds.find(kind);
            if (it == kinds.end()) {
                continue;
            }
            if (layer.n_proj == hob::MAX_PROJ) {
                refuse(path, "block " + std::to_string(key.first) + " has gate, up and merged gate_up experts");
            }
            hobbit_expert_tensor & t = sc.tensors[it->second];
            t.layer = (int) sc.layers.size();
            t.proj  = layer.n_proj;
            layer.tensors[layer.n_proj++] = it->second;
        }
        if (layer.n_proj < 2 || !kinds.count("down")) {
            refuse(path, "block " + std::to_string(key.first) + " lacks expert tensors");
        }
        for (int p = 1; p < layer.n_proj; ++p) {
            if (sc.tensors[layer.tensors[p]].ne[2] != sc.tensors[layer.tensors[0]].ne[2]) {
                refuse(path, "block " + std::to_string(key.first) + ": its tensors differ in the number of experts");
            }
        }
        sc.layers.push_back(layer);
    }
    return sc;
}
