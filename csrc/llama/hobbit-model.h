// hobbit-model.h - one loaded dual GGUF: its sidecar, its expert tensors that exist as shapes only, the
// banks that hold the slots, and the engine. What the patched loader and context call is declared here;
// csrc/patches says where.

#pragma once

#include "engine.h"
#include "simulate.h"
#include "hobbit-pinned.h"
#include "hobbit-sidecar.h"

#include "ggml-backend-impl.h"
#include "ggml-cpp.h"
#include "llama.h"

#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

struct gguf_context;

// The C API's handle is this object.
struct hobbit {
    // --- known after open ---
    hobbit_sidecar sidecar;
    hobbit_params  params;
    ggml_context_ptr meta_ctx; // shapes of the model's expert tensors
    std::unordered_map<std::string, ggml_tensor *> meta;
    size_t n_elements = 0; // of the expert tensors, as the source file had them
    size_t n_bytes    = 0;
    ggml_backend_buffer_type virtual_buft; // its buffers have no memory; context points here

    // --- known after start ---
    struct group_banks {
        ggml_tensor * tensor[hob::N_COPIES][hob::MAX_PROJ] = {}; // [n_in, n_out, n_slots], null: no slots
        ggml_tensor * heads = nullptr; // F32 [inner width, n_units + 1]: row u is 1 up to unit u, then 0; null: experts are not divided
        std::string   types[hob::N_COPIES];
        std::string   buft_name;
        ggml_backend_dev_t dev = nullptr;
    };
    std::vector<group_banks> banks; // [group]
    ggml_context_ptr bank_ctx;
    std::map<ggml_backend_buffer_type_t, size_t> bank_bytes;

    // all copies in host memory, [n_in, n_out, n_expert]; empty: they are read from the files
    struct host_copies {
        ggml_tensor * tensor[hob::N_COPIES][hob::MAX_PROJ] = {};
    };
    std::vector<host_copies> host; // [layer]
    ggml_context_ptr host_ctx;
    std::vector<std::unique_ptr<hobbit_pinned>> host_memory; // of these, or of some of them
    std::vector<ggml_backend_buffer_ptr> bank_bufs;
    std::map<ggml_backend_dev_t, std::unique_ptr<hob::device_link>> links;
    std::unique_ptr<hob::engine> engine; // freed first: its threads write into the banks

    std::shared_ptr<class hobbit_gates> gates; // the routers', for prediction (hobbit-router.h)

    std::unique_ptr<hob::replay> replay; // in a simulation, where there is no model

    // Layer and projection of one of the model's expert tensors; layer -1: not one of ours.
    struct place { int layer; int proj; };
    place find(const ggml_tensor * t) const;
};

// --- called by the loader ---

// The sidecar of the main file just opened; null for an ordinary GGUF. Throws std::runtime_error.
std::shared_ptr<hobbit> hobbit_open(const std::string & main_path, const gguf_context * main_meta);

// Shape and type of an expert tensor that the main file leaves out; null: not one of ours.
ggml_tensor * hobbit_tensor_meta(const hobbit * h, const char * name);

// Divide the budget, allocate the banks, start the threads; with measure without memory, for a model that is loaded to see
// what it would take (no_alloc). Throws std::runtime_error.
void hobbit_start(hobbit & h, const llama_model & model, bool measure);

// Into a model's memory by buffer type: the banks, and not the expert tensors, which have none. h may be null.
void hobbit_add_memory(const hobbit * h, std::map<ggml_backend_buffer_type_t, size_t> & bytes);

// What hobbit_last_error() says on this thread.
void hobbit_set_last_error(const std::string & why);

// --- called by the context ---

// Upper bound of the graph nodes that offloading adds.
size_t hobbit_extra_nodes(const hobbit * h, uint32_t n_tokens);

// Does this adapter change offloaded experts? That cannot be served.
bool hobbit_has_expert_tensor(const hobbit * h, const std::string & name);

// A forward pass; h may be null.
class hobbit_graph_scope {
  public:
    explicit hobbit_graph_scope(hobbit * h);
    ~hobbit_graph_scope();
    bool end(); // false: a load failed, the results are worthless (error() says why)

    static const char * error(const hobbit * h); // of this thread's last graph, if that was one of this model

  private:
    hobbit * h_;
};
