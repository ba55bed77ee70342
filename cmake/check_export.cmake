# cmake -DNM=... -DLIBRARY=... -DSYMBOL=... -P check_export.cmake: stops if LIBRARY does not export SYMBOL.
execute_process(COMMAND "${NM}" -g "${LIBRARY}" OUTPUT_VARIABLE plain ERROR_QUIET)
execute_process(COMMAND "${NM}" -D "${LIBRARY}" OUTPUT_VARIABLE dynamic ERROR_QUIET) # ELF; survives strip
if(NOT "${dynamic}${plain}" MATCHES " [TtW] _?${SYMBOL}\n")
    message(FATAL_ERROR "${LIBRARY} does not export ${SYMBOL}: it was linked without hobbit-cpp's sources")
endif()
