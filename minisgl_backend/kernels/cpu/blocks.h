// Weights in GGUF's block formats as they lie in a file, times activations that are quantized to int8 by groups of 32.
//
// A group of 32 weights is unpacked to bytes q, with value = scale * (q - offset) + min; one of activations is
// scale_x * x. Their product: scale * scale_x * (q . x - offset * sum(x)) + min * scale_x * sum(x), where what is in
// brackets is an exact integer. A panel of rows is unpacked at a time, so that each lane of a register has one row: it
// is done once for all rows of activations, and the order of an output's sums does not depend on how many there are.

#pragma once

#include "block_formats.h"

namespace {

constexpr long kPanelRows = 64;  // rows of activations whose sums are kept at once, at most

struct Quantized {  // 256 activations of one row
  int8_t q[kSuper * kGroup];
  float scale[kSuper];
  float sums[kSuper];     // scale * sum of 32 numbers
  int32_t halves[2 * kSuper];  // sums of 16 numbers
};

// out[m * stride + r] = weights[r] . x[m], for `count` rows of weights, at most kPanel, and M of x, or up to kPanelRows
// where M is 0. Sums take the same steps for any number of rows.
template <class F, int M>
void panel_dots(const uint8_t* weight, long row_bytes, int count, const Quantized* x, long rows, long groups, float* out,
                long stride) {
  const long supers = (groups + kSuper - 1) / kSuper;
  Reals sums[M ? M : kPanelRows], of_mins[M ? M : kPanelRows];
  if (M) rows = M;
  for (long m = 0; m < rows; m++) sums[m] = of_mins[m] = every(0.0f);
  constexpr bool kOwnScales = F::kNumbers == kGroup;  // before each group, and its min where it has one
  Reals scales[kSuper], seconds[kSuper];
  const char *next = (const char*)weight + kPanel * row_bytes, *done = next;
  for (long s = 0; s < supers; s++) {
    const int here = std::min<long>(kSuper, groups - s * kSuper);
    const uint8_t* p[kPanel];
    for (int r = 0; r < kPanel; r++) {
      p[r] = weight + std::min(r, count - 1) * row_bytes + s * (kSuper * kGroup / F::kNumbers) * F::kBytes;
      if (kPanel == 8)  // the next panel: the hardware does not follow so many rows
        for (int i = 0; i < kSuper * kGroup / F::kNumbers * F::kBytes; i += 64)
          _mm_prefetch((const char*)p[r] + kPanel * row_bytes + i, _MM_HINT_T0);
    }
    if constexpr (!kOwnScales) F::scales(p, scales, seconds);
    Lanes kept[3 * kWords];
    for (int b = 0; b < here; b++) {
      Lanes q[kWords];
      F::turned(p, b, kept, q);
      if (kPanel == 16)  // what follows, as much as all rows' groups are: more at once would wait for memory
        for (done += kPanel * kGroup * F::kBytes / F::kNumbers; next < done; next += 64) _mm_prefetch(next, _MM_HINT_T0);
      if constexpr (kOwnScales) halves_of(words_at(p, b * F::kBytes), scales[b], seconds[b]);
      const Reals scale = scales[b], second = seconds[b];
#pragma GCC unroll 4
      for (long m = 0; m < (M ? M : rows); m++) {
        const Quantized& a = x[m * supers + s];
        const int8_t* const numbers = a.q + b * kGroup;
        const int32_t* const halves = a.halves + 2 * b;
        const Reals of_x = every(a.scale[b]);
        if constexpr (F::kHalves) {
          sums[m] = plus(real(product<F, kWords / 2>(q, numbers, halves[0])), times(scale, of_x), sums[m]);
          const Lanes upper = product<F, kWords / 2>(q + kWords / 2, numbers + 16, halves[1]);
          sums[m] = plus(real(upper), times(second, of_x), sums[m]);
        } else {
          sums[m] = plus(real(product<F, kWords>(q, numbers, halves[0] + halves[1])), times(scale, of_x), sums[m]);
        }
        if (F::kMins) of_mins[m] = plus(second, every(a.sums[b]), of_mins[m]);
      }
    }
  }
  for (long m = 0; m < rows; m++) {
    float lanes[kPanel];
    put(lanes, F::kMins ? plus(every(1.0f), sums[m], of_mins[m]) : sums[m]);
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

constexpr int kFew = 4;  // rows of activations whose sums stay in registers
using PanelDots = void (*)(const uint8_t*, long, int, const Quantized*, long, long, float*, long);

struct BlockFormat {
  int type;            // ggml's number
  int bytes, numbers;  // of a block
  PanelDots dots[kFew + 1];  // by rows of activations; the first: of more
  void (*numbers_of)(const uint8_t*, long, bf16*);  // a row of `groups`, as numbers
};

// A row as numbers, for embeddings.
template <class F>
void row_of(const uint8_t* row, long groups, bf16* out) {
  for (long s = 0; s * kSuper < groups; s++) {
    const int count = std::min<long>(kSuper, groups - s * kSuper);
    const uint8_t* p = row + s * (kSuper * kGroup / F::kNumbers) * F::kBytes;
    float scale[kSuper], second[kSuper];
    if constexpr (F::kNumbers == kGroup) {
      for (int b = 0; b < count; b++) scale[b] = half(p + b * F::kBytes), second[b] = half(p + b * F::kBytes + 2);
    } else {
      const uint8_t* panel[kPanel];
      Reals first[kSuper], other[kSuper];
      std::fill(panel, panel + kPanel, p);
      F::scales(panel, first, other);
      for (int b = 0; b < kSuper; b++) scale[b] = first_of(first[b]), second[b] = first_of(other[b]);
    }
    for (int b = 0; b < count; b++) {
      uint8_t q[kGroup];
      _mm256_storeu_si256((__m256i*)q, F::unpack(p, b));
      for (int half_index = 0; half_index < 2; half_index++) {
        const float of_half = F::kHalves && half_index ? second[b] : scale[b];
        alignas(64) float values[16];
        for (int i = 0; i < 16; i++) {
          const uint8_t number = q[16 * half_index + i];
          values[i] = of_half * (number - F::kOffset) + (F::kMins ? second[b] : 0.0f);
        }
        store(out + (s * kSuper + b) * kGroup + 16 * half_index, load(values));
      }
    }
  }
}

template <class F>
constexpr BlockFormat block_format(int type) {
  return {type, F::kBytes, F::kNumbers,
          {panel_dots<F, 0>, panel_dots<F, 1>, panel_dots<F, 2>, panel_dots<F, 3>, panel_dots<F, 4>}, row_of<F>};
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
