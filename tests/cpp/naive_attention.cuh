// Attention by the book, in double precision: what the kernels are compared with. It shares the
// parameters with them and nothing else.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/params.h"
#include "gpu.h"

namespace prefill::test {

// Device memory for `size` values.
template <class Value>
class DeviceArray {
 public:
  explicit DeviceArray(int64_t size) : size_(size) {
    CHECK_CUDA(cudaMalloc(&data_, size_ * sizeof(Value)));
  }
  ~DeviceArray() { CHECK_CUDA(cudaFree(data_)); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  Value* data() const { return data_; }

  void upload(const Value* values) {
    CHECK_CUDA(cudaMemcpy(data_, values, size_ * sizeof(Value), cudaMemcpyHostToDevice));
    CHECK_CUDA(cudaDeviceSynchronize());  // a copy from pageable memory may return before its end
  }

  void download(Value* values) const {
    CHECK_CUDA(cudaMemcpy(values, data_, size_ * sizeof(Value), cudaMemcpyDeviceToHost));
  }

 private:
  int64_t size_;
  Value* data_ = nullptr;
};

// How a 16-bit type rounds: relative to the value, and absolutely where it is subnormal.
struct Rounding {
  double relative;
  double absolute;
};

// One output element, and the most that rounding each weight to 16 bits can move it.
struct NaiveOutput {
  double value;
  double weight_error;
  bool has_keys;
};

__device__ inline double naive_scale(const HeadScale& scale, int head) {
  return scale.data == nullptr ? 1. : scale.data[head * scale.stride];
}

// By the paper: 2^(-8k/n) for the first n heads, n the largest power of two; for the others every
// second slope of 2n heads.
__device__ inline double naive_slope(const PrefillParams& params, int head) {
  if (!params.has_alibi) return 0.;
  if (params.alibi_slopes.data != nullptr) {
    return params.alibi_slopes.data[head * params.alibi_slopes.stride];
  }
  const int n = 1 << static_cast<int>(floor(log2(params.num_qo_heads + 0.5)));
  return head < n ? exp2(-8. * (head + 1) / n) : exp2(-8. * (2 * (head - n) + 1) / (2 * n));
}

// One thread for each of the `size` elements of logits [num_qo_heads, qo_len, kv_len]. `mask` is
// bool [qo_len, kv_len], or null.
template <class T>
__global__ void naive_logits(const PrefillParams params, const uint8_t* mask, int64_t size,
                             double* logits) {
  const int64_t index = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (index >= size) return;
  const int64_t key = index % params.kv_len;
  const int64_t row = index / params.kv_len % params.qo_len;
  const int head = static_cast<int>(index / params.kv_len / params.qo_len);
  const int kv_head = head / (params.num_qo_heads / params.num_kv_heads);
  const T* q = static_cast<const T*>(params.q.data) + row * params.q.token_stride +
               head * params.q.head_stride;
  const T* k = static_cast<const T*>(params.k.data) + key * params.k.token_stride +
               kv_head * params.k.head_stride;
  double product = 0.;
  for (int d = 0; d < params.head_dim_qk; ++d) {
    product += double{static_cast<float>(q[d])} * static_cast<float>(k[d]);
  }
  const int64_t position = row + params.kv_len - params.qo_len;
  bool seen = position - params.window_left <= key && key <= position + params.window_right;
  if (mask != nullptr) seen = seen && mask[row * params.kv_len + key] != 0;
  const double scale =
      params.sm_scale * naive_scale(params.scale_q, head) * naive_scale(params.scale_k, kv_head);
  double logit = scale * product;
  if (params.soft_cap > 0.f) logit = params.soft_cap * tanh(logit / params.soft_cap);
  logit += naive_slope(params, head) * static_cast<double>(key - position);
  logits[index] = seen ? logit : -INFINITY;
}

// One thread for each of the `size` rows [num_qo_heads, qo_len]: logits become weights, zero in a
// row without keys.
__global__ void naive_softmax(const PrefillParams params, int64_t size, double* logits,
                              double* lse) {
  const int64_t row = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (row >= size) return;
  const int kv_len = params.kv_len;
  const auto head = static_cast<int>(row / params.qo_len);
  const double sink = params.sinks.data == nullptr
                          ? -INFINITY
                          : double{params.sinks.data[head * params.sinks.stride]};
  double* weights = logits + row * kv_len;
  double maximum = sink;
  for (int key = 0; key < kv_len; ++key) maximum = fmax(maximum, weights[key]);
  double sum = sink == -INFINITY ? 0. : exp(sink - maximum);
  for (int key = 0; key < kv_len; ++key) {
    weights[key] = weights[key] == -INFINITY ? 0. : exp(weights[key] - maximum);
    sum += weights[key];
  }
  for (int key = 0; key < kv_len; ++key) weights[key] /= sum == 0. ? 1. : sum;
  lse[row] = (maximum / log(2.) + log2(sum)) * params.lse_scale;
}

// One thread for each of the `size` elements of outputs [num_qo_heads, qo_len, head_dim_vo].
template <class T>
__global__ void naive_outputs(const PrefillParams params, Rounding rounding, int64_t size,
                              const double* all_weights, NaiveOutput* outputs) {
  const int64_t index = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (index >= size) return;
  const int64_t row = index / params.head_dim_vo;
  const int head = static_cast<int>(row / params.qo_len);
  const int kv_head = head / (params.num_qo_heads / params.num_kv_heads);
  const double* weights = all_weights + row * params.kv_len;
  const T* v = static_cast<const T*>(params.v.data) + kv_head * params.v.head_stride +
               index % params.head_dim_vo;
  // A kernel rounds weights while the largest one is 1.
  double largest = 0.;
  for (int key = 0; key < params.kv_len; ++key) largest = fmax(largest, weights[key]);
  NaiveOutput output{0., 0., largest > 0.};
  for (int64_t key = 0; key < params.kv_len; ++key) {
    const double value = static_cast<float>(v[key * params.v.token_stride]);
    const double error = rounding.relative * weights[key] + rounding.absolute * largest;
    output.value += weights[key] * value;
    output.weight_error += error * fabs(value);
  }
  const double scale = params.v_scale * naive_scale(params.scale_v, kv_head);
  outputs[index] = {scale * output.value, fabs(scale) * output.weight_error, output.has_keys};
}

// Fills lse [num_qo_heads, qo_len] and outputs [num_qo_heads, qo_len, head_dim_vo]. The custom mask
// is not that of `params`, but bool [qo_len, kv_len], or null.
template <class T>
void naive_attention(const PrefillParams& params, const uint8_t* mask, Rounding rounding,
                     double* lse, NaiveOutput* outputs, cudaStream_t stream) {
  constexpr int kThreads = 128;
  const auto blocks = [](int64_t threads) {
    return static_cast<unsigned>((threads + kThreads - 1) / kThreads);
  };
  const int64_t rows = int64_t{params.num_qo_heads} * params.qo_len;
  const int64_t pairs = rows * params.kv_len;
  const int64_t elements = rows * params.head_dim_vo;
  const DeviceArray<double> weights(pairs);
  naive_logits<T><<<blocks(pairs), kThreads, 0, stream>>>(params, mask, pairs, weights.data());
  CHECK_CUDA(cudaGetLastError());
  naive_softmax<<<blocks(rows), kThreads, 0, stream>>>(params, rows, weights.data(), lse);
  CHECK_CUDA(cudaGetLastError());
  naive_outputs<T><<<blocks(elements), kThreads, 0, stream>>>(params, rounding, elements,
                                                              weights.data(), outputs);
  CHECK_CUDA(cudaGetLastError());
  CHECK_CUDA(cudaStreamSynchronize(stream));
}

}  // namespace prefill::test
