// Weights in GGUF's block formats as they lie in a file, times activations that are quantized to int8 by groups of 32.
//
// A group of 32 weights is unpacked to bytes q, with value = scale * q + min; one of activations is scale_x * x. Their
// product: scale * scale_x * (q . x) + min * scale_x * sum(x). The sums of each group lie beside the activations, so
// the mins of 256 numbers cost one multiplication of eight lanes. Formats: ggml's block_q4_0, block_q4_K and so on.

#pragma once

#include "vector.h"

#include <algorithm>

namespace {

constexpr int kGroup = 32;     // numbers with one scale of an activation
constexpr int kSuper = 8;      // groups whose mins are multiplied at once
constexpr int kSlots = 2 * kSuper;  // sums beside them: of each 16 numbers
constexpr int kBlockRows = 2, kBlockTile = 4;  // rows of weights, and of activations, whose products are made at once

struct Quantized {  // 256 activations of one row
  int8_t q[kSuper * kGroup];
  float scale[kSuper];
  float sums[kSlots];  // scale * sum of 16 numbers: even ones first, then odd, so that lane i of each is of group i
};

inline float half(const uint8_t* p) {
  uint16_t bits;
  std::memcpy(&bits, p, 2);
  return _cvtsh_ss(bits);
}

inline __m256i products_of(__m256i q, __m256i x) {  // 8 sums of 4 products each, of unsigned and signed bytes
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  return _mm256_dpbusd_epi32(_mm256_setzero_si256(), q, x);
#elif defined(__AVXVNNI__)
  return _mm256_dpbusd_avx_epi32(_mm256_setzero_si256(), q, x);
#else
  return _mm256_madd_epi16(_mm256_maddubs_epi16(q, x), _mm256_set1_epi16(1));
#endif
}

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

// A format: kBytes of kNumbers weights; `unpack` a block of 32 to bytes; `scales` and mins of up to 8 blocks.
// kHalves: two scales a block, of 16 numbers each.
template <int BYTES, int OFFSET>
struct Simple {  // one block of 32: half scale, no min but the offset
  static constexpr int kBytes = BYTES, kNumbers = 32, kOffset = OFFSET;
  static constexpr bool kSigned = OFFSET == 0;
  static constexpr bool kHalves = false;
  static void scales(const uint8_t* p, int count, float* scale, float* min) {
    for (int b = 0; b < count; b++) {
      scale[b] = half(p + b * BYTES);
      min[b] = -OFFSET * scale[b];
    }
  }
};

struct Q4_0 : Simple<18, 8> {
  static __m256i unpack(const uint8_t* p, int b) { return nibbles(p + b * kBytes + 2); }
};

struct Q5_0 : Simple<22, 16> {
  static __m256i unpack(const uint8_t* p, int b) {
    p += b * kBytes;
    return _mm256_or_si256(nibbles(p + 6), bits_to(p + 2, 16));
  }
};

struct Q8_0 : Simple<34, 0> {  // signed bytes
  static __m256i unpack(const uint8_t* p, int b) { return _mm256_loadu_si256((const __m256i*)(p + b * kBytes + 2)); }
};

template <int BYTES>
struct WithMin {
  static constexpr int kBytes = BYTES, kNumbers = 32;
  static constexpr bool kSigned = false;
  static constexpr bool kHalves = false;
  static void scales(const uint8_t* p, int count, float* scale, float* min) {
    for (int b = 0; b < count; b++) {
      scale[b] = half(p + b * BYTES);
      min[b] = half(p + b * BYTES + 2);
    }
  }
};

struct Q4_1 : WithMin<20> {
  static __m256i unpack(const uint8_t* p, int b) { return nibbles(p + b * kBytes + 4); }
};

struct Q5_1 : WithMin<24> {
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
  static constexpr int kBytes = 144, kNumbers = 256;
  static constexpr bool kSigned = false;
  static constexpr bool kHalves = false;
  static void scales(const uint8_t* p, int, float* scale, float* min) { scales_k(p, scale, min); }
  static __m256i unpack(const uint8_t* p, int b) { return half_bytes(p + 16 + b / 2 * 32, b % 2); }
};

struct Q5_K {
  static constexpr int kBytes = 176, kNumbers = 256;
  static constexpr bool kSigned = false;
  static constexpr bool kHalves = false;
  static void scales(const uint8_t* p, int, float* scale, float* min) { scales_k(p, scale, min); }
  static __m256i unpack(const uint8_t* p, int b) {
    const __m256i high = _mm256_loadu_si256((const __m256i*)(p + 16)), bit = _mm256_set1_epi8(1 << b);
    const __m256i fifth = _mm256_and_si256(_mm256_cmpeq_epi8(_mm256_and_si256(high, bit), bit), _mm256_set1_epi8(16));
    return _mm256_or_si256(half_bytes(p + 48 + b / 2 * 32, b % 2), fifth);
  }
};

struct Q6_K {
  static constexpr int kBytes = 210, kNumbers = 256;
  static constexpr bool kSigned = false;
  static constexpr bool kHalves = true;
  static void scales(const uint8_t* p, int, float* scale, float* min) {  // each 16: even ones first, then odd
    const __m128i s = _mm_loadu_si128((const __m128i*)(p + 192));
    const __m128i split = _mm_shuffle_epi8(s, _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15));
    const __m256 d = _mm256_set1_ps(half(p + 208)), offset = _mm256_set1_ps(-32.0f);
    const __m256 even = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(split)), d);
    const __m256 odd = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(split, 8))), d);
    _mm256_storeu_ps(scale, even), _mm256_storeu_ps(scale + 8, odd);
    _mm256_storeu_ps(min, _mm256_mul_ps(even, offset)), _mm256_storeu_ps(min + 8, _mm256_mul_ps(odd, offset));
  }
  static __m256i unpack(const uint8_t* p, int b) {
    const int part = b / 4, quarter = b % 4;
    const __m256i low = half_bytes(p + 64 * part + 32 * (quarter % 2), quarter / 2);
    const __m256i high = _mm256_loadu_si256((const __m256i*)(p + 128 + 32 * part));
    const __m256i two = _mm256_and_si256(_mm256_srl_epi16(high, _mm_cvtsi32_si128(2 * quarter)), _mm256_set1_epi8(3));
    return _mm256_or_si256(low, _mm256_slli_epi16(two, 4));
  }
};

// sums[r * M + m] = weights[r] . x[m] for R rows of weights and M rows of activations, `supers` apart.
template <class F, int R, int M>
void block_dots(const uint8_t* weight, long row_bytes, const Quantized* x, long groups, float* out) {
  const long supers = (groups + kSuper - 1) / kSuper;
  __m256 sums[R * M];
  for (auto& one : sums) one = _mm256_setzero_ps();
  float scale[R][kSlots] = {}, min[R][kSlots] = {};
  for (long s = 0; s < supers; s++) {
    const int count = std::min<long>(kSuper, groups - s * kSuper);
    const uint8_t* p[R];
    for (int r = 0; r < R; r++) {
      p[r] = weight + r * row_bytes + s * (kSuper * kGroup / F::kNumbers) * F::kBytes;
      if (count < kSuper) std::fill(min[r], min[r] + kSlots, 0.0f);
      F::scales(p[r], count, scale[r], min[r]);
    }
    for (int r = 0; r < R; r++)
      for (int m = 0; m < M; m++) {
        const Quantized& a = x[m * supers + s];
        if constexpr (F::kHalves) {
          sums[r * M + m] = _mm256_fmadd_ps(_mm256_loadu_ps(min[r]), _mm256_loadu_ps(a.sums), sums[r * M + m]);
          sums[r * M + m] = _mm256_fmadd_ps(_mm256_loadu_ps(min[r] + 8), _mm256_loadu_ps(a.sums + 8), sums[r * M + m]);
        } else {
          const __m256 both = _mm256_add_ps(_mm256_loadu_ps(a.sums), _mm256_loadu_ps(a.sums + 8));
          sums[r * M + m] = _mm256_fmadd_ps(_mm256_loadu_ps(min[r]), both, sums[r * M + m]);
        }
      }
    const auto block = [&](int b) {
      for (int r = 0; r < R; r++) {
        const __m256i q = F::unpack(p[r], b);
        const __m256 w = F::kHalves ? _mm256_set_m128(_mm_broadcast_ss(scale[r] + 8 + b), _mm_broadcast_ss(scale[r] + b))
                                    : _mm256_broadcast_ss(scale[r] + b);
        for (int m = 0; m < M; m++) {
          const Quantized& a = x[m * supers + s];
          const __m256i numbers = _mm256_loadu_si256((const __m256i*)(a.q + b * kGroup));
          const __m256i product = F::kSigned ? products_of(_mm256_abs_epi8(q), _mm256_sign_epi8(numbers, q)) : products_of(q, numbers);
          const __m256 factor = _mm256_mul_ps(w, _mm256_broadcast_ss(a.scale + b));
          sums[r * M + m] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(product), factor, sums[r * M + m]);
        }
      }
    };
    if (count == kSuper) {
#pragma GCC unroll 8
      for (int b = 0; b < kSuper; b++) block(b);
    } else {
      for (int b = 0; b < count; b++) block(b);
    }
  }
  for (int i = 0; i < R * M; i++) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(sums[i]), _mm256_extractf128_ps(sums[i], 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    out[i] = _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
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
      a.sums[b] = scale * total(_mm256_add_epi32(n[0], n[1]));
      a.sums[8 + b] = scale * total(_mm256_add_epi32(n[2], n[3]));
    }
  }
}

inline long supers_of(long size) { return (size / kGroup + kSuper - 1) / kSuper; }

using BlockDots = void (*)(const uint8_t*, long, const Quantized*, long, float*);

struct BlockFormat {
  int type;            // ggml's number
  int bytes, numbers;  // of a block
  BlockDots dots[kBlockRows][kBlockTile];          // [rows of weights - 1][rows of activations - 1]
  void (*numbers_of)(const uint8_t*, long, bf16*);  // a row of `groups`, as numbers
};

// A row as numbers, for embeddings.
template <class F>
void row_of(const uint8_t* row, long groups, bf16* out) {
  for (long s = 0; s * kSuper < groups; s++) {
    const int count = std::min<long>(kSuper, groups - s * kSuper);
    const uint8_t* p = row + s * (kSuper * kGroup / F::kNumbers) * F::kBytes;
    float scale[kSlots], min[kSlots];
    F::scales(p, count, scale, min);
    for (int b = 0; b < count; b++) {
      uint8_t q[kGroup];
      _mm256_storeu_si256((__m256i*)q, F::unpack(p, b));
      for (int half_index = 0; half_index < 2; half_index++) {
        const int at = F::kHalves ? half_index * kSuper + b : b;
        alignas(64) float values[16];
        for (int i = 0; i < 16; i++) {
          const uint8_t number = q[16 * half_index + i];
          values[i] = scale[at] * (F::kSigned ? (int8_t)number : number) + min[at];
        }
        store(out + (s * kSuper + b) * kGroup + 16 * half_index, load(values));
      }
    }
  }
}

template <class F, int R>
constexpr void set_dots(BlockDots* dots) {
  dots[0] = block_dots<F, R, 1>, dots[1] = block_dots<F, R, 2>, dots[2] = block_dots<F, R, 3>;
  dots[3] = block_dots<F, R, 4>;
}

template <class F>
constexpr BlockFormat block_format(int type) {
  BlockFormat format = {type, F::kBytes, F::kNumbers, {}, row_of<F>};
  set_dots<F, 1>(format.dots[0]);
  set_dots<F, 2>(format.dots[1]);
  return format;
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
