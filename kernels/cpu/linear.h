// y [M, N] = x [M, K] w[N, K]^T for few rows, where reading the weight once at full memory speed is all that counts.
#pragma once

#include <algorithm>

#include "parallel.h"
#include "vec.h"

namespace product {

constexpr int kWide = 4;     // rows of w at a time: four streams from memory, and four sums make one store
constexpr int kMaxRows = 6;  // rows of x at a time: 6 x 4 sums leave registers for the operands

constexpr int kAhead = 2;    // tiles of w that are fetched ahead while one is multiplied

// Sums of ROWS x 4 products over K. FIRST: nobody has read these rows of w yet.
template <int ROWS, bool FIRST, class T>
inline void tile(const T* x, const T* w, int64_t K, float (*out)[kWide]) {
  vec::F sums[ROWS][kWide] = {};
  int64_t k = 0;
  for (; k + vec::kLanes <= K; k += vec::kLanes) {
    vec::F wide[kWide];
    vec::unroll<kWide>([&](auto n) ALWAYS_INLINE {
      wide[n] = vec::load(w + n * K + k);
      if (FIRST) __builtin_prefetch(w + (n + kAhead * kWide) * K + k, 0, 2);
    });
    vec::unroll<ROWS>([&](auto m) ALWAYS_INLINE {
      const vec::F row = vec::load(x + m * K + k);
      vec::unroll<kWide>([&](auto n) ALWAYS_INLINE { sums[m][n] += row * wide[n]; });
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

// Up to three columns that are left over when 4 does not divide N.
template <class T>
void leftover(const T* x, const T* w, const T* bias, T* y, int64_t M, int64_t N, int64_t K, int64_t n) {
  for (; n < N; n++)
    for (int64_t m = 0; m < M; m++) {
      vec::F sums{};
      for (int64_t k = 0; k < K; k += vec::kLanes) {
        const int64_t left = std::min(vec::kLanes, K - k);
        sums += vec::load(x + m * K + k, left) * vec::load(w + n * K + k, left);
      }
      y[m * N + n] = T(vec::sum(sums) + (bias ? float(bias[n]) : 0.0f));
    }
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

}  // namespace product
