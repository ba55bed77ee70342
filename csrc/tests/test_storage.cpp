// Reading real files, through the page cache and past it.

#include "check.h"
#include "storage.h"

#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <random>
#include <stdexcept>
#include <sys/stat.h>
#include <unistd.h>

using namespace hob;

namespace {

struct temp_file {
    std::string path;
    std::vector<uint8_t> bytes;

    explicit temp_file(size_t n) {
        const char * dir = getenv("TMPDIR");
        path = std::string(dir ? dir : "/tmp") + "/hobbit-core-test-XXXXXX";
        const int fd = mkstemp(&path[0]);
        std::mt19937 rng((uint32_t) n);
        bytes.resize(n);
        for (uint8_t & b : bytes) {
            b = (uint8_t) rng();
        }
        CHECK(fd >= 0 && write(fd, bytes.data(), n) == (ssize_t) n);
        close(fd);
    }
    ~temp_file() { unlink(path.c_str()); }
};

// Reads one range into a buffer at `shift` from a page boundary; true if the bytes are right and nothing
// beside them was written.
bool reads(storage & s, const temp_file & f, int file, size_t offset, size_t n, size_t shift) {
    aligned_buffer scratch(storage::scratch_bytes(n));
    aligned_buffer to(shift + n + 2 * IO_ALIGN);
    uint8_t * dst = to.data() + shift;
    memset(to.data(), 0xab, shift + n + 64);
    const std::string err = s.read(file, offset, n, dst, scratch.data());
    if (!err.empty()) {
        check::report(__FILE__, __LINE__, err);
        return false;
    }
    for (size_t i = 0; i < 64; ++i) {
        if (dst[n + i] != 0xab || (i < shift && dst[-1 - (ptrdiff_t) i] != 0xab)) {
            return false;
        }
    }
    return memcmp(dst, f.bytes.data() + offset, n) == 0;
}

} // namespace

TEST(storage_reads_any_range) {
    const temp_file a(100000), b(8192); // one ends within a page
    for (bool direct : { false, true }) {
        const auto s = open_files({ a.path, b.path }, direct);
        CHECK(direct || !s->direct());
        std::mt19937 rng(5);
        for (int i = 0; i < 200; ++i) {
            const size_t offset = rng() % a.bytes.size();
            const size_t n      = 1 + rng() % (a.bytes.size() - offset);
            CHECK(reads(*s, a, 0, offset, n, rng() % 3 == 0 ? 0 : rng() % 200));
        }
        CHECK(reads(*s, a, 0, 4096, 8192, 0));                    // all aligned
        CHECK(reads(*s, a, 0, 4096, 8192, 8));                    // address not
        CHECK(reads(*s, a, 0, 0, a.bytes.size(), 0));             // to the end, within a page
        CHECK(reads(*s, a, 0, a.bytes.size() - 1, 1, 0));
        CHECK(reads(*s, b, 1, 0, 8192, 0));                       // to the end, at a page
        CHECK(reads(*s, b, 1, 8191, 1, 5));
    }
}

TEST(storage_past_the_end_says_so) {
    const temp_file a(10000);
    for (bool direct : { false, true }) {
        const auto s = open_files({ a.path }, direct);
        aligned_buffer scratch(storage::scratch_bytes(20000));
        aligned_buffer to(20000);
        for (size_t offset : { (size_t) 9000, (size_t) 8192, (size_t) 10000, (size_t) 50000 }) {
            const std::string err = s->read(0, offset, 4096, to.data(), scratch.data());
            CHECK(err.find(a.path) == 0);
            CHECK(err.find("the file ends after") != std::string::npos);
        }
        CHECK(s->read(0, 9000, 1001, to.data(), scratch.data()).find("10000 bytes") != std::string::npos);
        CHECK_EQ(s->read(0, 9000, 1000, to.data(), scratch.data()), "");
    }
}

TEST(storage_a_file_cut_short_while_open) {
    temp_file a(20000);
    const auto s = open_files({ a.path }, true);
    CHECK_EQ(truncate(a.path.c_str(), 5000), 0);
    aligned_buffer scratch(storage::scratch_bytes(8192));
    aligned_buffer to(8192);
    CHECK(s->read(0, 4096, 4096, to.data(), scratch.data()).find("the file ends after") != std::string::npos);
}

namespace {

// What a program that overwrites a file in place does. The clock of file times may be coarse: the time is set, too.
void overwrite(const temp_file & f, const std::vector<uint8_t> & bytes, int seconds) {
    const int fd = open(f.path.c_str(), O_WRONLY);
    CHECK(fd >= 0 && pwrite(fd, bytes.data(), bytes.size(), 0) == (ssize_t) bytes.size());
    const timespec times[2] = { { 1000000000 + seconds, 0 }, { 1000000000 + seconds, 0 } };
    CHECK_EQ(futimens(fd, times), 0);
    close(fd);
}

} // namespace

TEST(storage_a_file_overwritten_while_open) {
    for (bool direct : { false, true }) {
        const temp_file a(200000);
        const auto s = open_files({ a.path }, direct);
        CHECK(reads(*s, a, 0, 100000, 5000, 3));
        overwrite(a, a.bytes, 1); // with itself, as a copy that is restored
        CHECK(reads(*s, a, 0, 100000, 5000, 3));
        std::vector<uint8_t> other = a.bytes;
        other[500] ^= 1; // the first bytes are another model's
        overwrite(a, other, 2);
        aligned_buffer scratch(storage::scratch_bytes(5000)), to(5000);
        for (int i = 0; i < 2; ++i) {
            CHECK(s->read(0, 100000, 5000, to.data(), scratch.data()).find("overwritten with another while it was in use") != std::string::npos);
        }
        overwrite(a, a.bytes, 3);
        CHECK(reads(*s, a, 0, 100000, 5000, 3));
        const temp_file b(200001); // renamed over it: what is open stays what it was
        CHECK_EQ(rename(b.path.c_str(), a.path.c_str()), 0);
        CHECK(reads(*s, a, 0, 0, 200000, 0));
    }
}

TEST(storage_a_missing_file_is_named) {
    const temp_file a(10);
    for (bool direct : { false, true }) {
        std::string what;
        try {
            open_files({ a.path, a.path + ".missing" }, direct);
        } catch (const std::runtime_error & e) {
            what = e.what();
        }
        CHECK(what.find(a.path + ".missing: cannot open: ") == 0);
    }
}
