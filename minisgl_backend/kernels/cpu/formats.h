// Weights in the number formats of quantized checkpoints, as they lie in memory, and what activations become for them.
//
// Each format is a struct with `X`, the numbers that a row of activations becomes; `width(weight)`, how many of them;
// `prepare`, which makes them; `tile`, products of R rows of weights and M of activations; and `widen`, a part of a row of
// weights as float32. Those of floating-point numbers are here, which are widened and multiplied by float32; those of integers
// are in integers.h.

#pragma once

#include "vector.h"

namespace {

enum Kind { kBfloat16, kFloat16, kFp8, kInt8, kInt4, kMxfp4 };

struct Weight {  // as linear/native.py fills it
  int32_t kind;       // Kind
  int32_t scale_bits; // of int4's scales: 32 float32, 16 bfloat16, 15 float16
  const uint8_t* numbers;
  const uint8_t* scales;
  const uint8_t* zeros;  // int4: zero points; null: 8
  int64_t size, rows;    // inputs, and outputs of one expert
  int64_t row_bytes;     // from a row of numbers to the next
  int64_t block_rows, block_size;  // FP8: outputs and inputs with one scale; int4: block_size is a group's inputs
  int64_t scales_of_row;           // FP8, MXFP4: from a row of scales to the next
  int64_t expert_numbers, expert_scales, expert_zeros;  // bytes from an expert to the next
  int64_t plane;         // int4: inputs of a plane
  float x_scale;         // FP8: of activations; 0: each row has its own

  Weight of_expert(long index) const {
    Weight one = *this;
    one.numbers += index * expert_numbers;
    if (scales) one.scales += index * expert_scales;
    if (zeros) one.zeros += index * expert_zeros;
    return one;
  }
};

// Bytes from a number to the one that is to be prefetched meanwhile: at the same place of a later tile of R rows, about as
// far as memory is away.
template <int R>
inline long ahead_of(const Weight& w) {
  constexpr long kAhead = 8192;
  return std::max(1L, kAhead / (R * w.row_bytes)) * R * w.row_bytes;
}

// Rows of prepared activations, `stride` bytes apart, and their scales.
struct Prepared {
  const uint8_t* numbers;
  const float* scales;
  long stride, scales_of_row;
  const long* order = nullptr;  // row m is row order[m]; null: m

  long row(long m) const { return order ? order[m] : m; }
};

constexpr float kLeast = 1e-10f;  // a row of zeros has a scale, too

// The largest of a row, NaN if there is one, over `largest`.
template <class T>
inline float scale_of(const T* x, long size, float largest) {
  Floats most = all(kLeast);
  bool broken = false;
  for (long i = 0; i < size; i += 16) {
    const Floats v = load(x + i, size - i);
    broken |= any_nan(v);
    most = max(most, max(v, sub(zeros(), v)));
  }
  return broken ? __builtin_nanf("") : max_of(most) / largest;
}

// What numbers of 16 bits and FP8 share: numbers that are widened to float32 and multiplied by float32.
template <class F>
struct Floating {
  using X = float;
  static long width(const Weight& w) { return (w.size + 31) / 32 * 32; }

  template <int R, int M>
  static void tile(const Weight& w, const long* rows, const Prepared& x, long first, float* out) {
    const uint8_t* numbers[R];
    const float* xs[M];
    for (int r = 0; r < R; r++) numbers[r] = w.numbers + rows[r] * w.row_bytes;
    for (int m = 0; m < M; m++) xs[m] = (const float*)(x.numbers + x.row(first + m) * x.stride);
    const long ahead = ahead_of<R>(w), block = F::block(w);
    Floats total[R * M];
    for (auto& one : total) one = zeros();
    for (long begin = 0, b = 0; begin < w.size; begin += block, b++) {
      const long end = std::min(w.size, begin + block);
      Floats sums[R * M];
      for (auto& one : sums) one = zeros();
      for (long k = begin; k < end; k += 16) {
        Floats part[R];
        for (int r = 0; r < R; r++) {
          part[r] = F::load(numbers[r], k);
          if (k * F::kBytes % 64 == 0) _mm_prefetch((const char*)numbers[r] + ahead + k * F::kBytes, _MM_HINT_T0);
        }
        for (int m = 0; m < M; m++) {
          const Floats v = ::load(xs[m] + k);
          for (int r = 0; r < R; r++) sums[r * M + m] = fma(part[r], v, sums[r * M + m]);
        }
      }
      for (int r = 0; r < R; r++) {
        const Floats scale = all(F::scale(w, rows[r], b));
        for (int m = 0; m < M; m++) total[r * M + m] = fma(sums[r * M + m], scale, total[r * M + m]);
      }
    }
    sums_of<R * M>(total, out);
    if (x.scales)
      for (int r = 0; r < R; r++)
        for (int m = 0; m < M; m++) out[r * M + m] *= x.scales[x.row(first + m) * x.scales_of_row];
  }

  static void widen(const Weight& w, long row, float* out) {
    const long block = F::block(w);
    for (long k = 0; k < w.size; k += 16)
      ::store(out + k, mul(F::load(w.numbers + row * w.row_bytes, k), all(F::scale(w, row, k / block))));
  }
};

template <class N>
struct Plain : Floating<Plain<N>> {
  static constexpr int kBytes = 2;
  static long block(const Weight& w) { return w.size; }
  static float scale(const Weight&, long, long) { return 1.0f; }
  static Floats load(const uint8_t* row, long k) { return ::load((const N*)row + k); }
  static long scales(const Weight&) { return 0; }
  template <class T>
  static void prepare(const Weight& w, const T* x, float* out, float*) {
    for (long i = 0; i < w.size; i += 16) ::store(out + i, ::load(x + i));
  }
};

// The nearest number in e4m3 of one between -448 and 448, as float32: three bits behind the first, none below 2^-9.
inline Floats to_e4m3(Floats x) {
  alignas(64) float v[16];
  store(v, x);
  for (float& one : v) {
    uint32_t bits;
    std::memcpy(&bits, &one, 4);
    bits = (bits + 0x7ffff + (bits >> 20 & 1)) & 0xfff00000;
    float rounded;
    std::memcpy(&rounded, &bits, 4);
    const float small = (one + 24576.0f) - 24576.0f;  // 1.5 * 2^14: what is left are multiples of 2^-9
    one = __builtin_fabsf(one) < 0.015625f ? small : rounded;
  }
  return load(v);
}

struct Fp8 : Floating<Fp8> {
  static constexpr int kBytes = 1;
  static long block(const Weight& w) { return w.block_size; }
  static float scale(const Weight& w, long row, long b) {
    return 256.0f * ((const float*)w.scales)[row / w.block_rows * w.scales_of_row + b];
  }
  // As float16 it has the same bits after the exponent's first, and is 2^-8 of its value.
  static Floats load(const uint8_t* row, long k) {
    const __m256i high = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)(row + k))), 8);
    const __m256i halves = _mm256_and_si256(_mm256_srai_epi16(high, 1), _mm256_set1_epi16((short)0xbf80));
#if defined(__AVX512F__)
    return _mm512_cvtph_ps(halves);
#else
    return {_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
#endif
  }
  static bool by_blocks(const Weight& w) { return w.block_size < w.size || w.block_rows > 1; }
  static long scales(const Weight& w) { return by_blocks(w) ? 0 : 1; }
  template <class T>
  static void prepare(const Weight& w, const T* x, float* out, float* scales) {
    const long block = by_blocks(w) ? w.block_size : w.size;
    for (long begin = 0; begin < w.size; begin += block) {
      const long end = std::min(w.size, begin + block);
      const float scale = w.x_scale ? w.x_scale : scale_of(x + begin, end - begin, 448.0f);
      // What is no number is the second operand of each maximum, which is then the result.
      const Floats back = all(by_blocks(w) ? scale : 1.0f), top = all(448.0f);
      for (long i = begin; i < end; i += 16) {
        const Floats part = div(::load(x + i), all(scale));
        const Floats inside = max(sub(zeros(), top), sub(zeros(), max(sub(zeros(), top), sub(zeros(), part))));
        ::store(out + i, mul(to_e4m3(inside), back));
      }
      if (!by_blocks(w)) *scales = scale;
    }
  }
};

}  // namespace
