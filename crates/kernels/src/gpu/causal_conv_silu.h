// silu of a causal depthwise convolution over TAPS rows, and the rows that the next call continues from.
//
// x [batch, rows, channels], tail [batch, TAPS - 1, channels] and weight [channels, TAPS, 1] are of type T. A
// thread computes one element: of the output for the first `rows` positions, of the new tail for the others.
// Taps are summed in f32 in their order; the sum, its sigmoid and their product each round to T.

// The element of row `row` of the tail followed by x.
template <typename T, int TAPS>
FUNCTION T row_element(const GLOBAL T* x, const GLOBAL T* tail, int rows, int channels, int c, int row, int b) {
  return row < TAPS - 1 ? tail[(b * (TAPS - 1) + row) * channels + c]
                        : x[(b * rows + row - (TAPS - 1)) * channels + c];
}

template <typename T, int TAPS>
FUNCTION void causal_conv_silu(const GLOBAL T* x, const GLOBAL T* tail, const GLOBAL T* weight, GLOBAL T* out,
                               GLOBAL T* new_tail, int rows, int channels, int c, int row, int b) {
  if (c >= channels || row >= rows + TAPS - 1) return;
  if (row >= rows) {
    new_tail[(b * (TAPS - 1) + row - rows) * channels + c] =
        row_element<T, TAPS>(x, tail, rows, channels, c, row, b);
    return;
  }
  float sum = 0;
  for (int tap = 0; tap < TAPS; tap++) {
    T value = row_element<T, TAPS>(x, tail, rows, channels, c, row + tap, b);
    sum += static_cast<float>(value) * static_cast<float>(weight[c * TAPS + tap]);
  }
  T convolved = static_cast<T>(sum);
  out[(b * rows + row) * channels + c] = static_cast<T>(convolved * sigmoid_of(convolved));
}
