# prefill_torch: torch's headers and libraries, through the stable ABI alone, so that one binary
# serves every torch from PREFILL_TORCH_TARGET on. Torch is located without importing it.
#
# Everything comes from libtorch_cpu.so but the current CUDA stream. Its symbol is weak (torch_stream.h)
# and lives in libtorch_cuda.so, which a CPU torch does not have; libtorch.so is there in both and
# depends on what there is.

set(PREFILL_TORCH_TARGET 2.10)
set(prefill_torch_target_number 0x020a000000000000)

execute_process(
  COMMAND ${Python_EXECUTABLE} -c
    "import importlib.util as u; s = u.find_spec('torch'); print(next(iter(s.submodule_search_locations)) if s else '')"
  OUTPUT_VARIABLE prefill_torch_root OUTPUT_STRIP_TRAILING_WHITESPACE
  COMMAND_ERROR_IS_FATAL ANY)
set(prefill_torch_library ${prefill_torch_root}/lib/libtorch_cpu.so)
if(NOT prefill_torch_root OR NOT EXISTS ${prefill_torch_library})
  message(FATAL_ERROR
    "No torch for ${Python_EXECUTABLE}: install torch>=${PREFILL_TORCH_TARGET} there (a CPU build "
    "will do), or name another interpreter with -DPython_EXECUTABLE=...")
endif()
file(STRINGS ${prefill_torch_root}/version.py prefill_torch_version REGEX "^__version__")
string(REGEX MATCH "[0-9]+\\.[0-9]+(\\.[0-9]+)?" prefill_torch_version "${prefill_torch_version}")
if(prefill_torch_version VERSION_LESS ${PREFILL_TORCH_TARGET})
  message(FATAL_ERROR
    "torch ${prefill_torch_version} at ${prefill_torch_root}: ${PREFILL_TORCH_TARGET} is needed.")
endif()

add_library(prefill_torch INTERFACE)
target_include_directories(prefill_torch SYSTEM INTERFACE ${prefill_torch_root}/include)
target_compile_definitions(prefill_torch INTERFACE
  TORCH_TARGET_VERSION=${prefill_torch_target_number})
target_link_libraries(prefill_torch INTERFACE ${prefill_torch_library})
target_link_options(prefill_torch INTERFACE
  LINKER:--no-as-needed ${prefill_torch_root}/lib/libtorch.so LINKER:--as-needed)
message(STATUS "prefill: torch ${prefill_torch_version} headers, stable ABI ${PREFILL_TORCH_TARGET}")
