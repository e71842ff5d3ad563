// One chunk of one head: loaded, its decays as products, its decayed pairs, and the way back through them.
#pragma once
#include "native_tiles.h"

namespace foci {

struct View {  // the last dimension is contiguous; strides count elements
  void* p;
  long b, t, h;
};

template <class T> inline T* place(const View& x, long row, long token, long head) {
  return (T*)x.p + row * x.b + token * x.t + head * x.h;
}

struct Job {  // the same fields, in the same order, as ops/native.py: Job
  long B, T, G, H, K, V, N, dtype, per_channel, own, threads;
  double scale;
  const int64_t* offsets;  // of documents; null: rows of a batch
  View q, k, v, erase, beta, decay, out;
  const float* bonus;
  float *state, *kept;
  View d_out, d_q, d_k, d_v, d_erase, d_beta, d_decay;
  float *d_bonus, *d_state;
};

// Buffers of one thread. `reads` holds the queries and, for the delta rule, the erase keys behind them, from row m on.
struct Room {
  int K, V;  // padded to vectors
  float *reads, *risen, *key, *write, *fallen, *write_t, *decay, *rise, *fall, *value, *error, *out, *products, *weights,
      *X, *total, *S, *D, *given, *given_t, *error_t, *d_error, *d_products, *d_reads, *d_write, *by_t, *through, *side,
      *beta, *one;
  float* memory;
  long used = 0;

  float* take(long n) {
    float* found = memory ? memory + used : nullptr;
    used += up(n, 16);
    return found;
  }
  long lay(long K_, long V_, float* p) {
    memory = p, used = 0, K = up(K_, L), V = up(V_, L);
    reads = take(2 * C * K), risen = take(2 * C * K), key = take(C * K), write = take(C * K), fallen = take(C * K);
    write_t = take(K * C), decay = take(C * K), rise = take(C * K), fall = take(C * K), value = take(C * V);
    error = take(C * V), out = take(C * V), products = take(2 * C * C), weights = take(C * C), X = take(C * C);
    total = take(K), S = take(K * V), D = take(K * V), given = take(2 * C * V), given_t = take(2 * C * V > 6 * C * K ? 2 * C * V : 6 * C * K);
    error_t = take(C * V), d_error = take(C * V), d_products = take(2 * C * C), d_reads = take(2 * C * K);
    d_write = take(C * K), by_t = take(2 * C * K), through = take(2 * C * K), side = take(2 * C * K), beta = take(2 * C);
    one = take(K);
    return used;
  }
};

// Tokens t0 : t0 + n of one sequence and head; m rows of each buffer are filled, zeros from n on.
template <bool DELTA, bool CHANNEL> struct Chunk {
  const Job& job;
  Room& r;
  long row, head;
  int n = 0, m = 0, sets = DELTA ? 2 : 1;

  template <class T> void take(long t0, int n_, float scale) {
    n = n_, m = up(n, ROWS);
    long shared = head / (job.H / job.G);
    load(r.reads, r.K, place<T>(job.q, row, t0, shared), job.q.t, n, m, job.K, scale);
    load(r.key, r.K, place<T>(job.k, row, t0, shared), job.k.t, n, m, job.K);
    load(r.value, r.V, place<T>(job.v, row, t0, head), job.v.t, n, m, job.V);
    if (DELTA) {
      const View& e = job.erase.p ? job.erase : job.k;
      load(r.reads + m * r.K, r.K, place<T>(e, row, t0, shared), e.t, n, m, job.K);
      for (int t = 0; t < m; t++) {
        r.beta[t] = t < n ? *place<float>(job.beta, row, t0 + t, head) : 0;
        for (int c = 0; c < r.K; c += L) at(r.write + t * r.K + c) = at(r.key + t * r.K + c) * r.beta[t];
      }
    } else {
      std::memcpy(r.write, r.key, sizeof(float) * m * r.K);
    }
    decays(t0);
    apply(r.risen, r.reads, r.rise, 0);
    if (DELTA) apply(r.risen + m * r.K, r.reads + m * r.K, r.rise, 0);
    apply(r.fallen, r.write, r.fall, 0);
  }

  // The `count` tokens from t0 on, which come next.
  template <class T> void expect(long t0, long count) {
    const int next = count < C ? (count > 0 ? count : 0) : C;
    const long shared = head / (job.H / job.G);
    fetch(place<T>(job.q, row, t0, shared), job.q.t, next, job.K);
    fetch(place<T>(job.k, row, t0, shared), job.k.t, next, job.K);
    fetch(place<T>(job.v, row, t0, head), job.v.t, next, job.V);
    if (CHANNEL) fetch(place<float>(job.decay, row, t0, head), job.decay.t, next, job.K);
  }

  // y[t] = x[t] * by[t] for the m rows; by[t] is a number, or one for each channel.
  void apply(float* y, const float* x, const float* by, int) {
    for (int t = 0; t < m; t++)
      for (int c = 0; c < r.K; c += L)
        at(y + t * r.K + c) = at(x + t * r.K + c) * (CHANNEL ? at(by + t * r.K + c) : all(by[t]));
  }

  // decay, rise and fall: products of decays alone, each factor at most 1. total: of the sum of the gates, so that it is
  // rounded once (ops/gates.py says why).
  void decays(long t0) {
    const int width = CHANNEL ? r.K : 1;
    if (!job.decay.p) {
      for (int t = 0; t < m; t++) r.decay[t] = 1;
      for (int c = 0; c < r.K; c += L) at(r.total + c) = all(1);
    } else if (CHANNEL) {
      load(r.decay, r.K, place<float>(job.decay, row, t0, head), job.decay.t, n, m, job.K);
      for (int c = 0; c < r.K; c += L) {
        vec gates{};
        for (int t = 0; t < n; t++) gates += at(r.decay + t * r.K + c);
        at(r.total + c) = exponential(gates);
      }
      for (int i = 0; i < m * r.K; i += L) at(r.decay + i) = exponential(at(r.decay + i));
    } else {
      float gates = 0;
      for (int t = 0; t < up(m, L); t++) r.decay[t] = t < n ? *place<float>(job.decay, row, t0 + t, head) : 0;
      for (int t = 0; t < n; t++) gates += r.decay[t];
      for (int c = 0; c < r.K; c += L) at(r.total + c) = exponential(all(gates));
      for (int t = 0; t < m; t += L) at(r.decay + t) = exponential(at(r.decay + t));
    }
    climb(width);
  }

  void climb(int width) {
    const int step = CHANNEL ? L : 1;
    for (int c = 0; c < width; c += step) {
      if (CHANNEL) {
        vec up_ = all(1), down = all(1);
        for (int t = 0; t < m; t++) {
          vec before = up_;
          up_ *= at(r.decay + t * r.K + c);
          at(r.rise + t * r.K + c) = job.own ? up_ : before;
        }
        for (int t = m - 1; t >= 0; t--) {
          at(r.fall + t * r.K + c) = down;
          down *= at(r.decay + t * r.K + c);
        }
      } else {
        float up_ = 1, down = 1;
        for (int t = 0; t < m; t++) {
          float before = up_;
          up_ *= r.decay[t];
          r.rise[t] = job.own ? up_ : before;
        }
        for (int t = m - 1; t >= 0; t--) r.fall[t] = down, down *= r.decay[t];
      }
    }
  }

  float* A() { return r.products; }
  float* E() { return r.products + m * C; }

  // A = decayed products of queries and writes, E of erase keys and writes below the diagonal; zero above.
  void pairs() {
    if (CHANNEL) pairs_by_channel();
    else pairs_by_token();
    for (int t = 0; t < m; t++) {
      for (int s = t + 1; s < C; s++) A()[t * C + s] = 0;
      if (DELTA)
        for (int s = t; s < C; s++) E()[t * C + s] = 0;
      if (job.bonus) {
        float total = 0;
        const float* u = job.bonus + head * job.K;
        for (int c = 0; c < job.K; c++) total += r.reads[t * r.K + c] * u[c] * r.key[t * r.K + c];
        A()[t * C + t] = total;
      }
    }
  }

  void pairs_by_token() {
    transpose(r.write_t, C, r.write, r.K, m, r.K);
    product<SET>(r.products, C, r.reads, r.K, 1, r.write_t, C, sets * m, up(m, L), r.K);
    weigh();
    for (int i = 0; i < sets * m; i++)
      for (int s = 0; s < C; s += L) at(r.products + i * C + s) *= at(r.weights + (i % m) * C + s);
  }

  // weights[t, s]: the decay between s and t; zero above the diagonal, and on it without a token's own decay.
  void weigh() {
    float* w = r.weights;
    std::memset(w, 0, sizeof(float) * C * C);
    if (job.own) w[0] = 1;
    for (int t = 1; t < m; t++) {
      float by = job.own ? r.decay[t] : r.decay[t - 1];
      for (int s = 0; s < C; s += L) at(w + t * C + s) = at(w + (t - 1) * C + s) * by;
      w[t * C + (job.own ? t : t - 1)] = 1;
    }
  }

  // Two halves that meet in the middle, and within each the pairs one by one.
  void pairs_by_channel() {
    std::memset(r.products, 0, sizeof(float) * sets * m * C);
    if (m > HALF) {
      to_middle();
      transpose(r.write_t, HALF, r.by_t, r.K, HALF, r.K);
      for (int i = 0; i < sets; i++)
        product<SET>(r.products + (i * m + HALF) * C, C, r.side + i * C * r.K, r.K, 1, r.write_t, HALF, m - HALF, HALF, r.K);
    }
    for (int t = 0; t < m; t++) {
      int first = t / HALF * HALF;
      vec found[2][HALF];
      for (int i = 0; i < sets; i++)
        for (int s = 0; s < HALF; s++) found[i][s] = vec{};
      for (int c = 0; c < r.K; c += L) {
        vec q = at(r.reads + t * r.K + c), e = DELTA ? at(r.reads + (m + t) * r.K + c) : q;
        if (job.own) found[0][t - first] += q * at(r.write + t * r.K + c);
        for (int s = t - 1; s >= first; s--) {
          if (job.own || s < t - 1) {
            vec by = at(r.decay + (s + 1) * r.K + c);
            q *= by;
            if (DELTA) e *= by;
          }
          vec y = at(r.write + s * r.K + c);
          found[0][s - first] += q * y;
          if (DELTA) found[1][s - first] += e * y;
        }
      }
      for (int i = 0; i < sets; i++)
        for (int s = first; s <= t; s++) r.products[(i * m + t) * C + s] = sum(found[i][s - first]);
    }
  }

  // side: reads of the right half risen from the middle; by_t: writes of the left half fallen to it.
  void to_middle() {
    for (int c = 0; c < r.K; c += L) {
      vec by = all(1);
      for (int t = HALF; t < m; t++) {
        vec own = at(r.decay + t * r.K + c);
        if (job.own) by *= own;
        at(r.through + t * r.K + c) = by;
        for (int i = 0; i < sets; i++)
          at(r.side + (i * C + t - HALF) * r.K + c) = at(r.reads + (i * m + t) * r.K + c) * by;
        if (!job.own) by *= own;
      }
      by = all(1);
      for (int s = HALF - 1; s >= 0; s--) {
        at(r.through + s * r.K + c) = by;
        at(r.by_t + s * r.K + c) = at(r.write + s * r.K + c) * by;
        by *= at(r.decay + s * r.K + c);
      }
    }
  }

  // X = (I + E)^-1 by forward substitution, row by row.
  void invert() {
    std::memset(r.X, 0, sizeof(float) * C * C);
    for (int t = 0; t < m; t++) {
      vec row[C / L];
      for (int j = 0; j < C / L; j++) row[j] = vec{};
      for (int s = 0; s < t; s++)
        for (int j = 0; j < C / L; j++) row[j] -= E()[t * C + s] * at(r.X + s * C + j * L);
      for (int j = 0; j < C / L; j++) at(r.X + t * C + j * L) = row[j];
      r.X[t * C + t] = 1;
    }
  }

  // What the tokens write: v itself, or the errors X (v - (rise e) S).
  const float* written() {
    if (!DELTA) return r.value;
    product<SUBTRACT>(r.value, r.V, r.risen + m * r.K, r.K, 1, r.S, r.V, m, r.V, r.K);
    product<SET>(r.error, r.V, r.X, C, 1, r.value, r.V, m, r.V, m);
    return r.error;
  }

  void carry(const float* written) {
    product<DECAY>(r.S, r.V, r.fallen, 1, r.K, written, r.V, r.K, r.V, m, r.total);
  }
};

}  // namespace foci
