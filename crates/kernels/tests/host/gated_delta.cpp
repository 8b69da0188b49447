// Runs the kernel group by group, the 32 lanes of a group as threads. Standard input: the type ('b' or 'f'), the key
// width (128 or 64) and the lanes of a row (4 or 32) as int32, batch and tokens, then q, k, v, decay, beta and
// memory; standard output: the output and the new memory. Heads: 2 for keys, 4 for values of 8.

#include <barrier>
#include <thread>

#include "input.h"
#include "prelude.h"

#include "gated_delta.h"

constexpr int DV = 8, HK = 2, HV = 4;

static std::barrier lanes(32);
static float exchanged[32];
static thread_local int own_lane;

float lane_at_distance(float x, int distance) {
  exchanged[own_lane] = x;
  lanes.arrive_and_wait();
  float y = exchanged[own_lane ^ distance];
  lanes.arrive_and_wait();
  return y;
}

float lanes_sum(float x) {
  for (int distance = 1; distance < 32; distance *= 2) x += lane_at_distance(x, distance);
  return x;
}

template <typename T, int DK, int LANES>
void run() {
  auto sizes = read<int>(2);
  int batch = sizes[0], tokens = sizes[1], positions = batch * tokens;
  auto q = read<T>(positions * HK * DK), k = read<T>(positions * HK * DK), v = read<T>(positions * HV * DV);
  auto decay = read<float>(positions * HV);
  auto beta = read<T>(positions * HV);
  auto memory = read<float>(batch * HV * DV * DK);
  std::vector<T> out(v.size());
  std::vector<float> new_memory(memory.size());
  std::vector<std::jthread> threads;
  for (int lane = 0; lane < 32; lane++) {
    threads.emplace_back([&, lane] {
      own_lane = lane;
      for (int head = 0; head < batch * HV; head++)
        for (int group = 0; group < DV * LANES / 32; group++)
          gated_delta<DK, DV, HK, HV, LANES>(q.data(), k.data(), v.data(), decay.data(), beta.data(), memory.data(),
                                             out.data(), new_memory.data(), tokens, lane, group, head);
    });
  }
  threads.clear();
  write(out);
  write(new_memory);
}

template <typename T>
void run() {
  auto choice = read<int>(2);
  if (choice[0] == 128 && choice[1] == 4) run<T, 128, 4>();
  if (choice[0] == 128 && choice[1] == 32) run<T, 128, 32>();
  if (choice[0] == 64 && choice[1] == 4) run<T, 64, 4>();
  if (choice[0] == 64 && choice[1] == 32) run<T, 64, 32>();
}

int main() {
  if (read<char>(1)[0] == 'b') {
    run<mlx::core::bfloat16_t>();
  } else {
    run<float>();
  }
}
