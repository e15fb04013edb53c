# prefill_cutlass: the headers of CUTLASS_DIR (option or environment), else those of the
# nvidia-cutlass package, which is located without importing it. Sets PREFILL_CUTLASS_VERSION.

set(CUTLASS_DIR "$ENV{CUTLASS_DIR}" CACHE PATH "A CUTLASS source tree; empty: the PyPI package")
if(CUTLASS_DIR)
  set(prefill_cutlass_root ${CUTLASS_DIR})
else()
  execute_process(
    COMMAND ${Python_EXECUTABLE} -c
      "import importlib.util as u; s = u.find_spec('cutlass_library'); print(next(iter(s.submodule_search_locations)) if s else '')"
    OUTPUT_VARIABLE prefill_cutlass_package OUTPUT_STRIP_TRAILING_WHITESPACE
    COMMAND_ERROR_IS_FATAL ANY)
  set(prefill_cutlass_root ${prefill_cutlass_package}/source)
endif()
set(prefill_cutlass_version_h ${prefill_cutlass_root}/include/cutlass/version.h)
if(NOT EXISTS ${prefill_cutlass_version_h})
  message(FATAL_ERROR
    "No CUTLASS headers: ${prefill_cutlass_version_h} does not exist. Run `pip install "
    "nvidia-cutlass==4.2.0.0` for ${Python_EXECUTABLE}, or set CUTLASS_DIR to a CUTLASS tree.")
endif()

set(PREFILL_CUTLASS_VERSION "")
foreach(part MAJOR MINOR PATCH)
  file(STRINGS ${prefill_cutlass_version_h} line REGEX "define CUTLASS_${part} ")
  string(REGEX MATCH "[0-9]+" number "${line}")
  list(APPEND PREFILL_CUTLASS_VERSION ${number})
endforeach()
list(JOIN PREFILL_CUTLASS_VERSION "." PREFILL_CUTLASS_VERSION)

add_library(prefill_cutlass INTERFACE)
target_include_directories(prefill_cutlass SYSTEM INTERFACE
  ${prefill_cutlass_root}/include ${prefill_cutlass_root}/tools/util/include)
target_compile_options(prefill_cutlass INTERFACE
  $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr>)
message(STATUS "prefill: CUTLASS ${PREFILL_CUTLASS_VERSION} at ${prefill_cutlass_root}")
