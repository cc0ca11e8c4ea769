// y [M, N] = x [M, K] w[N, K]^T for few rows, where reading the weight once at full memory speed is all that counts.
#pragma once

#include <algorithm>
#include <memory>

#include "parallel.h"
#include "vec.h"

namespace product {

constexpr int kWide = 4;  // rows of w at a time: four sums make one store
// Rows of x at a time: 6 x 4 sums of 32 registers, or 3 x 4 of 16, leave some for the operands.
constexpr int kMaxRows = vec::kLanes == 16 ? 6 : 3;
using parallel::kLine;
// Bytes of w that are fetched before their turn. They are fetched in the order of their addresses, which memory likes
// better than that of their use, from four rows in turn.
constexpr int64_t kAhead = 4096;

// Registers of floats that numbers are opened into at a time, and how many numbers these are.
template <class T>
constexpr int kParts = 1;
template <class T>
constexpr int64_t kStep = kParts<T> * vec::kLanes;

// Floats of the first `left` of kStep numbers, zero beyond. Their order is the same for all rows.
template <class T>
inline void open(const T* p, int64_t left, vec::F* parts) {
  vec::unroll<kParts<T>>([&](auto i) ALWAYS_INLINE {
    const int64_t here = left - i * vec::kLanes;
    const T* from = p + i * vec::kLanes;
    parts[i] = here >= vec::kLanes ? vec::load(from) : vec::load(from, std::max<int64_t>(here, 0));
  });
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// The floats at even places and those at odd places: an instruction each.
template <>
constexpr int kParts<c10::BFloat16> = 2;

inline void open(const c10::BFloat16* p, int64_t left, vec::F* parts) {
  alignas(32) uint16_t first[16] = {};
  if (left < 16) std::memcpy(first, p, left * sizeof *first);
  const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(left < 16 ? (const void*)first : p));
  parts[0] = (vec::F)_mm256_slli_epi32(pairs, 16);
  parts[1] = (vec::F)_mm256_and_si256(pairs, _mm256_set1_epi32(int(0xffff0000)));
}
#endif

// Numbers that a row of K is padded to, with zeros, when it is opened as a whole.
template <class T>
int64_t opened_size(int64_t K) {
  return (K + kStep<T> - 1) / kStep<T> * kStep<T>;
}

template <class T>
void open_row(const T* from, float* to, int64_t K) {
  for (int64_t k = 0; k < K; k += kStep<T>) {
    vec::F parts[kParts<T>];
    open(from + k, K - k, parts);
    for (int i = 0; i < kParts<T>; i++) vec::store(to + k + i * vec::kLanes, parts[i]);
  }
}

// Sums of ROWS x 4 products over K. The rows of x are opened and `stride` apart. At each step LINES more lines are
// fetched from `ahead`.
template <int ROWS, int LINES, class T>
inline void tile(const float* x, int64_t stride, const T* w, int64_t K, const char* ahead, float (*out)[kWide]) {
  vec::F sums[ROWS][kWide] = {};
  const auto step = [&](int64_t k, int64_t left) ALWAYS_INLINE {
    vec::unroll<LINES>([&](auto i) ALWAYS_INLINE { __builtin_prefetch(ahead + i * kLine); });
    ahead += LINES * kLine;
    vec::unroll<kWide>([&](auto n) ALWAYS_INLINE {
      vec::F parts[kParts<T>];
      open(w + n * K + k, left, parts);
      vec::unroll<kParts<T>>([&](auto i) ALWAYS_INLINE {
        vec::unroll<ROWS>([&](auto m) ALWAYS_INLINE {
          sums[m][n] += vec::load(x + m * stride + k + i * vec::kLanes) * parts[i];
        });
      });
    });
  };
  int64_t k = 0;
  for (; k + kStep<T> <= K; k += kStep<T>) step(k, kStep<T>);
  if (k < K) step(k, K - k);
  vec::unroll<ROWS>([&](auto m) ALWAYS_INLINE { vec::sum4(out[m], sums[m][0], sums[m][1], sums[m][2], sums[m][3]); });
}

// What rows of x are multiplied with rows of w as.
template <class T>
struct Opened {
  using Type = float;
};

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
template <>
struct Opened<c10::BFloat16> {
  using Type = c10::BFloat16;
};

template <>
constexpr int kParts<c10::BFloat16> = 2;

inline void open_row(const c10::BFloat16* from, c10::BFloat16* to, int64_t K) {
  std::fill(std::copy(from, from + K, to), to + opened_size<c10::BFloat16>(K), c10::BFloat16(0.0f));
}

template <int ROWS, int LINES, class T>
inline void tile(const c10::BFloat16* x, int64_t stride, const T* w, int64_t K, const char* ahead,
                 float (*out)[kWide]) {
  __m512 sums[ROWS][kWide] = {};
  for (int64_t k = 0; k < K; k += 32) {
    const __mmask32 mask = K - k >= 32 ? ~__mmask32(0) : (__mmask32(1) << (K - k)) - 1;
    vec::unroll<LINES>([&](auto i) ALWAYS_INLINE { __builtin_prefetch(ahead + i * kLine); });
    ahead += LINES * kLine;
    __m512bh wide[kWide];
    vec::unroll<kWide>([&](auto n) ALWAYS_INLINE { wide[n] = (__m512bh)_mm512_maskz_loadu_epi16(mask, w + n * K + k); });
    vec::unroll<ROWS>([&](auto m) ALWAYS_INLINE {
      const __m512bh row = (__m512bh)_mm512_loadu_si512(x + m * stride + k);
      vec::unroll<kWide>([&](auto n) ALWAYS_INLINE { sums[m][n] = _mm512_dpbf16_ps(sums[m][n], row, wide[n]); });
    });
  }
  vec::unroll<ROWS>([&](auto m) ALWAYS_INLINE {
    vec::sum4(out[m], (vec::F)sums[m][0], (vec::F)sums[m][1], (vec::F)sums[m][2], (vec::F)sums[m][3]);
  });
}
#endif

// `tile` by its rows less one.
template <int LINES, class X, class T>
constexpr void (*kTiles[])(const X*, int64_t, const T*, int64_t, const char*, float (*)[kWide]) = {
    tile<1, LINES, T>, tile<2, LINES, T>, tile<3, LINES, T>, tile<4, LINES, T>, tile<5, LINES, T>, tile<6, LINES, T>};

// Adds `bias` to sums [rows] and rounds them into y, whose rows are N apart.
template <class T>
inline void round(const float (*sums)[kWide], int64_t rows, const T* bias, T* y, int64_t N) {
  for (int64_t m = 0; m < rows; m++) {
    float total[kWide];
    for (int64_t n = 0; n < kWide; n++) total[n] = sums[m][n] + (bias ? float(bias[n]) : 0.0f);
    vec::round4(y + m * N, total);
  }
}

// The products of two rows, added up in the order of `tile`.
template <class T>
inline float dot(const T* x, const T* w, int64_t K) {
  vec::F sums{};
  for (int64_t k = 0; k < K; k += kStep<T>) {
    vec::F a[kParts<T>], b[kParts<T>];
    open(x + k, K - k, a);
    open(w + k, K - k, b);
    for (int i = 0; i < kParts<T>; i++) sums += a[i] * b[i];
  }
  return vec::sum(sums);
}

// Up to three columns that are left over when 4 does not divide N.
template <class T>
void leftover(const T* x, const T* w, const T* bias, T* y, int64_t M, int64_t N, int64_t K, int64_t n) {
  for (; n < N; n++)
    for (int64_t m = 0; m < M; m++)
      y[m * N + n] = T(dot(x + m * K, w + n * K, K) + (bias ? float(bias[n]) : 0.0f));
}

template <class T>
void few_rows(const T* x, const T* w, const T* bias, T* y, int64_t M, int64_t N, int64_t K) {
  using X = typename Opened<T>::Type;
  constexpr int kLines = kWide * kStep<T> * sizeof(T) / kLine;
  const int64_t passes = (M + kMaxRows - 1) / kMaxRows, most = (M + passes - 1) / passes;
  // Passes over the same rows of w share what is to be fetched, so that memory is as busy in one as in the next.
  const int sharing = std::min(kLines, passes >= 4 ? 4 : passes >= 2 ? 2 : 1);
  const auto* fetching = sharing == 1   ? kTiles<kLines, X, T>
                         : sharing == 2 ? kTiles<kLines / 2, X, T>
                                        : kTiles<kLines / 4, X, T>;
  const int64_t size = opened_size<T>(K), tiles = N / kWide, share = kWide * K * int64_t(sizeof(T)) / sharing;
  const std::unique_ptr<X[]> rows(new X[M * size]);
  for (int64_t m = 0; m < M; m++) open_row(x + m * K, &rows[m * size], K);
  parallel::Pool::get().reads({reinterpret_cast<const char*>(w), N * K * int64_t(sizeof(T))});
  parallel::loop(tiles, double(K) * (2.5e-4 + 4e-5 * double(M)), [&](int64_t i) {
    const int64_t n = i * kWide;
    float sums[kMaxRows][kWide];
    for (int64_t pass = 0; pass < passes; pass++) {
      const int64_t m = pass * most, count = std::min(most, M - m);
      const auto multiply = (pass < sharing ? fetching : kTiles<0, X, T>)[count - 1];
      const char* ahead = reinterpret_cast<const char*>(w + n * K) + kAhead + pass * share;
      multiply(&rows[m * size], size, w + n * K, K, ahead, sums);
      round(sums, count, bias ? bias + n : bias, y + m * N + n, N);
    }
  });
  leftover(x, w, bias, y, M, N, K, tiles * kWide);
}

}  // namespace product
