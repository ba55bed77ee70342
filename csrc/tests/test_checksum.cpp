// CRC-32, and reads that are compared with it.

#include "check.h"
#include "checksum.h"

#include <cstring>

using namespace hob;

namespace {

struct memory : storage {
    std::vector<uint8_t> bytes;
    std::string read(int, uint64_t offset, size_t n, uint8_t * dst, uint8_t *) override {
        if (offset + n > bytes.size()) {
            return "past the end";
        }
        memcpy(dst, bytes.data() + offset, n);
        return "";
    }
    bool direct() const override { return false; }
};

bool has(const std::string & text, const char * part) { return text.find(part) != std::string::npos; }

} // namespace

TEST(crc32_has_the_known_values) {
    const auto of = [](const char * s) { return crc32((const uint8_t *) s, strlen(s)); };
    CHECK_EQ(of(""), 0u);
    CHECK_EQ(of("a"), 0xE8B7BE43u);
    CHECK_EQ(of("123456789"), 0xCBF43926u); // the check value of the catalogue of CRCs
    CHECK_EQ(of("The quick brown fox jumps over the lazy dog"), 0x414FA339u);
    std::vector<uint8_t> zeros(32, 0), ones(32, 0xff);
    CHECK_EQ(crc32(zeros.data(), 32), 0x190A55ADu);
    CHECK_EQ(crc32(ones.data(), 32), 0xFF6CAB0Bu);
}

TEST(damaged_chunks_are_errors) {
    const size_t first = 1000, bytes = IO_CHUNK + 5000; // two experts of two chunks each
    auto m = std::make_unique<memory>();
    m->bytes.resize(first + 2 * bytes + 100);
    for (size_t i = 0; i < m->bytes.size(); ++i) {
        m->bytes[i] = (uint8_t) (i * 7 + i / 251);
    }
    checked_range r = { "x.high", 0, first, bytes, {} };
    for (size_t e = 0; e < 2; ++e) {
        r.values.push_back(crc32(&m->bytes[first + e * bytes], IO_CHUNK));
        r.values.push_back(crc32(&m->bytes[first + e * bytes + IO_CHUNK], 5000));
    }
    memory * files = m.get();
    const auto s = check_reads(std::move(m), { "file" }, { r });
    std::vector<uint8_t> to(IO_CHUNK);
    const auto read = [&](uint64_t offset, size_t n) { return s->read(0, offset, n, to.data(), nullptr); };
    for (size_t e = 0; e < 2; ++e) {
        CHECK_EQ(read(first + e * bytes, IO_CHUNK), "");
        CHECK_EQ(read(first + e * bytes + IO_CHUNK, 5000), "");
    }
    // nothing passes that could not be compared
    CHECK(has(read(first, 5000), "no checksum"));
    CHECK(has(read(first + 1, IO_CHUNK), "no checksum"));
    CHECK(has(read(0, 100), "no checksum"));
    CHECK(has(read(first + 2 * bytes, 100), "no checksum"));
    CHECK(has(read(first + 2 * bytes, IO_CHUNK), "past the end"));

    files->bytes[first + bytes + IO_CHUNK + 17] ^= 4;
    CHECK_EQ(read(first + bytes, IO_CHUNK), "");
    const std::string err = read(first + bytes + IO_CHUNK, 5000);
    CHECK(has(err, "file: damaged: x.high, expert 1: 5000 bytes at offset"));
}
