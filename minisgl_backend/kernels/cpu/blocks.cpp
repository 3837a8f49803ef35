// GEMMs in bfloat16 with weights in GGUF's blocks, as they lie in a file: see blocks.h.

#include <vector>

#include "blocks.h"
#include "gemm.h"

namespace {

constexpr long kPlain = 30;  // ggml's number of bfloat16

struct Weight {  // [rows, size], rows `row_bytes` apart
  long type;     // kPlain, or that of a BlockFormat
  const void* data;
  long rows, row_bytes;
};

// Rows [begin, end) of a weight times all rows of x, to sums[row * kBlock + n - begin].
void plain_products(const Gemm& p, const Weight& weight, long begin, long end, float* sums) {
  float tile[4 * kTile];
  const bf16* weights[kMostRows];
  const long most = rows_of_tile(p.rows);
  for (long n = begin, count; n < end; n += count) {
    count = std::min(most, end - n);
    for (long i = 0; i < count; i++) weights[i] = (const bf16*)((const char*)weight.data + (n + i) * weight.row_bytes);
    for (long row = 0, m; row < p.rows; row += m) {
      m = share_of(p.rows - row, kTile);
      dot_of(count, m)(weights, p.x + row * p.size, p.size, count * weight.row_bytes / sizeof(bf16), tile);
      for (long i = 0; i < count; i++)
        for (long r = 0; r < m; r++) sums[(row + r) * kBlock + n - begin + i] = tile[i * m + r];
    }
  }
}

void block_products(const Gemm& p, const Weight& weight, const Quantized* x, long begin, long end, float* sums) {
  const PanelDots dots = block_format_of(weight.type)->dots[p.rows > kFew ? 0 : p.rows];
  for (long n = begin; n < end; n += kPanel)
    dots((const uint8_t*)weight.data + n * weight.row_bytes, weight.row_bytes, std::min<long>(kPanel, end - n), x, p.rows,
         p.size / kGroup, sums + n - begin, kBlock);
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
  in_parts((outputs + block - 1) / block, [&](long item) {
    static thread_local std::vector<float> sums;
    sums.resize((activation ? 2 : 1) * std::min(rows, kRows) * kBlock);
    const long end = std::min(outputs, (item + 1) * block);
    for (long begin = item * block; begin < end; begin += kBlock)
      for (long row = 0; row < rows; row += kRows)
        block_outputs_of(gemm.from_row(row, std::min(kRows, rows - row)), weights, numbers + row * supers, begin,
                         std::min(end, begin + kBlock), sums.data());
  });
}

// Rows `ids` of a weight in blocks, as numbers: out [count, size].
void minisgl_block_rows(const Weight* weight, const int64_t* ids, long count, long size, bf16* out) {
  const BlockFormat& format = *block_format_of(weight->type);
#pragma omp parallel for if (count * size > kSerial)
  for (long i = 0; i < count; i++)
    format.numbers_of((const uint8_t*)weight->data + ids[i] * weight->row_bytes, size / kGroup, out + i * size);
}

}  // extern "C"
