// The selective scan of L channels at a time: their states [K, L] stay in registers or the nearest cache.
#pragma once
#include "native_chunk.h"

namespace foci {

struct Selective {  // the same fields, in the same order, as ops/selective_scan/native.py: Selective
  long B, T, D, K, N, dtype, threads;
  const int64_t* offsets;
  View x, dt, b, c, out;  // strides b and t alone; dt, b and c are float32
  const float *A, *skip;  // A [K, D]
  float* state;           // [N, K, D]
};

// n numbers of one token as a vector, zeros behind them.
template <class T> inline vec gather(const T* from, int n) {
  float found[L] = {};
  for (int i = 0; i < n; i++) found[i] = wide(from[i]);
  return at(found);
}

template <class T> void channels(const Selective& job, long sequence, long first) {
  const int n = job.D - first < L ? job.D - first : L;
  const long row = job.offsets ? 0 : sequence, start = job.offsets ? job.offsets[sequence] : 0;
  const long stop = job.offsets ? job.offsets[sequence + 1] : job.T, K = job.K;
  float h[K * L], A[K * L];
  for (long k = 0; k < K; k++) {
    at(h + k * L) = gather(job.state + (sequence * K + k) * job.D + first, n);
    at(A + k * L) = gather(job.A + k * job.D + first, n);
  }
  const vec skip = job.skip ? gather(job.skip + first, n) : vec{};
  for (long t = start; t < stop; t++) {
    const vec x = gather(place<T>(job.x, row, t, 0) + first, n), dt = gather(place<float>(job.dt, row, t, 0) + first, n);
    const float *b = place<float>(job.b, row, t, 0), *c = place<float>(job.c, row, t, 0);
    const vec u = dt * x;
    vec y = skip * x;
    for (long k = 0; k < K; k++) {
      vec now = exponential(dt * at(A + k * L)) * at(h + k * L) + u * b[k];
      at(h + k * L) = now;
      y += now * c[k];
    }
    float found[L];
    at(found) = y;
    T* out = place<T>(job.out, row, t, 0) + first;
    for (int i = 0; i < n; i++) narrow(found[i], out + i);
  }
  for (long k = 0; k < K; k++)
    for (int i = 0; i < n; i++) job.state[(sequence * K + k) * job.D + first + i] = h[k * L + i];
}

inline void selective(const Selective& job) {
  const long blocks = up(job.D, L) / L;
#pragma omp parallel for num_threads(job.threads) schedule(dynamic, 1)
  for (long i = 0; i < job.N * blocks; i++) {
    if (job.dtype == 0) channels<float>(job, i / blocks, i % blocks * L);
    else if (job.dtype == 1) channels<BFloat16>(job, i / blocks, i % blocks * L);
    else channels<_Float16>(job, i / blocks, i % blocks * L);
  }
}

}  // namespace foci
