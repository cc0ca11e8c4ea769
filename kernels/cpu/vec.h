// A register of floats at a time: loads and stores that widen and round, sums and exp. GCC's vector extensions, so any
// CPU; instructions by name only where the extensions make a poor choice.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Float8_e4m3fn.h>
#include <c10/util/Half.h>
#include <cstdint>
#include <cstring>
#include <utility>
#if defined(__AVX__)
#include <immintrin.h>
#endif

#define ALWAYS_INLINE __attribute__((always_inline))

namespace vec {

template <class Function, int... I>
ALWAYS_INLINE inline void unroll(const Function& f, std::integer_sequence<int, I...>) {
  (f(std::integral_constant<int, I>{}), ...);
}

// f(0), f(1), ... f(N - 1) with constants. An array that is only indexed by constants lives in registers; a loop over
// it, even one that the compiler unrolls later, makes it write every element to memory at every turn.
template <int N, class Function>
ALWAYS_INLINE inline void unroll(const Function& f) {
  unroll(f, std::make_integer_sequence<int, N>{});
}

#if defined(__AVX512F__)
constexpr int64_t kLanes = 16;  // of 32 registers
#else
constexpr int64_t kLanes = 8;  // of 16 registers with AVX2; two registers of NEON's 32
#endif
using F = float __attribute__((vector_size(4 * kLanes)));
using I = int32_t __attribute__((vector_size(4 * kLanes)));
using U = uint32_t __attribute__((vector_size(4 * kLanes)));
using U16 = uint16_t __attribute__((vector_size(2 * kLanes)));
using Words = uint16_t __attribute__((vector_size(4 * kLanes)));

inline F splat(float x) { return x - F{}; }

inline F load(const float* p) {
  F v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline F load(const c10::BFloat16* p) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  return (F)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
#endif
  U16 bits;
  std::memcpy(&bits, p, sizeof bits);
  return (F)(__builtin_convertvector(bits, U) << 16);
}

inline F load(const c10::Half* p) {
#if defined(__AVX512F__)
  return (F)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
  return (F)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  F v;
  for (int i = 0; i < kLanes; i++) v[i] = float(p[i]);
  return v;
#endif
}

// An 8-bit float has the fields of a half: sign, exponent, and the first bits of the fraction. Halves have an exponent
// bias of 15 instead of 7, and 8-bit floats a NaN where halves go on to larger numbers.
inline F load(const c10::Float8_e4m3fn* p) {
#if defined(__F16C__)
#if defined(__AVX512F__)
  const __m256i bytes = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p));
  const __m256i fields = _mm256_and_si256(_mm256_slli_epi16(bytes, 7), _mm256_set1_epi16(0x3fff));
  const __m256i sign = _mm256_and_si256(bytes, _mm256_set1_epi16(short(0x8000)));
  const F v = (F)_mm512_cvtph_ps(_mm256_or_si256(fields, sign)) * 256.0f;
#else
  const __m128i bytes = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)p));
  const __m128i fields = _mm_and_si128(_mm_slli_epi16(bytes, 7), _mm_set1_epi16(0x3fff));
  const __m128i sign = _mm_and_si128(bytes, _mm_set1_epi16(short(0x8000)));
  const F v = (F)_mm256_cvtph_ps(_mm_or_si128(fields, sign)) * 256.0f;
#endif
  const F nan = splat(__builtin_nanf(""));
  const F magnitude = v < 0.0f ? -v : v;
  return magnitude == 480.0f ? nan : v;
#else
  F v;
  for (int i = 0; i < kLanes; i++) v[i] = float(p[i]);
  return v;
#endif
}

inline void store(float* p, F v) { std::memcpy(p, &v, sizeof v); }

#if !(defined(__AVX512BF16__) && defined(__AVX512VL__))
// Bits of bfloat16 in the low halves of words: rounded to nearest, halfway cases to even.
template <class Floats, class Words>
inline Words bfloat16_bits(Floats v) {
  const Words x = (Words)v;
  const Words even = (x + 0x7fffu + ((x >> 16) & 1u)) >> 16;
  // Rounding would carry a NaN's bits over into an infinity or beyond.
  return (v == v) ? even : (even | 0x7fc0u);
}
#endif

inline void store(c10::BFloat16* p, F v) {
#if defined(__AVX512BF16__)
  auto bits = _mm512_cvtneps_pbh((__m512)v);
#else
  const U16 bits = __builtin_convertvector((bfloat16_bits<F, U>(v)), U16);
#endif
  std::memcpy(p, &bits, 2 * kLanes);
}

inline void store(c10::Half* p, F v) {
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < kLanes; i++) p[i] = c10::Half(v[i]);
#endif
}

// The first n < kLanes elements; zero beyond.
template <class T>
inline F load(const T* p, int64_t n) {
  T buffer[kLanes] = {};
  std::memcpy(buffer, p, n * sizeof(T));
  return load(buffer);
}

template <class T>
inline void store(T* p, F v, int64_t n) {
  T buffer[kLanes];
  store(buffer, v);
  std::memcpy(p, buffer, n * sizeof(T));
}

// Sums of four vectors, into p[0..3].
inline void sum4(float* p, F a, F b, F c, F d) {
#if defined(__AVX512DQ__)
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps((__m512)a, (__m512)b), _mm512_unpackhi_ps((__m512)a, (__m512)b));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps((__m512)c, (__m512)d), _mm512_unpackhi_ps((__m512)c, (__m512)d));
  const __m512d low = _mm512_unpacklo_pd((__m512d)ab, (__m512d)cd), high = _mm512_unpackhi_pd((__m512d)ab, (__m512d)cd);
  const __m512 lanes = _mm512_add_ps((__m512)low, (__m512)high);
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(lanes), _mm512_extractf32x8_ps(lanes, 1));
  _mm_storeu_ps(p, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
#elif defined(__AVX__) && !defined(__AVX512F__)
  const __m256 ab = _mm256_hadd_ps((__m256)a, (__m256)b), cd = _mm256_hadd_ps((__m256)c, (__m256)d);
  const __m256 half = _mm256_hadd_ps(ab, cd);
  _mm_storeu_ps(p, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
#else
  float s[4] = {};
  for (int i = 0; i < kLanes; i++) s[0] += a[i], s[1] += b[i], s[2] += c[i], s[3] += d[i];
  std::memcpy(p, s, sizeof s);
#endif
}

// p[0..3] = q[0..3], rounded.
template <class T>
inline void round4(T* p, const float* q) {
  for (int i = 0; i < 4; i++) p[i] = T(q[i]);
}

inline void round4(c10::BFloat16* p, const float* q) {
#if defined(__AVX512BF16__) && defined(__AVX512VL__)
  const auto bits = _mm_cvtneps_pbh(_mm_loadu_ps(q));
#else
  using F4 = float __attribute__((vector_size(16)));
  using U4 = uint32_t __attribute__((vector_size(16)));
  F4 v;
  std::memcpy(&v, q, sizeof v);
  const auto words = bfloat16_bits<F4, U4>(v);
  const uint16_t bits[4] = {uint16_t(words[0]), uint16_t(words[1]), uint16_t(words[2]), uint16_t(words[3])};
#endif
  std::memcpy(p, &bits, 8);
}

inline float sum(F a) {
  float s[4];
  sum4(s, a, F{}, F{}, F{});
  return s[0];
}

inline F max(F a, F b) { return a > b ? a : b; }

inline float max(F a) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)a);
#endif
  float m = a[0];
  for (int i = 1; i < kLanes; i++) m = a[i] > m ? a[i] : m;
  return m;
}

// exp with a relative error below 2e-7; 0 under -87, and finite (about 1e38) above 87.
inline F exp(F x) {
  const F low = splat(-87.0f), high = splat(87.0f);
  const I underflow = x < low;
  x = x < low ? low : x;
  x = x > high ? high : x;
  // x = n log 2 + r with |r| <= log(2) / 2; adding and subtracting 1.5 * 2^23 rounds to an integer.
  const F magic = splat(12582912.0f);
  const F shifted = x * 1.44269504f + magic;
  const F n = shifted - magic;
  const F r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  F p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const I power = (__builtin_convertvector(n, I) + 127) << 23;
  const F result = p * (F)power;
  return underflow ? F{} : result;
}

}  // namespace vec
