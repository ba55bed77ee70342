# Writes hobbit_build.json, which is shipped beside the libraries: what they were built from, and the
# processor features that they need (as Linux names them in /proc/cpuinfo). hobbit_cpp/_libs.py
# compares the latter with the machine at import: libraries built with -march=native, GGML_NATIVE's
# default, would otherwise die of an illegal instruction on an older processor.

set(hobbit_cpu_flags "")
# With GGML_CPU_ALL_VARIANTS there is no such target, and ggml chooses at run time.
if(TARGET ggml-cpu AND CMAKE_C_COMPILER_ID MATCHES "GNU|Clang" AND UNIX)
    get_target_property(hobbit_cpu_options ggml-cpu COMPILE_OPTIONS)
    set(hobbit_arch_options ${hobbit_cpu_options})
    list(FILTER hobbit_arch_options INCLUDE REGEX "^-m") # -march=native, -mavx2, -mcpu=...
    execute_process(
        COMMAND "${CMAKE_C_COMPILER}" ${hobbit_arch_options} -dM -E -x c /dev/null
        OUTPUT_VARIABLE hobbit_macros ERROR_QUIET)
    foreach(pair
            __SSE3__=pni __SSSE3__=ssse3 __SSE4_1__=sse4_1 __SSE4_2__=sse4_2 __POPCNT__=popcnt
            __AVX__=avx __AVX2__=avx2 __FMA__=fma __F16C__=f16c __BMI__=bmi1 __BMI2__=bmi2 __MOVBE__=movbe
            __AVXVNNI__=avx_vnni __AVX512F__=avx512f __AVX512CD__=avx512cd __AVX512BW__=avx512bw
            __AVX512DQ__=avx512dq __AVX512VL__=avx512vl __AVX512IFMA__=avx512ifma __AVX512VBMI__=avx512vbmi
            __AVX512VBMI2__=avx512_vbmi2 __AVX512VNNI__=avx512_vnni __AVX512BITALG__=avx512_bitalg
            __AVX512VPOPCNTDQ__=avx512_vpopcntdq __AVX512BF16__=avx512_bf16 __AVX512FP16__=avx512_fp16
            __AMX_TILE__=amx_tile __AMX_INT8__=amx_int8 __AMX_BF16__=amx_bf16
            __ARM_FEATURE_DOTPROD=asimddp __ARM_FEATURE_FP16_VECTOR_ARITHMETIC=asimdhp
            __ARM_FEATURE_MATMUL_INT8=i8mm __ARM_FEATURE_BF16=bf16 __ARM_FEATURE_SVE=sve __ARM_FEATURE_SVE2=sve2)
        string(REGEX MATCH "^([^=]+)=(.+)$" _ "${pair}")
        set(macro "${CMAKE_MATCH_1}")
        set(flag "${CMAKE_MATCH_2}")
        if(hobbit_macros MATCHES "#define ${macro} ")
            list(APPEND hobbit_cpu_flags "\"${flag}\"")
        endif()
    endforeach()
endif()
list(JOIN hobbit_cpu_flags ", " hobbit_cpu_flags)

set(hobbit_library_names ${HOBBIT_LIBRARIES})
list(TRANSFORM hobbit_library_names PREPEND "\"")
list(TRANSFORM hobbit_library_names APPEND "\"")
list(JOIN hobbit_library_names ", " hobbit_library_names)

set(hobbit_backend_dl false)
if(GGML_BACKEND_DL)
    set(hobbit_backend_dl true)
endif()

file(CONFIGURE OUTPUT "${CMAKE_CURRENT_BINARY_DIR}/hobbit_build.json" @ONLY CONTENT [=[{
  "version": "@HOBBIT_VERSION@",
  "llama_cpp_commit": "@HOBBIT_LLAMA_COMMIT@",
  "build_type": "@CMAKE_BUILD_TYPE@",
  "processor": "@CMAKE_SYSTEM_PROCESSOR@",
  "backend_dl": @hobbit_backend_dl@,
  "libraries": [@hobbit_library_names@],
  "cpu_flags": [@hobbit_cpu_flags@]
}
]=])
