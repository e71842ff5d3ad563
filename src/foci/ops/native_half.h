// Linear attention of bfloat16 with decays per token, multiplied in pairs of bfloat16 where the processor can.
#pragma once
#include "native_back.h"

namespace foci {

#if defined(__AVX512BF16__)
constexpr bool PAIRS = true;

typedef uint32_t pair;  // two bfloat16 that are multiplied and summed as one

// y[r, c] = (x[r, 2c], x[r, 2c + 1]), rounded.
inline void pair_columns(pair* y, const float* x, long ld, int rows, int width) {
  for (int r = 0; r < rows; r++)
    for (int c = 0; c < width; c += 32) {
      const float* from = x + r * ld + c;
      if (width - c >= 32)
        _mm512_storeu_si512(y + r * (width / 2) + c / 2, (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + 16), _mm512_loadu_ps(from)));
      else
        _mm256_storeu_si256((__m256i*)(y + r * (width / 2) + c / 2), (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(from)));
    }
}

// y[r, c] = (x[2r, c], x[2r + 1, c]), rounded.
inline void pair_rows(pair* y, const float* x, long ld, int rows, int width) {
  for (int r = 0; r < rows; r += 2)
    for (int c = 0; c < width; c += 16) {
      __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(x + r * ld + c)));
      __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(x + (r + 1) * ld + c)));
      _mm512_storeu_si512(y + (r / 2) * width + c, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    }
}

// As `block` and `product`, of pairs: depth counts pairs.
template <Mode mode, int NV>
inline void pair_block(float* c, long ldc, const pair* a, long ra, long ca, const pair* b, long ldb, int depth, const float* f) {
  __m512 acc[ROWS][NV];
  for (int i = 0; i < ROWS; i++)
    for (int j = 0; j < NV; j++)
      acc[i][j] = mode == SET ? _mm512_setzero_ps()
                              : _mm512_mul_ps(_mm512_loadu_ps(c + i * ldc + j * L), _mm512_set1_ps(mode == DECAY ? f[i] : 1.0f));
  for (int k = 0; k < depth; k++)
    for (int j = 0; j < NV; j++) {
      __m512bh row = (__m512bh)_mm512_loadu_si512(b + k * ldb + j * L);
      for (int i = 0; i < ROWS; i++)
        acc[i][j] = _mm512_dpbf16_ps(acc[i][j], (__m512bh)_mm512_set1_epi32(a[i * ra + k * ca]), row);
    }
  for (int i = 0; i < ROWS; i++)
    for (int j = 0; j < NV; j++) _mm512_storeu_ps(c + i * ldc + j * L, acc[i][j]);
}

template <Mode mode>
inline void pair_product(float* c, long ldc, const pair* a, long ra, long ca, const pair* b, long ldb, int M, int N, int depth,
                         const float* f = nullptr) {
  int j = 0;
  for (; j + 2 * L <= N; j += 2 * L)
    for (int i = 0; i < M; i += ROWS) pair_block<mode, 2>(c + i * ldc + j, ldc, a + i * ra, ra, ca, b + j, ldb, depth, f + i);
  for (; j < N; j += L)
    for (int i = 0; i < M; i += ROWS) pair_block<mode, 1>(c + i * ldc + j, ldc, a + i * ra, ra, ca, b + j, ldb, depth, f + i);
}

// Tokens t0 : t0 + n: out, unscaled, and the state behind them. What the backward alone needs lends its room.
inline void pair_chunk(Chunk<false, false>& chunk) {
  Room& r = chunk.r;
  const int m = chunk.m, half = r.K / 2;
  pair *reads = (pair*)r.d_reads, *risen = (pair*)r.through, *key = (pair*)r.side, *key_t = (pair*)r.write_t,
       *fallen = (pair*)r.d_write, *value = (pair*)r.given, *S = (pair*)r.D, *A = (pair*)r.X;
  pair_columns(reads, r.reads, r.K, m, r.K);
  pair_columns(key, r.key, r.K, m, r.K);
  transpose((float*)key_t, C, (const float*)key, half, m, half);
  pair_product<SET>(r.products, C, reads, half, 1, key_t, C, m, up(m, L), half);
  chunk.weigh();
  for (int t = 0; t < m; t++) {
    for (int s = 0; s < C; s += L) at(r.products + t * C + s) *= at(r.weights + t * C + s);
    for (int s = t + 1; s < C; s++) r.products[t * C + s] = 0;
  }
  pair_columns(A, r.products, C, m, C);
  pair_columns(risen, r.risen, r.K, m, r.K);
  pair_rows(fallen, r.fallen, r.K, m, r.K);
  pair_rows(value, r.value, r.V, m, r.V);
  pair_rows(S, r.S, r.V, r.K, r.V);
  pair_product<SET>(r.out, r.V, risen, half, 1, S, r.V, m, r.V, half);
  pair_product<ADD>(r.out, r.V, A, C / 2, 1, value, r.V, m, r.V, m / 2);
  pair_product<DECAY>(r.S, r.V, fallen, 1, r.K, value, r.V, r.K, r.V, m / 2, r.total);
}
#else
constexpr bool PAIRS = false;
inline void pair_chunk(Chunk<false, false>&) {}
#endif

}  // namespace foci
