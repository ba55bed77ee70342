# csrc/core with its unit tests, one executable; llama.cpp is not needed.
file(GLOB hobbit_tests CONFIGURE_DEPENDS "${HOBBIT_CSRC}/tests/*.cpp")
if(NOT hobbit_tests)
    message(FATAL_ERROR "there are no tests in ${HOBBIT_CSRC}/tests")
endif()
add_executable(hobbit-core-tests ${HOBBIT_CORE_SOURCES} ${hobbit_tests})
target_compile_features(hobbit-core-tests PRIVATE cxx_std_17)
target_include_directories(hobbit-core-tests PRIVATE "${HOBBIT_CSRC}/include" "${HOBBIT_CSRC}/core" "${HOBBIT_CSRC}/tests")
target_compile_definitions(hobbit-core-tests PRIVATE
    _GLIBCXX_ASSERTIONS # indexes are checked
    HOBBIT_VERSION="${HOBBIT_VERSION}" HOBBIT_LLAMA_COMMIT="${HOBBIT_LLAMA_COMMIT}")
target_link_libraries(hobbit-core-tests PRIVATE Threads::Threads)
if(NOT MSVC)
    target_compile_options(hobbit-core-tests PRIVATE -Wall -Wextra -UNDEBUG) # with assert(), in Release too
endif()
if(HOBBIT_SANITIZE)
    target_compile_options(hobbit-core-tests PRIVATE -fsanitize=${HOBBIT_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer -g -O1)
    target_link_options(hobbit-core-tests PRIVATE -fsanitize=${HOBBIT_SANITIZE})
endif()
enable_testing()
add_test(NAME core COMMAND hobbit-core-tests)
