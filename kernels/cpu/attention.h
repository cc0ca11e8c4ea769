// Attention of single rows over a paged cache.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "parallel.h"
#include "pointwise.h"

namespace attention {

constexpr int64_t kChunk = 256;  // tokens one piece of work covers, whatever the batch: results do not depend on it
constexpr int64_t kTile = 32;    // tokens whose scores are computed before their values are read
constexpr float kNothing = -std::numeric_limits<float>::infinity();

// Where the keys or values of a KV head of one request are.
template <class T>
struct Pages {
  const T* cache;
  const int32_t* table;
  int64_t block_size, token_stride, head_offset;

  const T* at(int64_t token) const {
    const int64_t row = int64_t(table[token / block_size]) * block_size + token % block_size;
    return cache + row * token_stride + head_offset;
  }

  // Where tokens [start, start + count) are.
  void gather(int64_t start, int64_t count, const T** rows) const {
    for (int64_t t = 0; t < count;) {
      const T* row = at(start + t);
      const int64_t stop = std::min(count, t + block_size - (start + t) % block_size);
      for (; t < stop; t++, row += token_stride) rows[t] = row;
    }
  }
};

// Asks for rows to be brought into the cache.
template <class T>
inline void fetch(const T* const* rows, int64_t count, int64_t dim) {
  for (int64_t t = 0; t < count; t++)
    for (int64_t d = 0; d < dim; d += parallel::kLine / sizeof(T)) __builtin_prefetch(rows[t] + d);
}

// scores[g][0..count) of G query heads [G, wide] against `count` keys, four keys at a time. With each four some of the
// `coming` rows of `next` are fetched: all at once would keep memory busy and the multipliers waiting, then the reverse.
template <int G, class T>
inline void score(const float* q, const T* const* keys, int64_t count, int64_t dim, int64_t wide, const T* const* next,
                  int64_t coming, float (*scores)[kTile]) {
  for (int64_t t = 0; t < count; t += 4) {
    fetch(next + 2 * t, std::clamp<int64_t>(coming - 2 * t, 0, 8), dim);
    // Keys beyond the last repeat it; their scores are not used.
    const T* four[4];
    for (int64_t i = 0; i < 4; i++) four[i] = keys[std::min(t + i, count - 1)];
    vec::F dots[G][4] = {};
    for (int64_t d = 0; d < dim; d += vec::kLanes) {
      const int64_t n = std::min(vec::kLanes, dim - d);
      vec::F key[4];
      vec::unroll<4>([&](auto i) ALWAYS_INLINE { key[i] = pointwise::get(four[i] + d, n); });
      vec::unroll<G>([&](auto g) ALWAYS_INLINE {
        const vec::F query = vec::load(q + g * wide + d);
        vec::unroll<4>([&](auto i) ALWAYS_INLINE { dots[g][i] += query * key[i]; });
      });
    }
    vec::unroll<G>([&](auto g) ALWAYS_INLINE {
      vec::sum4(scores[g] + t, dots[g][0], dots[g][1], dots[g][2], dots[g][3]);
    });
  }
}

// out[g][d..d + kLanes * P) += weights[g][t] * values[t][d..], for G query heads; n elements in the last of P vectors.
template <int G, int P, class T>
inline void mix(const float (*weights)[kTile], const T* const* values, int64_t count, int64_t d, int64_t n,
                int64_t wide, float* out) {
  vec::F sums[G][P];
  vec::unroll<G>([&](auto g) ALWAYS_INLINE {
    vec::unroll<P>([&](auto i) ALWAYS_INLINE { sums[g][i] = vec::load(out + g * wide + d + i * vec::kLanes); });
  });
  for (int64_t t = 0; t < count; t++)
    vec::unroll<P>([&](auto i) ALWAYS_INLINE {
      const T* from = values[t] + d + i * vec::kLanes;
      const vec::F value = i == P - 1 ? pointwise::get(from, n) : vec::load(from);
      vec::unroll<G>([&](auto g) ALWAYS_INLINE { sums[g][i] += value * weights[g][t]; });
    });
  vec::unroll<G>([&](auto g) ALWAYS_INLINE {
    vec::unroll<P>([&](auto i) ALWAYS_INLINE { vec::store(out + g * wide + d + i * vec::kLanes, sums[g][i]); });
  });
}

// Softmax over tokens [begin, end) for G query heads of one row that share a KV head.
// q [G, wide] is scaled and padded with zeros to `wide` (a multiple of kLanes). Results: per head the maximum, the sum of
// exponentials, and the unnormalised output [G, wide].
template <int G, class T>
void chunk(const float* q, const Pages<T>& keys, const Pages<T>& values, int64_t begin, int64_t end, int64_t dim,
           int64_t wide, float* maxima, float* sums, float* out) {
  std::fill(maxima, maxima + G, kNothing);
  std::fill(sums, sums + G, 0.0f);
  std::fill(out, out + G * wide, 0.0f);
  const T* rows[2][2 * kTile];  // of a tile and of the next: its keys, then its values
  const T **here = rows[0], **next = rows[1];
  alignas(64) float scores[G][kTile];
  const auto gather = [&](int64_t start, const T** to) {
    const int64_t count = std::clamp<int64_t>(end - start, 0, kTile);
    keys.gather(start, count, to);
    values.gather(start, count, to + count);
    return count;
  };
  int64_t count = gather(begin, here);
  fetch(here, 2 * count, dim);
  for (int64_t start = begin; start < end; start += kTile) {
    const int64_t coming = gather(start + kTile, next);
    score<G>(q, here, count, dim, wide, next, 2 * coming, scores);
    for (int g = 0; g < G; g++) {
      std::fill(scores[g] + count, scores[g] + kTile, kNothing);
      vec::F highest = vec::splat(maxima[g]);
      for (int64_t t = 0; t < kTile; t += vec::kLanes) highest = vec::max(highest, vec::load(scores[g] + t));
      const float top = vec::max(highest);
      const float shrink = maxima[g] == kNothing ? 0.0f : std::exp(maxima[g] - top);
      vec::F total{};
      for (int64_t t = 0; t < kTile; t += vec::kLanes) {
        const vec::F e = vec::exp(vec::load(scores[g] + t) - top);
        vec::store(scores[g] + t, e);
        total += e;
      }
      sums[g] = sums[g] * shrink + vec::sum(total);
      maxima[g] = top;
      if (shrink != 1.0f)
        for (int64_t d = 0; d < wide; d++) out[g * wide + d] *= shrink;
    }
    const T* const* mixed = here + count;
    constexpr int64_t kPieces = 4;
    int64_t d = 0;
    for (; d + kPieces * vec::kLanes <= dim; d += kPieces * vec::kLanes)
      mix<G, kPieces>(scores, mixed, count, d, vec::kLanes, wide, out);
    for (; d < dim; d += vec::kLanes) mix<G, 1>(scores, mixed, count, d, std::min(vec::kLanes, dim - d), wide, out);
    std::swap(here, next);
    count = coming;
  }
}

// `chunk` for any number of query heads per KV head.
template <class T>
void chunk(const float* q, const Pages<T>& keys, const Pages<T>& values, int64_t begin, int64_t end, int64_t groups,
           int64_t dim, int64_t wide, float* maxima, float* sums, float* out) {
  using Chunk = void (*)(const float*, const Pages<T>&, const Pages<T>&, int64_t, int64_t, int64_t, int64_t, float*,
                         float*, float*);
  constexpr Chunk kernels[] = {chunk<1, T>, chunk<2, T>, chunk<3, T>, chunk<4, T>};
  for (int64_t g = 0; g < groups; g += 4)
    kernels[std::min<int64_t>(4, groups - g) - 1](q + g * wide, keys, values, begin, end, dim, wide, maxima + g,
                                                  sums + g, out + g * wide);
}

}  // namespace attention
