// Attention of many rows of one request: keys and values packed once, then small tiles with a running softmax.
//
// Operands are 32-bit words: pairs of bfloat16 where the CPU multiplies those, single floats elsewhere. A word of the
// left operand (a query or a probability) is broadcast against a register of the right one (a key per lane, or a value's
// element per lane), so that no sum ever crosses lanes.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "attention.h"
#include "parallel.h"

namespace prefill {

using Word = uint32_t;

// float32 words: whatever the tensors' type.
struct Single {
  static constexpr int64_t kPerWord = 1;
  template <class T>
  static Word word(const T* p, int64_t) {
    const float value = float(p[0]);
    Word word;
    std::memcpy(&word, &value, 4);
    return word;
  }
  template <class T>
  static void rows(const T* a, const T*, int64_t size, Word* words) {
    for (int64_t i = 0; i < size; i++) words[i] = word(a + i, 1);
  }
  static vec::F multiply(vec::F sum, Word left, const Word* right) {
    float value;
    std::memcpy(&value, &left, 4);
    return sum + value * vec::load(reinterpret_cast<const float*>(right));
  }
  static void store(Word* words, vec::F values) { vec::store(reinterpret_cast<float*>(words), values); }
};

#if defined(__AVX512BF16__)
struct Pair {
  static constexpr int64_t kPerWord = 2;
  // Elements p[0] and p[1], or zero for the second if only one is left.
  static Word word(const c10::BFloat16* p, int64_t left) { return Word(p[0].x) | (left > 1 ? Word(p[1].x) << 16 : 0); }
  // Elements of two rows side by side; b may be null.
  static void rows(const c10::BFloat16* a, const c10::BFloat16* b, int64_t size, Word* words) {
    if (b == nullptr)
      for (int64_t i = 0; i < size; i++) words[i] = Word(a[i].x);
    else
      for (int64_t i = 0; i < size; i++) words[i] = Word(a[i].x) | Word(b[i].x) << 16;
  }
  static vec::F multiply(vec::F sum, Word left, const Word* right) {
    return (vec::F)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(int(left)),
                                    (__m512bh)_mm512_loadu_si512(right));
  }
  static void store(Word* words, vec::F values) { vec::store(reinterpret_cast<c10::BFloat16*>(words), values); }
};
#endif

template <class T>
struct Words {
  using Type = Single;
};
#if defined(__AVX512BF16__)
template <>
struct Words<c10::BFloat16> {
  using Type = Pair;
};
#endif

constexpr int64_t kTokens = 64;  // tokens of a tile
constexpr int64_t kVectors = kTokens / vec::kLanes;
constexpr int kRows = 6;                              // rows of a tile, and registers of the right operand at a
constexpr int kWide = vec::kLanes == 16 ? 4 : 2;      // time: 6 x 4 sums, or 6 x 2, leave room for the operands

inline int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

// Keys and values of one KV head from token `begin` on, padded with zeros to whole tiles.
// keys [tiles of kLanes tokens][dim / kPerWord][kLanes tokens], values [tokens / kPerWord][wide], `wide` a multiple of
// kLanes.
template <class W>
struct Context {
  int64_t tokens, dim, wide, depth;
  std::vector<Word> keys, values;

  Context(int64_t count, int64_t dim)
      : tokens(round_up(count, kTokens)),
        dim(dim),
        wide(round_up(dim, vec::kLanes)),
        depth(round_up(dim, W::kPerWord) / W::kPerWord),
        keys(tokens * depth, 0),
        values(tokens / W::kPerWord * wide, 0) {}

  // Packs up to kLanes tokens from `start` (a multiple of kLanes) on, as elements of type T.
  template <class T, class C>
  void pack(const attention::Pages<C>& key_pages, const attention::Pages<C>& value_pages, int64_t begin, int64_t start,
            int64_t count) {
    const T* rows[vec::kLanes];
    thread_local std::vector<T> widened;
    gather(key_pages, begin + start, count, rows, widened);
    Word* to = &keys[start * depth];
    for (int64_t t = 0; t < count; t++)
      for (int64_t w = 0; w < depth; w++)
        to[w * vec::kLanes + t] = W::word(rows[t] + w * W::kPerWord, dim - w * W::kPerWord);
    gather(value_pages, begin + start, count, rows, widened);
    for (int64_t t = 0; t < count; t += W::kPerWord)
      W::rows(rows[t], t + 1 < count ? rows[t + 1] : nullptr, dim, &values[(start + t) / W::kPerWord * wide]);
  }

 private:
  template <class T>
  void gather(const attention::Pages<T>& pages, int64_t start, int64_t count, const T** rows, std::vector<T>&) const {
    pages.gather(start, count, rows);
  }

  // Copies of rows whose elements are of another type than they are multiplied in.
  template <class T, class C>
  void gather(const attention::Pages<C>& pages, int64_t start, int64_t count, const T** rows,
              std::vector<T>& widened) const {
    const C* narrow[vec::kLanes];
    pages.gather(start, count, narrow);
    widened.resize(count * dim);
    for (int64_t t = 0; t < count; t++) {
      rows[t] = &widened[t * dim];
      pointwise::pieces(dim, [&](int64_t d, int64_t n) {
        pointwise::put(&widened[t * dim + d], pointwise::get(narrow[t] + d, n), n);
      });
    }
  }
};

// One row of queries of one head: where it is, where its result goes, and which tokens [begin, end) it sees.
template <class T>
struct Row {
  const T* query;
  T* out;
  int64_t begin, end;
};

template <int R, class W>
inline void score(const Word* queries, const Word* keys, int64_t depth, float (*scores)[kTokens]) {
  for (int64_t first = 0; first < kVectors; first += kWide, keys += kWide * depth * vec::kLanes) {
    vec::F sums[R][kWide] = {};
    for (int64_t w = 0; w < depth; w++)
      vec::unroll<R>([&](auto r) ALWAYS_INLINE {
        vec::unroll<kWide>([&](auto i) ALWAYS_INLINE {
          sums[r][i] = W::multiply(sums[r][i], queries[r * depth + w], keys + (i * depth + w) * vec::kLanes);
        });
      });
    vec::unroll<R>([&](auto r) ALWAYS_INLINE {
      vec::unroll<kWide>([&](auto i) ALWAYS_INLINE { vec::store(scores[r] + (first + i) * vec::kLanes, sums[r][i]); });
    });
  }
}

// out [R, wide] at elements d .. d + kLanes * P: times shrink[r], plus probabilities times values.
template <int R, int P, class W>
inline void mix(const Word (*weights)[kTokens], const float* shrink, const Word* values, int64_t wide, int64_t d,
                float* out) {
  vec::F sums[R][P];
  vec::unroll<R>([&](auto r) ALWAYS_INLINE {
    vec::unroll<P>([&](auto i) ALWAYS_INLINE {
      sums[r][i] = vec::load(out + r * wide + d + i * vec::kLanes) * shrink[r];
    });
  });
  for (int64_t w = 0; w < kTokens / W::kPerWord; w++)
    vec::unroll<R>([&](auto r) ALWAYS_INLINE {
      vec::unroll<P>([&](auto i) ALWAYS_INLINE {
        sums[r][i] = W::multiply(sums[r][i], weights[r][w], values + w * wide + d + i * vec::kLanes);
      });
    });
  vec::unroll<R>([&](auto r) ALWAYS_INLINE {
    vec::unroll<P>([&](auto i) ALWAYS_INLINE { vec::store(out + r * wide + d + i * vec::kLanes, sums[r][i]); });
  });
}

// One row's scores to unnormalised probabilities in words; returns what the output so far shrinks by.
template <class W>
inline float soften(float* scores, int64_t begin, int64_t end, float scale, float& top, float& sum, Word* words) {
  std::fill(scores, scores + std::clamp<int64_t>(begin, 0, kTokens), attention::kNothing);
  std::fill(scores + std::clamp<int64_t>(end, 0, kTokens), scores + kTokens, attention::kNothing);
  vec::F highest = vec::load(scores);
  for (int64_t i = 1; i < kVectors; i++) highest = vec::max(highest, vec::load(scores + i * vec::kLanes));
  const float previous = top;
  top = std::max(top, vec::max(highest) * scale);
  // As long as a row has seen nothing its maximum is minus infinity, which must not be subtracted from itself.
  const float shift = top == attention::kNothing ? 0.0f : top;
  vec::F total{};
  for (int64_t i = 0; i < kVectors; i++) {
    const vec::F e = vec::exp(vec::load(scores + i * vec::kLanes) * scale - shift);
    W::store(words + i * vec::kLanes / W::kPerWord, e);
    total += e;
  }
  const float shrink = previous == attention::kNothing ? 0.0f : std::exp(previous - top);
  sum = sum * shrink + vec::sum(total);
  return shrink;
}

// Attention of R rows; token 0 of the context is token `origin` of the request. Results are times `value_scale`.
template <int R, class W, class T>
void tile(const Row<T>* rows, const Context<W>& context, int64_t origin, float scale, float value_scale) {
  std::vector<Word> queries(R * context.depth);
  std::vector<float> out(R * context.wide, 0.0f);
  float top[R], sum[R] = {}, shrink[R];
  int64_t begin = rows[0].begin, end = rows[0].end;
  for (int r = 0; r < R; r++) {
    top[r] = attention::kNothing;
    begin = std::min(begin, rows[r].begin), end = std::max(end, rows[r].end);
    for (int64_t w = 0; w < context.depth; w++)
      queries[r * context.depth + w] = W::word(rows[r].query + w * W::kPerWord, context.dim - w * W::kPerWord);
  }
  float scores[R][kTokens];
  Word weights[R][kTokens];
  for (int64_t start = (begin - origin) / kTokens * kTokens; start < end - origin; start += kTokens) {
    score<R, W>(queries.data(), &context.keys[start * context.depth], context.depth, scores);
    for (int r = 0; r < R; r++)
      shrink[r] = soften<W>(scores[r], rows[r].begin - origin - start, rows[r].end - origin - start, scale, top[r],
                            sum[r], weights[r]);
    const Word* values = &context.values[start / W::kPerWord * context.wide];
    int64_t d = 0;
    for (; d + kWide * vec::kLanes <= context.wide; d += kWide * vec::kLanes)
      mix<R, kWide, W>(weights, shrink, values, context.wide, d, out.data());
    for (; d < context.wide; d += vec::kLanes) mix<R, 1, W>(weights, shrink, values, context.wide, d, out.data());
  }
  for (int r = 0; r < R; r++)
    for (int64_t d = 0; d < context.dim; d++) rows[r].out[d] = T(out[r * context.wide + d] / sum[r] * value_scale);
}

template <class W, class T>
void tile(const Row<T>* rows, int64_t count, const Context<W>& context, int64_t origin, float scale,
          float value_scale) {
  using Tile = void (*)(const Row<T>*, const Context<W>&, int64_t, float, float);
  constexpr Tile kernels[] = {tile<1, W, T>, tile<2, W, T>, tile<3, W, T>, tile<4, W, T>, tile<5, W, T>, tile<6, W, T>};
  kernels[count - 1](rows, context, origin, scale, value_scale);
}

}  // namespace prefill
