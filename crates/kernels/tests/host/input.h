#include <cstdio>
#include <cstdlib>
#include <vector>

// `count` values from standard input.
template <typename T>
std::vector<T> read(size_t count) {
  std::vector<T> values(count);
  if (fread(values.data(), sizeof(T), count, stdin) != count) exit(1);
  return values;
}

template <typename T>
void write(const std::vector<T>& values) {
  fwrite(values.data(), sizeof(T), values.size(), stdout);
}
