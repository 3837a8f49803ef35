// Panels of rows of weights in registers, each lane with one row: bytes of their groups, turned from how rows lie, and
// their products with a row of activations in int8.

#pragma once

#include "vector.h"

#include <algorithm>

namespace {

constexpr int kGroup = 32;     // numbers with one scale of an activation
constexpr int kSuper = 8;      // groups in 256 numbers
constexpr int kWords = kGroup / 4;       // four bytes of each row of a panel

inline float half(const uint8_t* p) {
  uint16_t bits;
  std::memcpy(&bits, p, 2);
  return _cvtsh_ss(bits);
}

// Where byte i of each word is, for all its bytes.
inline __m128i byte_of_each(int i) {
  return _mm_add_epi8(_mm_set1_epi8(i), _mm_setr_epi8(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12));
}

// Four bytes of each of 8 rows.
inline __m256i eight_words(const uint8_t* const* rows, long at) {
  const auto word = [&](int r) { return _mm_loadu_si32(rows[r] + at); };
  const auto four = [&](int r) {
    const __m128i a = _mm_unpacklo_epi32(word(r), word(r + 1)), b = _mm_unpacklo_epi32(word(r + 2), word(r + 3));
    return _mm_unpacklo_epi64(a, b);
  };
  return _mm256_set_m128i(four(4), four(0));
}

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
constexpr int kPanel = 16;  // rows of weights
using Lanes = __m512i;
using Reals = __m512;
inline Reals every(float x) { return _mm512_set1_ps(x); }
inline Reals plus(Reals a, Reals b, Reals c) { return _mm512_fmadd_ps(a, b, c); }
inline Reals times(Reals a, Reals b) { return _mm512_mul_ps(a, b); }
inline Reals real(Lanes x) { return _mm512_cvtepi32_ps(x); }
inline void put(float* p, Reals x) { _mm512_storeu_ps(p, x); }

// Four bytes of each row.
inline Lanes words_at(const uint8_t* const* rows, long at) {
  const __m256i low = eight_words(rows, at), high = eight_words(rows + 8, at);
  return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}
// The half numbers in the lower and upper halves of words.
inline void halves_of(Lanes words, Reals& low, Reals& high) {
  low = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(words));
  high = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(words, 16)));
}

inline Lanes masked(Lanes x, int shift, char mask) {  // of each byte's bits from `shift` on, those in `mask`
  return _mm512_and_si512(_mm512_srl_epi16(x, _mm_cvtsi32_si128(shift)), _mm512_set1_epi8(mask));
}
inline Lanes above(Lanes low, Lanes bits) { return _mm512_or_si512(low, _mm512_slli_epi16(bits, 4)); }

inline Lanes as_factor(Lanes x) { return _mm512_xor_si512(x, _mm512_set1_epi8((char)0x80)); }  // whose signs count

// 16 more for each byte of words whose bit, of 32 of its row, is set.
inline void add_fifths(Lanes bits, Lanes* words) {
  const __m512i sixteen = _mm512_set1_epi8(16);
#pragma GCC unroll 8
  for (int i = 0; i < kWords; i++) {
    const __m512i each = _mm512_shuffle_epi8(bits, _mm512_broadcast_i32x4(byte_of_each(i / 2)));
    const __m512i bit = _mm512_set1_epi32(i % 2 ? 0x80402010 : 0x08040201);
    words[i] = _mm512_mask_add_epi8(words[i], _mm512_test_epi8_mask(each, bit), words[i], sixteen);
  }
}

// words[i]: bytes 4 i to 4 i + 3 of each of 16 rows.
inline void turn(const __m256i* rows, Lanes* words) {
  __m512i z[8], pairs[8];
  for (int i = 0; i < 4; i++) {
    z[i] = _mm512_inserti64x4(_mm512_castsi256_si512(rows[i]), rows[4 + i], 1);
    z[4 + i] = _mm512_inserti64x4(_mm512_castsi256_si512(rows[8 + i]), rows[12 + i], 1);
  }
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = _mm512_unpacklo_epi32(z[i], z[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_epi32(z[i], z[i + 1]);
  }
  for (int i = 0; i < 2; i++) {
    const __m512i a = _mm512_unpacklo_epi64(pairs[i], pairs[2 + i]), b = _mm512_unpacklo_epi64(pairs[4 + i], pairs[6 + i]);
    const __m512i c = _mm512_unpackhi_epi64(pairs[i], pairs[2 + i]), d = _mm512_unpackhi_epi64(pairs[4 + i], pairs[6 + i]);
    words[2 * i] = _mm512_shuffle_i32x4(a, b, 0x88), words[2 * i + 4] = _mm512_shuffle_i32x4(a, b, 0xdd);
    words[2 * i + 1] = _mm512_shuffle_i32x4(c, d, 0x88), words[2 * i + 5] = _mm512_shuffle_i32x4(c, d, 0xdd);
  }
}

// words[i]: bytes at + 4 i to at + 4 i + 3 of each row.
inline void turn_16(const uint8_t* const* rows, long at, Lanes* words) {
  const auto row = [&](int r) { return _mm_loadu_si128((const __m128i*)(rows[r] + at)); };
  __m512i z[4];
  for (int i = 0; i < 4; i++) {
    const __m512i two = _mm512_inserti32x4(_mm512_castsi128_si512(row(i)), row(4 + i), 1);
    z[i] = _mm512_inserti32x4(_mm512_inserti32x4(two, row(8 + i), 2), row(12 + i), 3);
  }
  const __m512i a = _mm512_unpacklo_epi32(z[0], z[1]), b = _mm512_unpackhi_epi32(z[0], z[1]);
  const __m512i c = _mm512_unpacklo_epi32(z[2], z[3]), d = _mm512_unpackhi_epi32(z[2], z[3]);
  words[0] = _mm512_unpacklo_epi64(a, c), words[1] = _mm512_unpackhi_epi64(a, c);
  words[2] = _mm512_unpacklo_epi64(b, d), words[3] = _mm512_unpackhi_epi64(b, d);
}

// Byte i of each word, and the same with its sign.
inline Reals byte_of(Lanes x, int i) {
  return real(_mm512_and_si512(_mm512_srl_epi32(x, _mm_cvtsi32_si128(8 * i)), _mm512_set1_epi32(255)));
}
inline Reals signed_byte_of(Lanes x, int i) {
  return real(_mm512_srai_epi32(_mm512_sll_epi32(x, _mm_cvtsi32_si128(24 - 8 * i)), 24));
}

// sum(q x) - offset * sum(x) of COUNT words, for each row.
template <class F, int COUNT>
inline Lanes product(const Lanes* q, const int8_t* x, int32_t sum) {
  Lanes total = _mm512_set1_epi32(F::kOffset ? -F::kOffset * sum : 0);
  for (int i = 0; i < COUNT; i++) {
    int32_t word;
    std::memcpy(&word, x + 4 * i, 4);
    total = _mm512_dpbusd_epi32(total, q[i], _mm512_set1_epi32(word));
  }
  return total;
}
#else
constexpr int kPanel = 8;
using Lanes = __m256i;
using Reals = __m256;
inline Reals every(float x) { return _mm256_set1_ps(x); }
inline Reals plus(Reals a, Reals b, Reals c) { return _mm256_fmadd_ps(a, b, c); }
inline Reals times(Reals a, Reals b) { return _mm256_mul_ps(a, b); }
inline Reals real(Lanes x) { return _mm256_cvtepi32_ps(x); }
inline void put(float* p, Reals x) { _mm256_storeu_ps(p, x); }

inline Lanes words_at(const uint8_t* const* rows, long at) { return eight_words(rows, at); }
inline void halves_of(Lanes words, Reals& low, Reals& high) {
  const __m256i order = _mm256_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15, 0, 1, 4, 5, 8, 9, 12, 13, 2,
                                         3, 6, 7, 10, 11, 14, 15);
  const __m256i apart = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(words, order), 0xd8);
  low = _mm256_cvtph_ps(_mm256_castsi256_si128(apart)), high = _mm256_cvtph_ps(_mm256_extracti128_si256(apart, 1));
}

inline Lanes masked(Lanes x, int shift, char mask) {
  return _mm256_and_si256(_mm256_srl_epi16(x, _mm_cvtsi32_si128(shift)), _mm256_set1_epi8(mask));
}
inline Lanes above(Lanes low, Lanes bits) { return _mm256_or_si256(low, _mm256_slli_epi16(bits, 4)); }

inline Lanes as_factor(Lanes x) { return x; }
inline void add_fifths(Lanes bits, Lanes* words) {
#pragma GCC unroll 8
  for (int i = 0; i < kWords; i++) {
    const __m256i bit = _mm256_set1_epi32(i % 2 ? 0x80402010 : 0x08040201);
    const __m256i each = _mm256_shuffle_epi8(bits, _mm256_broadcastsi128_si256(byte_of_each(i / 2)));
    const __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(each, bit), bit);
    words[i] = _mm256_or_si256(words[i], _mm256_and_si256(set, _mm256_set1_epi8(16)));
  }
}

inline void turn(const __m256i* rows, Lanes* words) {
  __m256i pairs[8];
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = _mm256_unpacklo_epi32(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 2; i++) {
    const __m256i a = _mm256_unpacklo_epi64(pairs[i], pairs[2 + i]), b = _mm256_unpacklo_epi64(pairs[4 + i], pairs[6 + i]);
    const __m256i c = _mm256_unpackhi_epi64(pairs[i], pairs[2 + i]), d = _mm256_unpackhi_epi64(pairs[4 + i], pairs[6 + i]);
    words[2 * i] = _mm256_permute2x128_si256(a, b, 0x20), words[2 * i + 4] = _mm256_permute2x128_si256(a, b, 0x31);
    words[2 * i + 1] = _mm256_permute2x128_si256(c, d, 0x20), words[2 * i + 5] = _mm256_permute2x128_si256(c, d, 0x31);
  }
}

inline void turn_16(const uint8_t* const* rows, long at, Lanes* words) {
  const auto row = [&](int r) { return _mm_loadu_si128((const __m128i*)(rows[r] + at)); };
  __m256i y[4];
  for (int i = 0; i < 4; i++) y[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(row(i)), row(4 + i), 1);
  const __m256i a = _mm256_unpacklo_epi32(y[0], y[1]), b = _mm256_unpackhi_epi32(y[0], y[1]);
  const __m256i c = _mm256_unpacklo_epi32(y[2], y[3]), d = _mm256_unpackhi_epi32(y[2], y[3]);
  words[0] = _mm256_unpacklo_epi64(a, c), words[1] = _mm256_unpackhi_epi64(a, c);
  words[2] = _mm256_unpacklo_epi64(b, d), words[3] = _mm256_unpackhi_epi64(b, d);
}

inline Reals byte_of(Lanes x, int i) {
  return real(_mm256_and_si256(_mm256_srl_epi32(x, _mm_cvtsi32_si128(8 * i)), _mm256_set1_epi32(255)));
}
inline Reals signed_byte_of(Lanes x, int i) {
  return real(_mm256_srai_epi32(_mm256_sll_epi32(x, _mm_cvtsi32_si128(24 - 8 * i)), 24));
}

// Products of pairs are summed in 16 bits, as many as fit: |x| <= 127.
template <class F, int COUNT>
inline Lanes product(const Lanes* q, const int8_t* x, int32_t sum) {
  constexpr int kFit = F::kSigned ? 1 : std::min(COUNT, 32767 / (2 * 127 * F::kMost));
  Lanes total = _mm256_set1_epi32(F::kOffset && !F::kSigned ? -F::kOffset * sum : 0);
  for (int i = 0; i < COUNT; i += kFit) {
    __m256i part = _mm256_setzero_si256();
    for (int j = i; j < std::min(i + kFit, COUNT); j++) {
      int32_t word;
      std::memcpy(&word, x + 4 * j, 4);
      const __m256i four = _mm256_set1_epi32(word);
      if constexpr (F::kSigned) {
        part = _mm256_maddubs_epi16(_mm256_abs_epi8(q[j]), _mm256_sign_epi8(four, q[j]));
      } else {
        part = _mm256_add_epi16(part, _mm256_maddubs_epi16(q[j], four));
      }
    }
    total = _mm256_add_epi32(total, _mm256_madd_epi16(part, _mm256_set1_epi16(1)));
  }
  return total;
}
#endif

inline float first_of(Reals x) {
  float lanes[kPanel];
  put(lanes, x);
  return lanes[0];
}

// Of 16 bytes of each row: words of their lower halves, then of their upper ones.
inline void turn_halves(const uint8_t* const* rows, long at, Lanes* words) {
  Lanes both[4];
  turn_16(rows, at, both);
  for (int i = 0; i < 4; i++) words[i] = masked(both[i], 0, 15), words[4 + i] = masked(both[i], 4, 15);
}

inline void turn_bytes(const uint8_t* const* p, long at, Lanes* words) {
  __m256i rows[kPanel];
  for (int r = 0; r < kPanel; r++) rows[r] = _mm256_loadu_si256((const __m256i*)(p[r] + at));
  turn(rows, words);
}

}  // namespace
