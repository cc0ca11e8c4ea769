// y [M, N] = x [M, K] w[N, K]^T: for few rows, where reading the weight once at full memory speed is all that counts,
// and for many rows of a type that the CPU does not multiply.
#pragma once

#include <algorithm>
#include <memory>
#include <type_traits>
#include <vector>

#include "parallel.h"
#include "vec.h"

namespace product {

constexpr int kWide = 4;  // rows of w at a time: four streams from memory, and four sums make one store
// Rows of x at a time: 6 x 4 sums of 32 registers, or 3 x 4 of 16, leave some for the operands.
constexpr int kMaxRows = vec::kLanes == 16 ? 6 : 3;
constexpr int kAhead = 2;  // tiles of w that are fetched ahead while one is multiplied

// Sums of ROWS x 4 products over K. FIRST: nobody has read these rows of w yet.
template <int ROWS, bool FIRST, class T>
inline void tile(const T* x, const T* w, int64_t K, float (*out)[kWide]) {
  vec::F sums[ROWS][kWide] = {};
  int64_t k = 0;
  for (; k + vec::kLanes <= K; k += vec::kLanes) {
    vec::F row[ROWS];
    vec::unroll<ROWS>([&](auto m) ALWAYS_INLINE { row[m] = vec::load(x + m * K + k); });
    vec::unroll<kWide>([&](auto n) ALWAYS_INLINE {
      const vec::F wide = vec::load(w + n * K + k);
      if (FIRST) __builtin_prefetch(w + (n + kAhead * kWide) * K + k, 0, 2);
      vec::unroll<ROWS>([&](auto m) ALWAYS_INLINE { sums[m][n] += row[m] * wide; });
    });
  }
  if (k < K) {
    vec::unroll<ROWS>([&](auto m) ALWAYS_INLINE {
      const vec::F row = vec::load(x + m * K + k, K - k);
      vec::unroll<kWide>([&](auto n) ALWAYS_INLINE { sums[m][n] += row * vec::load(w + n * K + k, K - k); });
    });
  }
  vec::unroll<ROWS>([&](auto m) ALWAYS_INLINE { vec::sum4(out[m], sums[m][0], sums[m][1], sums[m][2], sums[m][3]); });
}

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
template <int ROWS, bool FIRST>
inline void tile(const c10::BFloat16* x, const c10::BFloat16* w, int64_t K, float (*out)[kWide]) {
  __m512 sums[ROWS][kWide] = {};
  for (int64_t k = 0; k < K; k += 32) {
    const __mmask32 mask = K - k >= 32 ? ~__mmask32(0) : (__mmask32(1) << (K - k)) - 1;
    __m512bh wide[kWide];
    vec::unroll<kWide>([&](auto n) ALWAYS_INLINE {
      wide[n] = (__m512bh)_mm512_maskz_loadu_epi16(mask, w + n * K + k);
      if (FIRST) _mm_prefetch(reinterpret_cast<const char*>(w + (n + kAhead * kWide) * K + k), _MM_HINT_T1);
    });
    vec::unroll<ROWS>([&](auto m) ALWAYS_INLINE {
      const __m512bh row = (__m512bh)_mm512_maskz_loadu_epi16(mask, x + m * K + k);
      vec::unroll<kWide>([&](auto n) ALWAYS_INLINE { sums[m][n] = _mm512_dpbf16_ps(sums[m][n], row, wide[n]); });
    });
  }
  vec::unroll<ROWS>([&](auto m) ALWAYS_INLINE {
    vec::sum4(out[m], (vec::F)sums[m][0], (vec::F)sums[m][1], (vec::F)sums[m][2], (vec::F)sums[m][3]);
  });
}
#elif defined(__AVX2__) && !defined(__AVX512F__)
#define PAIRED_HALVES
// Sixteen bfloat16, the first of each pair in the low half of a word; zero beyond the first n.
inline __m256i pairs(const c10::BFloat16* p, int64_t n) {
  if (n >= 16) return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  alignas(32) uint16_t buffer[16] = {};
  std::memcpy(buffer, p, n * sizeof *buffer);
  return _mm256_load_si256(reinterpret_cast<const __m256i*>(buffer));
}

// The floats at even places and at odd places, an instruction each.
inline vec::F even(__m256i pairs) { return (vec::F)_mm256_slli_epi32(pairs, 16); }
inline vec::F odd(__m256i pairs) { return (vec::F)_mm256_and_si256(pairs, _mm256_set1_epi32(int(0xffff0000))); }

template <int ROWS, bool FIRST>
inline void tile(const c10::BFloat16* x, const c10::BFloat16* w, int64_t K, float (*out)[kWide]) {
  vec::F sums[ROWS][kWide] = {};
  for (int64_t k = 0; k < K; k += 16) {
    vec::F row[ROWS][2];
    vec::unroll<ROWS>([&](auto m) ALWAYS_INLINE {
      const __m256i halves = pairs(x + m * K + k, K - k);
      row[m][0] = even(halves), row[m][1] = odd(halves);
    });
    vec::unroll<kWide>([&](auto n) ALWAYS_INLINE {
      const __m256i halves = pairs(w + n * K + k, K - k);
      if (FIRST) _mm_prefetch(reinterpret_cast<const char*>(w + (n + kAhead * kWide) * K + k), _MM_HINT_T1);
      const vec::F first = even(halves), second = odd(halves);
      vec::unroll<ROWS>([&](auto m) ALWAYS_INLINE { sums[m][n] += row[m][0] * first; });
      vec::unroll<ROWS>([&](auto m) ALWAYS_INLINE { sums[m][n] += row[m][1] * second; });
    });
  }
  vec::unroll<ROWS>([&](auto m) ALWAYS_INLINE { vec::sum4(out[m], sums[m][0], sums[m][1], sums[m][2], sums[m][3]); });
}
#endif

template <int ROWS, bool FIRST, class T>
void columns(const T* x, const T* w, const T* bias, T* y, int64_t N, int64_t K, int64_t n) {
  float sums[ROWS][kWide];
  tile<ROWS, FIRST>(x, w + n * K, K, sums);
  for (int m = 0; m < ROWS; m++) {
    if (bias)
      for (int i = 0; i < kWide; i++) sums[m][i] += float(bias[n + i]);
    vec::round4(y + m * N + n, sums[m]);
  }
}

// The products of two rows, added up in the order of `tile`.
template <class T>
inline float dot(const T* x, const T* w, int64_t K) {
  vec::F sums{};
  for (int64_t k = 0; k < K; k += vec::kLanes) {
    const int64_t left = std::min(vec::kLanes, K - k);
    sums += vec::load(x + k, left) * vec::load(w + k, left);
  }
  return vec::sum(sums);
}

#if defined(PAIRED_HALVES)
inline float dot(const c10::BFloat16* x, const c10::BFloat16* w, int64_t K) {
  vec::F sums{};
  for (int64_t k = 0; k < K; k += 16) {
    const __m256i a = pairs(x + k, K - k), b = pairs(w + k, K - k);
    sums += even(a) * even(b);
    sums += odd(a) * odd(b);
  }
  return vec::sum(sums);
}
#endif

// Up to three columns that are left over when 4 does not divide N.
template <class T>
void leftover(const T* x, const T* w, const T* bias, T* y, int64_t M, int64_t N, int64_t K, int64_t n) {
  for (; n < N; n++)
    for (int64_t m = 0; m < M; m++)
      y[m * N + n] = T(dot(x + m * K, w + n * K, K) + (bias ? float(bias[n]) : 0.0f));
}

template <class T>
void few_rows(const T* x, const T* w, const T* bias, T* y, int64_t M, int64_t N, int64_t K) {
  using Columns = void (*)(const T*, const T*, const T*, T*, int64_t, int64_t, int64_t);
  constexpr Columns first[] = {columns<1, true, T>, columns<2, true, T>, columns<3, true, T>,
                               columns<4, true, T>, columns<5, true, T>, columns<6, true, T>};
  constexpr Columns again[] = {columns<1, false, T>, columns<2, false, T>, columns<3, false, T>,
                               columns<4, false, T>, columns<5, false, T>, columns<6, false, T>};
  const int64_t passes = (M + kMaxRows - 1) / kMaxRows;
  const int64_t rows = (M + passes - 1) / passes;
  const int64_t tiles = N / kWide;
  parallel::loop(tiles, double(K) * (2.5e-4 + 4e-5 * double(M)), [&](int64_t i) {
    first[rows - 1](x, w, bias, y, N, K, i * kWide);
    for (int64_t m = rows; m < M; m += rows)
      again[std::min(rows, M - m) - 1](x + m * K, w, bias, y + m * N, N, K, i * kWide);
  });
  leftover(x, w, bias, y, M, N, K, tiles * kWide);
}

// Whether halves are turned into floats before they are multiplied, so that each should be turned once only.
template <class T>
constexpr bool widens() {
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
  return std::is_same_v<T, c10::Half>;
#else
  return !std::is_same_v<T, float>;
#endif
}

// Floats that a row of halves becomes. They are put in the order in which `tile` multiplies the halves themselves, so that
// the result of a row does not depend on how many others there are.
template <class T>
int64_t wide_size(int64_t count) {
  return count;
}

template <class T>
void widen(const T* from, float* to, int64_t count) {
  int64_t i = 0;
  for (; i + vec::kLanes <= count; i += vec::kLanes) vec::store(to + i, vec::load(from + i));
  if (i < count) vec::store(to + i, vec::load(from + i, count - i), count - i);
}

#if defined(PAIRED_HALVES)
template <>
inline int64_t wide_size<c10::BFloat16>(int64_t count) {
  return (count + 15) / 16 * 16;
}

template <>
inline void widen(const c10::BFloat16* from, float* to, int64_t count) {
  for (int64_t i = 0; i < count; i += 16) {
    const __m256i halves = pairs(from + i, count - i);
    vec::store(to + i, even(halves));
    vec::store(to + i + 8, odd(halves));
  }
}
#endif

// Any number of rows, in float32. Tiles of w are widened in turn, each for as many rows of x as the second-level cache
// holds.
template <class T>
void widened(const T* x, const T* w, const T* bias, T* y, int64_t M, int64_t N, int64_t K) {
  constexpr int64_t kBlockBytes = 256 * 1024;
  using Tile = void (*)(const float*, const float*, int64_t, float (*)[kWide]);
  constexpr Tile kernels[] = {tile<1, false, float>, tile<2, false, float>, tile<3, false, float>,
                              tile<4, false, float>, tile<5, false, float>, tile<6, false, float>};
  const int64_t size = wide_size<T>(K);
  const std::unique_ptr<float[]> rows(new float[M * size]);
  parallel::loop(M, double(K) * 2e-4, [&](int64_t m) { widen(x + m * K, &rows[m * size], K); });
  const int64_t block = std::max<int64_t>(1, kBlockBytes / (4 * size * kMaxRows)) * kMaxRows;
  const int64_t blocks = (M + block - 1) / block, tiles = (N + kWide - 1) / kWide;
  parallel::loop(blocks * tiles, double(K) * (4e-4 + 1e-4 * double(std::min(M, block))), [&](int64_t i) {
    const int64_t n = i % tiles * kWide, count = std::min<int64_t>(kWide, N - n);
    const int64_t begin = i / tiles * block, end = std::min(M, begin + block);
    thread_local std::vector<float> columns;
    columns.resize(kWide * size);
    for (int64_t c = 0; c < count; c++) widen(w + (n + c) * K, &columns[c * size], K);
    for (int64_t k = 0; k < kWide * K; k += 64 / sizeof(T)) __builtin_prefetch(w + (n + kWide) * K + k, 0, 2);
    for (int64_t m = begin; m < end; m += kMaxRows) {
      const int64_t here = std::min<int64_t>(kMaxRows, end - m);
      float sums[kMaxRows][kWide];
      kernels[here - 1](&rows[m * size], columns.data(), size, sums);
      for (int64_t r = 0; r < here; r++) {
        if (bias)
          for (int64_t c = 0; c < count; c++) sums[r][c] += float(bias[n + c]);
        if (count == kWide)
          vec::round4(y + (m + r) * N + n, sums[r]);
        else
          for (int64_t c = 0; c < count; c++) y[(m + r) * N + n + c] = T(sums[r][c]);
      }
    }
  });
}

}  // namespace product
