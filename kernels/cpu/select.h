// What sampling reads out of a row of logits: the largest, their sum, and what a mask leaves of it.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "vec.h"

namespace choose {

struct Candidate {
  float value;
  int32_t column;

  // Whether this one comes first: the larger value, of equal values the lower column.
  bool operator<(const Candidate& other) const {
    return value != other.value ? value > other.value : column < other.column;
  }
};

inline bool any(vec::I lanes) {
#if defined(__AVX512DQ__)
  return _mm512_movepi32_mask((__m512i)lanes) != 0;
#elif defined(__AVX__) && !defined(__AVX512F__)
  return _mm256_movemask_ps((__m256)lanes) != 0;
#else
  int32_t found = 0;
  for (int i = 0; i < vec::kLanes; i++) found |= lanes[i];
  return found != 0;
#endif
}

// The k first candidates of a row, in order. NaN counts as the smallest number there is.
//
// The row is read once. Whatever is above a threshold is collected; whenever the collection is full it is cut back to
// the best k, and the threshold rises to the least of them. An element equal to the threshold that is met later has a
// higher column than all that were kept, so it can be passed over.
inline void top_k(const float* row, int64_t size, int64_t k, float* values, int32_t* columns) {
  constexpr float kLeast = -std::numeric_limits<float>::infinity();
  constexpr int64_t kPiece = 4 * vec::kLanes;
  std::vector<Candidate> found;
  const size_t full = std::max<int64_t>(4 * k, 64);
  found.reserve(full + kPiece);
  float threshold = kLeast;
  for (int64_t i = 0; i < k; i++) found.push_back({std::isnan(row[i]) ? kLeast : row[i], int32_t(i)});
  const auto cut = [&] {
    std::nth_element(found.begin(), found.begin() + (k - 1), found.end());
    found.resize(k);
    threshold = found[k - 1].value;
  };
  const auto take = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++)
      if (row[i] > threshold) found.push_back({row[i], int32_t(i)});
    if (found.size() >= full) cut();
  };
  cut();
  int64_t at = k;
  for (; at + kPiece <= size; at += kPiece) {
    const vec::F level = vec::splat(threshold);
    vec::I above{};
    vec::unroll<4>([&](auto i) { above |= vec::load(row + at + i * vec::kLanes) > level; });
    if (any(above)) take(at, at + kPiece);
  }
  take(at, size);
  cut();
  std::sort(found.begin(), found.end());
  for (int64_t i = 0; i < k; i++) values[i] = found[i].value, columns[i] = found[i].column;
}

// log(sum(exp(x))) of a row; the least float if all of it is -inf.
inline float log_sum_exp(const float* row, int64_t size) {
  constexpr float kLeast = std::numeric_limits<float>::lowest();
  const vec::F least = vec::splat(kLeast);
  vec::F most = least;
  float largest = kLeast;
  int64_t at = 0;
  for (; at + vec::kLanes <= size; at += vec::kLanes) most = vec::max(most, vec::load(row + at));
  largest = std::max(largest, vec::max(most));
  for (; at < size; at++) largest = std::max(largest, row[at]);
  if (largest == kLeast) return kLeast;
  // Several sums, so that the float32 sum of a large vocabulary is not one long chain of roundings.
  constexpr int64_t kSums = 4;
  vec::F sums[kSums] = {};
  const vec::F shift = vec::splat(largest);
  for (at = 0; at + kSums * vec::kLanes <= size; at += kSums * vec::kLanes)
    vec::unroll<kSums>([&](auto i) { sums[i] += vec::exp(vec::load(row + at + i * vec::kLanes) - shift); });
  double total = 0;
  for (const vec::F& lanes : sums) total += vec::sum(lanes);
  for (; at < size; at++) total += std::exp(row[at] - largest);
  return largest + float(std::log(total));
}

// -inf in place of the elements of a row whose bit is not set; the lowest bit of a word comes first.
inline void mask(const float* row, const int32_t* words, float* out, int64_t size) {
  constexpr int64_t kWord = 32;
  for (int64_t begin = 0; begin < size; begin += kWord) {
    const int64_t end = std::min(begin + kWord, size);
    const uint32_t word = uint32_t(words[begin / kWord]);
    if (word == 0xffffffffu) {
      std::copy(row + begin, row + end, out + begin);
      continue;
    }
    for (int64_t i = begin; i < end; i++)
      out[i] = word >> (i - begin) & 1 ? row[i] : -std::numeric_limits<float>::infinity();
  }
}

}  // namespace choose
