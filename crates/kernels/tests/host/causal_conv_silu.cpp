// Runs the kernel for every thread of its grid, one after the other. Standard input: the type ('b' or 'f'), batch,
// rows and channels as int32, then x, tail and weight; standard output: the output and the new tail.

#include "input.h"
#include "prelude.h"

#include "causal_conv_silu.h"

template <typename T>
void run() {
  auto sizes = read<int>(3);
  int batch = sizes[0], rows = sizes[1], channels = sizes[2];
  auto x = read<T>(batch * rows * channels), tail = read<T>(batch * 3 * channels), weight = read<T>(channels * 4);
  std::vector<T> out(x.size()), new_tail(tail.size());
  for (int b = 0; b < batch; b++)
    for (int row = 0; row < rows + 3; row++)
      for (int c = 0; c < channels; c++)
        causal_conv_silu<T, 4>(x.data(), tail.data(), weight.data(), out.data(), new_tail.data(), rows, channels, c,
                               row, b);
  write(out);
  write(new_tail);
}

int main() {
  if (read<char>(1)[0] == 'b') {
    run<mlx::core::bfloat16_t>();
  } else {
    run<float>();
  }
}
