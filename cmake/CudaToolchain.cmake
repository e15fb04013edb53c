# Finds nvcc and enables CUDA with it; sets PREFILL_WITH_KERNELS, PREFILL_CUDA_VERSION and
# PREFILL_CUDA_ROOT. The order of the search is that of prefill_build.py: CMAKE_CUDA_COMPILER,
# CUDACXX, nvcc on PATH, CUDA_HOME, CUDA_PATH, /usr/local/cuda, the nvidia-cuda-nvcc package.

string(TOUPPER "${PREFILL_KERNELS}" prefill_kernels_mode)
set(PREFILL_WITH_KERNELS FALSE)
if(NOT prefill_kernels_mode STREQUAL "AUTO" AND NOT PREFILL_KERNELS)
  message(STATUS "prefill: PREFILL_KERNELS=OFF, no kernels in this build")
  return()
endif()

set(prefill_compiler_argument "")
if(CMAKE_CUDA_COMPILER)
  set(prefill_compiler_argument --compiler ${CMAKE_CUDA_COMPILER})
endif()
execute_process(
  COMMAND ${Python_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/prefill_build.py nvcc
          ${prefill_compiler_argument}
  OUTPUT_VARIABLE prefill_nvcc OUTPUT_STRIP_TRAILING_WHITESPACE
  COMMAND_ERROR_IS_FATAL ANY)
if(NOT prefill_nvcc)
  string(CONCAT prefill_no_nvcc
    "No nvcc 12.8 or later: not in CMAKE_CUDA_COMPILER, CUDACXX, PATH, CUDA_HOME, CUDA_PATH or /usr/local/cuda, and "
    "the nvidia-cuda-nvcc package is not installed for ${Python_EXECUTABLE}.")
  if(prefill_kernels_mode STREQUAL "AUTO")
    message(WARNING "${prefill_no_nvcc} Building without kernels: the reference backend alone.")
    return()
  endif()
  message(FATAL_ERROR "${prefill_no_nvcc} PREFILL_KERNELS=OFF builds the package without kernels.")
endif()

set(CMAKE_CUDA_COMPILER ${prefill_nvcc})
cmake_path(GET prefill_nvcc PARENT_PATH PREFILL_CUDA_ROOT)
cmake_path(GET PREFILL_CUDA_ROOT PARENT_PATH PREFILL_CUDA_ROOT)
# The PyPI packages keep their libraries in lib; their nvcc looks in lib64.
if(NOT EXISTS ${PREFILL_CUDA_ROOT}/lib64 AND EXISTS ${PREFILL_CUDA_ROOT}/lib/libcudart_static.a)
  string(APPEND CMAKE_CUDA_FLAGS_INIT " -L${PREFILL_CUDA_ROOT}/lib")
endif()
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
if(NOT CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 90)  # for CMake's own checks; every target names its archs
endif()
enable_language(CUDA)

if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.8)  # MINIMUM_NVCC in prefill_build.py
  message(FATAL_ERROR
    "nvcc ${CMAKE_CUDA_COMPILER_VERSION} at ${CMAKE_CUDA_COMPILER}: 12.8 or later is needed (13.0 is "
    "what the package is tested with). CUDACXX names another nvcc; PREFILL_KERNELS=OFF builds the package "
    "without kernels.")
endif()
string(REGEX MATCH "^[0-9]+\\.[0-9]+" PREFILL_CUDA_VERSION ${CMAKE_CUDA_COMPILER_VERSION})
set(PREFILL_WITH_KERNELS TRUE)
message(STATUS "prefill: nvcc ${CMAKE_CUDA_COMPILER_VERSION} at ${CMAKE_CUDA_COMPILER}")
