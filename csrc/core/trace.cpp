#include "trace.h"

#include <cerrno>
#include <cstring>
#include <unistd.h>

namespace hob {

// .npy version 1.0: magic, header length, a Python dict padded with blanks. The length is fixed, so that
// the number of rows can be filled in at the end.
std::string trace::header() const {
    constexpr size_t SIZE = 256;
    const std::string k = std::to_string(n_used_);
    std::string dict = "{'descr': [('seq', '<i4'), ('pos', '<i4'), ('layer', '<i4'), ('expert', '<i4', (" + k + ",)), ('weight', '<f4', (" + k +
                       ",))], 'fortran_order': False, 'shape': (" + std::to_string(rows_) + ",), }";
    dict.resize(SIZE - 10 - 1, ' ');
    dict += '\n';
    std::string h("\x93NUMPY\x01\x00", 8);
    h += (char) (dict.size() & 0xff);
    h += (char) (dict.size() >> 8);
    return h + dict;
}

std::string trace::start(const std::string & path, int n_used) {
    if (on()) {
        return "a trace is being recorded already: stop it first";
    }
    path_      = path;
    temporary_ = path + ".tmp-" + std::to_string(getpid());
    n_used_    = n_used;
    rows_      = 0;
    bad_       = false;
    row_.assign((3 + 2 * (size_t) n_used) * 4, '\0');
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
    const auto put = [&p](const void * v) { memcpy(p, v, 4); p += 4; };
    put(&seq);
    put(&pos);
    put(&layer);
    const int32_t no_expert = -1;
    const float   no_weight = 0.0f;
    for (int r = 0; r < n_used_; ++r) {
        put(r < n_used ? &experts[r] : &no_expert);
    }
    for (int r = 0; r < n_used_; ++r) {
        put(r < n_used ? &weights[r] : &no_weight);
    }
    bad_ = fwrite(row_.data(), 1, row_.size(), file_) != row_.size() || bad_;
    rows_++;
}

std::string trace::stop() {
    if (!on()) {
        return "no trace is being recorded";
    }
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
