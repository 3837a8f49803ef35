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

// The tokens [begin, end) of one sequence, whose pages are `stride` numbers apart in a cache of one head.
struct Tokens {
  const int32_t* pages;
  long page_size, stride, begin, end;

  // visit(token, its row of `cache`) for all of them, page by page: a division costs as much as a row.
  template <int D, class Visit>
  void each(const bf16* cache, const Visit& visit) const {
    for (long t = begin; t < end;) {
      const bf16* row = cache + pages[t / page_size] * stride + t % page_size * D;
      for (const long last = std::min(end, (t / page_size + 1) * page_size); t < last; t++, row += D) visit(t, row);
    }
  }
};

// scores[g * stride + t - begin] = scale * q[g] . k[t], for `group` queries.
template <int D>
void scores_of(const bf16* q, int group, const bf16* k, const Tokens& tokens, float scale, float* scores, long stride) {
  const bf16* keys[16];
  int count = 0;
  const auto score = [&] {
    for (int g = 0; g < group; g++) {
      Pairs query[D / 32];
      for (int i = 0; i < D / 32; i++) query[i] = load_pairs(q + g * D + 32 * i);
      Floats sums[16];
      for (int t = 0; t < 16; t++) {
        sums[t] = zeros();
        for (int i = 0; i < D / 32; i++) sums[t] = dot(sums[t], query[i], load_pairs(keys[t] + 32 * i));
      }
      store(scores + g * stride, mul(sums_of_16(sums), all(scale)));
    }
    scores += 16;
    count = 0;
  };
  tokens.each<D>(k, [&](long, const bf16* key) {
    keys[count++] = key;
    if (count == 16) score();
  });
  if (count == 0) return;
  std::fill(keys + count, keys + 16, keys[0]);  // what is computed of these is not used
  score();
}

// The `length` scores of one query, in a row of a multiple of 16, become exp(score - largest); returns 1 / their sum.
float softmax_weights(float* row, long length) {
  const long stride = (length + 15) / 16 * 16;
  std::fill(row + length, row + stride, -std::numeric_limits<float>::infinity());
  Floats largest = load(row);
  for (long t = 16; t < stride; t += 16) largest = max(largest, load(row + t));
  const Floats top = all(max_of(largest));
  Floats sum = zeros();
  for (long t = 0; t < stride; t += 16) {
    const Floats weight = exponential(sub(load(row + t), top));
    store(row + t, weight);
    sum = add(sum, weight);
  }
  return 1.0f / sum_of(sum);
}

// out [G, D]: softmax(scores) @ v of G queries at a time, so that each value is read and widened once for all of them.
template <int D, int G>
void weighted_values(const bf16* v, const Tokens& tokens, float* scores, long stride, bf16* out) {
  float inverse[G];
  Floats values[G][D / 16];
  for (int g = 0; g < G; g++) {
    inverse[g] = softmax_weights(scores + g * stride, tokens.end - tokens.begin);
    for (auto& one : values[g]) one = zeros();
  }
  tokens.each<D>(v, [&](long t, const bf16* value) {
    Floats weights[G];
    for (int g = 0; g < G; g++) weights[g] = all(scores[g * stride + t - tokens.begin]);
    for (int i = 0; i < D / 16; i++) {
      const Floats part = load(value + 16 * i);
      for (int g = 0; g < G; g++) values[g][i] = fma(weights[g], part, values[g][i]);
    }
  });
  for (int g = 0; g < G; g++) {
    const Floats scale = all(inverse[g]);
    for (int i = 0; i < D / 16; i++) store(out + g * D + 16 * i, mul(values[g][i], scale));
  }
}

// One key-value head of one sequence, with its `group` queries.
template <int D>
void attend(const bf16* q, bf16* out, int group, const bf16* k, const bf16* v, const Tokens& tokens, float scale,
            float* scores) {
  constexpr int kMost = std::max(1, kRegisters * 8 / D);  // queries whose sums of values stay in half the registers
  const long stride = (tokens.end - tokens.begin + 15) / 16 * 16;
  scores_of<D>(q, group, k, tokens, scale, scores, stride);
  for (int g = 0, count; g < group; g += count) {
    count = std::min(kMost, group - g);
    const auto kernel = count == 1   ? weighted_values<D, 1>
                        : count == 2 ? weighted_values<D, std::min(2, kMost)>
                        : count == 3 ? weighted_values<D, std::min(3, kMost)>
                                     : weighted_values<D, kMost>;
    kernel(v, tokens, scores + g * stride, stride, out + g * D);
  }
}

}  // namespace

extern "C" {

// x [rows, size] -> x / rms(x) * weight, to out.
void minisgl_rms_norm(const bf16* x, const bf16* weight, float eps, long rows, long size, bf16* out) {
#pragma omp parallel for if (rows * size > kSerial)
  for (long row = 0; row < rows; row++) norm_row(x + row * size, weight, eps, size, out + row * size);
}

// A GEMM with weight [outputs, size], or [2 * outputs, size] with an activation: 1 silu, 2 gelu_tanh. Null pointers are
// not used.
void minisgl_linear(const bf16* x, const bf16* weight, const bf16* norm_weight, float eps, const bf16* bias,
                    const bf16* residual, int activation, long rows, long size, long outputs, bf16* out) {
  static thread_local std::vector<bf16> normed;
  if (norm_weight) {
    normed.resize(rows * size);
    minisgl_rms_norm(x, norm_weight, eps, rows, size, normed.data());
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

// Ops.rope_store on qkv [tokens, (q_heads + 2 * kv_heads) * dim]: q is rotated in place, k and v go to the caches.
void minisgl_rope_store(bf16* qkv, const bf16* q_norm, const bf16* k_norm, float eps, const float* cos_sin,
                        const int32_t* positions, const int32_t* slots, bf16* k_cache, bf16* v_cache, long tokens,
                        long q_heads, long kv_heads, long dim, long page_size) {
  const long width = (q_heads + 2 * kv_heads) * dim, half = dim / 2;
#pragma omp parallel for if (tokens * width > kSerial)
  for (long token = 0; token < tokens; token++) {
    bf16* row = qkv + token * width;
    const float* cosines = cos_sin + positions[token] * dim;
    const long slot = slots[token], page = slot / page_size, offset = slot % page_size;
    for (long head = 0; head < q_heads + 2 * kv_heads; head++) {
      bf16* x = row + head * dim;
      bf16* target = x;
      const long kv_head = (head - q_heads) % kv_heads;
      if (head >= q_heads) {
        bf16* cache = head < q_heads + kv_heads ? k_cache : v_cache;
        target = cache + ((page * kv_heads + kv_head) * page_size + offset) * dim;
      }
      if (head >= q_heads + kv_heads) {
        std::copy(x, x + dim, target);
        continue;
      }
      const bf16* weight = head < q_heads ? q_norm : k_norm;
      Floats scale = all(1.0f);
      if (weight) {
        Floats sum = zeros();
        for (long i = 0; i < dim; i += 16) sum = fma(load(x + i), load(x + i), sum);
        scale = all(1.0f / __builtin_sqrtf(sum_of(sum) / dim + eps));
      }
      for (long i = 0; i < half; i += 16) {
        Floats first = mul(load(x + i), scale), second = mul(load(x + half + i), scale);
        if (weight) {
          first = mul(first, load(weight + i));
          second = mul(second, load(weight + half + i));
        }
        const Floats cosine = load(cosines + i), sine = load(cosines + half + i);
        store(target + i, fms(first, cosine, mul(second, sine)));
        store(target + half + i, fma(second, cosine, mul(first, sine)));
      }
    }
  }
}

// Decode attention: q, whose rows are `q_stride` apart, over the pages of each sequence -> out [batch, q_heads, dim].
// Caches [num_pages, kv_heads, page_size, dim] are read in place. window 0: none. dim: 64, 128 or 256.
void minisgl_decode_attention(const bf16* q, long q_stride, const bf16* k_cache, const bf16* v_cache,
                              const int32_t* page_table, long pages_per_row, const int32_t* rows,
                              const int32_t* lengths, long batch, long q_heads, long kv_heads, long dim,
                              long page_size, long window, float scale, bf16* out) {
  const int group = q_heads / kv_heads;
  const auto kernel = dim == 64 ? attend<64> : dim == 128 ? attend<128> : attend<256>;
  long work = 0;
  for (long i = 0; i < batch; i++) work += lengths[i] * q_heads * dim;
#pragma omp parallel for schedule(dynamic) if (work > kSerial)
  for (long item = 0; item < batch * kv_heads; item++) {
    static thread_local std::vector<float> scores;
    const long i = item / kv_heads, head = item % kv_heads;
    const long end = lengths[i], begin = window ? std::max(0L, end - window) : 0;
    if (scores.size() < (size_t)(group * (end - begin + 16))) scores.resize(group * (end - begin + 16));
    const long at = head * page_size * dim;
    const Tokens tokens = {page_table + rows[i] * pages_per_row, page_size, kv_heads * page_size * dim, begin, end};
    kernel(q + i * q_stride + head * group * dim, out + (i * q_heads + head * group) * dim, group, k_cache + at,
           v_cache + at, tokens, scale, scores.data());
  }
}

// Greedy sampling: out [2, rows] has the first index of each row's largest logit, then 1 where that is finite and the
// row has no NaN, else 0.
void minisgl_argmax(const bf16* logits, long rows, long size, int32_t* out) {
#pragma omp parallel for if (rows * size > 8 * kSerial)
  for (long row = 0; row < rows; row++) {
    const bf16* row_logits = logits + row * size;
    const Floats lowest = all(-std::numeric_limits<float>::infinity());
    Floats largest = lowest;
    bool broken = false;
    const auto part = [&](long i) { return first_of(load(row_logits + i, size - i), size - i, lowest); };
    for (long i = 0; i < size; i += 16) {
      const Floats values = part(i);
      broken |= any_nan(values);
      largest = max(largest, values);
    }
    const float top = max_of(largest);
    unsigned here = 0;
    long i = 0;
    for (; i < size && !here; i += 16) here = equal(part(i), all(top));
    out[row] = here ? i - 16 + __builtin_ctz(here) : 0;
    out[rows + row] = !broken && __builtin_isfinite(top);
  }
}

}  // extern "C"
