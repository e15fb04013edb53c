# Turns the list (PrefillKernels.cmake) into object libraries, one for each of its calls, and into the
# tables that C++ reads. All generated files lie in the build directory and change only when their content
# does.
#
# prefill_kernel_family(<backend> [NAME ...] ARCHS ... DTYPES ... HEAD_DIMS ... [EXTENDED_MMA ...])
#   the library prefill_<NAME>, by default prefill_<backend>: one .cu with the explicit
#   instantiations of each (backend, dtype, head-dim class). EXTENDED_MMA names the classes whose
#   tiles need CuTe's rarer WGMMA shapes, a header that costs a minute. ptxas's report stays beside
#   each object, for a test (ptxas_report.py)
# prefill_write_kernel_table()
#   kernel_table.inc (a PREFILL_KERNEL row each) and build_info.inc; call it after the last family

set(PREFILL_GENERATED_DIR ${PROJECT_BINARY_DIR}/generated)
set(PREFILL_KERNEL_LIBRARIES "")
set(PREFILL_BUILT_ARCHS "")
set(PREFILL_KERNEL_ROWS "")
set(PREFILL_ARCH_ROWS "")
set(PREFILL_KNOWN_DTYPES "")
set(PREFILL_KNOWN_HEAD_DIMS "")

# The compute capability of the first device as 80, 86, 90...
function(prefill_native_capability output)
  execute_process(
    COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
    OUTPUT_VARIABLE answer ERROR_QUIET RESULT_VARIABLE result)
  string(REGEX MATCH "[0-9]+\\.[0-9]" capability "${answer}")
  if(NOT result EQUAL 0 OR NOT capability)
    message(FATAL_ERROR
      "PREFILL_ARCHS=native needs a GPU, and nvidia-smi names none here. Say all, sm80 or sm90.")
  endif()
  string(REPLACE "." "" capability "${capability}")
  set(${output} ${capability} PARENT_SCOPE)
endfunction()

# Turns PREFILL_ARCHS into a pattern for the archs of the list, once.
function(prefill_arch_pattern output)
  if(PREFILL_ARCHS STREQUAL "all")
    set(pattern ".*")
  elseif(PREFILL_ARCHS STREQUAL "sm80")
    set(pattern "^80-")
  elseif(PREFILL_ARCHS STREQUAL "sm90")
    set(pattern "^90a?-")
  elseif(PREFILL_ARCHS STREQUAL "native")
    prefill_native_capability(capability)
    if(capability GREATER_EQUAL 80 AND capability LESS 90)
      set(pattern "^80-real")
    elseif(capability EQUAL 90)
      set(pattern "^90a?-")
    elseif(capability GREATER 90)
      set(pattern "-virtual$")
    else()
      message(FATAL_ERROR "PREFILL_ARCHS=native: this device is ${capability}, kernels need 80 or up")
    endif()
  else()
    message(FATAL_ERROR "PREFILL_ARCHS is '${PREFILL_ARCHS}'; allowed: all, sm80, sm90, native")
  endif()
  set(${output} ${pattern} PARENT_SCOPE)
endfunction()
prefill_arch_pattern(PREFILL_ARCH_PATTERN)

# The members of `listed` that the option asks for; the option is a list or "all".
function(prefill_trim output option)
  set(listed ${ARGN})
  if(NOT ${option} STREQUAL "all")
    string(REGEX REPLACE "[, ;]+" "|" pattern "${${option}}")
    list(FILTER listed INCLUDE REGEX "^(${pattern})$")
  endif()
  set(${output} ${listed} PARENT_SCOPE)
endfunction()

function(prefill_kernel_family backend)
  cmake_parse_arguments(PARSE_ARGV 1 family "" "NAME" "ARCHS;DTYPES;HEAD_DIMS;EXTENDED_MMA")
  set(PREFILL_KNOWN_DTYPES ${PREFILL_KNOWN_DTYPES} ${family_DTYPES} PARENT_SCOPE)
  set(PREFILL_KNOWN_HEAD_DIMS ${PREFILL_KNOWN_HEAD_DIMS} ${family_HEAD_DIMS} PARENT_SCOPE)

  if(NOT family_NAME)
    set(family_NAME ${backend})
  endif()
  set(archs ${family_ARCHS})
  list(FILTER archs INCLUDE REGEX "${PREFILL_ARCH_PATTERN}")
  prefill_trim(dtypes PREFILL_DTYPES ${family_DTYPES})
  prefill_trim(head_dims PREFILL_HEAD_DIMS ${family_HEAD_DIMS})
  if(NOT archs OR NOT dtypes OR NOT head_dims)
    message(STATUS "prefill: no ${family_NAME} kernels in this build")
    return()
  endif()

  set(sources "")
  set(rows "")
  foreach(dtype IN LISTS dtypes)
    foreach(dims IN LISTS head_dims)
      string(REGEX MATCH "^([0-9]+)x([0-9]+)$" _ ${dims})
      set(qk ${CMAKE_MATCH_1})
      set(vo ${CMAKE_MATCH_2})
      set(source ${PREFILL_GENERATED_DIR}/${backend}_${dtype}_${dims}.cu)
      set(types "DType::${dtype}, HeadDims<${qk}, ${vo}>")
      file(CONFIGURE OUTPUT ${source} @ONLY CONTENT [[
#include "@backend@/launch.cuh"

namespace prefill::@backend@ {

template KernelInfo kernel_info<@types@>();
template cudaError_t launch<@types@>(const PrefillParams&, cudaStream_t);

}  // namespace prefill::@backend@
]])
      if(dims IN_LIST family_EXTENDED_MMA)
        set_source_files_properties(${source} PROPERTIES
          COMPILE_DEFINITIONS CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED)
      endif()
      list(APPEND sources ${source})
      string(APPEND rows "PREFILL_KERNEL(${backend}, ${dtype}, ${qk}, ${vo})\n")
    endforeach()
  endforeach()

  set(library prefill_${family_NAME})
  add_library(${library} OBJECT ${sources})
  prefill_compile_options(${library})
  target_link_libraries(${library} PRIVATE prefill_cutlass)
  target_compile_options(${library} PRIVATE -Xptxas=-v,--warn-on-local-memory-usage)
  set(launcher ${Python_EXECUTABLE} ${PROJECT_SOURCE_DIR}/cmake/ptxas_report.py keep
      ${CMAKE_CUDA_COMPILER_LAUNCHER})
  set_target_properties(${library} PROPERTIES
    CUDA_ARCHITECTURES "${archs}"
    CUDA_COMPILER_LAUNCHER "${launcher}")

  list(APPEND PREFILL_BUILT_ARCHS ${archs})
  list(REMOVE_DUPLICATES PREFILL_BUILT_ARCHS)
  set(PREFILL_BUILT_ARCHS ${PREFILL_BUILT_ARCHS} PARENT_SCOPE)
  list(LENGTH sources count)
  list(JOIN archs "\", \"" quoted_archs)
  message(STATUS "prefill: ${count} ${family_NAME} kernels for ${archs}")
  set(PREFILL_KERNEL_LIBRARIES ${PREFILL_KERNEL_LIBRARIES} ${library} PARENT_SCOPE)
  set(PREFILL_KERNEL_ROWS "${PREFILL_KERNEL_ROWS}${rows}" PARENT_SCOPE)
  list(APPEND PREFILL_ARCH_ROWS "\"${backend}\": [\"${quoted_archs}\"]")
  set(PREFILL_ARCH_ROWS ${PREFILL_ARCH_ROWS} PARENT_SCOPE)
endfunction()

# Stops at a trimming option that names what the list does not have.
function(prefill_check_known option)
  if(${option} STREQUAL "all")
    return()
  endif()
  set(known ${ARGN})
  list(REMOVE_DUPLICATES known)
  string(REGEX REPLACE "[, ]+" ";" wanted "${${option}}")
  foreach(name IN LISTS wanted)
    if(NOT name IN_LIST known)
      list(JOIN known ", " names)
      message(FATAL_ERROR "${option} names '${name}'; the list has ${names}")
    endif()
  endforeach()
endfunction()

function(prefill_write_kernel_table)
  prefill_check_known(PREFILL_DTYPES ${PREFILL_KNOWN_DTYPES})
  prefill_check_known(PREFILL_HEAD_DIMS ${PREFILL_KNOWN_HEAD_DIMS})
  if(NOT PREFILL_KERNEL_ROWS)
    message(FATAL_ERROR "The trimming options leave no kernel; PREFILL_KERNELS=OFF builds none.")
  endif()
  file(CONFIGURE OUTPUT ${PREFILL_GENERATED_DIR}/kernel_table.inc @ONLY
    CONTENT "@PREFILL_KERNEL_ROWS@")
  list(REMOVE_DUPLICATES PREFILL_ARCH_ROWS)  # a backend may have several calls
  list(JOIN PREFILL_ARCH_ROWS ", " archs)
  file(CONFIGURE OUTPUT ${PREFILL_GENERATED_DIR}/build_info.inc @ONLY CONTENT [[
constexpr const char* kVersion = "@PROJECT_VERSION@";
constexpr const char* kCuda = "@PREFILL_CUDA_VERSION@";
constexpr const char* kCutlass = "@PREFILL_CUTLASS_VERSION@";
constexpr const char* kTorchTarget = "@PREFILL_TORCH_TARGET@";
constexpr const char* kArchs = R"({@archs@})";
]])
endfunction()
