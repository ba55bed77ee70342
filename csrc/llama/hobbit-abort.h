// hobbit-abort.h - ggml and llama.cpp end the process where an assertion fails, and some of theirs depend on what is in a
// file. While a file is being loaded that is an error of the load.

#pragma once

// While one of these lives, an abort of ggml's on this thread throws std::runtime_error. What other threads do ends the
// process as ever.
class hobbit_no_abort {
  public:
    hobbit_no_abort();
    ~hobbit_no_abort();
    hobbit_no_abort(const hobbit_no_abort &) = delete;
    hobbit_no_abort & operator=(const hobbit_no_abort &) = delete;
};
