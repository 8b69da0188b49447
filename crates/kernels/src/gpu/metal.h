#define GLOBAL device
#define LOCAL thread
#define FUNCTION inline

// As MLX's `Sigmoid` for Metal.
template <typename T>
FUNCTION T sigmoid_of(T x) {
  auto y = 1 / (1 + metal::precise::exp(metal::abs(x)));
  return (x < 0) ? y : 1 - y;
}

// The sum over 32 lanes, and the value of the lane whose number differs in the bit `distance`.
FUNCTION float lanes_sum(float x) { return simd_sum(x); }
FUNCTION float lane_at_distance(float x, int distance) { return simd_shuffle_xor(x, distance); }
