"""Version and pins, each in this one place.

CMakeLists.txt, setup.py, cmake/prepare_llama_cpp.py and the Makefile read this file as text, so
every line stays of the form NAME = "value" (or a whole number).
"""

__version__ = "0.1.0"

# Must equal HOBBIT_API_VERSION in csrc/include/hobbit.h; compared with the library at import.
HOBBIT_API_VERSION = 5

# llama.cpp comes from this source distribution of llama-cpp-python, whose bindings are used as well.
LLAMA_CPP_PYTHON_VERSION = "0.3.36"
LLAMA_CPP_PYTHON_SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
LLAMA_CPP_COMMIT = "0c1e57098"
