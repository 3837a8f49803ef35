// Formats whose numbers are integers: activations become integers of 16 bits, and sums are made in 32.

#pragma once

#include "formats.h"

namespace {

// x in integers of 16 bits, at most `largest`, with the scale that is returned.
template <class T>
inline float to_ints(const T* x, long size, float largest, int16_t* out) {
  const float scale = scale_of(x, size, largest);
  for (long i = 0; i < size; i += 16) store_ints(out + i, div(load(x + i, size - i), all(scale)));
  return scale;
}

struct Int8 {
  using X = int16_t;
  static long width(const Weight& w) { return w.size; }
  static long scales(const Weight&) { return 1; }
  template <class T>
  static void prepare(const Weight& w, const T* x, int16_t* out, float* scales) {
    *scales = to_ints(x, w.size, 127.0f, out);
  }

  template <int R, int M>
  static void tile(const Weight& w, const long* rows, const Prepared& x, long first, float* out) {
    const int8_t* numbers[R];
    const int16_t* xs[M];
    for (int r = 0; r < R; r++) numbers[r] = (const int8_t*)w.numbers + rows[r] * w.row_bytes;
    for (int m = 0; m < M; m++) xs[m] = (const int16_t*)(x.numbers + x.row(first + m) * x.stride);
    const long ahead = ahead_of<R>(w);
    Ints sums[R * M];
    for (auto& one : sums) one = no_ints();
    for (long k = 0; k < w.size; k += 32) {
      Ints part[R];
      for (int r = 0; r < R; r++) {
        part[r] = widen_ints(numbers[r] + k);
        if (k % 64 == 0) _mm_prefetch((const char*)numbers[r] + ahead + k, _MM_HINT_T0);
      }
      for (int m = 0; m < M; m++) {
        const Ints v = load_ints(xs[m] + k);
        for (int r = 0; r < R; r++) sums[r * M + m] = dot(sums[r * M + m], part[r], v);
      }
    }
    Floats totals[R * M];
    for (int i = 0; i < R * M; i++) totals[i] = floats(sums[i]);
    sums_of<R * M>(totals, out);
    for (int r = 0; r < R; r++)
      for (int m = 0; m < M; m++)
        out[r * M + m] *= x.scales[x.row(first + m) * x.scales_of_row] * ((const float*)w.scales)[rows[r]];
  }

  static void widen(const Weight& w, long row, float* out) {
    const int8_t* const numbers = (const int8_t*)w.numbers + row * w.row_bytes;
    const float scale = ((const float*)w.scales)[row];
    for (long k = 0; k < w.size; k++) out[k] = scale * numbers[k];
  }
};

// Eight planes of inputs in words: see int4/reference.py. Activations are in the order of the numbers of 16 words, a
// unit: of each 16 bits' four numbers first the lowest of all words, and so on. They have 15 bits, with a scale a unit.
struct Int4 {
  using X = int16_t;
  static constexpr int kUnit = 128;  // numbers of 16 words
  static long units(const Weight& w) { return w.row_bytes / 64; }
  static long width(const Weight& w) { return units(w) * kUnit; }
  static long scales(const Weight& w) { return units(w); }

  // Input of number `lane` (of 32) of those that nibble n of unit u holds.
  static long input(const Weight& w, long u, int n, int lane) {
    const long per_block = w.plane / 16, pair = lane / 4 + 8 * (u % per_block);
    return u / per_block * 8 * w.plane + (4 * (lane / 2 % 2) + n) * w.plane + 2 * pair + lane % 2;
  }

  template <class T>
  static void prepare(const Weight& w, const T* x, int16_t* out, float* scales) {
    for (long u = 0; u < units(w); u++) {
      T ordered[kUnit];
      for (int n = 0; n < 4; n++) {
        for (int lane = 0; lane < 32; lane += 2) {
          const long at = input(w, u, n, lane);
          if (at + 1 < w.size) {
            std::memcpy(ordered + 32 * n + lane, x + at, 2 * sizeof(T));
          } else {
            std::memset(ordered + 32 * n + lane, 0, 2 * sizeof(T));
            if (at < w.size) ordered[32 * n + lane] = x[at];
          }
        }
      }
      scales[u] = to_ints(ordered, kUnit, 32767.0f, out + u * kUnit);
    }
  }

  static float number(const Weight& w, long at) {
    if (w.scale_bits == 32) return ((const float*)w.scales)[at];
    const uint16_t bits = ((const uint16_t*)w.scales)[at];
    if (w.scale_bits == 15) return _cvtsh_ss(bits);
    const uint32_t wide = (uint32_t)bits << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
  }
  static int bits_of(float x) {
    int bits;
    std::memcpy(&bits, &x, 4);
    return bits;
  }

  struct OfPlane {  // planes n and 4 + n of a block of units, whose words take turns
    Ints zeros;
    Floats scales;
  };
  // Of a row, where the scales of planes n and 4 + n of all rows begin at `low` and at `high`.
  static OfPlane of_plane(const Weight& w, long row, long low, long high) {
    low += row, high += row;
    const int zero = w.zeros ? w.zeros[low] : 8, other = w.zeros ? w.zeros[high] : 8;
    return {alternating(zero * 0x10001, other * 0x10001),
            as_floats(alternating(bits_of(number(w, low)), bits_of(number(w, high))))};
  }
  static long scales_of_plane(const Weight& w, long plane) { return plane * w.plane / w.block_size * w.rows; }

  // Groups of a row are far apart: the cache line with those of later rows is fetched.
  static void prefetch_scale(const Weight& w, long at) {
    _mm_prefetch((const char*)w.scales + at * (w.scale_bits == 32 ? 4 : 2) + 64, _MM_HINT_T0);
    if (w.zeros) _mm_prefetch((const char*)w.zeros + at + 64, _MM_HINT_T0);
  }

  template <int R, int M>
  static void tile(const Weight& w, const long* rows, const Prepared& x, long first, float* out) {
    const int16_t* xs[M];
    const float* scales[M];
    for (int m = 0; m < M; m++) {
      xs[m] = (const int16_t*)(x.numbers + x.row(first + m) * x.stride);
      scales[m] = x.scales + x.row(first + m) * x.scales_of_row;
    }
    Floats total[R * M];
    for (auto& one : total) one = zeros();
    const long ahead = ahead_of<R>(w);
    const bool once = w.block_size % (4 * w.plane) == 0;  // planes 0 to 3 share a scale, and 4 to 7
    OfPlane of_planes[R][4];
    for (long u = 0, block = 0, left = 0; u < units(w); u++, left--) {
      if (left == 0) {
        for (int n = 0; n < (once ? 1 : 4); n++) {
          const long low = scales_of_plane(w, block * 8 + n), high = scales_of_plane(w, block * 8 + 4 + n);
          prefetch_scale(w, low + rows[0]), prefetch_scale(w, high + rows[0]);
          for (int r = 0; r < R; r++) of_planes[r][n] = of_plane(w, rows[r], low, high);
        }
        block++, left = w.plane / 16;
      }
      for (int r = 0; r < R; r++) {
        const uint8_t* const at = w.numbers + rows[r] * w.row_bytes + u * 64;
        _mm_prefetch((const char*)at + ahead, _MM_HINT_T0);
        const Ints words = load_ints(at);
        Ints sums[M];
        for (auto& one : sums) one = no_ints();
        const auto add_up = [&](const OfPlane& of) {
          for (int m = 0; m < M; m++) {
            const Floats scaled = mul(of.scales, all(scales[m][u]));
            total[r * M + m] = fma(floats(sums[m]), scaled, total[r * M + m]);
            sums[m] = no_ints();
          }
        };
        const auto plane = [&](Ints numbers, int n) {
          const OfPlane& of = of_planes[r][once ? 0 : n];
          const Ints part = sub(numbers, of.zeros);
          for (int m = 0; m < M; m++) sums[m] = dot(sums[m], part, load_ints(xs[m] + u * kUnit + 32 * n));
          if (!once) add_up(of);
        };
        plane(nibbles_of<0>(words), 0);
        plane(nibbles_of<1>(words), 1);
        plane(nibbles_of<2>(words), 2);
        plane(nibbles_of<3>(words), 3);
        if (once) add_up(of_planes[r][0]);
      }
    }
    sums_of<R * M>(total, out);
  }

  static void widen(const Weight& w, long row, float* out) {
    for (long u = 0; u < units(w); u++) {
      const uint16_t* const halves = (const uint16_t*)(w.numbers + row * w.row_bytes + u * 64);
      const long block = u / (w.plane / 16);
      for (int n = 0; n < 4; n++) {
        for (int high = 0; high < 2; high++) {
          const long group = (block * 8 + 4 * high + n) * w.plane / w.block_size * w.rows + row;
          const float scale = number(w, group);
          const int zero = w.zeros ? w.zeros[group] : 8;
          for (int i = 0; i < 16; i++) {
            const int lane = i / 2 * 4 + 2 * high + i % 2;
            const long at = input(w, u, n, lane);
            if (at < w.size) out[at] = scale * ((halves[lane] >> 4 * n & 15) - zero);
          }
        }
      }
    }
  }
};

// Blocks of 32 numbers in E2M1 with a power of two: see moe/mxfp4/weight.py. Activations have 15 bits, with a scale a
// block, in which those with even numbers come first.
struct Mxfp4 {
  using X = int16_t;
  static constexpr int kBlock = 32;
  static long width(const Weight& w) { return w.size; }
  static long scales(const Weight& w) { return w.size / kBlock; }
  template <class T>
  static void prepare(const Weight& w, const T* x, int16_t* out, float* scales) {
    for (long k = 0; k < w.size; k += kBlock) {
      T ordered[kBlock];
      for (int i = 0; i < kBlock; i++) ordered[i / 2 + i % 2 * 16] = x[k + i];
      scales[k / kBlock] = to_ints(ordered, kBlock, 32767.0f, out + k);
    }
  }
  static float scale(const Weight& w, long row, long b) {  // of twice the numbers
    const int power = w.scales[row * w.scales_of_row + b];
    return __builtin_ldexpf(1.0f, power - 128);
  }
  static Ints load(const uint8_t* p) {
    const __m128i bytes = _mm_loadu_si128((const __m128i*)p);
    const __m256i low = _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16(bytes, 4), bytes), _mm256_set1_epi8(15));
    const __m256i twice = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12));
    return widen_ints(_mm256_shuffle_epi8(twice, low));
  }

  template <int R, int M>
  static void tile(const Weight& w, const long* rows, const Prepared& x, long first, float* out) {
    const int16_t* xs[M];
    const float* scales[M];
    for (int m = 0; m < M; m++) {
      xs[m] = (const int16_t*)(x.numbers + x.row(first + m) * x.stride);
      scales[m] = x.scales + x.row(first + m) * x.scales_of_row;
    }
    Floats total[R * M];
    for (auto& one : total) one = zeros();
    const long ahead = ahead_of<R>(w);
    for (long b = 0; b < w.size / kBlock; b++) {
      for (int r = 0; r < R; r++) {
        const uint8_t* const at = w.numbers + rows[r] * w.row_bytes + b * 16;
        if (b % 4 == 0) _mm_prefetch((const char*)at + ahead, _MM_HINT_T0);
        const Ints part = load(at);
        const float of_block = scale(w, rows[r], b);
        for (int m = 0; m < M; m++) {
          const Ints sum = dot(no_ints(), part, load_ints(xs[m] + b * kBlock));
          total[r * M + m] = fma(floats(sum), all(of_block * scales[m][b]), total[r * M + m]);
        }
      }
    }
    sums_of<R * M>(total, out);
  }

  static void widen(const Weight& w, long row, float* out) {
    static constexpr float kNumbers[16] = {0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6};
    for (long k = 0; k < w.size; k++) {
      const uint8_t byte = w.numbers[row * w.row_bytes + k / 2];
      out[k] = 2 * scale(w, row, k / kBlock) * kNumbers[k % 2 ? byte >> 4 : byte & 15];
    }
  }
};

}  // namespace
