// y [M, N] = x [M, K] w[N, K]^T for few rows, where reading the weight once at full memory speed is all that counts.
#pragma once

#include <algorithm>
#include <array>
#include <memory>
#include <type_traits>
#include <utility>

#include "packed.h"
#include "parallel.h"
#include "vec.h"

namespace product {

constexpr int kWide = 4;  // rows of w at a time: four sums make one store
using parallel::kLine;
// Bytes of w that are fetched before their turn. They are fetched in the order of their addresses, which memory likes
// better than that of their use, from four rows in turn.
constexpr int64_t kAhead = 4096;

// What a register of operands holds: floats, or pairs of bfloat16 where the CPU multiplies those.
struct Floats {
  using Number = float;
  using Register = vec::F;
  using Sums = vec::F;
  static constexpr int64_t kNumbers = vec::kLanes;
  static Register load(const float* p) { return vec::load(p); }
  static Sums add(Sums sums, Register a, Register b) { return sums + a * b; }
};

template <class T>
struct Operands {
  using Type = Floats;
};

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
struct Pairs {
  using Number = c10::BFloat16;
  using Register = __m512bh;
  using Sums = __m512;
  static constexpr int64_t kNumbers = 2 * vec::kLanes;
  static Register load(const c10::BFloat16* p) { return (__m512bh)_mm512_loadu_si512(p); }
  static Sums add(Sums sums, Register a, Register b) { return _mm512_dpbf16_ps(sums, a, b); }
};

template <>
struct Operands<c10::BFloat16> {
  using Type = Pairs;
};

inline void open(vec::Words words, __m512bh* parts) { parts[0] = (__m512bh)words; }
#endif

template <class T>
using Register = typename Operands<T>::Type::Register;

// The bfloat16 at even places as floats and those at odd places: an instruction each.
inline void open(vec::Words words, vec::F* parts) {
  parts[0] = (vec::F)((vec::U)words << 16);
  parts[1] = (vec::F)((vec::U)words & 0xffff0000u);
}

// Registers that numbers are opened into at a time, and how many numbers these are.
template <class T>
constexpr int64_t kStep = std::is_same_v<T, c10::BFloat16> ? 2 * vec::kLanes : vec::kLanes;
template <class T>
constexpr int kParts = kStep<T> / Operands<T>::Type::kNumbers;

// Opens the first `left` of kStep numbers, zero beyond. Their order is the same for all rows.
template <class T>
inline void open(const T* p, int64_t left, Register<T>* parts) {
  if constexpr (std::is_same_v<T, c10::BFloat16>) {
    vec::Words words{};
    std::memcpy(&words, p, left < kStep<T> ? left * sizeof(T) : sizeof words);
    open(words, parts);
  } else {
    parts[0] = left < kStep<T> ? vec::load(p, left) : vec::load(p);
  }
}

// Rows of w as they are. kRows: of x at a time; kParts: registers that a row is opened into at a time; kLines: of memory,
// in which these numbers of all rows are.
template <class T>
struct Plain {
  using Number = T;
  // 6 x 4 sums of 32 registers, or 3 x 4 of 16, leave some for the operands.
  static constexpr int kRows = vec::kLanes == 16 ? 6 : 3;
  static constexpr int kParts = product::kParts<T>;
  static constexpr int kLines = kWide * kStep<T> * sizeof(T) / kLine;
  const T* rows;
  int64_t K;

  template <int ROW>
  ALWAYS_INLINE void open(int64_t k, int64_t left, Register<T>* parts) const {
    product::open(rows + ROW * K + k, left, parts);
  }
};

#if defined(PACKED_MATRICES)
// Rows of a packed tile.
struct Packed {
  using Number = c10::BFloat16;
  static constexpr int kRows = vec::kLanes == 16 ? 4 : 3;  // unpacking needs registers too
  static constexpr int kParts = 2 * product::kParts<Number>;
  static constexpr int kLines = packed::kBlockBytes / kLine;
  const uint8_t* tile;
  packed::Bytes table;
  const packed::Listed* next;

  template <int ROW>
  ALWAYS_INLINE void open(int64_t k, int64_t, Register<Number>* parts) {
    vec::Words words[2];
    const uint32_t begin = packed::kRows * k + ROW * packed::kBlock;
    packed::unpack<ROW>(tile + k / packed::kBlock * packed::kBlockBytes, table, begin, next, words);
    product::open(words[0], parts);
    product::open(words[1], parts + product::kParts<Number>);
  }
};

constexpr int64_t kMostPacked = Packed::kRows;  // rows of x up to which unpacking costs less than it saves
#endif

// The numbers of a row that W opens at a time.
template <class W>
constexpr int64_t kColumns = W::kParts * Operands<typename W::Number>::Type::kNumbers;

// Numbers that a row of x is padded to, with zeros, when it is opened as a whole: a multiple of all kColumns.
constexpr int64_t kPadding = packed::kBlock;

template <class T, class X>
void open_row(const T* from, X* to, int64_t K, int64_t size) {
  std::fill(to + K / kStep<T> * kStep<T>, to + size, X(0.0f));
  for (int64_t k = 0; k < K; k += kStep<T>) {
    Register<T> parts[kParts<T>];
    open(from + k, K - k, parts);
    std::memcpy(to + k, parts, sizeof parts);
  }
}

// Sums of ROWS x 4 products over K. The rows of x are opened and `stride` apart. At each step LINES more lines are
// fetched from `ahead`.
template <int ROWS, int LINES, class W, class X>
void tile(const X* x, int64_t stride, W w, int64_t K, const char* ahead, float (*out)[kWide]) {
  using O = typename Operands<typename W::Number>::Type;
  typename O::Sums sums[ROWS][kWide] = {};
  const auto step = [&](int64_t k, int64_t left) ALWAYS_INLINE {
    vec::unroll<LINES>([&](auto i) ALWAYS_INLINE { __builtin_prefetch(ahead + i * kLine); });
    ahead += LINES * kLine;
    vec::unroll<kWide>([&](auto n) ALWAYS_INLINE {
      typename O::Register parts[W::kParts];
      w.template open<n>(k, left, parts);
      vec::unroll<W::kParts>([&](auto i) ALWAYS_INLINE {
        vec::unroll<ROWS>([&](auto m) ALWAYS_INLINE {
          sums[m][n] = O::add(sums[m][n], O::load(x + m * stride + k + i * O::kNumbers), parts[i]);
        });
      });
    });
  };
  int64_t k = 0;
  for (; k + kColumns<W> <= K; k += kColumns<W>) step(k, kColumns<W>);
  if (k < K) step(k, K - k);
  vec::unroll<ROWS>([&](auto m) ALWAYS_INLINE {
    vec::sum4(out[m], (vec::F)sums[m][0], (vec::F)sums[m][1], (vec::F)sums[m][2], (vec::F)sums[m][3]);
  });
}

template <int LINES, class W, class X, int... I>
constexpr auto tiles_of(std::integer_sequence<int, I...>) {
  return std::array{tile<I + 1, LINES, W, X>...};
}

// `tile` by its rows less one.
template <int LINES, class W, class X>
constexpr auto kTiles = tiles_of<LINES, W, X>(std::make_integer_sequence<int, W::kRows>{});

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
  using O = typename Operands<T>::Type;
  typename O::Sums sums{};
  for (int64_t k = 0; k < K; k += kStep<T>) {
    Register<T> a[kParts<T>], b[kParts<T>];
    open(x + k, K - k, a);
    open(w + k, K - k, b);
    for (int i = 0; i < kParts<T>; i++) sums = O::add(sums, a[i], b[i]);
  }
  return vec::sum((vec::F)sums);
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
  using X = typename Operands<T>::Type::Number;
  const int64_t size = (K + kPadding - 1) / kPadding * kPadding, tiles = N / kWide;
  const std::unique_ptr<X[]> rows(new X[M * size]);
  for (int64_t m = 0; m < M; m++) open_row(x + m * K, &rows[m * size], K, size);
  // All columns of a tile of w, which has `bytes` from `begin` on.
  const auto products = [&](int64_t i, const auto& tile, const void* begin, int64_t bytes) {
    using W = std::decay_t<decltype(tile)>;
    const int64_t passes = (M + W::kRows - 1) / W::kRows, most = (M + passes - 1) / passes, n = i * kWide;
    // Passes over the same rows of w share what is to be fetched, so that memory is as busy in one as in the next.
    const int sharing = passes >= 4 ? 4 : passes >= 2 ? 2 : 1;
    const auto& fetching = sharing == 1   ? kTiles<W::kLines, W, X>
                           : sharing == 2 ? kTiles<W::kLines / 2, W, X>
                                          : kTiles<W::kLines / 4, W, X>;
    float sums[W::kRows][kWide];
    for (int64_t pass = 0; pass < passes; pass++) {
      const int64_t m = pass * most, count = std::min(most, M - m);
      const auto multiply = (pass < sharing ? fetching : kTiles<0, W, X>)[count - 1];
      const char* ahead = static_cast<const char*>(begin) + kAhead + bytes / sharing * pass;
      multiply(&rows[m * size], size, tile, K, ahead, sums);
      round(sums, count, bias ? bias + n : bias, y + m * N + n, N);
    }
  };
  const auto plain = [&](int64_t i) {
    const T* from = w + i * kWide * K;
    products(i, Plain<T>{from, K}, from, kWide * K * sizeof(T));
  };
  const auto loop = [&](const void* begin, int64_t bytes, const auto& body) {
    parallel::Pool::get().reads({static_cast<const char*>(begin), bytes});
    parallel::loop(tiles, double(K) * (2.5e-4 + 4e-5 * double(M)), body);
  };
#if defined(PACKED_MATRICES)
  if constexpr (std::is_same_v<T, c10::BFloat16>)
    if (const auto matrix = M <= kMostPacked ? packed::Matrices::get().find(w, N, K) : nullptr) {
      loop(matrix->tile(0), matrix->bytes(), [&](int64_t i) {
        const uint8_t* from = matrix->tile(i);
        const Packed tile{from, packed::repeat(matrix->tables[i].data()), &matrix->lists[matrix->begins[i]]};
        products(i, tile, from, matrix->tile_bytes());
      });
      return leftover(x, w, bias, y, M, N, K, tiles * kWide);
    }
#endif
  loop(w, tiles * kWide * K * int64_t(sizeof(T)), plain);
  leftover(x, w, bias, y, M, N, K, tiles * kWide);
}

}  // namespace product
