#include "fake_model.h"

#include <cstring>

using namespace hob;

fake_model::fake_model(const std::vector<group_spec> & groups, const std::vector<int> & group_of) : specs_(groups) {
    for (const group_spec & s : groups) {
        group_layout g;
        g.n_expert = s.n_expert;
        g.n_used   = s.n_used;
        g.n_proj   = s.n_proj;
        memcpy(g.proj_bytes, s.bytes, sizeof(s.bytes));
        if (s.n_units > 1) { // a byte is a column of down, a row of gate and up
            g.n_units = s.n_units;
            g.unit    = (int) s.bytes[COPY_HIGH][s.n_proj - 1] / 4 / s.n_units;
            for (int p = 0; p < s.n_proj; ++p) {
                g.n_parts[p] = s.n_parts[p];
                for (int c = 0; c < N_COPIES; ++c) {
                    g.row_bytes[c][p] = p + 1 == s.n_proj ? s.bytes[c][p] / 4 : 1; // down has 4 rows
                }
            }
        }
        layout.groups.push_back(g);
    }
    layout.files = { "high", "low" };
    files.resize(N_COPIES);
    for (size_t i = 0; i < group_of.size(); ++i) {
        group_layout & g = layout.groups[group_of[i]];
        layer_layout l;
        l.block    = (int) i;
        l.group    = group_of[i];
        l.in_group = g.n_layers++;
        l.n_expert = g.n_expert;
        l.n_used   = g.n_used;
        for (int c = 0; c < N_COPIES; ++c) {
            std::vector<uint8_t> & f = files[c];
            for (int p = 0; p < g.n_proj; ++p) {
                f.resize(f.size() + 13); // nothing is aligned
                l.src[c][p] = { c, f.size(), g.proj_bytes[c][p] };
                for (int e = 0; e < g.n_expert; ++e) {
                    // a run of bytes that no other (layer, expert, copy, projection) has
                    uint32_t x = (uint32_t) (((i * 1000 + e) * 2 + c) * 3 + p) * 2654435761u + 12345;
                    for (size_t b = 0; b < g.proj_bytes[c][p]; ++b) {
                        x = x * 1664525u + 1013904223u;
                        f.push_back((uint8_t) (x >> 24));
                    }
                }
            }
        }
        layout.layers.push_back(l);
    }
    for (layer_layout & l : layout.layers) {
        for (int c = 0; c < N_COPIES && specs_[l.group].link; ++c) {
            for (int p = 0; p < layout.groups[l.group].n_proj; ++p) {
                l.src[c][p].host = files[c].data() + l.src[c][p].offset;
            }
        }
    }
}

void fake_model::place_slots() {
    for (size_t gi = 0; gi < layout.groups.size(); ++gi) {
        group_layout & g = layout.groups[gi];
        for (int c = 0; c < N_COPIES; ++c) {
            for (int p = 0; p < g.n_proj; ++p) {
                bank & b = g.banks[c][p];
                b.stride = g.proj_bytes[c][p];
                banks.push_back(std::make_unique<std::vector<uint8_t>>(b.stride * g.n_slots[c] + 1, (uint8_t) 0xee));
                uint8_t * base = banks.back()->data();
                layout.groups[gi].on_device = !specs_[gi].host || specs_[gi].link;
                b.base  = specs_[gi].host && !specs_[gi].link ? base : nullptr;
                b.link  = specs_[gi].link ? &link : nullptr;
                b.memory = base;
                b.write = [base](size_t offset, const void * data, size_t n) { memcpy(base + offset, data, n); };
            }
        }
    }
}

void fake_model::place_slots(int high, int low) {
    for (group_layout & g : layout.groups) {
        g.n_slots[COPY_HIGH] = high;
        g.n_slots[COPY_LOW]  = low;
    }
    place_slots();
}

const uint8_t * fake_model::truth(int layer, int expert, int copy, int proj) const {
    const slab & s = layout.layers[layer].src[copy][proj];
    return files[s.file].data() + s.offset + expert * s.bytes;
}

bool fake_model::holds(int layer, int expert, int copy, int slot, int proj) const {
    const int gi = layout.layers[layer].group;
    const group_layout & g = layout.groups[gi];
    if (slot < 0 || slot >= g.n_slots[copy]) {
        return false;
    }
    size_t at = 0; // banks of the groups before
    for (int i = 0; i < gi; ++i) {
        at += N_COPIES * layout.groups[i].n_proj;
    }
    at += copy * g.n_proj + proj;
    const size_t n = g.proj_bytes[copy][proj];
    return memcmp(banks[at]->data() + slot * n, truth(layer, expert, copy, proj), n) == 0;
}

bool fake_model::holds_part(int layer, int expert, int copy, int slot, int proj, int units) const {
    const int gi = layout.layers[layer].group;
    const group_layout & g = layout.groups[gi];
    const uint8_t * is   = (const uint8_t *) g.banks[copy][proj].memory + (size_t) slot * g.proj_bytes[copy][proj];
    const uint8_t * want = truth(layer, expert, copy, proj);
    const size_t pieces = proj + 1 == g.n_proj ? g.proj_bytes[copy][proj] / g.row_bytes[copy][proj] : g.n_parts[proj];
    const size_t stride = g.proj_bytes[copy][proj] / pieces;
    for (size_t i = 0; i < pieces; ++i) {
        if (memcmp(is + i * stride, want + i * stride, stride / g.n_units * units) != 0) {
            return false;
        }
    }
    return true;
}

void fake_link::copy(const bank & to, size_t offset, const uint8_t * from, size_t n, size_t rows, size_t stride_to, size_t stride_from) {
    for (size_t i = 0; i < rows; ++i) {
        queue_.push_back({ (uint8_t *) to.memory + offset + i * stride_to, from + i * stride_from, n, tickets_ + 1 });
    }
    marked_ = false;
}

uint64_t fake_link::mark() {
    tickets_ += !marked_;
    marked_ = true;
    return tickets_;
}

void fake_link::before(void *, uint64_t ticket) {
    for (; !queue_.empty() && queue_.front().ticket <= ticket; queue_.pop_front()) {
        memcpy(queue_.front().to, queue_.front().from, queue_.front().n);
    }
}

void fake_link::wait(uint64_t ticket) {
    n_waits++;
    before(nullptr, ticket);
}

fake_model::place fake_model::whose(int file, uint64_t offset) const {
    for (size_t i = 0; i < layout.layers.size(); ++i) {
        const layer_layout & l = layout.layers[i];
        for (int p = 0; p < layout.groups[l.group].n_proj; ++p) {
            const slab & s = l.src[file][p];
            if (offset >= s.offset && offset < s.offset + s.bytes * l.n_expert) {
                return { (int) i, (int) ((offset - s.offset) / s.bytes), file, p };
            }
        }
    }
    return { -1, -1, -1, -1 };
}

std::string fake_storage::read(int file, uint64_t offset, size_t n, uint8_t * dst, uint8_t *) {
    if (before) {
        const std::string err = before(model_.whose(file, offset));
        if (!err.empty()) {
            return err;
        }
    }
    const std::vector<uint8_t> & f = model_.files[file];
    if (offset + n > f.size()) {
        return "past the end";
    }
    memcpy(dst, f.data() + offset, n);
    n_reads++;
    n_bytes += n;
    return "";
}

hobbit_params test_params(float t1, float t2, int policy) {
    hobbit_params p = {};
    p.t1     = t1;
    p.t2     = t2;
    p.policy = policy;
    p.prefetch_prompts = 1;
    for (float & w : p.policy_weights) {
        w = 0.25f;
    }
    p.budget_kind  = HOBBIT_BUDGET_MIN;
    p.n_io_threads = 2;
    p.cpu_batch    = 8;
    p.skip_mass    = 1.0f;
    return p;
}
