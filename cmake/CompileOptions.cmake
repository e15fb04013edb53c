# prefill_compile_options(<target>): language level, warnings and symbol visibility for all of our
# targets. Also: ccache where it works, and as many compile jobs as memory allows.

find_program(PREFILL_CCACHE ccache)
# It fails where it cannot write its cache: in a home that is read-only.
if(PREFILL_CCACHE)
  set(prefill_trial ${PROJECT_BINARY_DIR}/generated/ccache_trial)
  file(WRITE ${prefill_trial}.cpp "int main() {}\n")
  execute_process(
    COMMAND ${PREFILL_CCACHE} ${CMAKE_CXX_COMPILER} -c ${prefill_trial}.cpp -o ${prefill_trial}.o
    RESULT_VARIABLE prefill_ccache_result
    OUTPUT_VARIABLE prefill_ccache_said ERROR_VARIABLE prefill_ccache_said)
  if(NOT prefill_ccache_result EQUAL 0)
    string(STRIP "${prefill_ccache_said}" prefill_ccache_said)
    message(STATUS "prefill: ccache is left out, as it does not work: ${prefill_ccache_said}")
    set(PREFILL_CCACHE PREFILL_CCACHE-NOTFOUND)
  endif()
endif()
foreach(language CXX CUDA)
  if(PREFILL_CCACHE AND NOT CMAKE_${language}_COMPILER_LAUNCHER)
    # Paths below the source tree count as relative: another checkout hits the same entries.
    set(CMAKE_${language}_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env
        CCACHE_BASEDIR=${PROJECT_SOURCE_DIR} CCACHE_NOHASHDIR=1 ${PREFILL_CCACHE})
  endif()
endforeach()

# One attention kernel takes up to 4.5 GB to compile.
set(PREFILL_COMPILE_JOBS 0 CACHE STRING "Compile jobs at a time (Ninja); 0: by cores and memory, 5 GB each")
set(prefill_jobs ${PREFILL_COMPILE_JOBS})
if(prefill_jobs EQUAL 0)
  cmake_host_system_information(
    RESULT prefill_host QUERY TOTAL_PHYSICAL_MEMORY NUMBER_OF_LOGICAL_CORES)
  list(POP_FRONT prefill_host prefill_memory_mib prefill_cores)
  math(EXPR prefill_jobs "${prefill_memory_mib} / 5000")
  if(prefill_jobs GREATER prefill_cores)
    set(prefill_jobs ${prefill_cores})
  elseif(prefill_jobs LESS 1)
    set(prefill_jobs 1)
  endif()
endif()
set_property(GLOBAL PROPERTY JOB_POOLS prefill_compile=${prefill_jobs})

set(CMAKE_SKIP_RPATH ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

function(prefill_compile_options target)
  target_compile_features(${target} PRIVATE cxx_std_17)
  target_include_directories(${target} PRIVATE
    ${PROJECT_SOURCE_DIR}/csrc ${PREFILL_GENERATED_DIR})
  target_include_directories(${target} SYSTEM PRIVATE
    ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES}
    ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES}/cccl)  # CUDA 13: only nvcc knows of it
  target_compile_options(${target} PRIVATE
    $<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-fno-gnu-unique;-ffunction-sections;-fdata-sections>
    $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-fno-gnu-unique;-Xptxas=--warn-on-spills>)
  set_target_properties(${target} PROPERTIES
    CXX_EXTENSIONS OFF
    CUDA_EXTENSIONS OFF
    CXX_VISIBILITY_PRESET hidden
    CUDA_VISIBILITY_PRESET hidden
    VISIBILITY_INLINES_HIDDEN ON
    POSITION_INDEPENDENT_CODE ON
    CUDA_RUNTIME_LIBRARY Static
    CUDA_SEPARABLE_COMPILATION OFF
    JOB_POOL_COMPILE prefill_compile)
endfunction()
