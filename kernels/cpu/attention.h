// Attention of single rows over a paged cache, and the pieces of attention of many rows that are not products.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

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
};

// Softmax over tokens [begin, end) of one row's `groups` query heads that share a KV head.
// q [groups, wide] is scaled and padded with zeros to `wide` (a multiple of 16). Results: per head the maximum, the sum
// of exponentials, and the unnormalised output [groups, wide].
template <class T>
void chunk(const float* q, const Pages<T>& keys, const Pages<T>& values, int64_t begin, int64_t end, int64_t groups,
           int64_t dim, int64_t wide, float* maxima, float* sums, float* out) {
  std::fill(maxima, maxima + groups, kNothing);
  std::fill(sums, sums + groups, 0.0f);
  std::fill(out, out + groups * wide, 0.0f);
  const T* rows[kTile];
  alignas(64) float scores[kTile];
  std::vector<float> weights(groups * kTile);
  for (int64_t start = begin; start < end; start += kTile) {
    const int64_t count = std::min(kTile, end - start);
    for (int64_t t = 0; t < count; t++) rows[t] = keys.at(start + t);
    for (int64_t g = 0; g < groups; g++) {
      for (int64_t t = 0; t < count; t += 4) {
        // Rows beyond the last repeat it; their scores are not used.
        const T* four[4];
        for (int64_t i = 0; i < 4; i++) four[i] = rows[std::min(t + i, count - 1)];
        vec::F dots[4] = {};
        pointwise::pieces(dim, [&](int64_t d, int64_t n) {
          const vec::F query = vec::load(q + g * wide + d);
          for (int i = 0; i < 4; i++) dots[i] += query * pointwise::get(four[i] + d, n);
        });
        vec::sum4(scores + t, dots[0], dots[1], dots[2], dots[3]);
      }
      float top = maxima[g];
      for (int64_t t = 0; t < count; t++) top = std::max(top, scores[t]);
      for (int64_t t = count; t < kTile; t++) scores[t] = kNothing;
      const float shrink = maxima[g] == kNothing ? 0.0f : std::exp(maxima[g] - top);
      vec::F total{};
      for (int64_t t = 0; t < kTile; t += vec::kLanes) {
        const vec::F e = vec::exp(vec::load(scores + t) - top);
        vec::store(&weights[g * kTile + t], e);
        total += e;
      }
      sums[g] = sums[g] * shrink + vec::sum(total);
      maxima[g] = top;
      if (shrink != 1.0f)
        for (int64_t d = 0; d < wide; d++) out[g * wide + d] *= shrink;
    }
    for (int64_t t = 0; t < count; t++) rows[t] = values.at(start + t);
    pointwise::pieces(dim, [&](int64_t d, int64_t n) {
      constexpr int64_t kHeads = 8;
      for (int64_t first = 0; first < groups; first += kHeads) {
        const int64_t heads = std::min(kHeads, groups - first);
        vec::F acc[kHeads];
        for (int64_t g = 0; g < heads; g++) acc[g] = vec::load(out + (first + g) * wide + d);
        for (int64_t t = 0; t < count; t++) {
          const vec::F value = pointwise::get(rows[t] + d, n);
          for (int64_t g = 0; g < heads; g++) acc[g] += value * weights[(first + g) * kTile + t];
        }
        for (int64_t g = 0; g < heads; g++) vec::store(out + (first + g) * wide + d, acc[g]);
      }
    });
  }
}

// In place: scores[0..count) of one row to probabilities of the tokens in [begin, end), zero for the others.
template <class T>
void softmax(T* scores, int64_t begin, int64_t end, int64_t count, float scale) {
  float top = kNothing;
  vec::F wide = vec::splat(kNothing);
  int64_t i = begin;
  for (; i + vec::kLanes <= end; i += vec::kLanes) wide = vec::max(wide, vec::load(scores + i));
  top = vec::max(wide);
  for (; i < end; i++) top = std::max(top, float(scores[i]));
  const float shift = top * scale;
  vec::F sums{};
  float rest = 0.0f;
  for (i = begin; i + vec::kLanes <= end; i += vec::kLanes) sums += vec::exp(vec::load(scores + i) * scale - shift);
  for (; i < end; i++) rest += vec::exp(vec::splat(float(scores[i]) * scale - shift))[0];
  const float factor = 1.0f / (vec::sum(sums) + rest);
  for (i = begin; i + vec::kLanes <= end; i += vec::kLanes)
    vec::store(scores + i, vec::exp(vec::load(scores + i) * scale - shift) * factor);
  for (; i < end; i++) scores[i] = T(vec::exp(vec::splat(float(scores[i]) * scale - shift))[0] * factor);
  std::fill(scores, scores + begin, T(0.0f));
  std::fill(scores + end, scores + count, T(0.0f));
}

}  // namespace attention
