// Vectors, small products and loads of the compiled recurrences: everything here works on buffers that lie in the cache.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <immintrin.h>

namespace foci {

#if defined(__AVX512F__)
constexpr int L = 16, ROWS = 8, WIDE = 2;  // lanes of a vector; rows and vectors that a product holds in registers
#else
constexpr int L = 8, ROWS = 8, WIDE = 1;
#endif
constexpr int C = 32;     // tokens of a chunk
constexpr int HALF = 16;  // tokens within which decays per channel are multiplied pair by pair

typedef float vec __attribute__((vector_size(4 * L), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(4 * L), aligned(4), may_alias));

inline long up(long n, long to) { return (n + to - 1) / to * to; }
inline vec all(float x) { return vec{} + x; }
inline vec& at(float* p) { return *reinterpret_cast<vec*>(p); }
inline const vec& at(const float* p) { return *reinterpret_cast<const vec*>(p); }

inline float sum(vec x) {
  float total = 0;
  for (int i = 0; i < L; i++) total += x[i];
  return total;
}

// exp(x) within 2 ulp; exactly 0 below the smallest normal number and for -inf, exactly 1 for 0, inf where it is.
inline vec exponential(vec x) {
  const vec low = all(-87.33654f), high = all(88.7228f);
  vec n = x * 1.44269504088896341f;
  vec shifted = n + 12582912.0f;  // rounds to an integer: 1.5 * 2^23
  vec whole = shifted - 12582912.0f;
  vec r = x - whole * 0.693359375f - whole * -2.12194440e-4f;
  vec p = all(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  ints bits = (reinterpret_cast<ints&>(shifted) - 0x4B400000 + 127) << 23;
  vec power = reinterpret_cast<vec&>(bits);
  vec found = p * power;
  return x < low ? vec{} : x > high ? all(__builtin_inff()) : found;
}

enum Mode { SET, ADD, SUBTRACT, DECAY };

// c[ROWS, NV vectors] = a b after `mode` said what becomes of what c held; a[i, k] = a[i * ra + k * ca].
template <Mode mode, int NV>
inline void block(float* c, long ldc, const float* a, long ra, long ca, const float* b, long ldb, int depth, const float* f) {
  vec acc[ROWS][NV];
  for (int i = 0; i < ROWS; i++)
    for (int j = 0; j < NV; j++) {
      if (mode == SET) acc[i][j] = vec{};
      else acc[i][j] = at(c + i * ldc + j * L) * (mode == DECAY ? f[i] : 1.0f);
    }
  for (int k = 0; k < depth; k++) {
    vec row[NV];
    for (int j = 0; j < NV; j++) row[j] = at(b + k * ldb + j * L);
    for (int i = 0; i < ROWS; i++) {
      float x = a[i * ra + k * ca];
      for (int j = 0; j < NV; j++) {
        if (mode == SUBTRACT) acc[i][j] -= x * row[j];
        else acc[i][j] += x * row[j];
      }
    }
  }
  for (int i = 0; i < ROWS; i++)
    for (int j = 0; j < NV; j++) at(c + i * ldc + j * L) = acc[i][j];
}

// c[M, N] (mode) a[M, depth] b[depth, N]; M a multiple of ROWS, N of L. Each entry is summed in the order of k.
template <Mode mode>
inline void product(float* c, long ldc, const float* a, long ra, long ca, const float* b, long ldb, int M, int N, int depth,
                    const float* f = nullptr) {
  int j = 0;
  for (; j + WIDE * L <= N; j += WIDE * L)
    for (int i = 0; i < M; i += ROWS) block<mode, WIDE>(c + i * ldc + j, ldc, a + i * ra, ra, ca, b + j, ldb, depth, f + i);
  for (; j < N; j += L)
    for (int i = 0; i < M; i += ROWS) block<mode, 1>(c + i * ldc + j, ldc, a + i * ra, ra, ca, b + j, ldb, depth, f + i);
}

// y[8, 8] = x[8, 8] transposed.
inline void transpose8(float* y, long ldy, const float* x, long ldx) {
  __m256 a[8], b[8];
  for (int i = 0; i < 8; i++) a[i] = _mm256_loadu_ps(x + i * ldx);
  for (int i = 0; i < 8; i += 2) b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]), b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; j++) {
      a[i + 2 * j] = _mm256_shuffle_ps(b[i + j], b[i + j + 2], 0x44);
      a[i + 2 * j + 1] = _mm256_shuffle_ps(b[i + j], b[i + j + 2], 0xEE);
    }
  for (int i = 0; i < 4; i++) {
    _mm256_storeu_ps(y + i * ldy, _mm256_permute2f128_ps(a[i], a[i + 4], 0x20));
    _mm256_storeu_ps(y + (i + 4) * ldy, _mm256_permute2f128_ps(a[i], a[i + 4], 0x31));
  }
}

// y[columns, rows] = x[rows, columns] transposed; both multiples of 8.
inline void transpose(float* y, long ldy, const float* x, long ldx, int rows, int columns) {
  for (int j = 0; j < columns; j += 8)
    for (int i = 0; i < rows; i += 8) transpose8(y + j * ldy + i, ldy, x + i * ldx + j, ldx);
}

struct BFloat16 { uint16_t bits; };

inline float wide(float x) { return x; }
inline float wide(_Float16 x) { return (float)x; }
inline float wide(BFloat16 x) {
  uint32_t bits = (uint32_t)x.bits << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}
inline void narrow(float x, float* y) { *y = x; }
inline void narrow(float x, _Float16* y) { *y = (_Float16)x; }
inline void narrow(float x, BFloat16* y) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  y->bits = x == x ? (uint16_t)rounded : (uint16_t)0x7FC0;
}

// n rows of `width` numbers into a buffer of rows of ld, zeros behind them up to `rows`.
template <class T>
inline void load(float* into, long ld, const T* from, long stride, int n, int rows, int width, float by = 1.0f) {
  for (int t = 0; t < n; t++) {
    const T* x = from + t * stride;
    float* y = into + t * ld;
    for (int c = 0; c < width; c++) y[c] = wide(x[c]) * by;
    for (int c = width; c < ld; c++) y[c] = 0;
  }
  if (n < rows) std::memset(into + n * ld, 0, sizeof(float) * (rows - n) * ld);
}

// n rows on their way to the cache: each lies on a page of its own, where the processor does not look ahead.
template <class T> inline void fetch(const T* from, long stride, int n, int width) {
  for (int t = 0; t < n; t++)
    for (int c = 0; c < width; c += 64 / (int)sizeof(T)) __builtin_prefetch(from + t * stride + c);
}

template <class T>
inline void store(T* into, long stride, const float* from, long ld, int n, int width, float by = 1.0f) {
  for (int t = 0; t < n; t++)
    for (int c = 0; c < width; c++) narrow(from[t * ld + c] * by, into + t * stride + c);
}

}  // namespace foci
