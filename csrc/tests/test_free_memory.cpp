// Memory that can still be taken, on machines made up of files.

#include "check.h"
#include "free_memory.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <sys/stat.h>
#include <unistd.h>

namespace {

const uint64_t MIB = 1024 * 1024, GIB = 1024 * MIB;

// A root folder with /proc and control groups; removed at the end.
struct machine {
    std::string root;

    machine() {
        const char * tmp = getenv("TMPDIR");
        std::string name = std::string(tmp ? tmp : "/tmp") + "/hobbit-memory-XXXXXX";
        CHECK(mkdtemp(&name[0]) != nullptr);
        root = name + "/";
        write("proc/meminfo", "MemTotal: 67108864 kB\nMemFree: 3145728 kB\nMemAvailable: 57671680 kB\n"); // 64, 3, 55 GiB
    }

    ~machine() { std::filesystem::remove_all(root); }

    void write(const std::string & path, const std::string & text) {
        for (size_t at = path.find('/'); at != std::string::npos; at = path.find('/', at + 1)) {
            mkdir((root + path.substr(0, at)).c_str(), 0755);
        }
        std::ofstream(root + path) << text;
    }

    // one level; limit "max" in v2: none
    void v2(const std::string & folder, const std::string & limit, uint64_t used, uint64_t cache) {
        write("cg/" + folder + "memory.max", limit);
        write("cg/" + folder + "memory.current", std::to_string(used));
        write("cg/" + folder + "memory.stat", "anon 5\ninactive_file " + std::to_string(cache / 2) + "\nactive_file " + std::to_string(cache - cache / 2) + "\n");
    }

    void in_v2(const std::string & path, const std::string & mounted = "/") {
        write("proc/self/cgroup", "0::" + path + "\n");
        write("proc/self/mountinfo", "22 1 0:21 / /proc rw - proc proc rw\n30 23 0:26 " + mounted + " /cg rw,nosuid - cgroup2 cgroup rw\n");
    }

    void v1(const std::string & folder, uint64_t limit, uint64_t used, uint64_t cache, uint64_t whole = 0) {
        write("cg/" + folder + "memory.limit_in_bytes", std::to_string(limit));
        write("cg/" + folder + "memory.usage_in_bytes", std::to_string(used));
        write("cg/" + folder + "memory.stat", "inactive_file 1\ntotal_inactive_file " + std::to_string(cache) + "\n" +
                                                  (whole ? "hierarchical_memory_limit " + std::to_string(whole) + "\n" : ""));
    }

    void in_v1(const std::string & path, const std::string & mounted = "/") {
        write("proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:" + path + "\n0::/\n");
        write("proc/self/mountinfo", "31 30 0:27 / /cpu rw - cgroup cgroup rw,cpu\n35 30 0:31 " + mounted + " /cg rw - cgroup cgroup rw,memory\n");
    }

    uint64_t available() const { return hob::available_memory(root); }
};

const uint64_t NONE = 9223372036854771712ull;

} // namespace

TEST(memory_without_groups) {
    machine m;
    CHECK_EQ(m.available(), 55 * GIB);
    m.write("proc/self/cgroup", "rubbish\n0::/x\n");
    m.write("proc/self/mountinfo", "rubbish\n30 23 0:26 / /cg rw - cgroup2 cgroup rw\n");
    CHECK_EQ(m.available(), 55 * GIB);
    m.write("proc/meminfo", "MemTotal: 5 kB\n");
    CHECK_EQ(m.available(), 0u);
}

TEST(memory_in_v2) {
    machine m;
    m.in_v2("/pod/box");
    m.v2("pod/box/", "max", 100 * MIB, 0);
    m.v2("pod/", std::to_string(2 * GIB), GIB, 512 * MIB);
    m.v2("", "max", 9 * GIB, 0);
    CHECK_EQ(m.available(), 2 * GIB - 512 * MIB);
    m.write("cg/pod/box/memory.high", std::to_string(GIB));
    CHECK_EQ(m.available(), GIB - 100 * MIB);
    m.v2("pod/", std::to_string(GIB), 2 * GIB, 0); // over its limit
    CHECK_EQ(m.available(), 0u);
}

TEST(memory_inside_a_container) {
    machine m;
    m.v2("", std::to_string(GIB), 0, 0);
    for (const char * path : { "/", "/../other" }) {
        m.in_v2(path);
        CHECK_EQ(m.available(), GIB);
    }
    m.in_v2("/docker/abcd", "/docker/abc"); // not below what is mounted
    CHECK_EQ(m.available(), GIB);
    m.in_v1("/docker/abc", "/docker/abc");
    m.v1("", NONE, 0, 0, 2 * GIB);
    CHECK_EQ(m.available(), 2 * GIB);
}

TEST(memory_in_v1) {
    machine m;
    m.in_v1("/pod/box");
    m.v1("pod/box/", NONE, 200 * MIB, 0);
    m.v1("pod/", GIB, 900 * MIB, 800 * MIB);
    m.v1("", NONE, 30 * GIB, 0);
    CHECK_EQ(m.available(), GIB - 100 * MIB);
}

TEST(memory_of_this_machine) {
    std::ifstream meminfo("/proc/meminfo");
    if (meminfo) {
        CHECK(hob::available_memory() > 1 * MIB);
    }
}
