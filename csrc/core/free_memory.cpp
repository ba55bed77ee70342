#include "free_memory.h"

#include <algorithm>
#include <fstream>
#include <sstream>
#include <vector>

namespace hob {

namespace {

constexpr uint64_t UNLIMITED = 1ull << 60; // v1 says "no limit" with a number near 2^63

// The number that a file holds; otherwise, if there is no such file or it says "max".
uint64_t number(const std::string & path, uint64_t otherwise) {
    std::ifstream f(path);
    uint64_t x;
    return f >> x ? x : otherwise;
}

// The sum of these keys in a file of lines "key number [unit]".
uint64_t sum_of(const std::string & path, const std::vector<std::string> & keys) {
    std::ifstream f(path);
    std::string line;
    uint64_t sum = 0;
    while (std::getline(f, line)) {
        std::istringstream in(line);
        std::string key;
        uint64_t x;
        if (in >> key >> x && std::find(keys.begin(), keys.end(), key) != keys.end()) {
            sum += x;
        }
    }
    return sum;
}

// What one level leaves.
uint64_t left_in(const std::string & folder, bool v2) {
    const uint64_t used = number(folder + (v2 ? "/memory.current" : "/memory.usage_in_bytes"), UNLIMITED);
    if (used >= UNLIMITED) {
        return UNLIMITED;
    }
    const std::string stat = folder + "/memory.stat";
    uint64_t limit;
    if (v2) {
        limit = std::min(number(folder + "/memory.max", UNLIMITED), number(folder + "/memory.high", UNLIMITED));
    } else {
        const uint64_t all = sum_of(stat, { "hierarchical_memory_limit" }); // covers parents that cannot be seen from here
        limit = std::min(number(folder + "/memory.limit_in_bytes", UNLIMITED), all > 0 ? all : UNLIMITED);
    }
    if (limit >= UNLIMITED) {
        return UNLIMITED;
    }
    const std::string prefix = v2 ? "" : "total_";
    const uint64_t held = used - std::min(used, sum_of(stat, { prefix + "active_file", prefix + "inactive_file" }));
    return limit - std::min(limit, held);
}

bool has(const std::string & list, const std::string & word) { return ("," + list + ",").find("," + word + ",") != std::string::npos; }

std::vector<std::string> split(const std::string & line) {
    std::istringstream in(line);
    std::vector<std::string> words;
    for (std::string w; in >> w;) {
        words.push_back(w);
    }
    return words;
}

std::vector<std::string> lines_of(const std::string & path) {
    std::ifstream f(path);
    std::vector<std::string> lines;
    for (std::string line; std::getline(f, line);) {
        lines.push_back(line);
    }
    return lines;
}

// The least that any level leaves, from the process's group up to the mount point.
uint64_t left_in_groups(const std::string & root) {
    uint64_t least = UNLIMITED;
    const std::vector<std::string> mounts = lines_of(root + "proc/self/mountinfo");
    for (const std::string & line : lines_of(root + "proc/self/cgroup")) { // ID:CONTROLLERS:PATH
        const size_t a = line.find(':'), b = line.find(':', a + 1);
        if (a == std::string::npos || b == std::string::npos) {
            continue;
        }
        const std::string controllers = line.substr(a + 1, b - a - 1), path = line.substr(b + 1);
        for (const std::string & mount : mounts) { // ID PARENT DEVICE ROOT MOUNTPOINT OPTIONS ... - TYPE SOURCE SUPEROPTIONS
            const std::vector<std::string> m = split(mount);
            const size_t dash = (size_t) (std::find(m.begin(), m.end(), "-") - m.begin());
            if (dash + 1 >= m.size() || dash < 5) {
                continue;
            }
            const bool v2 = m[dash + 1] == "cgroup2" && controllers.empty();
            const bool v1 = m[dash + 1] == "cgroup" && has(controllers, "memory") && has(m.back(), "memory");
            if (!v1 && !v2) {
                continue;
            }
            // A container may see its own subtree only; what leads out of it is the mount point itself.
            const std::string top = m[3] == "/" ? "" : m[3];
            std::string below = path.compare(0, top.size(), top) == 0 ? path.substr(top.size()) : "";
            if (below == "/" || below.compare(0, 1, "/") != 0 || below.compare(0, 3, "/..") == 0) {
                below.clear();
            }
            const std::string base = root + m[4].substr(1);
            for (;; below.erase(below.rfind('/'))) {
                least = std::min(least, left_in(base + below, v2));
                if (below.empty()) {
                    break;
                }
            }
            break;
        }
    }
    return least;
}

} // namespace

uint64_t available_memory(const std::string & root) {
    const uint64_t kib = sum_of(root + "proc/meminfo", { "MemAvailable:" });
    return kib == 0 ? 0 : std::min(kib * 1024, left_in_groups(root));
}

} // namespace hob
