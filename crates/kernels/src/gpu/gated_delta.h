// The gated delta rule over the tokens of a call, for rows of the memory that do not depend on each other.
//
// q and k [batch, tokens, HK, DK], v and out [batch, tokens, HV, DV], decay and beta [batch, tokens, HV], memory
// [batch, HV, DV, DK] in f32. For each token: S = decay S; d = beta (v - S k); S = S + k d; out = S q.
//
// A row belongs to LANES threads of 32, each with DK / LANES neighbouring elements. Sums run over DK / 32 elements
// in their order, and over the 32 sums by pairs of neighbours, whatever LANES is. With LANES = 32 the device's own
// sum over threads does the latter. V, D and B are pointers: Metal has short arrays in an address space of their own.

template <int RUNS, int LANES>
FUNCTION float sum_of_runs(LOCAL float* runs) {
  for (int left = RUNS; left > 1; left /= 2) {
    for (int i = 0; i < left / 2; i++) runs[i] = runs[2 * i] + runs[2 * i + 1];
  }
  float sum = runs[0];
  if (LANES == 32) return lanes_sum(sum);
  for (int distance = 1; distance < LANES; distance *= 2) sum += lane_at_distance(sum, distance);
  return sum;
}

template <int DK, int DV, int HK, int HV, int LANES, typename T, typename V, typename D, typename B>
FUNCTION void gated_delta(const GLOBAL T* q, const GLOBAL T* k, V v, D decay, B beta, const GLOBAL float* memory,
                          GLOBAL T* out, GLOBAL float* new_memory, int tokens, int lane, int group,
                          int batch_head) {
  constexpr int OWN = DK / LANES;
  constexpr int RUN = DK / 32;
  constexpr int RUNS = OWN / RUN;
  int b = batch_head / HV;
  int head = batch_head % HV;
  int key_head = head / (HV / HK);
  int row = group * (32 / LANES) + lane / LANES;
  int first = lane % LANES * OWN;

  float s[OWN];
  const GLOBAL float* old_row = memory + (batch_head * DV + row) * DK + first;
  for (int i = 0; i < OWN; i++) s[i] = old_row[i];

  for (int token = 0; token < tokens; token++) {
    int position = b * tokens + token;
    const GLOBAL T* q_row = q + (position * HK + key_head) * DK + first;
    const GLOBAL T* k_row = k + (position * HK + key_head) * DK + first;
    int gate = position * HV + head;
    float kept = decay[gate];
    float runs[RUNS];
    for (int run = 0; run < RUNS; run++) {
      float sum = 0.0f;
      for (int i = run * RUN; i < (run + 1) * RUN; i++) {
        s[i] = s[i] * kept;
        sum += s[i] * static_cast<float>(k_row[i]);
      }
      runs[run] = sum;
    }
    float remembered = sum_of_runs<RUNS, LANES>(runs);
    float delta = (static_cast<float>(v[gate * DV + row]) - remembered) * static_cast<float>(beta[gate]);
    for (int run = 0; run < RUNS; run++) {
      float sum = 0.0f;
      for (int i = run * RUN; i < (run + 1) * RUN; i++) {
        s[i] = s[i] + static_cast<float>(k_row[i]) * delta;
        sum += s[i] * static_cast<float>(q_row[i]);
      }
      runs[run] = sum;
    }
    float y = sum_of_runs<RUNS, LANES>(runs);
    if (lane % LANES == 0) out[gate * DV + row] = static_cast<T>(y);
  }

  GLOBAL float* new_row = new_memory + (batch_head * DV + row) * DK + first;
  for (int i = 0; i < OWN; i++) new_row[i] = s[i];
}
