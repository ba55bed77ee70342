// gpu_run.cpp - load a model in one configuration and time prompts and decoding; one JSON line a measurement.
//
// One source for both sides, against the llama.h of each: with -DHOBBIT our library, with -DMOE_CACHE a llama.cpp
// that has an expert cache. benchmarks/gpu.py builds and runs it. Tokens are the same in every run.
//
//   gpu_run MODEL name=NAME [key=value ...]
//     both     ngl=99 threads=16 ubatch=512 prompts=512,4096 batches= decode=24 rounds=5 fa=0 kv8=0 tokens=random|ids
//              ids: the token's id is its position, as gguf_tools.synth --like wants it
//     llama    ncmoe=0 moe_cache_mib=0
//     hobbit   cache=0.25 (share of the experts) or cache_bytes=N, t=0.6/0.9,1/1  miss=fetch|cpu|auto  cpu_batch=8 low=0 io=4

#include "ggml-backend.h"
#include "llama.h"
#ifdef HOBBIT
#    include "hobbit.h"
#endif

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <list>
#include <map>
#include <random>
#include <sstream>
#include <string>
#include <vector>

static std::map<std::string, std::string> arg;

static std::string text(const char * key, const char * otherwise) { return arg.count(key) ? arg[key] : otherwise; }
static double number(const char * key, double otherwise) { return arg.count(key) ? atof(arg[key].c_str()) : otherwise; }

static std::vector<std::string> list(const std::string & s, char by) {
    std::vector<std::string> out;
    std::stringstream in(s);
    for (std::string x; std::getline(in, x, by);) {
        out.push_back(x);
    }
    return out;
}

static double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

static double median(std::vector<double> x) {
    std::sort(x.begin(), x.end());
    return x.empty() ? 0.0 : x.size() % 2 ? x[x.size() / 2] : 0.5 * (x[x.size() / 2 - 1] + x[x.size() / 2]);
}

static double used_mib() { // of all GPUs, by everybody
    double used = 0.0;
    for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
        ggml_backend_dev_t dev = ggml_backend_dev_get(i);
        size_t free, total;
        if (ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_GPU) {
            ggml_backend_dev_memory(dev, &free, &total);
            used += (double) (total - free) / 1048576.0;
        }
    }
    return used;
}

static llama_context * ctx;
static std::mt19937 rng(1);
static int n_vocab;
static bool by_position;

static void run(int n, int at, bool all = false) { // all: a result for each
    std::vector<llama_token> tokens(n);
    for (int i = 0; i < n; ++i) {
        tokens[i] = by_position ? (at + i) % n_vocab : 300 + (llama_token) (rng() % (unsigned) (n_vocab - 400));
    }
    llama_batch b = llama_batch_init(n, 0, 1);
    b.n_tokens = n;
    for (int i = 0; i < n; ++i) {
        b.token[i]     = tokens[i];
        b.pos[i]       = at + i;
        b.n_seq_id[i]  = 1;
        b.seq_id[i][0] = 0;
        b.logits[i]    = all || i + 1 == n;
    }
    if (llama_decode(ctx, b) != 0) {
        fprintf(stderr, "gpu_run: decode failed\n");
        exit(1);
    }
    llama_synchronize(ctx);
    llama_batch_free(b);
}

static void forget() { llama_memory_clear(llama_get_memory(ctx), false); }

static void quiet(ggml_log_level level, const char * line, void *) {
    if (level == GGML_LOG_LEVEL_ERROR || level == GGML_LOG_LEVEL_WARN || (getenv("GPU_RUN_VERBOSE") && strstr(line, "hobbit"))) {
        fputs(line, stderr);
    }
}

int main(int argc, char ** argv) {
    if (argc < 2) {
        fprintf(stderr, "usage: gpu_run MODEL name=NAME [key=value ...]; the source says more\n");
        return 2;
    }
    for (int i = 2; i < argc; ++i) {
        const char * eq = strchr(argv[i], '=');
        if (!eq) {
            fprintf(stderr, "gpu_run: %s is not key=value\n", argv[i]);
            return 2;
        }
        arg[std::string(argv[i], eq - argv[i])] = eq + 1;
    }
    by_position = text("tokens", "random") == "ids";
    llama_log_set(quiet, nullptr);
    llama_backend_init();
    const double idle_mib = used_mib();

    llama_model_params mp = llama_model_default_params();
    mp.n_gpu_layers = (int) number("ngl", 99);
    mp.load_mode    = LLAMA_LOAD_MODE_NONE;
    std::list<std::string> patterns;
    std::vector<llama_model_tensor_buft_override> overrides;
    for (int i = 0; i < (int) number("ncmoe", 0); ++i) {
        patterns.push_back("blk\\." + std::to_string(i) + "\\.ffn_(up|down|gate|gate_up)_(ch|)exps");
        overrides.push_back({ patterns.back().c_str(), ggml_backend_cpu_buffer_type() });
    }
    overrides.push_back({ nullptr, nullptr });
    mp.tensor_buft_overrides = overrides.data();
#ifdef HOBBIT
    hobbit_params hp;
    hobbit_default_params(&hp);
    hp.cache_fraction = number("cache", 0.25);
    if (arg.count("cache_bytes")) {
        hp.budget_kind = HOBBIT_BUDGET_AT_LEAST;
        hp.cache_bytes = strtoull(arg["cache_bytes"].c_str(), nullptr, 10);
    }
    const std::string miss = text("miss", "auto");
    hp.miss         = miss == "fetch" ? HOBBIT_MISS_FETCH : miss == "cpu" ? HOBBIT_MISS_CPU : HOBBIT_MISS_AUTO;
    hp.low_fraction = (float) number("low", 0.0);
    hp.n_io_threads = (int) number("io", 4);
    hp.host_copies  = (int) number("host", HOBBIT_HOST_AUTO);
    hp.cpu_batch    = (int) number("cpu_batch", hp.cpu_batch);
    hp.preload      = (int) number("preload", hp.preload);
    hp.admit        = (int) number("admit", hp.admit);
    hp.t2           = 1.0f;
    if (hobbit_set_load_params(&hp) != 0) {
        fprintf(stderr, "gpu_run: %s\n", hobbit_last_error());
        return 1;
    }
#endif
    const double t_load = now();
    llama_model * model = llama_model_load_from_file(argv[1], mp);
    if (!model) {
#ifdef HOBBIT
        fprintf(stderr, "gpu_run: %s\n", hobbit_last_error());
#endif
        return 1;
    }
    n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    const double load_s = now() - t_load;

    std::vector<int> prompts;
    for (const std::string & n : list(text("prompts", "512,4096"), ',')) {
        prompts.push_back(atoi(n.c_str()));
    }
    const int decode = (int) number("decode", 24);
    const int rounds = (int) number("rounds", 5);

    llama_context_params cp = llama_context_default_params();
    cp.n_ctx   = std::max(prompts.empty() ? 0 : *std::max_element(prompts.begin(), prompts.end()), 64 + std::max(decode * rounds, 12 * 64) + 64) + 64;
    cp.n_batch = cp.n_ctx;
    cp.n_ubatch = (uint32_t) number("ubatch", 512);
    cp.n_threads = cp.n_threads_batch = (int) number("threads", 16);
    cp.flash_attn_type = number("fa", 0) ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    if (number("kv8", 0)) {
        cp.type_k = cp.type_v = GGML_TYPE_Q8_0;
    }
#ifdef MOE_CACHE
    cp.moe_cache_size = (size_t) number("moe_cache_mib", 0) * 1048576;
#endif
    ctx = llama_init_from_model(model, cp);
    if (!ctx) {
        fprintf(stderr, "gpu_run: no context\n");
        return 1;
    }

    std::vector<std::pair<float, float>> thresholds = { { 0.0f, 0.0f } };
#ifdef HOBBIT
    hobbit * h = hobbit_from_model(model);
    thresholds.clear();
    for (const std::string & t : list(text("t", "0.6/0.9"), ',')) {
        const auto x = list(t, '/');
        thresholds.push_back({ (float) atof(x[0].c_str()), (float) atof(x[1].c_str()) });
    }
#endif
    bool first = true;
    for (const auto & [t1, t2] : thresholds) {
        printf("{\"name\": \"%s\", \"load_s\": %.1f", text("name", "run").c_str(), load_s);
#ifdef HOBBIT
        if (h) {
            hobbit_set_thresholds(h, t1, t2);
        }
        printf(", \"t1\": %g, \"t2\": %g", t1, t2);
#endif
        for (int n : prompts) {
            std::vector<double> s;
            const int times = n > 1024 ? 1 : 3;
            for (int i = 0; i < times + first; ++i) {
                rng.seed(n);
                forget();
#ifdef HOBBIT
                if (h) {
                    hobbit_reset_stats(h);
                }
#endif
                const double t0 = now();
                run(n, 0);
                if (i > 0 || !first) {
                    s.push_back(now() - t0);
                }
            }
            printf(", \"prompt_%d\": %.2f", n, n / median(s));
#ifdef HOBBIT
            if (h) { // of the last one
                hobbit_stats st;
                hobbit_get_stats(h, &st);
                printf(", \"prompt_%d_mb\": %.0f", n, st.bytes_read / 1e6);
            }
#endif
        }
        first = false;
        for (const std::string & x : list(text("batches", ""), ',')) { // tokens a second of short batches
            const int n = atoi(x.c_str());
            std::vector<double> s;
            rng.seed(n);
            forget();
            run(64, 0);
            for (int i = 0; i < 12; ++i) {
                const double t0 = now();
                run(n, 64 + i * n, true);
                s.push_back(now() - t0);
            }
            printf(", \"batch_%d\": %.2f", n, n / median(s));
        }
        rng.seed(7);
        forget();
        run(64, 0);
        int at = 64;
        for (int i = 0; i < 32; ++i) { // warm up, and let the shares settle
            run(1, at++);
        }
#ifdef HOBBIT
        if (h) {
            hobbit_reset_stats(h);
        }
#endif
        std::vector<double> s;
        for (int r = 0; r < rounds; ++r) {
            const double t0 = now();
            for (int i = 0; i < decode; ++i) {
                run(1, at++);
            }
            s.push_back(decode / (now() - t0));
        }
        printf(", \"decode\": %.2f, \"decode_min\": %.2f, \"decode_max\": %.2f, \"gpu_mib\": %.0f", median(s), *std::min_element(s.begin(), s.end()),
               *std::max_element(s.begin(), s.end()), used_mib() - idle_mib);
#ifdef HOBBIT
        if (h) {
            hobbit_stats st;
            hobbit_info  in;
            hobbit_get_stats(h, &st);
            hobbit_get_info(h, &in);
            const double n = decode * rounds;
            const double R = (double) st.requests;
            printf(", \"wanted\": [%.3f, %.3f, %.3f], \"hits\": %.3f, \"link_mb\": %.2f, \"cpu_mb\": %.2f, \"cpu_ms\": %.3f, \"wait_ms\": %.3f, \"plan_ms\": %.3f, "
                   "\"other_ms\": %.3f, \"link_gbs\": %.1f, \"cpu_gbs\": %.1f, \"prefetch_mb\": %.2f, \"pinned\": %d",
                   st.wanted_high / R, st.wanted_low / R, st.wanted_skip / R, (st.hits_high + st.hits_low) / R, st.bytes_read / n / 1e6, st.bytes_cpu / n / 1e6,
                   st.cpu_us / n / 1e3, st.wait_us / n / 1e3, st.plan_us / n / 1e3, (st.compute_us - st.cpu_us) / n / 1e3, in.link_speed / 1e9,
                   in.cpu_speed / 1e9, st.bytes_prefetch / n / 1e6, in.host_pinned);
        }
#endif
        printf("}\n");
        fflush(stdout);
    }
    llama_free(ctx);
    llama_model_free(model);
    llama_backend_free();
    return 0;
}
