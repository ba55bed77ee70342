// faulty_io.c - LD_PRELOADed into a process: reads of files whose path contains a text fail, come short, are interrupted or slow; memory
// runs out. Tests set it through ctypes; what it stands in for: pread, pread64, read, fread of the C library, and C++'s operator new.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { NONE, ERROR, SHORT, INTERRUPT, DELAY, END };

static char path_part[256];
static pthread_mutex_t path_lock = PTHREAD_MUTEX_INITIALIZER; // a read of before may still look
static _Atomic int kind, number, milliseconds, after, left;
static _Atomic long first_byte, end_byte;
static _Atomic long hits;

// kind: ERROR with errno number, SHORT (a byte less than asked, at least 1), INTERRUPT (EINTR before every read), DELAY, END (0 bytes, as
// after the end). For the reads of files with part in their path that touch [first, end), from the n_before-th on, n_times of
// them (-1: all).
void faults_set(const char * part, int new_kind, int new_number, int ms, long first, long end, int n_before, int n_times) {
    kind = NONE;
    pthread_mutex_lock(&path_lock);
    snprintf(path_part, sizeof(path_part), "%s", part);
    pthread_mutex_unlock(&path_lock);
    number = new_number;
    milliseconds = ms;
    first_byte = first;
    end_byte = end;
    after = n_before;
    left = n_times;
    hits = 0;
    kind = new_kind;
}

void faults_off(void) { kind = NONE; }

long faults_hits(void) { return hits; } // reads that a fault met

static int mine(int fd, long from, size_t n) {
    if (kind == NONE || from >= end_byte || from + (long) n <= first_byte) {
        return 0;
    }
    char link[64], path[4096];
    snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    const ssize_t length = readlink(link, path, sizeof(path) - 1);
    if (length <= 0) {
        return 0;
    }
    path[length] = 0;
    pthread_mutex_lock(&path_lock);
    const int ours = strstr(path, path_part) != NULL;
    pthread_mutex_unlock(&path_lock);
    if (!ours || after-- > 0) {
        return 0;
    }
    after = 0;
    if (left == 0) {
        return 0;
    }
    if (left > 0) {
        left--;
    }
    hits++;
    return 1;
}

// -2: go on, with *n bytes; else what the read gives
static ssize_t fault(int fd, long from, size_t * n) {
    static _Thread_local int interrupted;
    if (*n == 0 || !mine(fd, from, *n)) {
        return -2;
    }
    switch (kind) {
        case ERROR:
            errno = number;
            return -1;
        case SHORT:
            *n = *n > 4096 ? (*n - 1) / 4096 * 4096 : *n > 1 ? *n - 1 : 1; // whole pages, for direct reads
            return -2;
        case INTERRUPT:
            interrupted = !interrupted;
            if (interrupted) {
                errno = EINTR;
                return -1;
            }
            return -2;
        case DELAY:
            nanosleep(&(struct timespec) { milliseconds / 1000, milliseconds % 1000 * 1000000L }, NULL);
            return -2;
        case END:
            return 0;
    }
    return -2;
}

#define REAL(name, type) static type real; if (!real) real = (type) dlsym(RTLD_NEXT, name)

typedef ssize_t (*pread_fn)(int, void *, size_t, off_t);
typedef ssize_t (*read_fn)(int, void *, size_t);
typedef size_t (*fread_fn)(void *, size_t, size_t, FILE *);

ssize_t pread(int fd, void * to, size_t n, off_t from) {
    REAL("pread", pread_fn);
    const ssize_t r = fault(fd, from, &n);
    return r == -2 ? real(fd, to, n, from) : r;
}

ssize_t pread64(int fd, void * to, size_t n, off64_t from) {
    REAL("pread64", pread_fn);
    const ssize_t r = fault(fd, from, &n);
    return r == -2 ? real(fd, to, n, from) : r;
}

ssize_t read(int fd, void * to, size_t n) {
    REAL("read", read_fn);
    const ssize_t r = kind == NONE ? -2 : fault(fd, lseek(fd, 0, SEEK_CUR), &n);
    return r == -2 ? real(fd, to, n) : r;
}

size_t fread(void * to, size_t size, size_t count, FILE * f) {
    REAL("fread", fread_fn);
    size_t n = size * count;
    const ssize_t r = kind == NONE || kind == SHORT || kind == INTERRUPT ? -2 : fault(fileno(f), ftell(f), &n);
    return r == -2 ? real(to, size, count, f) : 0;
}

// The n-th operator new (from 1 on) of the thread that asks for it throws std::bad_alloc. 0: none does.
static _Thread_local long refused;

void memory_refuse(long n) { refused = n; }

long memory_left(void) { return refused; } // allocations until then; 0: it has been

_Noreturn void _ZSt17__throw_bad_allocv(void); // libstdc++

void * _Znwm(size_t n) { // operator new(unsigned long)
    void * p = refused > 0 && --refused == 0 ? NULL : malloc(n > 0 ? n : 1);
    if (!p) {
        _ZSt17__throw_bad_allocv();
    }
    return p;
}
