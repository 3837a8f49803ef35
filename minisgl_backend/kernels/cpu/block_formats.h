// GGUF's block formats, as panels of rows take them apart. Formats: ggml's block_q4_0, block_q4_K and so on.

#pragma once

#include "panels.h"

namespace {

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

// A format: kBytes of kNumbers weights. `turned`: a panel's group b as bytes of at most kMost; `kept` is what groups have in
// common, from those before. `unpack`: the same of one row. `scales` of a panel's
// 8 groups, [group][row], where they do not lie before each group, and their mins, or second scales. kSigned: bytes less 128 are the numbers. kHalves: two scales a group, of 16 numbers each.
template <int BYTES, int OFFSET>
struct Simple {  // one block of 32: half scale, no min
  static constexpr int kBytes = BYTES, kNumbers = 32, kOffset = OFFSET, kMost = 2 * OFFSET - 1;
  static constexpr bool kSigned = OFFSET == 128, kHalves = false, kMins = false;
};

struct Q4_0 : Simple<18, 8> {
  static void turned(const uint8_t* const* p, int b, Lanes*, Lanes* q) { turn_halves(p, b * kBytes + 2, q); }
  static __m256i unpack(const uint8_t* p, int b) { return nibbles(p + b * kBytes + 2); }
};

struct Q5_0 : Simple<22, 16> {
  static void turned(const uint8_t* const* p, int b, Lanes*, Lanes* q) {
    turn_halves(p, b * kBytes + 6, q);
    add_fifths(words_at(p, b * kBytes + 2), q);
  }
  static __m256i unpack(const uint8_t* p, int b) {
    p += b * kBytes;
    return _mm256_or_si256(nibbles(p + 6), bits_to(p + 2, 16));
  }
};

struct Q8_0 : Simple<34, 128> {
  static void turned(const uint8_t* const* p, int b, Lanes*, Lanes* q) {
    turn_bytes(p, b * kBytes + 2, q);
    for (int i = 0; i < kWords; i++) q[i] = as_factor(q[i]);
  }
  static __m256i unpack(const uint8_t* p, int b) {
    return _mm256_xor_si256(_mm256_loadu_si256((const __m256i*)(p + b * kBytes + 2)), _mm256_set1_epi8((char)0x80));
  }
};

template <int BYTES, int MOST>
struct WithMin {
  static constexpr int kBytes = BYTES, kNumbers = 32, kOffset = 0, kMost = MOST;
  static constexpr bool kSigned = false, kHalves = false, kMins = true;
};

struct Q4_1 : WithMin<20, 15> {
  static void turned(const uint8_t* const* p, int b, Lanes*, Lanes* q) { turn_halves(p, b * kBytes + 4, q); }
  static __m256i unpack(const uint8_t* p, int b) { return nibbles(p + b * kBytes + 4); }
};

struct Q5_1 : WithMin<24, 31> {
  static void turned(const uint8_t* const* p, int b, Lanes*, Lanes* q) {
    turn_halves(p, b * kBytes + 8, q);
    add_fifths(words_at(p, b * kBytes + 4), q);
  }
  static __m256i unpack(const uint8_t* p, int b) {
    p += b * kBytes;
    return _mm256_or_si256(nibbles(p + 8), bits_to(p + 4, 16));
  }
};

// Two halves, and 8 scales and 8 mins of 6 bits in 12 bytes.
inline void scales_k(const uint8_t* const* p, Reals* scale, Reals* min) {
  Lanes head[4];
  Reals of_scales, of_mins;
  turn_16(p, 0, head);
  halves_of(head[0], of_scales, of_mins);
  of_mins = times(of_mins, every(-1.0f));
  const Lanes scales[2] = {masked(head[1], 0, 63), above(masked(head[3], 0, 15), masked(head[1], 6, 3))};
  const Lanes mins[2] = {masked(head[2], 0, 63), above(masked(head[3], 4, 15), masked(head[2], 6, 3))};
  for (int b = 0; b < kSuper; b++) {
    scale[b] = times(byte_of(scales[b / 4], b % 4), of_scales);
    min[b] = times(byte_of(mins[b / 4], b % 4), of_mins);
  }
}

inline __m256i half_bytes(const uint8_t* p, int high) {
  const __m256i bytes = _mm256_loadu_si256((const __m256i*)p);
  return _mm256_and_si256(_mm256_srli_epi16(bytes, high ? 4 : 0), _mm256_set1_epi8(15));
}

struct Q4_K {
  static constexpr int kBytes = 144, kNumbers = 256, kOffset = 0, kMost = 15;
  static constexpr bool kSigned = false, kHalves = false, kMins = true;
  static void scales(const uint8_t* const* p, Reals* scale, Reals* min) { scales_k(p, scale, min); }
  static void turned(const uint8_t* const* p, int b, Lanes* kept, Lanes* q) {
    if (b % 2 == 0) turn_bytes(p, 16 + b / 2 * kGroup, kept);
    for (int i = 0; i < kWords; i++) q[i] = masked(kept[i], b % 2 * 4, 15);
  }
  static __m256i unpack(const uint8_t* p, int b) { return half_bytes(p + 16 + b / 2 * 32, b % 2); }
};

struct Q5_K {
  static constexpr int kBytes = 176, kNumbers = 256, kOffset = 0, kMost = 31;
  static constexpr bool kSigned = false, kHalves = false, kMins = true;
  static void scales(const uint8_t* const* p, Reals* scale, Reals* min) { scales_k(p, scale, min); }
  static void turned(const uint8_t* const* p, int b, Lanes* kept, Lanes* q) {
    Lanes* const fifth = kept + kWords;
    if (b == 0) turn_bytes(p, 16, fifth);
    if (b % 2 == 0) turn_bytes(p, 48 + b / 2 * kGroup, kept);
    for (int i = 0; i < kWords; i++) q[i] = above(masked(kept[i], b % 2 * 4, 15), masked(fifth[i], b, 1));
  }
  static __m256i unpack(const uint8_t* p, int b) {
    const __m256i high = _mm256_loadu_si256((const __m256i*)(p + 16)), bit = _mm256_set1_epi8(1 << b);
    const __m256i fifth = _mm256_and_si256(_mm256_cmpeq_epi8(_mm256_and_si256(high, bit), bit), _mm256_set1_epi8(16));
    return _mm256_or_si256(half_bytes(p + 48 + b / 2 * 32, b % 2), fifth);
  }
};

struct Q6_K {
  static constexpr int kBytes = 210, kNumbers = 256, kOffset = 32, kMost = 63;
  static constexpr bool kSigned = false, kHalves = true, kMins = false;
  static void scales(const uint8_t* const* p, Reals* even, Reals* odd) {
    Lanes bytes[4];
    Reals before, factor;
    turn_16(p, 192, bytes);
    halves_of(words_at(p, 206), before, factor);  // the last of a block
    for (int b = 0; b < kSuper; b++) {
      even[b] = times(signed_byte_of(bytes[b / 2], b % 2 * 2), factor);
      odd[b] = times(signed_byte_of(bytes[b / 2], b % 2 * 2 + 1), factor);
    }
  }
  static void turned(const uint8_t* const* p, int b, Lanes* kept, Lanes* q) {
    const int part = b / 4, quarter = b % 4;
    Lanes *const low = kept + quarter % 2 * kWords, *const high = kept + 2 * kWords;
    if (quarter == 0) turn_bytes(p, 128 + 32 * part, high);
    if (quarter < 2) turn_bytes(p, 64 * part + 32 * quarter, low);
    for (int i = 0; i < kWords; i++) q[i] = above(masked(low[i], quarter / 2 * 4, 15), masked(high[i], 2 * quarter, 3));
  }
  static __m256i unpack(const uint8_t* p, int b) {
    const int part = b / 4, quarter = b % 4;
    const __m256i low = half_bytes(p + 64 * part + 32 * (quarter % 2), quarter / 2);
    const __m256i high = _mm256_loadu_si256((const __m256i*)(p + 128 + 32 * part));
    const __m256i two = _mm256_and_si256(_mm256_srl_epi16(high, _mm_cvtsi32_si128(2 * quarter)), _mm256_set1_epi8(3));
    return _mm256_or_si256(low, _mm256_slli_epi16(two, 4));
  }
};

}  // namespace
