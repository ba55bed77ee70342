#include "trace.h"

#include "shape.h"

#include <cerrno>
#include <cstring>
#include <unistd.h>

namespace hob {

// .npy version 1.0: magic, header length, a Python dict padded with blanks. The length is fixed, so that
// the number of rows can be filled in at the end.
static std::string npy_header(const std::string & fields, uint64_t n) {
    constexpr size_t SIZE = 256;
    std::string dict = "{'descr': [" + fields + "], 'fortran_order': False, 'shape': (" + std::to_string(n) + ",), }";
    dict.resize(SIZE - 10 - 1, ' ');
    dict += '\n';
    std::string h("\x93NUMPY\x01\x00", 8);
    h += (char) (dict.size() & 0xff);
    h += (char) (dict.size() >> 8);
    return h + dict;
}

std::string trace::header() const {
    const std::string k = std::to_string(n_used_);
    return npy_header("('seq', '<i2'), ('pos', '<i4'), ('layer', '<i2'), ('expert', '<i2', (" + k + ",)), ('weight', '<f4', (" + k + ",))", rows_);
}

// struct hobbit_layer, one per layer.
static std::string layer_array(const model_layout & layout) {
    static_assert(sizeof(hobbit_layer) == 64, "as the header says");
    const std::vector<hobbit_layer> layers = shape_of(layout);
    return npy_header("('block', '<i4'), ('group', '<i4'), ('n_expert', '<i4'), ('n_expert_used', '<i4'), "
                      "('high_bytes', '<u8', (3,)), ('low_bytes', '<u8', (3,))", layers.size()) +
           std::string((const char *) layers.data(), layers.size() * sizeof(hobbit_layer));
}

std::string trace::start(const std::string & path, int n_used, const model_layout & layout) {
    if (on()) {
        return "a trace is being recorded already: stop it first";
    }
    path_      = path;
    temporary_ = path + ".tmp-" + std::to_string(getpid());
    n_used_    = n_used;
    rows_      = 0;
    bad_       = false;
    row_.assign(trace_row_bytes(n_used), '\0');
    layers_ = layer_array(layout);
    file_ = fopen(temporary_.c_str(), "wb");
    if (!file_) {
        return temporary_ + ": cannot create: " + strerror(errno);
    }
    const std::string h = header();
    bad_ = fwrite(h.data(), 1, h.size(), file_) != h.size();
    return "";
}

void trace::add(int32_t seq, int32_t pos, int32_t layer, const int32_t * experts, const float * weights, int n_used) {
    char * p = &row_[0];
    const auto put2 = [&p](int32_t v) { const int16_t x = (int16_t) v; memcpy(p, &x, 2); p += 2; };
    const auto put4 = [&p](const void * v) { memcpy(p, v, 4); p += 4; };
    put2(seq);
    put4(&pos);
    put2(layer);
    const float no_weight = 0.0f;
    for (int r = 0; r < n_used_; ++r) {
        put2(r < n_used ? experts[r] : -1);
    }
    for (int r = 0; r < n_used_; ++r) {
        put4(r < n_used ? &weights[r] : &no_weight);
    }
    bad_ = fwrite(row_.data(), 1, row_.size(), file_) != row_.size() || bad_;
    rows_++;
}

void trace_row::read(const char * from, int n_used) {
    const auto get2 = [&from] { int16_t x; memcpy(&x, from, 2); from += 2; return (int32_t) x; };
    const auto get4 = [&from](void * v) { memcpy(v, from, 4); from += 4; };
    experts.resize(n_used);
    weights.resize(n_used);
    seq = get2();
    get4(&pos);
    layer = get2();
    for (int32_t & e : experts) {
        e = get2();
    }
    for (float & w : weights) {
        get4(&w);
    }
}

std::string trace::stop() {
    if (!on()) {
        return "no trace is being recorded";
    }
    bad_ = fwrite(layers_.data(), 1, layers_.size(), file_) != layers_.size() || bad_;
    const std::string h = header();
    bad_ = fseek(file_, 0, SEEK_SET) != 0 || fwrite(h.data(), 1, h.size(), file_) != h.size() || bad_;
    bad_ = fclose(file_) != 0 || bad_;
    file_ = nullptr;
    if (!bad_ && rename(temporary_.c_str(), path_.c_str()) == 0) {
        return "";
    }
    const std::string why = strerror(errno);
    remove(temporary_.c_str());
    return path_ + ": the trace could not be written: " + why;
}

} // namespace hob
