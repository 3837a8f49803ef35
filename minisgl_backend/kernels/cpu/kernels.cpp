// CPU kernels in bfloat16, compiled at the first start (kernels/cpu/library.py) by GCC 11 or later: for AVX-512 BF16, or
// for AVX2, which widens numbers to float32 first.
//
// Weights stay as checkpoints have them, one row for each output: nothing is packed, so they are in memory once. A GEMM
// of few rows takes the time of reading its weights. The hardware's prefetching does not follow rows of two kilobytes
// well, so each tile of rows prefetches the next: 1.3 times as fast at one row, 1.6 times at eight.
// Sums, norms, rotations, softmax and activations are float32.
//
// Threads are OpenMP's, shared with torch: the symbols are resolved by the libgomp that torch has loaded.

#include <vector>

#include "gemm.h"

namespace {

// `finish` with the sums, for which there is room in between.
void outputs_of(const Gemm& p, long begin, long end, float* sums) {
  float tile[4 * kTile];
  const bf16* weights[kMostRows];
  const long per_output = p.activation ? 2 : 1, most = rows_of_tile(p.rows) / per_output;
  for (long n = begin, count; n < end; n += count) {
    count = std::min(most, end - n);
    for (long i = 0; i < count; i++) {
      weights[i] = p.weight + (n + i) * p.size;
      if (p.activation) weights[count + i] = weights[i] + p.outputs * p.size;
    }
    for (long row = 0, m; row < p.rows; row += m) {
      m = share_of(p.rows - row, kTile);
      dot_of(count * per_output, m)(weights, p.x + row * p.size, p.size, count * p.size, tile);
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
  const long share = outputs / (16 * omp_get_max_threads());
  const long block = std::max(kGranule, (share + kGranule - 1) / kGranule * kGranule);
  in_parts((outputs + block - 1) / block, [&](long item) {
    static thread_local std::vector<float> sums;
    sums.resize((activation ? 2 : 1) * std::min(rows, kRows) * kBlock);
    const long end = std::min(outputs, (item + 1) * block);
    for (long begin = item * block; begin < end; begin += kBlock)
      for (long row = 0; row < rows; row += kRows)
        outputs_of(gemm.from_row(row, std::min(kRows, rows - row)), begin, std::min(end, begin + kBlock), sums.data());
  });
}

}  // extern "C"
