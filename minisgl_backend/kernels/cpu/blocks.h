// Weights in GGUF's block formats as they lie in a file, times activations that are quantized to int8 by groups of 32.
//
// A group of 32 weights is unpacked to bytes q, with value = scale * (q - offset) + min; one of activations is
// scale_x * x. Their product: scale * scale_x * (q . x - offset * sum(x)) + min * scale_x * sum(x), where what is in
// brackets is an exact integer. A panel of rows is unpacked at a time, so that each lane of a register has one row: it
// is done once for all rows of activations, and the order of an output's sums does not depend on how many there are.
// Formats: ggml's block_q4_0, block_q4_K and so on.

#pragma once

#include "vector.h"

#include <algorithm>

namespace {

constexpr int kGroup = 32;     // numbers with one scale of an activation
constexpr int kSuper = 8;      // groups in 256 numbers
constexpr int kSlots = 2 * kSuper;
constexpr int kWords = kGroup / 4;       // four bytes of each row of a panel
constexpr long kPanelRows = 64;          // rows of activations whose sums are kept at once, at most

struct Quantized {  // 256 activations of one row
  int8_t q[kSuper * kGroup];
  float scale[kSuper];
  float sums[kSuper];     // scale * sum of 32 numbers
  int32_t halves[kSlots];  // sums of 16 numbers
};

inline float half(const uint8_t* p) {
  uint16_t bits;
  std::memcpy(&bits, p, 2);
  return _cvtsh_ss(bits);
}

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
constexpr int kPanel = 16;  // rows of weights
using Lanes = __m512i;
using Reals = __m512;
inline Reals reals(const float* p) { return _mm512_loadu_ps(p); }
inline Reals every(float x) { return _mm512_set1_ps(x); }
inline Reals plus(Reals a, Reals b, Reals c) { return _mm512_fmadd_ps(a, b, c); }
inline Reals times(Reals a, Reals b) { return _mm512_mul_ps(a, b); }
inline Reals real(Lanes x) { return _mm512_cvtepi32_ps(x); }
inline void put(float* p, Reals x) { _mm512_storeu_ps(p, x); }

// The half numbers in the lower or upper halves of words.
inline Reals halves_of(const uint32_t* words, bool upper) {
  const __m512i both = _mm512_loadu_si512(words);
  return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(upper ? _mm512_srli_epi32(both, 16) : both));
}

inline Lanes masked(Lanes x, int shift, char mask) {  // of each byte's bits from `shift` on, those in `mask`
  return _mm512_and_si512(_mm512_srl_epi16(x, _mm_cvtsi32_si128(shift)), _mm512_set1_epi8(mask));
}
inline Lanes with_fifth(Lanes low, Lanes bit) { return _mm512_or_si512(low, _mm512_slli_epi16(bit, 4)); }

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

// Of 16 bytes of each row: words of their lower halves, then of their upper ones.
inline void turn_halves(const uint8_t* const* rows, long at, Lanes* words) {
  const auto row = [&](int r) { return _mm_loadu_si128((const __m128i*)(rows[r] + at)); };
  __m512i z[4];
  for (int i = 0; i < 4; i++) {
    const __m512i two = _mm512_inserti32x4(_mm512_castsi128_si512(row(i)), row(4 + i), 1);
    z[i] = _mm512_inserti32x4(_mm512_inserti32x4(two, row(8 + i), 2), row(12 + i), 3);
  }
  const __m512i a = _mm512_unpacklo_epi32(z[0], z[1]), b = _mm512_unpackhi_epi32(z[0], z[1]);
  const __m512i c = _mm512_unpacklo_epi32(z[2], z[3]), d = _mm512_unpackhi_epi32(z[2], z[3]);
  const Lanes both[4] = {_mm512_unpacklo_epi64(a, c), _mm512_unpackhi_epi64(a, c), _mm512_unpacklo_epi64(b, d),
                         _mm512_unpackhi_epi64(b, d)};
  for (int i = 0; i < 4; i++) words[i] = masked(both[i], 0, 15), words[4 + i] = masked(both[i], 4, 15);
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
inline Reals reals(const float* p) { return _mm256_loadu_ps(p); }
inline Reals every(float x) { return _mm256_set1_ps(x); }
inline Reals plus(Reals a, Reals b, Reals c) { return _mm256_fmadd_ps(a, b, c); }
inline Reals times(Reals a, Reals b) { return _mm256_mul_ps(a, b); }
inline Reals real(Lanes x) { return _mm256_cvtepi32_ps(x); }
inline void put(float* p, Reals x) { _mm256_storeu_ps(p, x); }

inline Reals halves_of(const uint32_t* words, bool upper) {
  const __m256i both = _mm256_loadu_si256((const __m256i*)words);
  const __m256i one = upper ? _mm256_srli_epi32(both, 16) : _mm256_and_si256(both, _mm256_set1_epi32(0xffff));
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(one, one), 0x08);
  return _mm256_cvtph_ps(_mm256_castsi256_si128(packed));
}

inline Lanes masked(Lanes x, int shift, char mask) {
  return _mm256_and_si256(_mm256_srl_epi16(x, _mm_cvtsi32_si128(shift)), _mm256_set1_epi8(mask));
}
inline Lanes with_fifth(Lanes low, Lanes bit) { return _mm256_or_si256(low, _mm256_slli_epi16(bit, 4)); }

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

inline void turn_halves(const uint8_t* const* rows, long at, Lanes* words) {
  const auto row = [&](int r) { return _mm_loadu_si128((const __m128i*)(rows[r] + at)); };
  __m256i y[4];
  for (int i = 0; i < 4; i++) y[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(row(i)), row(4 + i), 1);
  const __m256i a = _mm256_unpacklo_epi32(y[0], y[1]), b = _mm256_unpackhi_epi32(y[0], y[1]);
  const __m256i c = _mm256_unpacklo_epi32(y[2], y[3]), d = _mm256_unpackhi_epi32(y[2], y[3]);
  const Lanes both[4] = {_mm256_unpacklo_epi64(a, c), _mm256_unpackhi_epi64(a, c), _mm256_unpacklo_epi64(b, d),
                         _mm256_unpackhi_epi64(b, d)};
  for (int i = 0; i < 4; i++) words[i] = masked(both[i], 0, 15), words[4 + i] = masked(both[i], 4, 15);
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
        const __m256i number = _mm256_xor_si256(q[j], _mm256_set1_epi8((char)0x80));
        part = _mm256_maddubs_epi16(_mm256_abs_epi8(number), _mm256_sign_epi8(four, number));
      } else {
        part = _mm256_add_epi16(part, _mm256_maddubs_epi16(q[j], four));
      }
    }
    total = _mm256_add_epi32(total, _mm256_madd_epi16(part, _mm256_set1_epi16(1)));
  }
  return total;
}
#endif

inline __m256i nibbles(const uint8_t* p) {  // 16 bytes: low halves, then high halves
  const __m128i bytes = _mm_loadu_si128((const __m128i*)p);
  const __m256i both = _mm256_set_m128i(_mm_srli_epi16(bytes, 4), bytes);
  return _mm256_and_si256(both, _mm256_set1_epi8(15));
}

inline __m256i bits_to(const uint8_t* p, char value) {  // 32 bits -> 32 bytes, `value` where set
  uint32_t bits;
  std::memcpy(&bits, p, 4);
  const __m256i spread = _mm256_shuffle_epi8(
      _mm256_set1_epi32(bits), _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303));
  const __m256i mask = _mm256_set1_epi64x(0x8040201008040201);
  return _mm256_and_si256(_mm256_cmpeq_epi8(_mm256_and_si256(spread, mask), mask), _mm256_set1_epi8(value));
}

enum Layout { kEach, kHalfBytes, kPairs };  // as `panel_numbers` reads it

// A format: kBytes of kNumbers weights; `unpack` a group to bytes of at most kMost; `scales` and mins of up to 8 groups.
// kSigned: bytes less 128 are the numbers. kHalves: two scales a group, of 16 numbers each: first ones, then second ones.
template <int BYTES, int OFFSET>
struct Simple {  // one block of 32: half scale, no min
  static constexpr int kBytes = BYTES, kNumbers = 32, kOffset = OFFSET, kMost = 2 * OFFSET - 1;
  static constexpr bool kSigned = OFFSET == 128, kHalves = false, kMins = false;
  static void scales(const uint8_t* p, int count, float* scale, float*) {
    for (int b = 0; b < count; b++) scale[b] = half(p + b * BYTES);
  }
};

struct Q4_0 : Simple<18, 8> {
  static constexpr Layout kLayout = kHalfBytes;
  static __m256i unpack(const uint8_t* p, int b) { return nibbles(p + b * kBytes + 2); }
};

struct Q5_0 : Simple<22, 16> {
  static constexpr Layout kLayout = kEach;
  static __m256i unpack(const uint8_t* p, int b) {
    p += b * kBytes;
    return _mm256_or_si256(nibbles(p + 6), bits_to(p + 2, 16));
  }
};

struct Q8_0 : Simple<34, 128> {
  static constexpr Layout kLayout = kEach;
  static __m256i unpack(const uint8_t* p, int b) {
    return _mm256_xor_si256(_mm256_loadu_si256((const __m256i*)(p + b * kBytes + 2)), _mm256_set1_epi8((char)0x80));
  }
};

template <int BYTES, int MOST>
struct WithMin {
  static constexpr int kBytes = BYTES, kNumbers = 32, kOffset = 0, kMost = MOST;
  static constexpr bool kSigned = false, kHalves = false, kMins = true;
  static void scales(const uint8_t* p, int count, float* scale, float* min) {
    for (int b = 0; b < count; b++) {
      scale[b] = half(p + b * BYTES);
      min[b] = half(p + b * BYTES + 2);
    }
  }
};

struct Q4_1 : WithMin<20, 15> {
  static constexpr Layout kLayout = kHalfBytes;
  static __m256i unpack(const uint8_t* p, int b) { return nibbles(p + b * kBytes + 4); }
};

struct Q5_1 : WithMin<24, 31> {
  static constexpr Layout kLayout = kEach;
  static __m256i unpack(const uint8_t* p, int b) {
    p += b * kBytes;
    return _mm256_or_si256(nibbles(p + 8), bits_to(p + 4, 16));
  }
};

// 8 scales and 8 mins of 6 bits in 12 bytes, times two halves.
inline void scales_k(const uint8_t* p, float* scale, float* min) {
  uint32_t words[4];
  std::memcpy(words, p + 4, 12);
  constexpr uint32_t low6 = 0x3f3f3f3f, low4 = 0x0f0f0f0f, low2 = 0x03030303;
  words[3] = ((words[2] >> 4) & low4) | (((words[1] >> 6) & low2) << 4);
  const uint32_t last_scales = (words[2] & low4) | (((words[0] >> 6) & low2) << 4);
  const uint32_t first_mins = words[1] & low6;
  const __m128i sc = _mm_set_epi32(0, 0, last_scales, words[0] & low6), mn = _mm_set_epi32(0, 0, words[3], first_mins);
  _mm256_storeu_ps(scale, _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(sc)), _mm256_set1_ps(half(p))));
  _mm256_storeu_ps(min, _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(mn)), _mm256_set1_ps(-half(p + 2))));
}

inline __m256i half_bytes(const uint8_t* p, int high) {
  const __m256i bytes = _mm256_loadu_si256((const __m256i*)p);
  return _mm256_and_si256(_mm256_srli_epi16(bytes, high ? 4 : 0), _mm256_set1_epi8(15));
}

struct Q4_K {
  static constexpr int kBytes = 144, kNumbers = 256, kOffset = 0, kMost = 15;
  static constexpr bool kSigned = false, kHalves = false, kMins = true;
  static constexpr Layout kLayout = kPairs;
  static void scales(const uint8_t* p, int, float* scale, float* min) { scales_k(p, scale, min); }
  static __m256i unpack(const uint8_t* p, int b) { return half_bytes(p + 16 + b / 2 * 32, b % 2); }
};

struct Q5_K {
  static constexpr int kBytes = 176, kNumbers = 256, kOffset = 0, kMost = 31;
  static constexpr bool kSigned = false, kHalves = false, kMins = true;
  static constexpr Layout kLayout = kPairs;
  static void scales(const uint8_t* p, int, float* scale, float* min) { scales_k(p, scale, min); }
  static __m256i unpack(const uint8_t* p, int b) {
    const __m256i high = _mm256_loadu_si256((const __m256i*)(p + 16)), bit = _mm256_set1_epi8(1 << b);
    const __m256i fifth = _mm256_and_si256(_mm256_cmpeq_epi8(_mm256_and_si256(high, bit), bit), _mm256_set1_epi8(16));
    return _mm256_or_si256(half_bytes(p + 48 + b / 2 * 32, b % 2), fifth);
  }
};

struct Q6_K {
  static constexpr int kBytes = 210, kNumbers = 256, kOffset = 32, kMost = 63;
  static constexpr bool kSigned = false, kHalves = true, kMins = false;
  static constexpr Layout kLayout = kEach;
  static void scales(const uint8_t* p, int, float* scale, float*) {
    const __m128i s = _mm_loadu_si128((const __m128i*)(p + 192));
    const __m128i split = _mm_shuffle_epi8(s, _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15));
    const __m256 d = _mm256_set1_ps(half(p + 208));
    const __m256 even = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(split)), d);
    const __m256 odd = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(split, 8))), d);
    _mm256_storeu_ps(scale, even), _mm256_storeu_ps(scale + 8, odd);
  }
  static __m256i unpack(const uint8_t* p, int b) {
    const int part = b / 4, quarter = b % 4;
    const __m256i low = half_bytes(p + 64 * part + 32 * (quarter % 2), quarter / 2);
    const __m256i high = _mm256_loadu_si256((const __m256i*)(p + 128 + 32 * part));
    const __m256i two = _mm256_and_si256(_mm256_srl_epi16(high, _mm_cvtsi32_si128(2 * quarter)), _mm256_set1_epi8(3));
    return _mm256_or_si256(low, _mm256_slli_epi16(two, 4));
  }
};

// Of `here` groups of a panel, [group][row]; where groups have two scales, all first ones, then all second ones.
template <class F>
inline void panel_scales(const uint8_t* const* p, int here, float* scales, float* mins) {
  if constexpr (F::kNumbers == kGroup) {  // a block begins with a half number, and with its min where it has one
    uint32_t words[kSuper * kPanel];
    for (int r = 0; r < kPanel; r++)
      for (int b = 0; b < here; b++) std::memcpy(words + b * kPanel + r, p[r] + b * F::kBytes, 4);
    for (int b = 0; b < here; b++) {
      put(scales + b * kPanel, halves_of(words + b * kPanel, false));
      if (F::kMins) put(mins + b * kPanel, halves_of(words + b * kPanel, true));
    }
  } else {
    for (int r = 0; r < kPanel; r++) {
      float scale[kSlots], min[kSuper];
      F::scales(p[r], here, scale, min);
      for (int b = 0; b < (F::kHalves ? kSlots : kSuper); b++) scales[b * kPanel + r] = scale[b];
      if (F::kMins)
        for (int b = 0; b < kSuper; b++) mins[b * kPanel + r] = min[b];
    }
  }
}

inline void turn_bytes(const uint8_t* const* p, long at, Lanes* words) {
  __m256i rows[kPanel];
  for (int r = 0; r < kPanel; r++) rows[r] = _mm256_loadu_si256((const __m256i*)(p[r] + at));
  turn(rows, words);
}

// Group b of a panel's rows in bytes. `kept`: what groups have in common, from the one before.
template <class F>
inline void panel_numbers(const uint8_t* const* p, int b, Lanes* kept, Lanes* q) {
  if constexpr (F::kLayout == kHalfBytes) {
    turn_halves(p, b * F::kBytes + F::kBytes - kGroup / 2, q);
  } else if constexpr (F::kLayout == kPairs) {  // two groups in the halves of 32 bytes, perhaps with fifth bits
    Lanes* const fifth = kept + kWords;
    if (b % 2 == 0) turn_bytes(p, F::kBytes - kSuper / 2 * kGroup + b / 2 * kGroup, kept);
    if (F::kMost > 15 && b == 0) turn_bytes(p, 16, fifth);
    for (int i = 0; i < kWords; i++) {
      q[i] = masked(kept[i], b % 2 * 4, 15);
      if (F::kMost > 15) q[i] = with_fifth(q[i], masked(fifth[i], b, 1));
    }
  } else {
    __m256i rows[kPanel];
    for (int r = 0; r < kPanel; r++) rows[r] = F::unpack(p[r], b);
    turn(rows, q);
  }
}

// out[m * stride + r] = weights[r] . x[m], for `count` rows of weights, at most kPanel, and up to kPanelRows of x.
template <class F>
void panel_dots(const uint8_t* weight, long row_bytes, int count, const Quantized* x, long rows, long groups, float* out,
                long stride) {
  const long supers = (groups + kSuper - 1) / kSuper;
  Reals sums[kPanelRows];
  for (long m = 0; m < rows; m++) sums[m] = every(0.0f);
  float scales[kSlots * kPanel], mins[kSuper * kPanel];
  for (long s = 0; s < supers; s++) {
    const int here = std::min<long>(kSuper, groups - s * kSuper);
    const uint8_t* p[kPanel];
    for (int r = 0; r < kPanel; r++) {
      p[r] = weight + std::min(r, count - 1) * row_bytes + s * (kSuper * kGroup / F::kNumbers) * F::kBytes;
      if (rows < 8)  // the next panel: the hardware does not follow so many rows
        for (int i = 0; i < kSuper * kGroup / F::kNumbers * F::kBytes; i += 64)
          _mm_prefetch((const char*)p[r] + kPanel * row_bytes + i, _MM_HINT_T0);
    }
    panel_scales<F>(p, here, scales, mins);
    Lanes kept[2 * kWords];
    for (int b = 0; b < here; b++) {
      Lanes q[kWords];
      panel_numbers<F>(p, b, kept, q);
      const Reals scale = reals(scales + b * kPanel), second = F::kHalves ? reals(scales + (kSuper + b) * kPanel) : scale;
      const Reals min = F::kMins ? reals(mins + b * kPanel) : scale;
      for (long m = 0; m < rows; m++) {
        const Quantized& a = x[m * supers + s];
        const int8_t* const numbers = a.q + b * kGroup;
        const int32_t* const halves = a.halves + 2 * b;
        const Reals of_x = every(a.scale[b]);
        Reals sum = sums[m];
        if constexpr (F::kHalves) {
          sum = plus(real(product<F, kWords / 2>(q, numbers, halves[0])), times(scale, of_x), sum);
          sum = plus(real(product<F, kWords / 2>(q + kWords / 2, numbers + 16, halves[1])), times(second, of_x), sum);
        } else {
          sum = plus(real(product<F, kWords>(q, numbers, halves[0] + halves[1])), times(scale, of_x), sum);
        }
        if (F::kMins) sum = plus(min, every(a.sums[b]), sum);
        sums[m] = sum;
      }
    }
  }
  for (long m = 0; m < rows; m++) {
    float lanes[kPanel];
    put(lanes, sums[m]);
    std::copy(lanes, lanes + count, out + m * stride);
  }
}

inline __m256 eight(const bf16* p) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

// x: `size` numbers, a multiple of 32.
void quantize(const bf16* x, long size, Quantized* out) {
  const long groups = size / kGroup;
  for (long s = 0; s * kSuper < groups; s++) {
    Quantized& a = out[s];
    const int count = std::min<long>(kSuper, groups - s * kSuper);
    if (count < kSuper) std::memset((void*)&a, 0, sizeof a);
    for (int b = 0; b < count; b++) {
      const bf16* v = x + (s * kSuper + b) * kGroup;
      const __m256 sign = _mm256_set1_ps(-0.0f);
      __m256 part[4], most = _mm256_setzero_ps();
      for (int i = 0; i < 4; i++) {
        part[i] = eight(v + 8 * i);
        most = _mm256_max_ps(most, _mm256_andnot_ps(sign, part[i]));
      }
      __m128 four = _mm_max_ps(_mm256_castps256_ps128(most), _mm256_extractf128_ps(most, 1));
      four = _mm_max_ps(four, _mm_movehl_ps(four, four));
      const float top = _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
      const float scale = top / 127.0f;
      const __m256 inverse = _mm256_set1_ps(top > 0 ? 127.0f / top : 0.0f);
      __m256i n[4];
      for (int i = 0; i < 4; i++) n[i] = _mm256_cvtps_epi32(_mm256_mul_ps(part[i], inverse));
      const __m256i lo = _mm256_packs_epi32(n[0], n[1]), hi = _mm256_packs_epi32(n[2], n[3]);
      const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(lo, hi), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
      _mm256_storeu_si256((__m256i*)(a.q + b * kGroup), bytes);
      a.scale[b] = scale;
      const auto total = [](__m256i u) {
        __m128i t = _mm_add_epi32(_mm256_castsi256_si128(u), _mm256_extracti128_si256(u, 1));
        t = _mm_add_epi32(t, _mm_shuffle_epi32(t, 0x4e));
        return _mm_cvtsi128_si32(_mm_add_epi32(t, _mm_shuffle_epi32(t, 0xb1)));
      };
      a.halves[2 * b] = total(_mm256_add_epi32(n[0], n[1]));
      a.halves[2 * b + 1] = total(_mm256_add_epi32(n[2], n[3]));
      a.sums[b] = scale * (a.halves[2 * b] + a.halves[2 * b + 1]);
    }
  }
}

inline long supers_of(long size) { return (size / kGroup + kSuper - 1) / kSuper; }

using PanelDots = void (*)(const uint8_t*, long, int, const Quantized*, long, long, float*, long);

struct BlockFormat {
  int type;            // ggml's number
  int bytes, numbers;  // of a block
  PanelDots dots;
  void (*numbers_of)(const uint8_t*, long, bf16*);  // a row of `groups`, as numbers
};

// A row as numbers, for embeddings.
template <class F>
void row_of(const uint8_t* row, long groups, bf16* out) {
  for (long s = 0; s * kSuper < groups; s++) {
    const int count = std::min<long>(kSuper, groups - s * kSuper);
    const uint8_t* p = row + s * (kSuper * kGroup / F::kNumbers) * F::kBytes;
    float scale[kSlots], min[kSuper];
    F::scales(p, count, scale, min);
    for (int b = 0; b < count; b++) {
      uint8_t q[kGroup];
      _mm256_storeu_si256((__m256i*)q, F::unpack(p, b));
      for (int half_index = 0; half_index < 2; half_index++) {
        const int at = F::kHalves ? half_index * kSuper + b : b;
        alignas(64) float values[16];
        for (int i = 0; i < 16; i++) {
          const uint8_t number = q[16 * half_index + i];
          values[i] = scale[at] * (number - F::kOffset) + (F::kMins ? min[b] : 0.0f);
        }
        store(out + (s * kSuper + b) * kGroup + 16 * half_index, load(values));
      }
    }
  }
}

template <class F>
constexpr BlockFormat block_format(int type) {
  return {type, F::kBytes, F::kNumbers, panel_dots<F>, row_of<F>};
}

constexpr BlockFormat kBlockFormats[] = {
    block_format<Q4_0>(2), block_format<Q4_1>(3),  block_format<Q5_0>(6),  block_format<Q5_1>(7),
    block_format<Q8_0>(8), block_format<Q4_K>(12), block_format<Q5_K>(13), block_format<Q6_K>(14),
};

const BlockFormat* block_format_of(long type) {
  for (const BlockFormat& format : kBlockFormats)
    if (format.type == type) return &format;
  return nullptr;
}

}  // namespace
