#include "storage.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <deque>
#include <fcntl.h>
#include <functional>
#include <mutex>
#include <new>
#include <stdexcept>
#include <stdlib.h>
#include <string_view>
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

// Is the file still the one that was opened? Its first bytes tell, which hold the pair's id.
constexpr size_t HEAD_BYTES = 65536;

struct open_file {
    std::string       path;
    int               fd = -1;
    std::atomic<bool> direct{ false };
    std::mutex        mutex; // of what follows
    timespec          written = {};
    size_t            head    = 0; // hash of the first bytes
};

std::string failed(const open_file & f, size_t n, uint64_t offset, const std::string & why) {
    return f.path + ": reading " + std::to_string(n) + " bytes at offset " + std::to_string(offset) + " failed: " + why;
}

// pread until n bytes are there or at least need of them: a direct read that crosses the end of the
// file returns short.
std::string read_fully(open_file & f, uint8_t * dst, size_t n, size_t need, uint64_t offset) {
    size_t done = 0;
    while (done < need) {
        const bool direct = f.direct; // another thread may end that while this one reads
        const ssize_t r = pread(f.fd, dst + done, n - done, (off_t) (offset + done));
        if (r > 0) {
            done += (size_t) r;
        } else if (r == 0) {
            return failed(f, need, offset, "the file ends after " + std::to_string(offset + done) + " bytes");
        } else if (errno == EINVAL && direct) { // its file system wants more than IO_ALIGN, or an odd number of bytes came
#ifdef O_DIRECT
            fcntl(f.fd, F_SETFL, fcntl(f.fd, F_GETFL) & ~O_DIRECT);
#endif
            f.direct = false;
        } else if (errno != EINTR) {
            return failed(f, need, offset, strerror(errno));
        }
    }
    return "";
}

timespec written_at(const struct stat & st) {
#ifdef __APPLE__
    return st.st_mtimespec;
#else
    return st.st_mtim;
#endif
}

size_t hash_of_head(open_file & f, size_t size, std::string & err) {
    const size_t n = std::min(size, HEAD_BYTES);
    aligned_buffer head(HEAD_BYTES);
    err = read_fully(f, head.data(), HEAD_BYTES, n, 0);
    return std::hash<std::string_view>()(std::string_view((const char *) head.data(), n));
}

class file_storage : public storage {
  public:
    file_storage(const std::vector<std::string> & paths, bool direct_io) {
        for (const std::string & path : paths) {
            open_one(path, direct_io);
        }
    }

    ~file_storage() override {
        for (open_file & f : files_) {
            if (f.fd >= 0) {
                close(f.fd);
            }
        }
    }

    bool direct() const override {
        return !files_.empty() && std::all_of(files_.begin(), files_.end(), [](const open_file & f) { return f.direct.load(); });
    }

    std::string read(int file, uint64_t offset, size_t n, uint8_t * dst, uint8_t * scratch) override {
        open_file & f = files_[file];
        std::string err;
        if (!f.direct || (aligned(offset) && aligned(n) && aligned((uintptr_t) dst))) {
            err = read_fully(f, dst, n, n, offset);
        } else {
            const uint64_t first = offset - offset % IO_ALIGN;
            const uint64_t last  = (offset + n + IO_ALIGN - 1) / IO_ALIGN * IO_ALIGN;
            const size_t   skip  = (size_t) (offset - first);
            err = read_fully(f, scratch, (size_t) (last - first), skip + n, first);
            if (err.empty()) {
                memcpy(dst, scratch + skip, n);
            }
        }
        return err.empty() ? check(f) : err;
    }

  private:
    void open_one(const std::string & path, bool direct_io) {
        open_file & f = files_.emplace_back();
        f.path = path;
#ifdef O_DIRECT
        if (direct_io) {
            f.fd     = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
            f.direct = f.fd >= 0;
        }
#endif
        if (f.fd < 0) {
            f.fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
        }
        struct stat st;
        std::string err;
        if (f.fd < 0 || fstat(f.fd, &st) != 0) {
            err = path + ": cannot open: " + strerror(errno);
        } else {
            f.written = written_at(st);
            f.head    = hash_of_head(f, (size_t) st.st_size, err);
        }
        if (!err.empty()) {
            for (const open_file & x : files_) {
                if (x.fd >= 0) {
                    close(x.fd);
                }
            }
            throw std::runtime_error(err);
        }
    }

    // After a read: what it gave is of the file as it was opened.
    static std::string check(open_file & f) {
        struct stat st;
        if (fstat(f.fd, &st) != 0) {
            return f.path + ": " + strerror(errno);
        }
        const timespec now = written_at(st);
        std::lock_guard<std::mutex> lock(f.mutex);
        if (now.tv_sec == f.written.tv_sec && now.tv_nsec == f.written.tv_nsec) {
            return "";
        }
        std::string err;
        const size_t head = hash_of_head(f, (size_t) st.st_size, err);
        if (err.empty() && head != f.head) {
            err = f.path + ": the file was overwritten with another while it was in use: load the model again";
        }
        if (err.empty()) {
            f.written = now;
        }
        return err;
    }

    std::deque<open_file> files_;
};

} // namespace

std::unique_ptr<storage> open_files(const std::vector<std::string> & paths, bool direct_io) {
    return std::make_unique<file_storage>(paths, direct_io);
}

} // namespace hob
