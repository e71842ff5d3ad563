// The recurrences compiled: one head of one sequence at a time, chunk by chunk, forward and backward.
#include "native_half.h"
#include "native_scan.h"
#include <cstdlib>
#include <type_traits>
#include <omp.h>

namespace foci {

struct Sequence { long row, start, stop, kept; };

// Sequence n: a row of the batch or a document; `kept`: its first place among the spans.
inline Sequence sequence(const Job& job, long n) {
  if (!job.offsets) return {n, 0, job.T, n * (up(job.T, SPAN) / SPAN)};
  return {0, job.offsets[n], job.offsets[n + 1], job.offsets[n] / SPAN + n};
}

inline void square(float* into, long ld, const float* from, long K, long V) {
  for (long c = 0; c < K; c++) std::memcpy(into + c * ld, from + c * V, sizeof(float) * V);
}

inline void back(float* into, const float* from, long ld, long K, long V) {
  for (long c = 0; c < K; c++) std::memcpy(into + c * V, from + c * ld, sizeof(float) * V);
}

template <class T, bool DELTA, bool CHANNEL> void forward_head(const Job& job, Room& r, long n, long head) {
  Sequence s = sequence(job, n);
  Chunk<DELTA, CHANNEL> chunk{job, r, s.row, head};
  constexpr bool CAN_PAIR = PAIRS && !DELTA && !CHANNEL && std::is_same<T, BFloat16>::value;
  const bool pairs = CAN_PAIR && job.own;
  float* state = job.state + (n * job.H + head) * job.K * job.V;
  std::memset(r.S, 0, sizeof(float) * r.K * r.V);
  square(r.S, r.V, state, job.K, job.V);
  for (long t0 = s.start; t0 < s.stop; t0 += C) {
    int token = (t0 - s.start) % SPAN;
    Kept kept{job, s.kept + (t0 - s.start) / SPAN, head, DELTA};
    if (job.kept && !token) back(kept.state(), r.S, r.V, job.K, job.V);
    chunk.template take<T>(t0, s.stop - t0 < C ? s.stop - t0 : C, pairs ? 1 : job.scale);
    chunk.template expect<T>(t0 + C, s.stop - t0 - C);
    if constexpr (CAN_PAIR) {
      if (pairs) {
        pair_chunk(chunk);
        store(place<T>(job.out, s.row, t0, head), job.out.t, r.out, r.V, chunk.n, job.V, job.scale);
        continue;
      }
    }
    chunk.pairs();
    if (DELTA) chunk.invert();
    const float* written = chunk.written();
    if (DELTA && job.kept) back(kept.errors(token), written, r.V, chunk.n, job.V);
    product<SET>(r.out, r.V, r.risen, r.K, 1, r.S, r.V, chunk.m, r.V, r.K);
    product<ADD>(r.out, r.V, chunk.A(), C, 1, written, r.V, chunk.m, r.V, chunk.m);
    store(place<T>(job.out, s.row, t0, head), job.out.t, r.out, r.V, chunk.n, job.V);
    chunk.carry(written);
  }
  back(state, r.S, r.V, job.K, job.V);
}

template <class T, bool DELTA, bool CHANNEL> void backward_head(const Job& job, Room& r, long n, long head) {
  Sequence s = sequence(job, n);
  Back<T, DELTA, CHANNEL> back_{{job, r, s.row, head}};
  float* d_state = job.d_state + (n * job.H + head) * job.K * job.V;
  std::memset(r.D, 0, sizeof(float) * r.K * r.V);
  square(r.D, r.V, d_state, job.K, job.V);
  back_.bonus = job.d_bonus ? job.d_bonus + (n * job.H + head) * job.K : nullptr;
  for (long spans = (s.stop - s.start + SPAN - 1) / SPAN, i = spans - 1; i >= 0; i--) {
    Kept kept{job, s.kept + i, head, DELTA};
    long begin = s.start + i * SPAN, end = begin + SPAN < s.stop ? begin + SPAN : s.stop;
    for (long t0 = begin + (end - begin - 1) / C * C; t0 >= begin; t0 -= C) {
      std::memset(r.S, 0, sizeof(float) * r.K * r.V);
      square(r.S, r.V, kept.state(), job.K, job.V);
      for (long before = begin; before < t0; before += C) {
        back_.take(before, C);
        back_.carry(back_.recalled(kept, before - begin));
      }
      back_.take(t0, end - t0 < C ? end - t0 : C);
      back_.chunk(kept, t0 - begin, t0);
    }
  }
  back(d_state, r.D, r.V, job.K, job.V);
}

// One token: the state [K, V] is read once for both products, and written once.
template <bool DELTA> void step(const Job& job, long row, long head) {
  const long K = job.K, V = job.V, shared = head / (job.H / job.G);
  const float *q = place<float>(job.q, row, 0, shared), *k = place<float>(job.k, row, 0, shared);
  const float *e = DELTA && job.erase.p ? place<float>(job.erase, row, 0, shared) : k, *v = place<float>(job.v, row, 0, head);
  const float *g = job.decay.p ? place<float>(job.decay, row, 0, head) : nullptr, *u = job.bonus ? job.bonus + head * K : nullptr;
  float *S = job.state + (row * job.H + head) * K * V, *out = place<float>(job.out, row, 0, head);
  float by[K], asked[K], read[V], written[V], own = 0;
  for (long c = 0; c < K; c++) by[c] = g ? std::exp(g[job.per_channel ? c : 0]) : 1;
  for (long c = 0; c < K; c++) asked[c] = job.own ? q[c] * by[c] : q[c], own += u ? q[c] * u[c] * k[c] : q[c] * k[c];
  for (long x = 0; x < V; x++) out[x] = read[x] = 0;
  for (long c = 0; c < K; c++) {
    const float a = asked[c], b = e[c] * by[c], *row_ = S + c * V;
    for (long x = 0; x < V; x++) {
      out[x] += a * row_[x];
      if (DELTA) read[x] += b * row_[x];
    }
  }
  const float beta = DELTA ? *place<float>(job.beta, row, 0, head) : 0;
  for (long x = 0; x < V; x++) {
    written[x] = DELTA ? beta * (v[x] - read[x]) : v[x];
    out[x] = job.scale * (out[x] + own * written[x]);
  }
  for (long c = 0; c < K; c++) {
    const float a = by[c], b = k[c];
    float* row_ = S + c * V;
    for (long x = 0; x < V; x++) row_[x] = a * row_[x] + b * written[x];
  }
}

template <bool DELTA> void steps(const Job& job) {
#pragma omp parallel for num_threads(job.threads) schedule(static)
  for (long i = 0; i < job.B * job.H; i++) step<DELTA>(job, i / job.H, i % job.H);
}

typedef void (*Head)(const Job&, Room&, long, long);

inline void heads(const Job& job, Head run) {
#pragma omp parallel num_threads(job.threads)
  {
    Room r;
    void* memory = nullptr;
    long size = sizeof(float) * r.lay(job.K, job.V, nullptr);
    if (posix_memalign(&memory, 64, size)) std::abort();
    r.lay(job.K, job.V, (float*)memory);
#pragma omp for schedule(dynamic, 1)
    for (long i = 0; i < job.N * job.H; i++) run(job, r, i / job.H, i % job.H);
    std::free(memory);
  }
}

template <class T> void choose(const Job& job, bool delta, bool backward) {
  const Head table[2][2][2] = {
      {{forward_head<T, false, false>, forward_head<T, false, true>}, {forward_head<T, true, false>, forward_head<T, true, true>}},
      {{backward_head<T, false, false>, backward_head<T, false, true>}, {backward_head<T, true, false>, backward_head<T, true, true>}},
  };
  heads(job, table[backward][delta][job.per_channel]);
}

inline void run(const Job& job, bool delta, bool backward) {
  if (job.dtype == 0) choose<float>(job, delta, backward);
  else if (job.dtype == 1) choose<BFloat16>(job, delta, backward);
  else choose<_Float16>(job, delta, backward);
}

}  // namespace foci

extern "C" {
void foci_linear_forward(const foci::Job* job) { foci::run(*job, false, false); }
void foci_linear_backward(const foci::Job* job) { foci::run(*job, false, true); }
void foci_delta_forward(const foci::Job* job) { foci::run(*job, true, false); }
void foci_delta_backward(const foci::Job* job) { foci::run(*job, true, true); }
void foci_linear_step(const foci::Job* job) { foci::steps<false>(*job); }
void foci_delta_step(const foci::Job* job) { foci::steps<true>(*job); }
void foci_selective_forward(const foci::Selective* job) { foci::selective(*job); }
}
