// The way back through one chunk of one head: from the gradients of its outputs and of the state behind it.
#pragma once
#include "native_chunk.h"

namespace foci {

constexpr int SPAN = 64;  // tokens between the states that the forward keeps

// What the forward left of one span: the state at its start, and for the delta rule the errors of its tokens.
struct Kept {
  const Job& job;
  long span, head;
  bool delta;
  float* state() const { return job.kept + (span * job.H + head) * (job.K + (delta ? SPAN : 0)) * job.V; }
  float* errors(long token) const { return state() + (job.K + token) * job.V; }
};

template <class T, bool DELTA, bool CHANNEL> struct Back : Chunk<DELTA, CHANNEL> {
  using Base = Chunk<DELTA, CHANNEL>;
  using Base::job, Base::r, Base::row, Base::head, Base::n, Base::m, Base::sets;
  float* bonus = nullptr;

  Back(Base base) : Base(base) {}
  void take(long t0, int n_) { Base::template take<T>(t0, n_, job.scale); }

  const float* recalled(const Kept& kept, long token) {
    if (!DELTA) return r.value;
    load(r.error, r.V, kept.errors(token), job.V, n, m, job.V);
    return r.error;
  }

  // The gradients of tokens t0 on, stored; D, of the state behind the chunk, becomes that of the state before it.
  void chunk(const Kept& kept, long token, long t0) {
    this->pairs();
    if (DELTA) this->invert();
    const float* written = recalled(kept, token);
    int N = up(m, L), both = up(sets * m, L);
    // given: what the reads are given by the outputs, do for the queries and -dR for the erase keys.
    load(r.given, r.V, place<T>(job.d_out, row, t0, head), job.d_out.t, n, m, job.V);
    product<SET>(r.d_error, r.V, this->A(), 1, C, r.given, r.V, m, r.V, m);
    product<ADD>(r.d_error, r.V, r.fallen, r.K, 1, r.D, r.V, m, r.V, r.K);
    float* d_value = r.d_error;
    if (DELTA) {
      d_value = r.out;
      product<SET>(d_value, r.V, r.X, 1, C, r.d_error, r.V, m, r.V, m);
      for (int i = 0; i < m * r.V; i += L) at(r.given + m * r.V + i) = -at(d_value + i);
    }
    store(place<float>(job.d_v, row, t0, head), job.d_v.t, d_value, r.V, n, job.V);
    if (both > sets * m) std::memset(r.given + sets * m * r.V, 0, sizeof(float) * (both - sets * m) * r.V);
    transpose(r.given_t, 2 * C, r.given, r.V, both, r.V);
    if (N > m) std::memset((float*)written + m * r.V, 0, sizeof(float) * (N - m) * r.V);
    transpose(r.error_t, C, written, r.V, N, r.V);
    product<SET>(r.d_products, C, r.given, r.V, 1, r.error_t, C, sets * m, N, r.V);
    float* by_reads = r.side;  // transposed: [K, both] and, in by_t, [K, N]
    product<SET>(by_reads, 2 * C, r.S, r.V, 1, r.given_t, 2 * C, r.K, both, r.V);
    transpose(r.through, r.K, by_reads, 2 * C, r.K, sets * m);
    product<SET>(r.by_t, C, r.D, r.V, 1, r.error_t, C, r.K, N, r.V);
    transpose(r.d_write, r.K, r.by_t, C, r.K, m);
    float* through_fall = r.d_write;
    totals();
    product<DECAY>(r.D, r.V, r.risen, 1, r.K, r.given, r.V, r.K, r.V, sets * m, r.total);
    spread(through_fall);
    finish(t0);
  }

  // one: by channel, what the state before the chunk and D say of the whole chunk's decay.
  void totals() {
    for (int c = 0; c < r.K; c++) {
      vec found{};
      if (job.d_decay.p)
        for (int v = 0; v < r.V; v += L) found += at(r.S + c * r.V + v) * at(r.D + c * r.V + v);
      r.one[c] = sum(found);
    }
  }

  // through: gradients of the risen reads; d_write comes as those of the fallen writes. Both become gradients of the
  // reads (in d_reads) and writes, and by_t holds those of the gates, by channel or in its first column.
  void spread(float* fallen_) {
    mask();
    float* gates = r.by_t;  // after d_write was read from it
    std::memset(gates, 0, sizeof(float) * m * r.K);
    if (CHANNEL) channels(gates, fallen_);
    else tokens(gates, fallen_);
  }

  void mask() {
    for (int t = 0; t < m; t++) {
      r.beta[C + t] = r.d_products[t * C + t];  // for a bonus
      for (int s = t + (job.own ? 1 : 0); s < C; s++) r.d_products[t * C + s] = 0;
      if (DELTA)
        for (int s = t; s < C; s++) r.d_products[(m + t) * C + s] = 0;
    }
  }

  void tokens(float* gates, float* fallen_) {
    float between[C] = {}, before[C], rising[C], falling[C];
    for (int t = 0; t < m; t++) {
      // Pairs that begin before gate g and end at it or later; without a token's own decay, later.
      float run = 0;
      for (int g = 0; g <= t; g++) {
        before[g] = run;
        for (int i = 0; i < sets; i++) run += r.products[(i * m + t) * C + g] * r.d_products[(i * m + t) * C + g];
      }
      for (int g = 0; g < t + (job.own ? 1 : 0); g++) between[g] += before[g];
      vec up_{}, down{};
      for (int c = 0; c < r.K; c += L) {
        for (int i = 0; i < sets; i++) up_ += at(r.risen + (i * m + t) * r.K + c) * at(r.through + (i * m + t) * r.K + c);
        down += at(r.fallen + t * r.K + c) * at(fallen_ + t * r.K + c);
      }
      rising[t] = sum(up_), falling[t] = sum(down);
    }
    float whole = 0, run = 0;
    for (int c = 0; c < job.K; c++) whole += r.one[c];
    for (int t = m - 1; t >= 0; t--) {
      if (job.own) run += rising[t];
      gates[t * r.K] = between[t] + run + whole * r.total[0];
      if (!job.own) run += rising[t];
    }
    run = 0;
    for (int t = 0; t < m; t++) gates[t * r.K] += run, run += falling[t];

    for (int i = 0; i < sets * m; i++)
      for (int s = 0; s < C; s += L) at(r.d_products + i * C + s) *= at(r.weights + (i % m) * C + s);
    product<SET>(r.d_reads, r.K, r.d_products, C, 1, r.write, r.K, sets * m, r.K, m);
    for (int i = 0; i < sets; i++)
      for (int t = 0; t < m; t++)
        for (int c = 0; c < r.K; c += L)
          at(r.d_reads + (i * m + t) * r.K + c) += at(r.through + (i * m + t) * r.K + c) * r.rise[t];
    for (int t = 0; t < m; t++)
      for (int c = 0; c < r.K; c += L) at(fallen_ + t * r.K + c) *= r.fall[t];
    product<ADD>(fallen_, r.K, r.d_products, 1, C, r.reads, r.K, m, r.K, sets * m);
  }

  void channels(float* gates, float* fallen_) {
    // What comes through the state, kept apart until the pairs' own gradients have been weighed.
    float* state_reads = r.through;
    std::memcpy(r.side, state_reads, sizeof(float) * sets * m * r.K);
    float *rising = r.side, *d_pairs = r.d_reads, *d_columns = r.write_t;
    std::memset(d_pairs, 0, sizeof(float) * sets * m * r.K);
    std::memset(d_columns, 0, sizeof(float) * m * r.K);
    pair_gradients(d_pairs, d_columns);
    for (int c = 0; c < r.K; c += L) {
      vec run = at(r.one + c) * at(r.total + c);
      for (int t = m - 1; t >= 0; t--) {
        vec rows{}, later{};
        for (int i = 0; i < sets; i++) {
          long x = (i * m + t) * r.K + c;
          rows += at(r.reads + x) * at(d_pairs + x);
          later += at(r.risen + x) * at(rising + x);
        }
        vec columns = at(r.write + t * r.K + c) * at(d_columns + t * r.K + c);
        if (job.own) run += rows + later;
        run -= columns;
        at(gates + t * r.K + c) = run;
        if (!job.own) run += rows + later;
      }
      run = vec{};
      for (int t = 0; t < m; t++) {
        at(gates + t * r.K + c) += run;
        run += at(r.fallen + t * r.K + c) * at(fallen_ + t * r.K + c);
      }
    }
    for (int t = 0; t < m; t++)
      for (int c = 0; c < r.K; c += L) {
        long x = t * r.K + c;
        for (int i = 0; i < sets; i++)
          at(d_pairs + i * m * r.K + x) += at(rising + i * m * r.K + x) * at(r.rise + x);
        at(fallen_ + x) = at(fallen_ + x) * at(r.fall + x) + at(d_columns + x);
        if (job.own) {  // a token's product with itself is weighed by nothing
          float d = r.beta[C + t];
          at(d_pairs + x) += at(r.write + x) * d;
          at(fallen_ + x) += at(r.reads + x) * d;
        }
      }
  }

  // Through the decayed pairs below the diagonal, to reads and writes: one by one in each half, and between the halves.
  void pair_gradients(float* d_reads, float* d_write) {
    for (int t = 0; t < m; t++) {
      int first = t / HALF * HALF;
      for (int c = 0; c < r.K; c += L) {
        vec by = all(1), dq{}, de{}, q = at(r.reads + t * r.K + c), e = DELTA ? at(r.reads + (m + t) * r.K + c) : q;
        for (int s = t - 1; s >= first; s--) {
          if (job.own || s < t - 1) by *= at(r.decay + (s + 1) * r.K + c);
          vec y = at(r.write + s * r.K + c) * by;
          float a = r.d_products[t * C + s];
          dq += a * y;
          vec back = a * q;
          if (DELTA) {
            float b = r.d_products[(m + t) * C + s];
            de += b * y;
            back += b * e;
          }
          at(d_write + s * r.K + c) += back * by;
        }
        at(d_reads + t * r.K + c) += dq;
        if (DELTA) at(d_reads + (m + t) * r.K + c) += de;
      }
    }
    if (m <= HALF) return;
    float* rising = r.given_t;  // room for side, which is taken
    float* falling = middle(rising);
    int later = m - HALF;
    for (int i = 0; i < sets; i++) {
      const float* d = r.d_products + (i * m + HALF) * C;
      float* found = r.given_t + 2 * C * r.K;
      product<SET>(found, r.K, d, C, 1, falling, r.K, later, r.K, HALF);
      for (int t = 0; t < later; t++)
        for (int c = 0; c < r.K; c += L)
          at(d_reads + (i * m + HALF + t) * r.K + c) += at(found + t * r.K + c) * at(r.through + (HALF + t) * r.K + c);
      product<SET>(found, r.K, d, 1, C, rising + i * C * r.K, r.K, HALF, r.K, later);
      for (int s = 0; s < HALF; s++)
        for (int c = 0; c < r.K; c += L)
          at(d_write + s * r.K + c) += at(found + s * r.K + c) * at(r.through + s * r.K + c);
    }
  }

  // Reads risen from the middle and writes fallen to it, again; `through` holds the decays themselves.
  float* middle(float* rising) {
    float *side = r.side, *by_t = r.by_t;
    r.side = rising, r.by_t = rising + 4 * C * r.K;
    this->to_middle();
    float* falling = r.by_t;
    r.side = side, r.by_t = by_t;
    return falling;
  }

  void finish(long t0) {
    float *dq = r.d_reads, *de = r.d_reads + m * r.K, *dw = r.d_write;
    if (job.bonus) {
      const float* u = job.bonus + head * job.K;
      for (int t = 0; t < n; t++)
        for (int c = 0; c < job.K; c++) {
          long x = t * r.K + c;
          float d = r.beta[C + t];
          dq[x] += d * u[c] * r.key[x];
          dw[x] += d * u[c] * r.reads[x];
          if (bonus) bonus[c] += d * r.reads[x] * r.key[x];
        }
    }
    store(place<float>(job.d_q, row, t0, head), job.d_q.t, dq, r.K, n, job.K, job.scale);
    if (DELTA) {
      for (int t = 0; t < n; t++) {
        vec found{};
        for (int c = 0; c < r.K; c += L) {
          long x = t * r.K + c;
          found += at(dw + x) * at(r.key + x);
          at(dw + x) *= r.beta[t];
          if (!job.erase.p) at(dw + x) += at(de + x);
        }
        *place<float>(job.d_beta, row, t0 + t, head) = sum(found);
      }
      if (job.erase.p) store(place<float>(job.d_erase, row, t0, head), job.d_erase.t, de, r.K, n, job.K);
    }
    store(place<float>(job.d_k, row, t0, head), job.d_k.t, dw, r.K, n, job.K);
    if (job.d_decay.p) {
      if (CHANNEL)  // sums leave rounding errors where a decay is 0, and nothing depends on that gate (ops/gates.py)
        for (int x = 0; x < n * r.K; x += L) at(r.by_t + x) = at(r.decay + x) == vec{} ? vec{} : at(r.by_t + x);
      store(place<float>(job.d_decay, row, t0, head), job.d_decay.t, r.by_t, r.K, n, CHANNEL ? job.K : 1);
    }
  }
};

}  // namespace foci
