// See common.h.
#pragma once

#include "ggml.h"

#include <cstdio>

enum { LOG_LEVEL_ERROR, LOG_LEVEL_DEBUG };

#define LOG(...)     printf(__VA_ARGS__)
#define LOG_INF(...) printf(__VA_ARGS__)
#define LOG_ERR(...) fprintf(stderr, __VA_ARGS__)

inline int    common_log_get_verbosity(ggml_log_level) { return LOG_LEVEL_ERROR; }
inline void   common_log_set_verbosity_thold(int) {}
inline void * common_log_main() { return nullptr; }
inline void   common_log_flush(void *) {}
