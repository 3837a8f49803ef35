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

// Outputs [begin, end) of all rows. numbers: what p.x is in int8.
void outputs_of(const Gemm& p, const Weight* weights, const Quantized* numbers, long begin, long end) {
  static thread_local std::vector<float> sums;
  sums.resize((p.activation ? 2 : 1) * std::min(p.rows, kRows) * kBlock);
  const long supers = supers_of(p.size);
  for (; begin < end; begin += kBlock)
    for (long row = 0; row < p.rows; row += kRows)
      block_outputs_of(p.from_row(row, std::min(kRows, p.rows - row)), weights, numbers + row * supers, begin,
                       std::min(end, begin + kBlock), sums.data());
}

// Outputs of a thread's turn: a thread that other programs slow down takes fewer turns.
long turn_of(long outputs) {
  const long share = outputs / (16 * omp_get_max_threads());
  return (std::max(1L, share) + kPanel - 1) / kPanel * kPanel;
}

void quantize_rows(const bf16* x, long rows, long size, std::vector<Quantized>& out) {
  const long supers = supers_of(size);
  out.resize(rows * supers);
  Quantized* const numbers = out.data();
#pragma omp parallel for if (rows * size > kSerial)
  for (long row = 0; row < rows; row++) quantize(x + row * size, size, numbers + row * supers);
}

}  // namespace

extern "C" {

// `minisgl_linear` with weights in blocks, or plain, below one another.
void minisgl_block_linear(const bf16* x, const Weight* weights, const bf16* norm_weight, float eps, const bf16* bias,
                          const bf16* residual, int activation, long rows, long size, long outputs, bf16* out) {
  static thread_local std::vector<bf16> normed;
  static thread_local std::vector<Quantized> quantized;
  if (norm_weight) {
    normed.resize(rows * size);
    rms_norm(x, norm_weight, eps, rows, size, normed.data());
    x = normed.data();
  }
  quantize_rows(x, rows, size, quantized);
  const Quantized* const numbers = quantized.data();
  const Gemm gemm = {x, nullptr, bias, residual, out, rows, size, outputs, activation};
  const long turn = turn_of(outputs);
  in_parts((outputs + turn - 1) / turn, [&](long item) {
    outputs_of(gemm, weights, numbers, item * turn, std::min(outputs, (item + 1) * turn));
  });
}

// x [tokens, size] -> the weighted sum of the picked experts of each, plus the residual, to out. gate_up and down: an
// expert's weights, as of `minisgl_block_linear`. ids, weights [tokens, picked].
void minisgl_block_mixture(const bf16* x, const Weight* const* gate_up, const Weight* const* down, const int64_t* ids,
                           const float* weights, const bf16* residual, int activation, long experts, long tokens,
                           long picked, long size, long inner, bf16* out) {
  const long pairs = tokens * picked;
  std::vector<long> ends(experts + 1), place(pairs), active;
  for (long i = 0; i < pairs; i++) ends[ids[i] + 1]++;
  for (long e = 0; e < experts; e++) {
    if (ends[e + 1]) active.push_back(e);
    ends[e + 1] += ends[e];
  }
  std::vector<long> next(ends);
  static thread_local std::vector<bf16> sorted, between, found;
  static thread_local std::vector<Quantized> first, second;
  sorted.resize(pairs * size), between.resize(pairs * inner), found.resize(pairs * size);
  for (long i = 0; i < pairs; i++) {
    place[i] = next[ids[i]]++;
    std::copy_n(x + i / picked * size, size, sorted.data() + place[i] * size);
  }
  // Each expert's rows lie together.
  const auto each = [&](const Weight* const* weight, const std::vector<bf16>& from, std::vector<Quantized>& numbers,
                        long size, long outputs, int activation, std::vector<bf16>& to) {
    quantize_rows(from.data(), pairs, size, numbers);
    const bf16* const source = from.data();
    bf16* const target = to.data();
    const Quantized* const quantized = numbers.data();
    const long turn = turn_of(outputs * active.size()), turns = (outputs + turn - 1) / turn;
    in_parts(turns * active.size(), [&](long item) {
      const long e = active[item / turns], begin = item % turns * turn, row = ends[e];
      const Gemm gemm = {source + row * size, nullptr, nullptr, nullptr, target + row * outputs, ends[e + 1] - row, size,
                         outputs, activation};
      outputs_of(gemm, weight[e], quantized + row * supers_of(size), begin, std::min(outputs, begin + turn));
    });
  };
  each(gate_up, sorted, first, size, inner, activation, between);
  each(down, between, second, inner, size, 0, found);
  const bf16* const sums = found.data();
  // Token by token, in the order of its choices: not in that of experts.
#pragma omp parallel for if (pairs * size > kSerial)
  for (long token = 0; token < tokens; token++) {
    for (long n = 0; n < size; n += 16) {
      Floats sum = zeros();
      for (long i = token * picked; i < (token + 1) * picked; i++)
        sum = fma(load(sums + place[i] * size + n), all(weights[i]), sum);
      if (residual) sum = add(sum, load(residual + token * size + n));
      store(out + token * size + n, sum);
    }
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
