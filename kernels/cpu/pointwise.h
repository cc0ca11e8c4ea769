// Norms, rotary embedding and activation of one row: float32 inside, the tensors' type outside.
#pragma once

#include <algorithm>
#include <cmath>

#include "vec.h"

namespace pointwise {

// Calls f(offset, count) for pieces of kLanes elements and the rest.
template <class Function>
inline void pieces(int64_t size, Function f) {
  for (int64_t i = 0; i < size; i += vec::kLanes) f(i, std::min(vec::kLanes, size - i));
}

template <class T>
inline vec::F get(const T* p, int64_t n) {
  return n == vec::kLanes ? vec::load(p) : vec::load(p, n);
}

template <class T>
inline void put(T* p, vec::F v, int64_t n) {
  n == vec::kLanes ? vec::store(p, v) : vec::store(p, v, n);
}

template <class T>
void rms_norm(const T* x, const T* weight, T* out, int64_t size, float eps) {
  vec::F squares{};
  pieces(size, [&](int64_t i, int64_t n) {
    const vec::F v = get(x + i, n);
    squares += v * v;
  });
  const float scale = 1.0f / std::sqrt(vec::sum(squares) / float(size) + eps);
  pieces(size, [&](int64_t i, int64_t n) { put(out + i, get(x + i, n) * scale * get(weight + i, n), n); });
}

template <class T>
void add(const T* x, const T* residual, T* total, int64_t size) {
  pieces(size, [&](int64_t i, int64_t n) { put(total + i, get(x + i, n) + get(residual + i, n), n); });
}

template <class T>
void widen(const T* x, float* out, int64_t size) {
  pieces(size, [&](int64_t i, int64_t n) { put(out + i, get(x + i, n), n); });
}

// Dimension i is paired with i + size / 2.
template <class T>
void rotate(const T* x, const float* cos, const float* sin, T* out, int64_t size) {
  const int64_t half = size / 2;
  pieces(half, [&](int64_t i, int64_t n) {
    const vec::F a = get(x + i, n), b = get(x + half + i, n), c = get(cos + i, n), s = get(sin + i, n);
    put(out + i, a * c - b * s, n);
    put(out + half + i, b * c + a * s, n);
  });
}

template <class T>
void silu_mul(const T* gate, const T* up, T* out, int64_t size) {
  pieces(size, [&](int64_t i, int64_t n) {
    const vec::F g = get(gate + i, n);
    put(out + i, g / (1.0f + vec::exp(-g)) * get(up + i, n), n);
  });
}

}  // namespace pointwise
