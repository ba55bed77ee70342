// hobbit-core-tests [--seed N] [--steps N] [PART-OF-A-NAME]...
//
// Runs all tests, or those whose name contains one of the arguments. --steps is the length of the random
// tests: short by default, long for a night.

#include "check.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace check {

std::vector<test> & tests() {
    static std::vector<test> all;
    return all;
}

std::atomic<int> failed_checks{ 0 };
uint32_t seed  = 1;
int      steps = 150;

void report(const char * file, int line, const std::string & what) {
    if (failed_checks++ < 10) {
        fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
    }
}

void failed(const char * file, int line, const char * what) { report(file, line, what); }

std::string text(long long x) { return std::to_string(x); }
std::string text(unsigned long long x) { return std::to_string(x); }
std::string text(double x) { return std::to_string(x); }
std::string text(const std::string & x) { return x; }

void unequal(const char * file, int line, const char * what, const std::string & a, const std::string & b) {
    report(file, line, std::string(what) + ": " + a + " is not " + b);
}

} // namespace check

int main(int argc, char ** argv) {
    std::vector<const char *> wanted;
    for (int i = 1; i < argc; ++i) {
        if (i + 1 < argc && strcmp(argv[i], "--seed") == 0) {
            check::seed = (uint32_t) strtoul(argv[++i], nullptr, 10);
        } else if (i + 1 < argc && strcmp(argv[i], "--steps") == 0) {
            check::steps = atoi(argv[++i]);
        } else {
            wanted.push_back(argv[i]);
        }
    }
    int passed = 0;
    int failed = 0;
    for (const check::test & t : check::tests()) {
        bool run = wanted.empty();
        for (const char * w : wanted) {
            run = run || strstr(t.name, w);
        }
        if (!run) {
            continue;
        }
        check::failed_checks = 0;
        t.run();
        if (check::failed_checks > 0) {
            printf("FAILED %s: %d checks (seed %u)\n", t.name, check::failed_checks.load(), check::seed);
            failed++;
        } else {
            passed++;
        }
        fflush(stdout);
    }
    printf("%d passed, %d failed\n", passed, failed);
    return failed > 0 || passed == 0;
}
