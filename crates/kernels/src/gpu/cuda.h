#include "mlx/backend/cuda/device/unary_ops.cuh"

#define GLOBAL
#define LOCAL
#define FUNCTION __forceinline__ __device__

// MLX's own for CUDA.
template <typename T>
FUNCTION T sigmoid_of(T x) {
  return mlx::core::cu::Sigmoid{}(x);
}

// The value of the lane whose number differs in the bit `distance`, and the sum over 32 lanes.
FUNCTION float lane_at_distance(float x, int distance) { return __shfl_xor_sync(0xffffffff, x, distance); }
FUNCTION float lanes_sum(float x) {
  for (int distance = 1; distance < 32; distance *= 2) x += lane_at_distance(x, distance);
  return x;
}
