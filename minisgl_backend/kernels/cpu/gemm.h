// What GEMMs in bfloat16 and with weights in blocks share: tiles of rows, and what follows their sums.

#pragma once

#include <array>
#include <utility>

#include "epilogue.h"

namespace {

constexpr bool kWide = kRegisters == 32;
constexpr int kTile = kWide ? 8 : 3;  // rows of activations that share a pass over weights
constexpr int kMostRows = kWide ? 8 : 4;  // rows of weights of a tile
constexpr long kGranule = 24;  // outputs of a thread are a multiple: whole tiles
constexpr long kBlock = 48;     // outputs whose sums are kept until what follows them is computed, 16 at a time
constexpr long kRows = 64;      // rows of activations whose sums are kept at once

// out[r * M + m] = weights[r] . x[m], for R rows of weights and M of x; `ahead`: elements from a row to the same row of
// the next tile.
template <int R, int M>
void dot(const bf16* const* weights, const bf16* x, long size, long ahead, float* out) {
  Floats sums[R * M];
  for (auto& one : sums) one = zeros();
  for (long k = 0; k < size; k += 32) {
    Pairs w[R];
    for (int r = 0; r < R; r++) {
      w[r] = load_pairs(weights[r] + k);
      _mm_prefetch((const char*)(weights[r] + ahead + k), _MM_HINT_T0);
    }
    for (int m = 0; m < M; m++) {
      const Pairs v = load_pairs(x + m * size + k);
      for (int r = 0; r < R; r++) sums[r * M + m] = dot(sums[r * M + m], w[r], v);
    }
  }
  sums_of<R * M>(sums, out);
}

using Dot = void (*)(const bf16* const*, const bf16*, long, long, float*);

template <int R, int... M>
constexpr std::array<Dot, sizeof...(M)> dots(std::integer_sequence<int, M...>) {
  return {dot<R, M + 1>...};
}
using Rows = std::make_integer_sequence<int, kTile>;
constexpr std::array<Dot, kTile> kDots[] = {dots<1>(Rows()), dots<2>(Rows()), dots<3>(Rows()), dots<4>(Rows())};
template <int... R>
constexpr std::array<Dot, sizeof...(R)> single_dots(std::integer_sequence<int, R...>) {
  return {dot<R + 1, 1>...};
}
constexpr std::array<Dot, kMostRows> kSingleDots = single_dots(std::make_integer_sequence<int, kMostRows>());

// Rows of weights whose sums with so many rows of activations fit in registers.
inline long rows_of_tile(long rows) { return rows == 1 ? kMostRows : kWide ? rows > 6 ? 3 : 4 : 2; }
inline Dot dot_of(long count, long rows) { return rows == 1 ? kSingleDots[count - 1] : kDots[count - 1][rows - 1]; }

struct Gemm {
  const bf16 *x, *weight, *bias, *residual;
  bf16* out;
  long rows, size, outputs;  // outputs: columns of out
  int activation;            // of gates; 0: none

  Gemm from_row(long row, long count) const {
    Gemm part = *this;
    part.x += row * size, part.out += row * outputs, part.rows = count;
    if (residual) part.residual += row * outputs;
    return part;
  }
};

// Columns [begin, end) of the output, at most kBlock, of `sums` [activation ? 2 : 1][rows][kBlock].
void finish(const Gemm& p, long begin, long end, const float* sums) {
  for (long row = 0; row < p.rows; row++) {
    for (long n = begin; n < end; n += 16) {
      const long count = std::min(16L, end - n);
      const float* sum = sums + row * kBlock + n - begin;
      const long at = row * p.outputs + n;
      Floats value = load(sum);
      if (p.activation) value = gated(p.activation, value, load(sum + p.rows * kBlock));
      if (p.bias) value = add(value, load(p.bias + n, count));
      if (p.residual) value = add(value, load(p.residual + at, count));
      store(p.out + at, value, count);
    }
  }
}

}  // namespace
