// Norms, rotations and decode attention: what a layer computes between its GEMMs.
//
// T: the number format of activations and of the cache, bfloat16 or float16. Sums, statistics, softmax and rotations are
// float32.

#include <omp.h>

#include <algorithm>
#include <vector>

#include "epilogue.h"

namespace {

// The tokens [begin, end) of one sequence, whose pages are `stride` numbers apart in a cache of one head.
struct Tokens {
  const int32_t* pages;
  long page_size, stride, begin, end;

  // visit(token, its row of `cache`) for all of them, page by page: a division costs as much as a row.
  template <int D, class T, class Visit>
  void each(const T* cache, const Visit& visit) const {
    for (long t = begin; t < end;) {
      const T* row = cache + pages[t / page_size] * stride + t % page_size * D;
      for (const long last = std::min(end, (t / page_size + 1) * page_size); t < last; t++, row += D) visit(t, row);
    }
  }
};

// scores[g * stride + t - begin] = scale * q[g] . k[t], for `group` queries.
template <int D, class T>
void scores_of(const T* q, int group, const T* k, const Tokens& tokens, float scale, float* scores, long stride) {
  const T* keys[16];
  int count = 0;
  const auto score = [&] {
    for (int g = 0; g < group; g++) {
      decltype(load_pairs(q)) query[D / 32];
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
  tokens.each<D>(k, [&](long, const T* key) {
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
template <int D, int G, class T>
void weighted_values(const T* v, const Tokens& tokens, float* scores, long stride, T* out) {
  float inverse[G];
  Floats values[G][D / 16];
  for (int g = 0; g < G; g++) {
    inverse[g] = softmax_weights(scores + g * stride, tokens.end - tokens.begin);
    for (auto& one : values[g]) one = zeros();
  }
  tokens.each<D>(v, [&](long t, const T* value) {
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
template <int D, class T>
void attend(const T* q, T* out, int group, const T* k, const T* v, const Tokens& tokens, float scale,
            float* scores) {
  constexpr int kMost = std::max(1, kRegisters * 8 / D);  // queries whose sums of values stay in half the registers
  const long stride = (tokens.end - tokens.begin + 15) / 16 * 16;
  scores_of<D>(q, group, k, tokens, scale, scores, stride);
  for (int g = 0, count; g < group; g += count) {
    count = std::min(kMost, group - g);
    const auto kernel = count == 1   ? weighted_values<D, 1, T>
                        : count == 2 ? weighted_values<D, std::min(2, kMost), T>
                        : count == 3 ? weighted_values<D, std::min(3, kMost), T>
                                     : weighted_values<D, kMost, T>;
    kernel(v, tokens, scores + g * stride, stride, out + g * D);
  }
}

template <class T, class W>
void add_norm(const T* hidden, const T* x, const W* weight, float eps, float multiplier, long size, T* out) {
  const Floats scale = scale_of_norm(x, eps, size), times = all(multiplier);
  for (long i = 0; i < size; i += 16) {
    const Floats normed = mul(mul(load(x + i), scale), load(weight + i));
    store(out + i, fma(times, normed, load(hidden + i)));
  }
}

// run(a number, a norm's weight), of their types.
template <class Run>
void by_formats(int formats, const Run& run) {
  const bool is_half = formats & 1;
  if (formats & 2) {
    is_half ? run(f16(), float()) : run(bf16(), float());
  } else {
    is_half ? run(f16(), f16()) : run(bf16(), bf16());
  }
}

// Ops.rope_store on qkv [tokens, (q_heads + 2 * kv_heads) * dim]: q is rotated in place, k and v go to the caches.
template <class T, class W>
void rope_store(T* qkv, const W* q_norm, const W* k_norm, float eps, const float* cos_sin,
                        const int32_t* positions, const int32_t* slots, T* k_cache, T* v_cache, long tokens,
                        long q_heads, long kv_heads, long dim, long page_size) {
  const long width = (q_heads + 2 * kv_heads) * dim, half = dim / 2;
#pragma omp parallel for if (tokens * width > kSerial)
  for (long token = 0; token < tokens; token++) {
    T* row = qkv + token * width;
    const float* cosines = cos_sin + positions[token] * dim;
    const long slot = slots[token], page = slot / page_size, offset = slot % page_size;
    for (long head = 0; head < q_heads + 2 * kv_heads; head++) {
      T* x = row + head * dim;
      T* target = x;
      const long kv_head = (head - q_heads) % kv_heads;
      if (head >= q_heads) {
        T* cache = head < q_heads + kv_heads ? k_cache : v_cache;
        target = cache + ((page * kv_heads + kv_head) * page_size + offset) * dim;
      }
      if (head >= q_heads + kv_heads) {
        std::copy(x, x + dim, target);
        continue;
      }
      const W* weight = head < q_heads ? q_norm : k_norm;
      const Floats scale = weight ? scale_of_norm(x, eps, dim) : all(1.0f);
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
template <class T>
void decode_attention(const T* q, long q_stride, const T* k_cache, const T* v_cache,
                              const int32_t* page_table, long pages_per_row, const int32_t* rows,
                              const int32_t* lengths, long batch, long q_heads, long kv_heads, long dim,
                              long page_size, long window, float scale, T* out) {
  const int group = q_heads / kv_heads;
  const auto kernel = dim == 64 ? attend<64, T> : dim == 128 ? attend<128, T> : attend<256, T>;
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

}  // namespace

// The same functions with is_half: numbers are float16, else bfloat16. With `formats`: 1 is added for float16, and 2 for
// norms' weights in float32.
extern "C" {

void minisgl_rms_norm(int formats, const void* x, const void* weight, float eps, long rows, long size, void* out) {
  by_formats(formats, [&](auto number, auto of_weight) {
    using T = decltype(number);
    rms_norm((const T*)x, (const decltype(of_weight)*)weight, eps, rows, size, (T*)out);
  });
}

// out = hidden + multiplier * norm(x)
void minisgl_add_norm(int formats, const void* hidden, const void* x, const void* weight, float eps, float multiplier,
                      long rows, long size, void* out) {
  by_formats(formats, [&](auto number, auto of_weight) {
    using T = decltype(number);
#pragma omp parallel for if (rows * size > kSerial)
    for (long at = 0; at < rows * size; at += size)
      add_norm((const T*)hidden + at, (const T*)x + at, (const decltype(of_weight)*)weight, eps, multiplier, size,
               (T*)out + at);
  });
}

void minisgl_rope_store(int formats, void* qkv, const void* q_norm, const void* k_norm, float eps, const float* cos_sin,
                        const int32_t* positions, const int32_t* slots, void* k_cache, void* v_cache, long tokens,
                        long q_heads, long kv_heads, long dim, long page_size) {
  by_formats(formats, [&](auto number, auto of_weight) {
    using T = decltype(number);
    using W = decltype(of_weight);
    rope_store((T*)qkv, (const W*)q_norm, (const W*)k_norm, eps, cos_sin, positions, slots, (T*)k_cache, (T*)v_cache,
               tokens, q_heads, kv_heads, dim, page_size);
  });
}

void minisgl_decode_attention(int is_half, const void* q, long q_stride, const void* k_cache, const void* v_cache,
                              const int32_t* page_table, long pages_per_row, const int32_t* rows,
                              const int32_t* lengths, long batch, long q_heads, long kv_heads, long dim,
                              long page_size, long window, float scale, void* out) {
  const auto run = [&](auto number) {
    using T = decltype(number);
    decode_attention((const T*)q, q_stride, (const T*)k_cache, (const T*)v_cache, page_table, pages_per_row, rows,
                     lengths, batch, q_heads, kv_heads, dim, page_size, window, scale, (T*)out);
  };
  is_half ? run(f16()) : run(bf16());
}

}  // extern "C"
