// CPU kernels in bfloat16 for processors with AVX-512 BF16, compiled at the first start (kernels/cpu/library.py) by GCC
// 11 or later.
//
// Weights stay as checkpoints have them, one row for each output: nothing is packed, so they are in memory once. A GEMM
// of few rows takes the time of reading its weights. The hardware's prefetching does not follow rows of two kilobytes
// well, so each tile of rows prefetches the next: 1.3 times as fast at one row, 1.6 times at eight.
// Sums, norms, rotations, softmax and activations are float32.
//
// Threads are OpenMP's, shared with torch: the symbols are resolved by the libgomp that torch has loaded.

#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

namespace {

using bf16 = uint16_t;

constexpr int kTile = 8;        // rows of activations that share a pass over weights
constexpr long kGranule = 12;   // outputs of a thread are a multiple: whole tiles of 1, 2, 3 and 4 rows of weights
constexpr long kBlock = 48;     // outputs whose sums are kept until what follows them is computed, 16 at a time
constexpr long kSerial = 1 << 15;  // numbers below which a second thread costs more than it saves

inline __m512 load(const bf16* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}

inline __m512 load(const bf16* p, __mmask16 mask) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, p)), 16));
}

inline void store(bf16* p, __m512 x) { _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(x)); }

inline __m512bh load_pairs(const bf16* p) { return (__m512bh)_mm512_loadu_si512(p); }

inline void store(bf16* p, __mmask16 mask, __m512 x) {
  _mm256_mask_storeu_epi16(p, mask, (__m256i)_mm512_cvtneps_pbh(x));
}

// e^x: a power of two times a polynomial on [-ln(2)/2, ln(2)/2] (relative error below 1e-6).
inline __m512 exponential(__m512 x) {
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
  const __m512 rest = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693145752f), x);  // ln(2) in two parts
  const __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(1.42860677e-6f), rest);
  __m512 p = _mm512_set1_ps(1.0f / 720);
  for (float c : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
  return _mm512_scalef_ps(p, n);
}

void norm_row(const bf16* x, const bf16* weight, float eps, long size, bf16* out) {
  __m512 sum = _mm512_setzero_ps();
  for (long i = 0; i < size; i += 16) {
    const __m512 v = load(x + i);
    sum = _mm512_fmadd_ps(v, v, sum);
  }
  const __m512 scale = _mm512_set1_ps(1.0f / __builtin_sqrtf(_mm512_reduce_add_ps(sum) / size + eps));
  for (long i = 0; i < size; i += 16) {
    store(out + i, _mm512_mul_ps(_mm512_mul_ps(load(x + i), scale), load(weight + i)));
  }
}

// The steps of adding up each of several vectors, two at a time: 16 numbers of each become 8, 4, 2 and 1. A vector
// that is added up alone, by _mm512_reduce_add_ps, takes the same steps: a sum does not depend on how many there are.
inline __m512 to_8(__m512 a, __m512 b) {
  return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
}
inline __m512 to_4(__m512 a, __m512 b) {
  return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}
inline __m512 to_2(__m512 a, __m512 b) {
  return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
}
inline __m512 to_1(__m512 a, __m512 b) {
  return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));
}

// Number i of the result is the sum of v[i]: 16 vectors with 45 instructions, of which one alone takes nine.
inline __m512 sums_of_16(const __m512* v) {
  __m512 four[4];  // of four vectors each, four numbers; the order is such that the result's is that of v
  for (int i = 0; i < 4; i++) four[i] = to_4(to_8(v[i], v[i + 4]), to_8(v[i + 8], v[i + 12]));
  return to_1(to_2(four[0], four[1]), to_2(four[2], four[3]));
}

inline __m256 sums_of_8(const __m512* v) {
  const __m512 two = to_2(to_4(to_8(v[0], v[2]), to_8(v[4], v[6])), to_4(to_8(v[1], v[3]), to_8(v[5], v[7])));
  const __m512i order = _mm512_setr_epi32(0, 1, 4, 5, 8, 9, 12, 13, 0, 0, 0, 0, 0, 0, 0, 0);
  return _mm512_castps512_ps256(_mm512_permutexvar_ps(order, to_1(two, two)));
}

template <int N>
inline void sums_of(const __m512* v, float* out) {
  int i = 0;
  for (; i + 16 <= N; i += 16) _mm512_storeu_ps(out + i, sums_of_16(v + i));
  if (i + 8 <= N) _mm256_storeu_ps(out + i, sums_of_8(v + i)), i += 8;
  for (; i < N; i++) out[i] = _mm512_reduce_add_ps(v[i]);
}

// out[r * M + m] = weights[r] . x[m], for R rows of weights and M of x; `ahead`: elements from a row to the same row of
// the next tile.
template <int R, int M>
void dot(const bf16* const* weights, const bf16* x, long size, long ahead, float* out) {
  __m512 sums[R * M];
  for (auto& one : sums) one = _mm512_setzero_ps();
  for (long k = 0; k < size; k += 32) {
    __m512bh w[R];
    for (int r = 0; r < R; r++) {
      w[r] = load_pairs(weights[r] + k);
      _mm_prefetch((const char*)(weights[r] + ahead + k), _MM_HINT_T0);
    }
    for (int m = 0; m < M; m++) {
      const __m512bh v = load_pairs(x + m * size + k);
      for (int r = 0; r < R; r++) sums[r * M + m] = _mm512_dpbf16_ps(sums[r * M + m], w[r], v);
    }
  }
  sums_of<R * M>(sums, out);
}

using Dot = void (*)(const bf16* const*, const bf16*, long, long, float*);

#define DOTS(R) {dot<R, 1>, dot<R, 2>, dot<R, 3>, dot<R, 4>, dot<R, 5>, dot<R, 6>, dot<R, 7>, dot<R, 8>}
constexpr Dot kDots[4][kTile] = {DOTS(1), DOTS(2), DOTS(3), DOTS(4)};  // [rows of weights - 1][rows of x - 1]

struct Gemm {
  const bf16 *x, *weight, *bias, *residual;
  bf16* out;
  long rows, size, outputs;  // outputs: columns of out
  bool gated;
};

inline __m512 silu(__m512 x) {
  const __m512 e = exponential(_mm512_sub_ps(_mm512_setzero_ps(), x));
  return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), e));
}

// Columns [begin, end) of the output, at most kBlock. `sums`: [gated ? 2 : 1][rows][kBlock], for what is in between.
void outputs_of(const Gemm& p, long begin, long end, float* sums) {
  float tile[4 * kTile];
  const bf16* weights[4];
  // Up to the number of weight rows whose sums fit in registers; a gate and its up are two.
  const long per_output = p.gated ? 2 : 1;
  const long most = (p.rows > 6 ? 3 : 4) / per_output;
  for (long n = begin, count; n < end; n += count) {
    count = std::min(most, end - n);
    for (long i = 0; i < count; i++) {
      weights[i] = p.weight + (n + i) * p.size;
      if (p.gated) weights[count + i] = weights[i] + p.outputs * p.size;
    }
    for (long row = 0, m; row < p.rows; row += m) {
      m = std::min<long>(kTile, p.rows - row);
      kDots[count * per_output - 1][m - 1](weights, p.x + row * p.size, p.size, count * p.size, tile);
      const float* next = tile;
      for (long part = 0; part < per_output; part++) {
        float* column = sums + (part * p.rows + row) * kBlock + n - begin;
        for (long i = 0; i < count; i++)
          for (long r = 0; r < m; r++) column[r * kBlock + i] = *next++;
      }
    }
  }
  for (long row = 0; row < p.rows; row++) {
    for (long n = begin; n < end; n += 16) {
      const __mmask16 mask = (1u << std::min(16L, end - n)) - 1;
      const float* sum = sums + row * kBlock + n - begin;
      const long at = row * p.outputs + n;
      __m512 value = _mm512_loadu_ps(sum);
      if (p.gated) value = _mm512_mul_ps(silu(value), _mm512_loadu_ps(sum + p.rows * kBlock));
      if (p.bias) value = _mm512_add_ps(value, load(p.bias + n, mask));
      if (p.residual) value = _mm512_add_ps(value, load(p.residual + at, mask));
      store(p.out + at, mask, value);
    }
  }
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
      __m512bh query[D / 32];
      for (int i = 0; i < D / 32; i++) query[i] = load_pairs(q + g * D + 32 * i);
      __m512 sums[16];
      for (int t = 0; t < 16; t++) {
        sums[t] = _mm512_setzero_ps();
        for (int i = 0; i < D / 32; i++) sums[t] = _mm512_dpbf16_ps(sums[t], query[i], load_pairs(keys[t] + 32 * i));
      }
      _mm512_storeu_ps(scores + g * stride, _mm512_mul_ps(sums_of_16(sums), _mm512_set1_ps(scale)));
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
  __m512 largest = _mm512_loadu_ps(row);
  for (long t = 16; t < stride; t += 16) largest = _mm512_max_ps(largest, _mm512_loadu_ps(row + t));
  const __m512 top = _mm512_set1_ps(_mm512_reduce_max_ps(largest));
  __m512 sum = _mm512_setzero_ps();
  for (long t = 0; t < stride; t += 16) {
    const __m512 weight = exponential(_mm512_sub_ps(_mm512_loadu_ps(row + t), top));
    _mm512_storeu_ps(row + t, weight);
    sum = _mm512_add_ps(sum, weight);
  }
  return 1.0f / _mm512_reduce_add_ps(sum);
}

// out [G, D]: softmax(scores) @ v of G queries at a time, so that each value is read and widened once for all of them.
template <int D, int G>
void weighted_values(const bf16* v, const Tokens& tokens, float* scores, long stride, bf16* out) {
  float inverse[G];
  __m512 values[G][D / 16];
  for (int g = 0; g < G; g++) {
    inverse[g] = softmax_weights(scores + g * stride, tokens.end - tokens.begin);
    for (auto& one : values[g]) one = _mm512_setzero_ps();
  }
  tokens.each<D>(v, [&](long t, const bf16* value) {
    __m512 weights[G];
    for (int g = 0; g < G; g++) weights[g] = _mm512_set1_ps(scores[g * stride + t - tokens.begin]);
    for (int i = 0; i < D / 16; i++) {
      const __m512 part = load(value + 16 * i);
      for (int g = 0; g < G; g++) values[g][i] = _mm512_fmadd_ps(weights[g], part, values[g][i]);
    }
  });
  for (int g = 0; g < G; g++) {
    const __m512 scale = _mm512_set1_ps(inverse[g]);
    for (int i = 0; i < D / 16; i++) store(out + g * D + 16 * i, _mm512_mul_ps(values[g][i], scale));
  }
}

// One key-value head of one sequence, with its `group` queries.
template <int D>
void attend(const bf16* q, bf16* out, int group, const bf16* k, const bf16* v, const Tokens& tokens, float scale,
            float* scores) {
  constexpr int kMost = 256 / D;  // queries whose sums of values stay in 16 registers
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

// PlainKernels.linear: weight [outputs, size], or [2 * outputs, size] if `gated`; null pointers are not used.
void minisgl_linear(const bf16* x, const bf16* weight, const bf16* norm_weight, float eps, const bf16* bias,
                    const bf16* residual, int gated, long rows, long size, long outputs, bf16* out) {
  static thread_local std::vector<bf16> normed;
  if (norm_weight) {
    normed.resize(rows * size);
    for (long row = 0; row < rows; row++) norm_row(x + row * size, norm_weight, eps, size, normed.data() + row * size);
    x = normed.data();
  }
  const Gemm gemm = {x, weight, bias, residual, out, rows, size, outputs, gated != 0};
  // Blocks are scheduled dynamically: a thread that other programs slow down takes fewer.
  const long share = outputs / (16 * omp_get_max_threads());
  const long block = std::max(kGranule, (share + kGranule - 1) / kGranule * kGranule);
#pragma omp parallel for schedule(dynamic)
  for (long n = 0; n < outputs; n += block) {
    static thread_local std::vector<float> sums;
    sums.resize((gated ? 2 : 1) * rows * kBlock);
    const long end = std::min(outputs, n + block);
    for (long begin = n; begin < end; begin += kBlock)
      outputs_of(gemm, begin, std::min(end, begin + kBlock), sums.data());
  }
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
      __m512 scale = _mm512_set1_ps(1.0f);
      if (weight) {
        __m512 sum = _mm512_setzero_ps();
        for (long i = 0; i < dim; i += 16) sum = _mm512_fmadd_ps(load(x + i), load(x + i), sum);
        scale = _mm512_set1_ps(1.0f / __builtin_sqrtf(_mm512_reduce_add_ps(sum) / dim + eps));
      }
      for (long i = 0; i < half; i += 16) {
        __m512 first = _mm512_mul_ps(load(x + i), scale), second = _mm512_mul_ps(load(x + half + i), scale);
        if (weight) {
          first = _mm512_mul_ps(first, load(weight + i));
          second = _mm512_mul_ps(second, load(weight + half + i));
        }
        const __m512 cosine = _mm512_loadu_ps(cosines + i), sine = _mm512_loadu_ps(cosines + half + i);
        store(target + i, _mm512_fmsub_ps(first, cosine, _mm512_mul_ps(second, sine)));
        store(target + half + i, _mm512_fmadd_ps(second, cosine, _mm512_mul_ps(first, sine)));
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
    const __m512 lowest = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
    __m512 largest = lowest;
    __mmask16 broken = 0;
    const auto part = [&](long i) {
      const __mmask16 inside = size - i >= 16 ? 0xffff : (1 << (size - i)) - 1;
      const __m256i bits = _mm256_maskz_loadu_epi16(inside, row_logits + i);
      const __m512 values = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
      return _mm512_mask_mov_ps(lowest, inside, values);
    };
    for (long i = 0; i < size; i += 16) {
      const __m512 values = part(i);
      broken |= _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
      largest = _mm512_max_ps(largest, values);
    }
    const float top = _mm512_reduce_max_ps(largest);
    __mmask16 here = 0;
    long i = 0;
    for (; i < size && !here; i += 16) here = _mm512_cmp_ps_mask(part(i), _mm512_set1_ps(top), _CMP_EQ_OQ);
    out[row] = here ? i - 16 + __builtin_ctz(here) : 0;
    out[rows + row] = !broken && __builtin_isfinite(top);
  }
}

}  // extern "C"
