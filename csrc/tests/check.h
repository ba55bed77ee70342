// check.h - a registry of tests and the macros that they use.
//
//   TEST(name) { CHECK(x > 0); CHECK_EQ(a, b); }
//
// A failed check is printed and the test goes on; a test with a failed check has failed. Checks may be
// made from several threads.

#pragma once

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <sstream>
#include <string>
#include <vector>

namespace check {

struct test {
    const char * name;
    void (*run)();
};

std::vector<test> & tests();
extern std::atomic<int> failed_checks; // of the running test

// Set by the command line: how long the random tests are, and where they start.
extern uint32_t seed;
extern int      steps;

struct registration {
    registration(const char * name, void (*run)()) { tests().push_back({ name, run }); }
};

inline void report(const char * file, int line, const std::string & what) {
    if (failed_checks++ < 10) {
        fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
    }
}

template <class A, class B> void equal(const char * file, int line, const char * text, const A & a, const B & b) {
    if (!(a == b)) {
        std::ostringstream s;
        s << text << ": " << a << " is not " << b;
        report(file, line, s.str());
    }
}

} // namespace check

#define TEST(name)                                             \
    static void name();                                        \
    static const check::registration register_##name(#name, name); \
    static void name()

#define CHECK(x)       ((x) ? (void) 0 : check::report(__FILE__, __LINE__, #x))
#define CHECK_EQ(a, b) check::equal(__FILE__, __LINE__, #a, (a), (b))
