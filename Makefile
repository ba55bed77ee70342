# make setup      .venv with hobbit-cpp built from this tree (first time: about 5 minutes on 2 cores)
# make demo       set up, then run the demo
# make test       set up, then run the tests; PYTEST_ARGS="-k stats" narrows
# make core-test  build the C++ core alone and run its unit tests; SANITIZE=address,undefined
# make tools      llama.cpp's own llama-cli, llama-server, llama-bench, ... in build/tools/bin (docs/tools.md)
# make test-aarch64   the whole package for 64-bit ARM, cross-compiled, under qemu-user (docs/edge.md)
# make stress     the core's random schedules, STEPS long (a million), with SANITIZE=... if given
# make test-sanitize  build llama.cpp, ggml and the engine with AddressSanitizer and UBSan, and run SANITIZED_TESTS with them
# make test-tsan  the same with ThreadSanitizer and TSAN_TESTS
# make soak       an hour of mixed use (SECONDS_OF_SOAK)
# make fuzz       fuzz what reads files, MINUTES=10 each (benchmarks/fuzz.py)
# make sbom       write build/sbom.cdx.json, a CycloneDX bill of materials
# make audit      ask for known vulnerabilities of what is installed; an error where one package could not be asked about
# make clean      remove everything that was built
#
# PYTHON=python3.12 chooses the Python, CMAKE_ARGS="-DGGML_CUDA=ON" goes to the build of llama.cpp,
# HOBBIT_LLAMA_CPP_SOURCE=path avoids its download.

PYTHON      ?= python3
CMAKE       ?= cmake
PYTEST_ARGS ?=
SANITIZE    ?=
STEPS       ?= 1000000
SEED        ?= 1
SECONDS_OF_SOAK ?= 3600
SANITIZED_TESTS ?= tests/test_identity.py tests/test_llama_features.py tests/test_llama_threads.py
TSAN_TESTS  ?= tests/test_llama_threads.py tests/test_io_faults.py $(addprefix tests/test_identity.py::test_,two_contexts_take_turns two_threads_on_one_model two_models_at_once) \
    tests/test_llama.py::test_two_at_once $(addprefix tests/test_llama_running.py::test_,prefetch_from_a_hook event_hook_agrees_with_statistics)
JOBS        ?= $(shell nproc 2>/dev/null || sysctl -n hw.ncpu)
CMAKE_ARGS  ?=
export CMAKE_ARGS

comma := ,
VENV := .venv
PY   := $(VENV)/bin/python
PIP  := $(PY) -m pip --disable-pip-version-check
PIN  := $(shell sed -n 's/^LLAMA_CPP_PYTHON_VERSION = "\(.*\)"$$/\1/p' hobbit_cpp/_version.py)

# A change in any of these rebuilds (folders: a file was added or removed); changed Python modules
# need nothing, the install is an editable one.
SOURCES := CMakeLists.txt setup.py pyproject.toml hobbit_cpp/_version.py $(shell find cmake csrc -not -name "*requirements.txt" -not -name sbom.py)

# The checked sdist of llama-cpp-python; or what HOBBIT_LLAMA_CPP_SOURCE names.
SDIST = $(PY) cmake/prepare_llama_cpp.py --sdist --pin hobbit_cpp/_version.py --download build/download --source "$$HOBBIT_LLAMA_CPP_SOURCE"

.PHONY: setup demo test core-tests-built core-test stress test-sanitize test-tsan soak tools test-aarch64 fuzz sbom audit clean force

setup: $(VENV)/built

demo: setup
	$(VENV)/bin/hobbit demo

test: setup
	$(PY) -m pytest $(PYTEST_ARGS)

$(VENV)/made:
	$(PYTHON) -m venv $(VENV)
	@touch $@

# The Python bindings, not compiled: our libllama serves them. From the checked sdist, which the build
# needs anyway; --no-cache-dir, or pip would keep a llama-cpp-python without libraries for later.
$(VENV)/bindings-$(PIN): $(VENV)/made
	sdist="$$($(SDIST))" && \
	    CMAKE_ARGS="-DLLAMA_BUILD=OFF -DLLAVA_BUILD=OFF" $(PIP) install --no-cache-dir --no-deps "$$sdist"
	@touch $@

# Rewritten only when CMAKE_ARGS changed, which rebuilds.
$(VENV)/cmake-args: force | $(VENV)/made
	@printf '%s\n' "$$CMAKE_ARGS" | cmp -s - $@ || printf '%s\n' "$$CMAKE_ARGS" > $@

# Build inputs are pinned by hash: these tools, and the sdist above (hobbit_cpp/_version.py).
$(VENV)/build-tools: cmake/build-requirements.txt $(VENV)/made
	$(PIP) install --quiet --require-hashes -r cmake/build-requirements.txt
	@touch $@

$(VENV)/built: $(SOURCES) $(VENV)/bindings-$(PIN) $(VENV)/cmake-args $(VENV)/build-tools
	$(PIP) install --verbose --no-build-isolation -e '.[test,server]'
	@touch $@

core-tests-built:
	$(CMAKE) -S . -B build/core-tests -DHOBBIT_CORE_TESTS=ON -DHOBBIT_SANITIZE="$(SANITIZE)"
	$(CMAKE) --build build/core-tests --parallel $(JOBS)

core-test: core-tests-built
	build/core-tests/hobbit-core-tests

# --steps counts forward passes of the short tests, of which this one takes twenty steps for each
stress: core-tests-built
	build/core-tests/hobbit-core-tests --seed $(SEED) --steps $$(($(STEPS) / 20)) stress_random_schedules

# The Python modules with the sanitized libraries, in a folder of their own, which pytest runs in: that comes first.
# $(1): the build's folder, $(2): its options, $(3): the runtimes to preload, $(4): their options, $(5): tests, $(6): what starts the process
define test-sanitized
	$(CMAKE) -S . -B $(1) -DHOBBIT_PYTHON="$(abspath $(PY))" $(2)
	$(CMAKE) --build $(1) --parallel $(JOBS)
	rm -rf $(1)/site $(1)/log && mkdir -p $(1)/site $(1)/log && cp -r hobbit_cpp gguf_tools $(1)/site
	$(CMAKE) --install $(1) --prefix "$(CURDIR)/$(1)/site"
	cd $(1)/site && $(6) env LD_PRELOAD="$(foreach name,$(3),$(shell $(CC) -print-file-name=$(name).so))" PYTHONPATH="$(CURDIR)/$(1)/site" $(4) \
	    $(abspath $(PY)) -m pytest -q $(addprefix $(CURDIR)/,$(5)) $(PYTEST_ARGS)
endef

# A report of AddressSanitizer's, or of UBSan's on csrc, ends the process; one of UBSan's on llama.cpp or ggml is a word on stderr. With the processor's
# common instructions, which are quicker to compile (a third), and without AMX, whose misaligned loads UBSan reports.
test-sanitize: setup
	$(call test-sanitized,build/sanitize,-DHOBBIT_SANITIZE=address$(comma)undefined -DGGML_NATIVE=OFF,libasan libubsan,\
	    ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1,$(SANITIZED_TESTS))

# Reports that tests/tsan.supp has no reason for are an error: of the process, whose status is 66 then. Without OpenMP, whose threads the runtime does
# not know; at fixed addresses, which the runtime needs on some kernels.
test-tsan: setup
	$(call test-sanitized,build/tsan,-DHOBBIT_SANITIZE=thread -DGGML_OPENMP=OFF -DGGML_NATIVE=OFF,libtsan,\
	    TSAN_OPTIONS="suppressions=$(CURDIR)/tests/tsan.supp:log_path=$(CURDIR)/build/tsan/log/tsan:history_size=4",$(TSAN_TESTS),$(shell setarch -R true && echo setarch -R))

soak: setup
	$(PY) benchmarks/soak.py --seconds $(SECONDS_OF_SOAK)

tools: $(VENV)/made
	source="$${HOBBIT_LLAMA_CPP_SOURCE:-$$($(SDIST))}" && \
	    HOBBIT_LLAMA_CPP_SOURCE="$$source" $(CMAKE) -S . -B build/tools -DHOBBIT_TOOLS=ON -DHOBBIT_PYTHON="$(abspath $(PY))" $(CMAKE_ARGS)
	$(CMAKE) --build build/tools --target hobbit_tools --parallel $(JOBS)

test-aarch64: $(VENV)/made
	PYTHON="$(PY)" JOBS="$(JOBS)" tests/aarch64.sh

MINUTES ?= 10
fuzz: setup
	$(PY) benchmarks/fuzz.py all --minutes $(MINUTES)

# Tools that only look at the environment get one of their own.
TOOLS := build/supply-tools
$(TOOLS)/made: cmake/supply-requirements.txt
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/pip --disable-pip-version-check install --quiet -r cmake/supply-requirements.txt
	@touch $@

sbom: setup $(TOOLS)/made
	$(TOOLS)/bin/python cmake/sbom.py $(PY) -o build/sbom.cdx.json

audit: setup $(TOOLS)/made
	$(PIP) freeze --exclude-editable | grep == > build/installed.txt
	$(TOOLS)/bin/pip-audit --strict --disable-pip --no-deps -r build/installed.txt

clean:
	rm -rf build dist $(VENV) hobbit_cpp/lib *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
