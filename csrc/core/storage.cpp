#include "storage.h"

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <new>
#include <stdexcept>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

namespace hob {

aligned_buffer::aligned_buffer(size_t size) {
    void * p = nullptr;
    if (posix_memalign(&p, IO_ALIGN, size) != 0) {
        throw std::bad_alloc();
    }
    data_ = (uint8_t *) p;
}

aligned_buffer::~aligned_buffer() { free(data_); }

namespace {

bool aligned(uint64_t x) { return x % IO_ALIGN == 0; }

// pread until n bytes are there or at least need of them: a direct read that crosses the end of the
// file returns short.
std::string read_fully(int fd, const std::string & path, uint8_t * dst, size_t n, size_t need, uint64_t offset) {
    size_t done = 0;
    while (done < need) {
        const ssize_t r = pread(fd, dst + done, n - done, (off_t) (offset + done));
        if (r > 0) {
            done += (size_t) r;
        } else if (r == 0) {
            return path + ": reading " + std::to_string(need) + " bytes at offset " + std::to_string(offset) +
                   " failed: the file ends after " + std::to_string(offset + done) + " bytes";
        } else if (errno != EINTR) {
            return path + ": reading " + std::to_string(need) + " bytes at offset " + std::to_string(offset) +
                   " failed: " + strerror(errno);
        }
    }
    return "";
}

class file_storage : public storage {
  public:
    file_storage(const std::vector<std::string> & paths, bool direct_io) : paths_(paths) {
        direct_ = direct_io && !paths.empty();
        for (const std::string & path : paths) {
            int fd = -1;
            bool fd_direct = false;
#ifdef O_DIRECT
            if (direct_io) {
                fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
                fd_direct = fd >= 0;
            }
#endif
            if (fd < 0) {
                fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
            }
            if (fd < 0) {
                const std::string why = strerror(errno);
                close_all();
                throw std::runtime_error(path + ": cannot open: " + why);
            }
            direct_ = direct_ && fd_direct;
            fds_.push_back({ fd, fd_direct });
        }
    }

    ~file_storage() override { close_all(); }

    bool direct() const override { return direct_; }

    std::string read(int file, uint64_t offset, size_t n, uint8_t * dst, uint8_t * scratch) override {
        const auto [fd, is_direct] = fds_[file];
        if (!is_direct || (aligned(offset) && aligned(n) && aligned((uintptr_t) dst))) {
            return read_fully(fd, paths_[file], dst, n, n, offset);
        }
        const uint64_t first = offset - offset % IO_ALIGN;
        const uint64_t last  = (offset + n + IO_ALIGN - 1) / IO_ALIGN * IO_ALIGN;
        const size_t   skip  = (size_t) (offset - first);
        const std::string err = read_fully(fd, paths_[file], scratch, (size_t) (last - first), skip + n, first);
        if (err.empty()) {
            memcpy(dst, scratch + skip, n);
        }
        return err;
    }

  private:
    void close_all() {
        for (auto & f : fds_) {
            close(f.fd);
        }
        fds_.clear();
    }

    struct open_file { int fd; bool direct; };

    std::vector<std::string> paths_;
    std::vector<open_file>   fds_;
    bool direct_ = false;
};

} // namespace

std::unique_ptr<storage> open_files(const std::vector<std::string> & paths, bool direct_io) {
    return std::make_unique<file_storage>(paths, direct_io);
}

} // namespace hob
