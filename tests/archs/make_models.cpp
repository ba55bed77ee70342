// Writes a tiny random model of an architecture:  make_models ARCH OUT.gguf [KEY=NUMBER | KEY= ...]
// KEY= leaves the key out.
// Without arguments it lists all architectures that llama.cpp has.
//
// The metadata that an architecture needs come from the fixtures of llama.cpp's own test of architectures, which is
// included here from the pinned source. Models differ from those that it writes: more experts than a token uses,
// norms around 1 and matrices scaled by their width, so that what an expert computes reaches the logits.

#define main upstream_main
#include "test-llama-archs.cpp"
#undef main

#include "llama-model.h"

#include <algorithm>

namespace {

constexpr uint32_t N_EXPERT = 8;
constexpr uint32_t N_USED   = 3;

bool contains(const char * text, const char * part) { return strstr(text, part) != nullptr; }

void fill(ggml_tensor * t, void *) {
    uint32_t seed = 2166136261u;
    for (const char * c = t->name; *c; ++c) {
        seed = (seed ^ (uint8_t) *c) * 16777619u;
    }
    std::mt19937 gen(seed);
    std::normal_distribution<float> normal;
    const bool  norm  = (contains(t->name, "norm") && contains(t->name, ".weight")) || contains(t->name, "scale");
    const bool  decay = contains(t->name, "ssm_a"); // must be negative
    const float scale = ggml_n_dims(t) < 2 || norm || decay ? 0.1f
                      : contains(t->name, "ffn_gate_inp.") ? 2.0f / std::sqrt((float) t->ne[0]) // choices that are no ties
                      : 1.0f / std::sqrt((float) t->ne[0]);
    std::vector<float> x(ggml_nelements(t));
    for (float & v : x) {
        v = scale * normal(gen);
        v = norm ? 1.0f + v : decay ? -std::fabs(v) : v;
    }
    if (t->type != GGML_TYPE_F32) {
        throw std::runtime_error(std::string(t->name) + " is not f32");
    }
    ggml_backend_tensor_set(t, x.data(), 0, ggml_nbytes(t));
}

// The same metadata under the name of another architecture.
gguf_context_ptr renamed(gguf_context * from, const std::string & old_name, const std::string & name) {
    gguf_context_ptr to(gguf_init_empty());
    for (int64_t i = 0; i < gguf_get_n_kv(from); ++i) {
        std::string key = gguf_get_key(from, i);
        if (key.compare(0, old_name.size() + 1, old_name + ".") == 0) {
            key = name + key.substr(old_name.size());
        }
        const auto * k = key.c_str();
        switch (gguf_get_kv_type(from, i)) {
            case GGUF_TYPE_UINT32:  gguf_set_val_u32 (to.get(), k, gguf_get_val_u32 (from, i)); break;
            case GGUF_TYPE_FLOAT32: gguf_set_val_f32 (to.get(), k, gguf_get_val_f32 (from, i)); break;
            case GGUF_TYPE_BOOL:    gguf_set_val_bool(to.get(), k, gguf_get_val_bool(from, i)); break;
            case GGUF_TYPE_STRING:  gguf_set_val_str (to.get(), k, gguf_get_val_str (from, i)); break;
            case GGUF_TYPE_ARRAY:
                if (gguf_get_arr_type(from, i) == GGUF_TYPE_STRING) {
                    std::vector<const char *> texts;
                    for (size_t n = 0; n < gguf_get_arr_n(from, i); ++n) {
                        texts.push_back(gguf_get_arr_str(from, i, n));
                    }
                    gguf_set_arr_str(to.get(), k, texts.data(), texts.size());
                } else {
                    gguf_set_arr_data(to.get(), k, gguf_get_arr_type(from, i), gguf_get_arr_data(from, i), gguf_get_arr_n(from, i));
                }
                break;
            default:
                throw std::runtime_error(key + " has a type that the fixtures did not use");
        }
    }
    gguf_set_val_str(to.get(), "general.architecture", name.c_str());
    return to;
}

gguf_context_ptr fixture(llm_arch arch) {
    if (arch != LLM_ARCH_DFLASH) {
        return get_gguf_ctx(arch, true);
    }
    // its drafts with experts are blocks of deepseek4 without compressed attention
    gguf_context_ptr g = renamed(get_gguf_ctx(LLM_ARCH_DEEPSEEK4, true).get(), llm_arch_name(LLM_ARCH_DEEPSEEK4), llm_arch_name(arch));
    const uint32_t none[4] = {}, targets[1] = { 0 };
    gguf_set_arr_data(g.get(), "dflash.attention.compress_ratios", GGUF_TYPE_UINT32, none, 4);
    gguf_set_arr_data(g.get(), "dflash.target_layers", GGUF_TYPE_UINT32, targets, 1);
    gguf_remove_key(g.get(), "dflash.rope.dimension_sections");
    return g;
}

// What the fixtures leave out because llama.cpp's test does not run these.
void complete(llm_arch arch, gguf_context * g, const std::string & prefix) {
    if (arch == LLM_ARCH_GEMMA4) {
        const bool pattern[5] = { true, true, true, true, false };
        gguf_set_arr_data(g, (prefix + "attention.sliding_window_pattern").c_str(), GGUF_TYPE_BOOL, pattern, 5);
    }
    if (arch == LLM_ARCH_NOMIC_BERT_MOE) {
        gguf_set_val_u32(g, "tokenizer.ggml.token_type_count", 2);
        gguf_set_val_u32(g, (prefix + "moe_every_n_layers").c_str(), 2);
        gguf_set_val_bool(g, (prefix + "attention.causal").c_str(), false);
    }
}

int make(const char * name, const char * path, const std::vector<std::string> & extra) {
    const llm_arch arch = llm_arch_from_string(name);
    if (arch == LLM_ARCH_UNKNOWN) {
        throw std::runtime_error(std::string("no architecture is called ") + name);
    }
    const std::string prefix = std::string(name) + ".";
    gguf_context_ptr g = fixture(arch);
    gguf_set_val_u32(g.get(), (prefix + "expert_count").c_str(), N_EXPERT);
    gguf_set_val_u32(g.get(), (prefix + "expert_used_count").c_str(), N_USED);
    complete(arch, g.get(), prefix);
    for (const std::string & e : extra) {
        const size_t at = e.find('=');
        const std::string key = prefix + e.substr(0, at);
        if (e.size() == at + 1) {
            gguf_remove_key(g.get(), key.c_str());
        } else {
            gguf_set_val_u32(g.get(), key.c_str(), (uint32_t) std::stoul(e.substr(at + 1)));
        }
    }
    llama_model_params params = llama_model_default_params();
    params.progress_callback = silent_model_load_progress;
    params.load_mtp          = true;
    llama_model_ptr model(llama_model_init_from_user(g.get(), fill, nullptr, params));
    if (!model) {
        return 1; // the reason is in the log
    }
    // not by llama.cpp's saver: it does not know all architectures, and leaves out keys
    gguf_context_ptr out(gguf_init_empty());
    gguf_set_kv(out.get(), g.get());
    for (const auto & [tensor, t] : llama_internal_get_tensor_map(model.get())) {
        if (gguf_find_tensor(out.get(), tensor.c_str()) < 0) { // shared ones are there twice
            gguf_add_tensor(out.get(), t);
        }
    }
    return gguf_write_to_file(out.get(), path, false) ? 0 : 1;
}

} // namespace

int main(int argc, char ** argv) {
    if (argc < 3) {
        for (const llm_arch arch : llm_arch_all()) {
            printf("%s\n", llm_arch_name(arch));
        }
        return 0;
    }
    try {
        return make(argv[1], argv[2], std::vector<std::string>(argv + 3, argv + argc));
    } catch (const std::exception & e) {
        fprintf(stderr, "%s\n", e.what());
        return 1;
    }
}
