// The bytes of a trace file: .npy version 1.0 (docs/trace.md).

#include "check.h"
#include "trace.h"

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <unistd.h>

using namespace hob;

namespace {

struct temp_dir {
    std::string path;
    temp_dir() {
        const char * dir = getenv("TMPDIR");
        path = std::string(dir ? dir : "/tmp") + "/hobbit-core-test-XXXXXX";
        CHECK(mkdtemp(&path[0]) != nullptr);
    }
    ~temp_dir() { CHECK_EQ(rmdir(path.c_str()), 0); } // nothing may be left in it
};

std::string contents(const std::string & path) {
    std::ifstream f(path, std::ios::binary);
    return { std::istreambuf_iterator<char>(f), {} };
}

bool exists(const std::string & path) { return access(path.c_str(), F_OK) == 0; }

} // namespace

TEST(trace_bytes) {
    temp_dir dir;
    const std::string path = dir.path + "/t.npy";
    trace t;
    CHECK(!t.on());
    CHECK_EQ(t.start(path, 3), "");
    CHECK(t.on());
    CHECK(!t.start(path, 3).empty()); // one at a time
    const int32_t experts[4] = { 7, 8, 9, 10 };
    const float   weights[4] = { 0.5f, 0.25f, 0.25f, 0.0f };
    t.add(1, 20, 3, experts, weights, 2); // fewer than the file has room for
    t.add(4, 50, 6, experts, weights, 4); // more (a warm-up run)
    CHECK(!exists(path)); // appears when it is complete
    CHECK_EQ(t.stop(), "");
    CHECK(!t.on());
    CHECK(!t.stop().empty());

    const std::string f = contents(path);
    CHECK_EQ(f.size(), 256u + 2 * 9 * 4);
    CHECK_EQ(f.substr(0, 10), std::string("\x93NUMPY\x01\x00\xf6\x00", 10)); // 246 bytes of header follow
    const std::string dict = f.substr(10, 246);
    CHECK_EQ(dict.find("{'descr': [('seq', '<i4'), ('pos', '<i4'), ('layer', '<i4'), ('expert', '<i4', (3,)), ('weight', '<f4', (3,))], "
                       "'fortran_order': False, 'shape': (2,), }"), 0u);
    CHECK_EQ(dict.back(), '\n');
    int32_t row[9];
    memcpy(row, f.data() + 256, sizeof(row));
    const int32_t expected[6] = { 1, 20, 3, 7, 8, -1 };
    CHECK(memcmp(row, expected, sizeof(expected)) == 0);
    const float expected_w[3] = { 0.5f, 0.25f, 0.0f };
    CHECK(memcmp(row + 6, expected_w, sizeof(expected_w)) == 0);
    memcpy(row, f.data() + 256 + 36, sizeof(row));
    CHECK_EQ(row[2], 6);
    CHECK_EQ(row[5], 9);
    unlink(path.c_str());
}

TEST(trace_is_completed_by_the_destructor) {
    temp_dir dir;
    const std::string path = dir.path + "/t.npy";
    {
        trace t;
        CHECK_EQ(t.start(path, 1), "");
    }
    CHECK_EQ(contents(path).size(), 256u); // no rows is a trace, too
    unlink(path.c_str());
}

TEST(trace_where_nothing_can_be_written) {
    trace t;
    const std::string err = t.start("/nonexistent-folder/t.npy", 2);
    CHECK(err.find("/nonexistent-folder/") != std::string::npos);
    CHECK(!t.on());
    {
        temp_dir dir;
        // the name is taken by a folder that is not empty: the rename fails
        const std::string path = dir.path + "/t.npy";
        CHECK_EQ(system(("mkdir -p " + path + "/x").c_str()), 0);
        CHECK_EQ(t.start(path, 2), "");
        CHECK(!t.stop().empty());
        CHECK_EQ(system(("rm -r " + path).c_str()), 0);
    }
}
