// CPU kernels in bfloat16, compiled at the first start (kernels/cpu/library.py) by GCC 11 or later: for AVX-512 BF16, or
// for AVX2, which widens numbers to float32 first.
//
// Weights stay as checkpoints have them, one row for each output: nothing is packed, so they are in memory once. A GEMM
// of few rows takes the time of reading its weights. The hardware's prefetching does not follow rows of two kilobytes
// well, so each tile of rows prefetches the next: 1.3 times as fast at one row, 1.6 times at eight.
// Sums, norms, rotations, softmax and activations are float32.
//
// Threads are OpenMP's, shared with torch: the symbols are resolved by the libgomp that torch has loaded.

#include <omp.h>

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "blocks.h"
#include "epilogue.h"

namespace {

constexpr bool kWide = kRegisters == 32;
constexpr int kTile = kWide ? 8 : 3;  // rows of activations that share a pass over weights
constexpr long kGranule = 12;   // outputs of a thread are a multiple: whole tiles of 1, 2, 3 and 4 rows of weights
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

// The same, with the sums, for which there is room in between.
void outputs_of(const Gemm& p, long begin, long end, float* sums) {
  float tile[4 * kTile];
  const bf16* weights[4];
  // Up to the number of weight rows whose sums fit in registers; a gate and its up are two.
  const long per_output = p.activation ? 2 : 1;
  const long most = (kWide ? p.rows > 6 ? 3 : 4 : p.rows > 1 ? 2 : 4) / per_output;
  for (long n = begin, count; n < end; n += count) {
    count = std::min(most, end - n);
    for (long i = 0; i < count; i++) {
      weights[i] = p.weight + (n + i) * p.size;
      if (p.activation) weights[count + i] = weights[i] + p.outputs * p.size;
    }
    for (long row = 0, m; row < p.rows; row += m) {
      m = share_of(p.rows - row, kTile);
      kDots[count * per_output - 1][m - 1](weights, p.x + row * p.size, p.size, count * p.size, tile);
      const float* next = tile;
      for (long part = 0; part < per_output; part++) {
        float* column = sums + (part * p.rows + row) * kBlock + n - begin;
        for (long i = 0; i < count; i++)
          for (long r = 0; r < m; r++) column[r * kBlock + i] = *next++;
      }
    }
  }
  finish(p, begin, end, sums);
}

constexpr long kPlain = 30;  // ggml's number of bfloat16

struct Weight {  // [rows, size], rows `row_bytes` apart
  long type;     // kPlain, or that of a BlockFormat
  const void* data;
  long rows, row_bytes;
};

// Rows [begin, end) of a weight times all rows of x, to sums[row * kBlock + n - begin].
void plain_products(const Gemm& p, const Weight& weight, long begin, long end, float* sums) {
  float tile[4 * kTile];
  const bf16* weights[4];
  const long most = kWide ? p.rows > 6 ? 3 : 4 : p.rows > 1 ? 2 : 4;  // whose sums fit in registers
  for (long n = begin, count; n < end; n += count) {
    count = std::min(most, end - n);
    for (long i = 0; i < count; i++) weights[i] = (const bf16*)((const char*)weight.data + (n + i) * weight.row_bytes);
    for (long row = 0, m; row < p.rows; row += m) {
      m = share_of(p.rows - row, kTile);
      kDots[count - 1][m - 1](weights, p.x + row * p.size, p.size, count * weight.row_bytes / sizeof(bf16), tile);
      for (long i = 0; i < count; i++)
        for (long r = 0; r < m; r++) sums[(row + r) * kBlock + n - begin + i] = tile[i * m + r];
    }
  }
}

void block_products(const Gemm& p, const Weight& weight, const Quantized* x, long begin, long end, float* sums) {
  const BlockFormat& format = *block_format_of(weight.type);
  for (long n = begin; n < end; n += kPanel)
    format.dots((const uint8_t*)weight.data + n * weight.row_bytes, weight.row_bytes, std::min<long>(kPanel, end - n), x,
                p.rows, p.size / kGroup, sums + n - begin, kBlock);
}

// Rows [begin, end) of all weights, which lie below one another.
void products(const Gemm& p, const Weight* weight, const Quantized* x, long begin, long end, float* sums) {
  for (long first = 0; begin < end; first += weight->rows, weight++) {
    const long from = begin - first, to = std::min(end - first, weight->rows);
    if (from >= to) continue;
    if (weight->type == kPlain) {
      plain_products(p, *weight, from, to, sums);
    } else {
      block_products(p, *weight, x, from, to, sums);
    }
    begin += to - from, sums += to - from;
  }
}

// `outputs_of` such weights; x: what p.x is in int8.
void block_outputs_of(const Gemm& p, const Weight* weights, const Quantized* x, long begin, long end, float* sums) {
  products(p, weights, x, begin, end, sums);
  if (p.activation) products(p, weights, x, p.outputs + begin, p.outputs + end, sums + p.rows * kBlock);
  finish(p, begin, end, sums);
}

}  // namespace

extern "C" {

// A GEMM with weight [outputs, size], or [2 * outputs, size] with an activation: 1 silu, 2 gelu_tanh. Null pointers are
// not used.
void minisgl_linear(const bf16* x, const bf16* weight, const bf16* norm_weight, float eps, const bf16* bias,
                    const bf16* residual, int activation, long rows, long size, long outputs, bf16* out) {
  static thread_local std::vector<bf16> normed;
  if (norm_weight) {
    normed.resize(rows * size);
    rms_norm(x, norm_weight, eps, rows, size, normed.data());
    x = normed.data();
  }
  const Gemm gemm = {x, weight, bias, residual, out, rows, size, outputs, activation};
  // Blocks are scheduled dynamically: a thread that other programs slow down takes fewer.
  const long share = outputs / (16 * omp_get_max_threads());
  const long block = std::max(kGranule, (share + kGranule - 1) / kGranule * kGranule);
#pragma omp parallel for schedule(dynamic)
  for (long n = 0; n < outputs; n += block) {
    static thread_local std::vector<float> sums;
    sums.resize((activation ? 2 : 1) * std::min(rows, kRows) * kBlock);
    const long end = std::min(outputs, n + block);
    for (long begin = n; begin < end; begin += kBlock)
      for (long row = 0; row < rows; row += kRows)
        outputs_of(gemm.from_row(row, std::min(kRows, rows - row)), begin, std::min(end, begin + kBlock), sums.data());
  }
}

// `minisgl_linear` with weights in blocks, or plain, below one another.
void minisgl_block_linear(const bf16* x, const Weight* weights, const bf16* norm_weight, float eps, const bf16* bias,
                          const bf16* residual, int activation, long rows, long size, long outputs, bf16* out) {
  static thread_local std::vector<bf16> normed;
  static thread_local std::vector<Quantized> quantized;
  const long supers = supers_of(size);
  quantized.resize(rows * supers);
  if (norm_weight) normed.resize(rows * size);
  bf16* const norms = normed.data();
  Quantized* const numbers = quantized.data();
#pragma omp parallel for if (rows * size > kSerial)
  for (long row = 0; row < rows; row++) {
    const bf16* source = x + row * size;
    if (norm_weight) {
      norm_row(source, norm_weight, eps, size, norms + row * size);
      source = norms + row * size;
    }
    quantize(source, size, numbers + row * supers);
  }
  const Gemm gemm = {norm_weight ? norms : x, nullptr, bias, residual, out, rows, size, outputs, activation};
  const long share = outputs / (16 * omp_get_max_threads());
  const long block = (std::max(1L, share) + kPanel - 1) / kPanel * kPanel;
#pragma omp parallel for schedule(dynamic)
  for (long n = 0; n < outputs; n += block) {
    static thread_local std::vector<float> sums;
    sums.resize((activation ? 2 : 1) * std::min(rows, kRows) * kBlock);
    const long end = std::min(outputs, n + block);
    for (long begin = n; begin < end; begin += kBlock)
      for (long row = 0; row < rows; row += kRows)
        block_outputs_of(gemm.from_row(row, std::min(kRows, rows - row)), weights, numbers + row * supers, begin,
                         std::min(end, begin + kBlock), sums.data());
  }
}

// Rows `ids` of a weight in blocks, as numbers: out [count, size].
void minisgl_block_rows(const Weight* weight, const int64_t* ids, long count, long size, bf16* out) {
  const BlockFormat& format = *block_format_of(weight->type);
#pragma omp parallel for if (count * size > kSerial)
  for (long i = 0; i < count; i++)
    format.numbers_of((const uint8_t*)weight->data + ids[i] * weight->row_bytes, size / kGroup, out + i * size);
}

}  // extern "C"
