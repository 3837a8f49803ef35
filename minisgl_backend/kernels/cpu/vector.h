// Sixteen float32 as one value, and what the kernels do with them: one register with AVX-512, two with AVX2.
//
// A build is for one or the other (library.py chooses by what the processor has); sums are made in the same order
// wherever they are made, so a result does not depend on how many rows are computed beside it.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

namespace {

using bf16 = uint16_t;
struct f16 {  // IEEE 754 binary16
  uint16_t bits;
};

constexpr float kInfinity = std::numeric_limits<float>::infinity();

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512BF16__)

constexpr int kRegisters = 32;  // of sixteen float32 each

using Floats = __m512;
using Pairs = __m512bh;  // 32 numbers to be multiplied pair by pair

inline Floats zeros() { return _mm512_setzero_ps(); }
inline Floats all(float x) { return _mm512_set1_ps(x); }
inline Floats load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Floats x) { _mm512_storeu_ps(p, x); }
inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
inline Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats div(Floats a, Floats b) { return _mm512_div_ps(a, b); }
inline Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats fms(Floats a, Floats b, Floats c) { return _mm512_fmsub_ps(a, b, c); }
inline float sum_of(Floats x) { return _mm512_reduce_add_ps(x); }
inline float max_of(Floats x) { return _mm512_reduce_max_ps(x); }
inline bool any_nan(Floats x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q) != 0; }
inline unsigned equal(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }  // a bit for each

inline __mmask16 first(long count) { return count >= 16 ? 0xffff : (1u << count) - 1; }
inline Floats widen(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
inline Floats load(const bf16* p) { return widen(_mm256_loadu_si256((const __m256i*)p)); }
inline Floats load(const bf16* p, long count) { return widen(_mm256_maskz_loadu_epi16(first(count), p)); }
inline void store(bf16* p, Floats x) { _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(x)); }
inline void store(bf16* p, Floats x, long count) {
  _mm256_mask_storeu_epi16(p, first(count), (__m256i)_mm512_cvtneps_pbh(x));
}
inline Floats load(const f16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline Floats load(const f16* p, long count) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(count), p)); }
inline void store(f16* p, Floats x) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(x, 0)); }
inline void store(f16* p, Floats x, long count) { _mm256_mask_storeu_epi16(p, first(count), _mm512_cvtps_ph(x, 0)); }
// The first `count` numbers of x, `other` behind them.
inline Floats first_of(Floats x, long count, Floats other) { return _mm512_mask_mov_ps(other, first(count), x); }

inline Pairs load_pairs(const bf16* p) { return (Pairs)_mm512_loadu_si512(p); }
inline Floats dot(Floats sum, Pairs a, Pairs b) { return _mm512_dpbf16_ps(sum, a, b); }

// 32 integers of 16 bits, and 16 sums of neighbours' products.
using Ints = __m512i;
inline Ints no_ints() { return _mm512_setzero_si512(); }
inline Ints load_ints(const void* p) { return _mm512_loadu_si512(p); }
inline Ints widen_ints(const int8_t* p) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p)); }
inline Ints widen_ints(__m256i x) { return _mm512_cvtepi8_epi16(x); }
inline Ints dot(Ints sum, Ints a, Ints b) { return _mm512_dpwssd_epi32(sum, a, b); }
inline Ints sub(Ints a, Ints b) { return _mm512_sub_epi16(a, b); }
inline Ints alternating(int32_t even, int32_t odd) { return _mm512_set1_epi64((int64_t)odd << 32 | (uint32_t)even); }
template <int N>
inline Ints nibbles_of(Ints x) {  // number N of each 16 bits' four
  return _mm512_and_si512(_mm512_srli_epi16(x, 4 * N), _mm512_set1_epi16(15));
}
inline Floats floats(Ints x) { return _mm512_cvtepi32_ps(x); }
inline Floats as_floats(Ints x) { return _mm512_castsi512_ps(x); }
inline void store_ints(int16_t* p, Floats x) {  // to the nearest, ties to even
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(x)));
}

// e^x: a power of two times a polynomial on [-ln(2)/2, ln(2)/2] (relative error below 1e-6).
inline Floats exponential(Floats x) {
  const Floats n = _mm512_roundscale_ps(mul(x, all(1.44269504f)), 0);
  const Floats rest = _mm512_fnmadd_ps(n, all(0.693145752f), x);  // ln(2) in two parts
  const Floats r = _mm512_fnmadd_ps(n, all(1.42860677e-6f), rest);
  Floats p = all(1.0f / 720);
  for (float c : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = fma(p, r, all(c));
  return _mm512_scalef_ps(p, n);
}

// The steps of adding up each of several vectors, two at a time: 16 numbers of each become 8, 4, 2 and 1. A vector
// that is added up alone, by _mm512_reduce_add_ps, takes the same steps: a sum does not depend on how many there are.
inline Floats to_8(Floats a, Floats b) {
  return add(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
}
inline Floats to_4(Floats a, Floats b) {
  return add(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}
inline Floats to_2(Floats a, Floats b) { return add(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee)); }
inline Floats to_1(Floats a, Floats b) { return add(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd)); }

// Number i of the result is the sum of v[i]: 16 vectors with 45 instructions, of which one alone takes nine.
inline Floats sums_of_16(const Floats* v) {
  Floats four[4];  // of four vectors each, four numbers; the order is such that the result's is that of v
  for (int i = 0; i < 4; i++) four[i] = to_4(to_8(v[i], v[i + 4]), to_8(v[i + 8], v[i + 12]));
  return to_1(to_2(four[0], four[1]), to_2(four[2], four[3]));
}

inline __m256 sums_of_8(const Floats* v) {
  const Floats two = to_2(to_4(to_8(v[0], v[2]), to_8(v[4], v[6])), to_4(to_8(v[1], v[3]), to_8(v[5], v[7])));
  const __m512i order = _mm512_setr_epi32(0, 1, 4, 5, 8, 9, 12, 13, 0, 0, 0, 0, 0, 0, 0, 0);
  return _mm512_castps512_ps256(_mm512_permutexvar_ps(order, to_1(two, two)));
}

#else  // AVX2 with FMA

constexpr int kRegisters = 8;

struct Floats {
  __m256 a, b;
};
struct Pairs {
  __m256i a, b;
};

inline Floats zeros() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Floats all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Floats load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, Floats x) { _mm256_storeu_ps(p, x.a), _mm256_storeu_ps(p + 8, x.b); }
inline Floats add(Floats x, Floats y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline Floats sub(Floats x, Floats y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline Floats mul(Floats x, Floats y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline Floats div(Floats x, Floats y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline Floats max(Floats x, Floats y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline Floats fma(Floats x, Floats y, Floats z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
inline Floats fms(Floats x, Floats y, Floats z) {
  return {_mm256_fmsub_ps(x.a, y.a, z.a), _mm256_fmsub_ps(x.b, y.b, z.b)};
}
inline unsigned bits(__m256 a, __m256 b) { return _mm256_movemask_ps(a) | _mm256_movemask_ps(b) << 8; }
inline bool any_nan(Floats x) {
  return bits(_mm256_cmp_ps(x.a, x.a, _CMP_UNORD_Q), _mm256_cmp_ps(x.b, x.b, _CMP_UNORD_Q)) != 0;
}
inline unsigned equal(Floats x, Floats y) {
  return bits(_mm256_cmp_ps(x.a, y.a, _CMP_EQ_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_EQ_OQ));
}

// Sums are made as `sums_of_8` makes them: halves, neighbours, neighbours, halves.
inline float sum_of(Floats x) {
  __m256 v = _mm256_add_ps(x.a, x.b);
  v = _mm256_hadd_ps(v, v);
  v = _mm256_hadd_ps(v, v);
  return _mm_cvtss_f32(_mm_add_ss(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1)));
}
inline float max_of(Floats x) {
  const __m256 v = _mm256_max_ps(x.a, x.b);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}
inline __m256 sums_of_8(const Floats* v) {
  __m256 two[4];
  for (int i = 0; i < 4; i++) {
    two[i] = _mm256_hadd_ps(_mm256_add_ps(v[2 * i].a, v[2 * i].b), _mm256_add_ps(v[2 * i + 1].a, v[2 * i + 1].b));
  }
  const __m256 first = _mm256_hadd_ps(two[0], two[1]), second = _mm256_hadd_ps(two[2], two[3]);
  return _mm256_add_ps(_mm256_permute2f128_ps(first, second, 0x20), _mm256_permute2f128_ps(first, second, 0x31));
}
inline Floats sums_of_16(const Floats* v) { return {sums_of_8(v), sums_of_8(v + 8)}; }

inline __m256 widen(__m128i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); }
inline Floats load(const bf16* p) {
  return {widen(_mm_loadu_si128((const __m128i*)p)), widen(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
inline Floats load(const bf16* p, long count) {
  if (count >= 16) return load(p);
  bf16 part[16] = {};
  std::memcpy(part, p, count * sizeof(bf16));
  return load(part);
}
inline Floats load(const f16* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p + 1))};
}
inline Floats load(const f16* p, long count) {
  if (count >= 16) return load(p);
  f16 part[16] = {};
  std::memcpy(part, p, count * sizeof(f16));
  return load(part);
}
inline void store(f16* p, Floats x) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x.a, 0));
  _mm_storeu_si128((__m128i*)p + 1, _mm256_cvtps_ph(x.b, 0));
}
inline void store(f16* p, Floats x, long count) {
  f16 part[16];
  store(part, x);
  std::memcpy(p, part, std::min(count, 16L) * sizeof(f16));
}
inline __m256i narrow(__m256 x) {  // to the nearest, ties to even; what is no number stays none
  const __m256i number = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(number, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(number, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(number, _mm256_set1_epi32(0x400000));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, is_nan), 16);
}
inline void store(bf16* p, Floats x) {
  const __m256i both = _mm256_packus_epi32(narrow(x.a), narrow(x.b));
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(both, 0xd8));
}
inline void store(bf16* p, Floats x, long count) {
  if (count >= 16) return store(p, x);
  bf16 part[16];
  store(part, x);
  std::memcpy(p, part, count * sizeof(bf16));
}
inline Floats first_of(Floats x, long count, Floats other) {
  const __m256i place = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), end = _mm256_set1_epi32((int)count);
  const __m256 a = _mm256_castsi256_ps(_mm256_cmpgt_epi32(end, place));
  const __m256 b = _mm256_castsi256_ps(_mm256_cmpgt_epi32(end, _mm256_add_epi32(place, _mm256_set1_epi32(8))));
  return {_mm256_blendv_ps(other.a, x.a, a), _mm256_blendv_ps(other.b, x.b, b)};
}

inline Pairs load_pairs(const bf16* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 16))};
}
inline __m256 even(__m256i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)); }
inline __m256 odd(__m256i x) { return _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(0xffff0000))); }
inline Floats dot(Floats sum, Pairs x, Pairs y) {
  sum.a = _mm256_fmadd_ps(even(x.a), even(y.a), sum.a), sum.b = _mm256_fmadd_ps(even(x.b), even(y.b), sum.b);
  sum.a = _mm256_fmadd_ps(odd(x.a), odd(y.a), sum.a), sum.b = _mm256_fmadd_ps(odd(x.b), odd(y.b), sum.b);
  return sum;
}

struct Ints {
  __m256i a, b;
};
inline Ints no_ints() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline Ints load_ints(const void* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)};
}
inline Ints widen_ints(__m256i x) {
  return {_mm256_cvtepi8_epi16(_mm256_castsi256_si128(x)), _mm256_cvtepi8_epi16(_mm256_extracti128_si256(x, 1))};
}
inline Ints widen_ints(const int8_t* p) { return widen_ints(_mm256_loadu_si256((const __m256i*)p)); }
inline Ints dot(Ints sum, Ints x, Ints y) {
  return {_mm256_add_epi32(sum.a, _mm256_madd_epi16(x.a, y.a)), _mm256_add_epi32(sum.b, _mm256_madd_epi16(x.b, y.b))};
}
inline Ints sub(Ints x, Ints y) { return {_mm256_sub_epi16(x.a, y.a), _mm256_sub_epi16(x.b, y.b)}; }
inline Ints alternating(int32_t even, int32_t odd) {
  const __m256i both = _mm256_set1_epi64x((int64_t)odd << 32 | (uint32_t)even);
  return {both, both};
}
template <int N>
inline Ints nibbles_of(Ints x) {
  const __m256i mask = _mm256_set1_epi16(15);
  return {_mm256_and_si256(_mm256_srli_epi16(x.a, 4 * N), mask), _mm256_and_si256(_mm256_srli_epi16(x.b, 4 * N), mask)};
}
inline Floats floats(Ints x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline Floats as_floats(Ints x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
inline void store_ints(int16_t* p, Floats x) {
  const __m256i both = _mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b));
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(both, 0xd8));
}

inline __m256 exponential(__m256 x) {  // see above; 0 below the least normal number
  const __m256 inside = _mm256_min_ps(_mm256_max_ps(x, _mm256_set1_ps(-87.336544f)), _mm256_set1_ps(88.722839f));
  const __m256 n = _mm256_round_ps(_mm256_mul_ps(inside, _mm256_set1_ps(1.44269504f)), 0);
  const __m256 rest = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693145752f), inside);
  const __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(1.42860677e-6f), rest);
  __m256 p = _mm256_set1_ps(1.0f / 720);
  for (float c : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(c));
  // Two factors: 2^128 is no float32, but e^88.7 is.
  const __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1), bias = _mm256_set1_epi32(127);
  const auto power = [&](__m256i e) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(e, bias), 23)); };
  const __m256 value = _mm256_mul_ps(_mm256_mul_ps(p, power(half)), power(_mm256_sub_epi32(whole, half)));
  const __m256 lowest = _mm256_set1_ps(-87.336544f), highest = _mm256_set1_ps(88.722839f);
  const __m256 bounded = _mm256_blendv_ps(value, _mm256_set1_ps(kInfinity), _mm256_cmp_ps(x, highest, _CMP_GT_OQ));
  const __m256 kept = _mm256_andnot_ps(_mm256_cmp_ps(x, lowest, _CMP_LT_OQ), bounded);
  return _mm256_blendv_ps(kept, x, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}
inline Floats exponential(Floats x) { return {exponential(x.a), exponential(x.b)}; }

#endif

struct Wide {  // 32 numbers of float16
  Floats low, high;
};
inline Wide load_pairs(const f16* p) { return {load(p), load(p + 16)}; }
inline Floats dot(Floats sum, Wide x, Wide y) { return fma(x.high, y.high, fma(x.low, y.low, sum)); }

template <int N>
inline void sums_of(const Floats* v, float* out) {
  int i = 0;
  for (; i + 16 <= N; i += 16) store(out + i, sums_of_16(v + i));
  if (i + 8 <= N) _mm256_storeu_ps(out + i, sums_of_8(v + i)), i += 8;
  for (; i < N; i++) out[i] = sum_of(v[i]);
}

}  // namespace
