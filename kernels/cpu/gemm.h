// y [M, N] = x [M, K] w[N, K]^T for many rows, where multiplications are all that counts. As in K. Goto and R. van de
// Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008: a panel of columns of w^T is widened to float32 and
// laid out in the order in which it is read, and then serves all rows of x. Its numbers fill registers and those of x
// are broadcast, so that no sum crosses lanes.
#pragma once

#include <algorithm>
#include <array>
#include <memory>
#include <vector>

#include "parallel.h"
#include "pointwise.h"
#include "vec.h"

namespace product {

constexpr int kPanelRegisters = 2;
constexpr int64_t kPanel = kPanelRegisters * vec::kLanes;  // columns
// Rows of x at a time: 12 x 2 sums of 32 registers, or 6 x 2 of 16, leave some for the operands.
constexpr int kTileRows = vec::kLanes == 16 ? 12 : 6;

// One k of a panel.
struct alignas(64) PanelRow {
  float columns[kPanel];
};

template <int... L>
inline vec::F shuffle(vec::F a, vec::F b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, L...);
#else
  return __builtin_shuffle(a, b, vec::I{L...});
#endif
}

// Exchanges lanes l + D of a with lanes l of b, for every l without the bit D.
template <int D, int... L>
ALWAYS_INLINE inline void exchange(vec::F& a, vec::F& b, std::integer_sequence<int, L...>) {
  constexpr int kOther = vec::kLanes;
  const vec::F low = shuffle<(L & D ? kOther + L - D : L)...>(a, b);
  b = shuffle<(L & D ? kOther + L : L + D)...>(a, b);
  a = low;
}

// Transposes kLanes rows: quadrants of blocks of 2 D x 2 D, from the whole down to 2 x 2.
template <int D = vec::kLanes / 2>
ALWAYS_INLINE inline void transpose(vec::F* rows) {
  vec::unroll<vec::kLanes>([&](auto i) ALWAYS_INLINE {
    if constexpr (!(i & D)) exchange<D>(rows[i], rows[i + D], std::make_integer_sequence<int, vec::kLanes>{});
  });
  if constexpr (D > 1) transpose<D / 2>(rows);
}

// Rows w [columns, K] as a panel [K]. What fills it up to kPanel columns and a multiple of kLanes rows means nothing.
template <class T>
void pack(const T* w, int64_t columns, int64_t K, PanelRow* panel) {
  for (int64_t first = 0; first < columns; first += vec::kLanes) {
    const T* from[vec::kLanes];
    for (int64_t i = 0; i < vec::kLanes; i++) from[i] = w + std::min(first + i, columns - 1) * K;
    const auto block = [&](int64_t k, const auto& load) ALWAYS_INLINE {
      vec::F rows[vec::kLanes];
      vec::unroll<vec::kLanes>([&](auto i) ALWAYS_INLINE { rows[i] = load(from[i] + k); });
      transpose(rows);
      vec::unroll<vec::kLanes>([&](auto i) ALWAYS_INLINE { vec::store(panel[k + i].columns + first, rows[i]); });
    };
    int64_t k = 0;
    for (; k + vec::kLanes <= K; k += vec::kLanes) block(k, [](const T* p) ALWAYS_INLINE { return vec::load(p); });
    if (k < K) block(k, [&](const T* p) ALWAYS_INLINE { return vec::load(p, K - k); });
  }
}

// ROWS rows of y, `stride` apart, of kPanel columns. Row K of the panel is the bias. Each step fetches `bytes` more
// from `ahead`.
template <int ROWS, class T>
void multiply(const float* x, const PanelRow* panel, int64_t K, T* y, int64_t stride, const char* ahead,
              int64_t bytes) {
  vec::F sums[ROWS][kPanelRegisters] = {};
  const auto column = [&](int64_t k, int i) ALWAYS_INLINE { return vec::load(panel[k].columns + i * vec::kLanes); };
  for (int64_t k = 0; k < K; k++) {
    __builtin_prefetch(ahead + k * bytes, 0, 2);
    vec::F right[kPanelRegisters];
    vec::unroll<kPanelRegisters>([&](auto i) ALWAYS_INLINE { right[i] = column(k, i); });
    vec::unroll<ROWS>([&](auto m) ALWAYS_INLINE {
      const vec::F left = vec::splat(x[m * K + k]);
      vec::unroll<kPanelRegisters>([&](auto i) ALWAYS_INLINE { sums[m][i] += left * right[i]; });
    });
  }
  vec::unroll<ROWS>([&](auto m) ALWAYS_INLINE {
    vec::unroll<kPanelRegisters>([&](auto i) ALWAYS_INLINE {
      vec::store(y + m * stride + i * vec::kLanes, sums[m][i] + column(K, i));
    });
  });
}

// `multiply` by its rows less one.
template <class T, int... I>
constexpr auto multiplications(std::integer_sequence<int, I...>) {
  return std::array{multiply<I + 1, T>...};
}

// A row's result is that of its products added up in their order, however many rows and threads there are.
template <class T>
void many_rows(const T* x, const T* w, const T* bias, T* y, int64_t M, int64_t N, int64_t K) {
  constexpr auto kMultiply = multiplications<T>(std::make_integer_sequence<int, kTileRows>{});
  constexpr int64_t kTasks = 4, kFewest = 64;  // tasks per thread; rows of a task for which it may pack a panel again
  const auto over = [](int64_t count, int64_t size) { return (count + size - 1) / size; };
  const std::unique_ptr<float[]> rows(new float[M * K]);
  parallel::loop(M, double(K) * 2e-4, [&](int64_t m) { pointwise::widen(x + m * K, &rows[m * K], K); });
  const int64_t panels = over(N, kPanel);
  const int64_t blocks = std::max<int64_t>(1, std::min(over(kTasks * at::get_num_threads(), panels), M / kFewest));
  parallel::loop(panels * blocks, double(K) * double(M / blocks) * 4e-4, [&](int64_t task) {
    const int64_t n = task / blocks * kPanel, columns = std::min(kPanel, N - n);
    const int64_t begin = task % blocks * M / blocks, count = (task % blocks + 1) * M / blocks - begin;
    thread_local std::vector<PanelRow> panel;
    panel.resize(K + vec::kLanes);
    pack(w + n * K, columns, K, panel.data());
    for (int64_t c = 0; c < columns; c++) panel[K].columns[c] = bias ? float(bias[n + c]) : 0.0f;
    // Tiles of about as many rows each. Together they fetch the next panel of w, which memory has not ready in time.
    constexpr int64_t kBytes = kPanel * sizeof(T);
    const int64_t tiles = over(count, kTileRows), bytes = over(kBytes, tiles);
    const char* next = reinterpret_cast<const char*>(w + (n + kPanel) * K);
    for (int64_t tile = 0; tile < tiles; tile++) {
      const int64_t m = begin + count * tile / tiles, some = begin + count * (tile + 1) / tiles - m;
      T edge[kTileRows * kPanel];
      T* to = y + m * N + n;
      const bool whole = columns == kPanel;
      kMultiply[some - 1](&rows[m * K], panel.data(), K, whole ? to : edge, whole ? N : kPanel,
                          next + std::min(tile * bytes, kBytes) * K, bytes);
      for (int64_t r = 0; !whole && r < some; r++) std::copy_n(edge + r * kPanel, columns, to + r * N);
    }
  });
}

}  // namespace product
