# THE LIST: every kernel of the package. One call a backend and width of elements; a build makes each
# (dtype, head-dim class) of it, trimmed by PREFILL_ARCHS, PREFILL_DTYPES and PREFILL_HEAD_DIMS.
#
# ARCHS are CMake's. fa2: sm_80 machine code does not run on Hopper, hence 90-real; the PTX is for newer
# devices. fa3: WGMMA and TMA exist in 90a only.
# Each of them is two kernels of fa2 and of fa3 in 8 bits, and three of fa3 in 16, by what calls ask of
# scores (csrc/common/scores.h, with what that gains: 7 to 21 % on fa2, up to 30 % of short calls on
# fa3).
# HEAD_DIMS are <QK>x<VO>. Head dims between two classes ride on the next one up by zero fill.

prefill_kernel_family(
  fa2
  ARCHS 80-real 90-real 80-virtual
  DTYPES float16 bfloat16
  HEAD_DIMS 64x64 128x128 192x128 256x256)

prefill_kernel_family(
  fa3
  ARCHS 90a-real
  DTYPES float16 bfloat16
  HEAD_DIMS 64x64 128x128 192x128 256x256
  EXTENDED_MMA 64x64 256x256)

# Head dims up to 64 are widened: the softmax binds there, and 8 bits came to 0.87 of 16 (docs/tuning.md).
prefill_kernel_family(
  fa3
  NAME fa3_float8
  ARCHS 90a-real
  DTYPES float8_e4m3 float8_e5m2
  HEAD_DIMS 128x128 192x128 256x256)
