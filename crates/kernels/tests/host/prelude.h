#include "mlx/backend/cpu/unary_ops.h"

#define GLOBAL
#define LOCAL
#define FUNCTION static inline

// MLX's own for the CPU.
template <typename T>
FUNCTION T sigmoid_of(T x) {
  return mlx::core::detail::Sigmoid{}(x);
}

// Lanes are threads of the program, which defines these where its kernel needs them.
float lanes_sum(float x);
float lane_at_distance(float x, int distance);
