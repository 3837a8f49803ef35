// Layers with states: the gated delta rule's window and fold, and the gated short convolution; see the torch references
// in kernels/recurrent, which say what is computed.
//
// T: the number format of activations, tails' keys and raw inputs; all else is float32.

#include <omp.h>

#include <cmath>
#include <vector>

#include "epilogue.h"

namespace {

constexpr float kL2Eps = 1e-6f;                     // calls.L2_EPS
constexpr int kLanes = kRegisters == 32 ? 4 : 2;    // vectors of values that are summed up at once

// One layer of a step, or for folds all layers alike: `NativeDelta` of recurrent.py.
struct Delta {
  const void* x;
  void* out;
  const int32_t *rows, *lens, *slots, *borders;
  float* states;
  void *conv, *tail_k;
  float *tail_u, *tail_g;
  void* tail_conv;
  const float *conv_weight, *a_log, *dt_bias, *norm;
  const int32_t *sources, *targets, *ends;
  int64_t count, x_stride, k_heads, v_heads, k_dim, v_dim, width, length, ring, page_size, num_layers, num_slots,
      num_rows;
  float eps, beta_scale;

  long channels() const { return 2 * k_heads * k_dim + v_heads * v_dim; }
};

template <class A, class B>
float dot(const A* a, const B* b, long size) {
  Floats sum = zeros();
  for (long i = 0; i < size; i += 16) sum = fma(load(a + i), load(b + i), sum);
  return sum_of(sum);
}

void scale(float* x, float by, long size) {
  for (long i = 0; i < size; i += 16) store(x + i, mul(load(x + i), all(by)));
}

// Of a token's channels from `first` on: the raw inputs into the ring, and silu of their convolution, rounded to T.
template <class T>
void convolved(const Delta& d, const T* token, T* ring, long position, long first, long size, float* out) {
  const long channels = d.channels();
  T* const own = ring + position % d.ring * channels + first;
  std::copy(token + first, token + first + size, own);
  for (long i = 0; i < size; i += 16) {
    Floats sum = zeros();
    for (long tap = std::max(0L, (long)d.width - 1 - position); tap < d.width; tap++) {
      const T* const raw = ring + (position - d.width + 1 + tap) % d.ring * channels + first;
      sum = fma(load(raw + i), load(d.conv_weight + tap * channels + first + i), sum);
    }
    T rounded[16];
    store(rounded, silu(sum));
    store(out + i, load(rounded));
  }
}

// seen[0] += a @ rows, seen[1] += b @ rows, of `count` rows of v_dim numbers, row(i) each.
template <class Row>
void add_products(const float* a, const float* b, long count, long v_dim, const Row& row, float* seen_a, float* seen_b) {
  long e = 0;
  for (; e + 16 * kLanes <= v_dim; e += 16 * kLanes) {
    Floats of_a[kLanes], of_b[kLanes];
    for (int l = 0; l < kLanes; l++) of_a[l] = load(seen_a + e + 16 * l), of_b[l] = load(seen_b + e + 16 * l);
    for (long i = 0; i < count; i++) {
      const float* const values = row(i) + e;
      const Floats by_a = all(a[i]), by_b = all(b[i]);
      for (int l = 0; l < kLanes; l++) {
        const Floats value = load(values + 16 * l);
        of_a[l] = fma(by_a, value, of_a[l]), of_b[l] = fma(by_b, value, of_b[l]);
      }
    }
    for (int l = 0; l < kLanes; l++) store(seen_a + e + 16 * l, of_a[l]), store(seen_b + e + 16 * l, of_b[l]);
  }
  for (; e < v_dim; e += 16) {
    Floats of_a = load(seen_a + e), of_b = load(seen_b + e);
    for (long i = 0; i < count; i++) {
      const Floats value = load(row(i) + e);
      of_a = fma(all(a[i]), value, of_a), of_b = fma(all(b[i]), value, of_b);
    }
    store(seen_a + e, of_a), store(seen_b + e, of_b);
  }
}

struct Scratch {
  std::vector<float> numbers;
  float* next;

  void start(long size) {
    if ((long)numbers.size() < size) numbers.resize(size);
    next = numbers.data();
  }
  float* take(long size) { return next += size, next - size; }
};

// One entry and one key head, with the value heads that read it.
template <class T>
void window(const Delta& d, long entry, long key_head, Scratch& scratch) {
  const long group = d.v_heads / d.k_heads, channels = d.channels(), row = d.rows[entry];
  const long position = d.lens[entry] - 1, border = d.borders[row], slot = d.slots[row];
  const long num_tail = position - border, place = position % d.length;
  const T* const token = (const T*)d.x + entry * d.x_stride;
  T* const ring = (T*)d.tail_conv + row * d.ring * channels;
  T* const keys = (T*)d.tail_k + (row * d.k_heads + key_head) * d.length * d.k_dim;
  scratch.start(4 * d.k_dim + 4 * d.length + 3 * d.v_dim);
  float* const q = scratch.take(d.k_dim);
  float* const k = scratch.take(d.k_dim);
  convolved(d, token, ring, position, key_head * d.k_dim, d.k_dim, q);
  convolved(d, token, ring, position, (d.k_heads + key_head) * d.k_dim, d.k_dim, k);
  for (long i = 0; i < d.k_dim; i += 16) store(keys + place * d.k_dim + i, load(k + i));  // exact: they were rounded
  scale(q, 1.0f / std::sqrt((dot(q, q, d.k_dim) + kL2Eps) * d.k_dim), d.k_dim);
  scale(k, 1.0f / std::sqrt(dot(k, k, d.k_dim) + kL2Eps), d.k_dim);
  const float qk = dot(q, k, d.k_dim);
  float* const tail_k = scratch.take(d.length);  // products of the tail's normed keys
  float* const tail_q = scratch.take(d.length);
  for (long j = 0; j < num_tail; j++) {
    const T* const key = keys + (border + j) % d.length * d.k_dim;
    const float inverse = 1.0f / std::sqrt(dot(key, key, d.k_dim) + kL2Eps);
    tail_k[j] = inverse * dot(key, k, d.k_dim), tail_q[j] = inverse * dot(key, q, d.k_dim);
  }
  float* const weight_k = scratch.take(d.length);
  float* const weight_q = scratch.take(d.length);
  float* const grown_k = scratch.take(d.k_dim);
  float* const grown_q = scratch.take(d.k_dim);
  float* const v = scratch.take(d.v_dim);
  float* const seen_k = scratch.take(d.v_dim);
  float* const seen_q = scratch.take(d.v_dim);
  for (long head = key_head * group; head < (key_head + 1) * group; head++) {
    float* const tail_u = d.tail_u + (row * d.v_heads + head) * d.length * d.v_dim;
    float* const tail_g = d.tail_g + (row * d.v_heads + head) * d.length;
    const float* const state = d.states + (slot * d.v_heads + head) * d.k_dim * d.v_dim;
    convolved(d, token, ring, position, 2 * d.k_heads * d.k_dim + head * d.v_dim, d.v_dim, v);
    T gates[16] = {token[channels + d.v_heads * d.v_dim + head], token[channels + d.v_heads * (d.v_dim + 1) + head]};
    float ba[16];
    store(ba, load(gates));
    const float a = ba[1] + d.dt_bias[head], beta = d.beta_scale / (1.0f + std::exp(-ba[0]));
    const float g = -std::exp(d.a_log[head]) * (a > 20.0f ? a : std::log1p(std::exp(a)));
    float later = g;  // of the decays behind a token, from the last one back
    for (long j = num_tail - 1; j >= 0; j--) {
      const float decay = std::exp(later);
      weight_k[j] = decay * tail_k[j], weight_q[j] = decay * tail_q[j];
      later += tail_g[(border + j) % d.length];
    }
    const float decay = std::exp(later);
    for (long i = 0; i < d.k_dim; i += 16) {
      store(grown_k + i, mul(all(decay), load(k + i))), store(grown_q + i, mul(all(decay), load(q + i)));
    }
    std::fill(seen_k, seen_k + d.v_dim, 0.0f), std::fill(seen_q, seen_q + d.v_dim, 0.0f);
    const auto of_state = [&](long i) { return state + i * d.v_dim; };
    const auto of_tail = [&](long j) { return tail_u + (border + j) % d.length * d.v_dim; };
    add_products(grown_k, grown_q, d.k_dim, d.v_dim, of_state, seen_k, seen_q);
    add_products(weight_k, weight_q, num_tail, d.v_dim, of_tail, seen_k, seen_q);
    tail_g[place] = g;
    Floats squares = zeros();
    for (long e = 0; e < d.v_dim; e += 16) {
      const Floats u = mul(all(beta), sub(load(v + e), load(seen_k + e)));
      store(tail_u + place * d.v_dim + e, u);
      T rounded[16];
      store(rounded, fma(all(qk), u, load(seen_q + e)));
      const Floats o = load(rounded);
      store(seen_q + e, o);
      squares = fma(o, o, squares);
    }
    const Floats inverse = all(1.0f / std::sqrt(sum_of(squares) / d.v_dim + d.eps));
    const T* const z = token + channels + head * d.v_dim;
    T* const out = (T*)d.out + (entry * d.v_heads + head) * d.v_dim;
    for (long e = 0; e < d.v_dim; e += 16) {
      T rounded[16];
      store(rounded, mul(mul(load(seen_q + e), inverse), load(d.norm + e)));
      store(out + e, mul(load(rounded), silu(load(z + e))));
    }
  }
}

template <class T>
void windows(const Delta& d) {
  const auto follows = [&](long i) {  // a row's drafts are computed behind each other
    return i > 0 && d.rows[i] == d.rows[i - 1] && d.lens[i] == d.lens[i - 1] + 1;
  };
  const long work = d.count * d.v_heads * d.k_dim * d.v_dim, of_head = d.v_heads / d.k_heads * d.v_dim;
#pragma omp parallel for schedule(dynamic) if (work > kSerial)
  for (long item = 0; item < d.count * d.k_heads; item++) {
    static thread_local Scratch scratch;
    const long first = item / d.k_heads, key_head = item % d.k_heads;
    if (follows(first)) continue;
    for (long entry = first; entry == first || (entry < d.count && follows(entry)); entry++) {
      if (d.slots[d.rows[entry]] == 0) {  // it pads the batch
        T* const out = (T*)d.out + (entry * d.k_heads + key_head) * of_head;
        std::fill(out, out + of_head, T());
      } else {
        window<T>(d, entry, key_head, scratch);
      }
    }
  }
}

// One fold in one layer, of one value head; and the raw inputs of its channels.
template <class T>
void fold(const Delta& d, long index, long layer, long head, Scratch& scratch) {
  const long group = d.v_heads / d.k_heads, key_head = head / group, size = d.k_dim * d.v_dim, row = d.rows[index];
  const long at_row = layer * d.num_rows + row, target = layer * d.num_slots + d.targets[index];
  const float* const source = d.states + ((layer * d.num_slots + d.sources[index]) * d.v_heads + head) * size;
  float* const state = d.states + (target * d.v_heads + head) * size;
  const T* const keys = (const T*)d.tail_k + (at_row * d.k_heads + key_head) * d.length * d.k_dim;
  const float* const us = d.tail_u + (at_row * d.v_heads + head) * d.length * d.v_dim;
  const float* const gs = d.tail_g + (at_row * d.v_heads + head) * d.length;
  if (d.sources[index] == 0) {
    std::fill(state, state + size, 0.0f);
  } else if (source != state) {
    std::copy(source, source + size, state);
  }
  scratch.start(d.page_size * (d.k_dim + 1));
  float* const factors = scratch.take(d.page_size * d.k_dim);  // [k_dim, page_size]
  float* const weights = scratch.take(d.page_size);
  for (long page = d.borders[row]; page < d.ends[index]; page += d.page_size) {
    float later = 0.0f;
    for (long j = d.page_size - 1; j >= 0; j--) {
      const long at = (page + j) % d.length;
      const T* const key = keys + at * d.k_dim;
      const float weight = std::exp(later) / std::sqrt(dot(key, key, d.k_dim) + kL2Eps);
      for (long i = 0; i < d.k_dim; i += 16) {
        float part[16];
        store(part, mul(all(weight), load(key + i)));
        for (int l = 0; l < 16; l++) factors[(i + l) * d.page_size + j] = part[l];
      }
      later += gs[at];
    }
    const Floats decay = all(std::exp(later));
    for (long e = 0; e < d.v_dim;) {
      const bool is_wide = e + 16 * kLanes <= d.v_dim;
      const int lanes = is_wide ? kLanes : 1;
      for (long i = 0; i < d.k_dim; i++) {
        float* const values = state + i * d.v_dim + e;
        const float* const factor = factors + i * d.page_size;
        Floats sums[kLanes];
        for (int l = 0; l < lanes; l++) sums[l] = mul(decay, load(values + 16 * l));
        for (long j = 0; j < d.page_size; j++) {
          const Floats by = all(factor[j]);
          const float* const u = us + (page + j) % d.length * d.v_dim + e;
          if (is_wide) {
            for (int l = 0; l < kLanes; l++) sums[l] = fma(by, load(u + 16 * l), sums[l]);
          } else {
            sums[0] = fma(by, load(u), sums[0]);
          }
        }
        for (int l = 0; l < lanes; l++) store(values + 16 * l, sums[l]);
      }
      e += 16 * lanes;
    }
  }
  const long channels = d.channels(), before = d.width - 1;
  const T* const ring = (const T*)d.tail_conv + at_row * d.ring * channels;
  T* const kept = (T*)d.conv + target * before * channels;
  const auto keep = [&](long first, long count) {
    for (long i = 0; i < before; i++) {
      const long seen = d.ends[index] - before + i;
      T* const to = kept + i * channels + first;
      if (seen < 0) {
        std::fill(to, to + count, T());
      } else {
        const T* const from = ring + seen % d.ring * channels + first;
        std::copy(from, from + count, to);
      }
    }
  };
  keep(2 * d.k_heads * d.k_dim + head * d.v_dim, d.v_dim);
  if (head % group == 0) keep(key_head * d.k_dim, d.k_dim), keep((d.k_heads + key_head) * d.k_dim, d.k_dim);
}

// One layer of a step: `NativeShortConv` of recurrent.py.
struct ShortConv {
  const void *bcx, *weight, *bias;
  const int32_t *rows, *ends, *page_table;
  void *ring, *out;
  int64_t tokens, channels, width, length, page_size, table_stride;
};

template <class T>
void short_conv(const ShortConv& s, const float* taps, long t) {
  const long row = s.rows[t], position = s.ends[t] - 1;
  const T* const token = (const T*)s.bcx + t * 3 * s.channels;
  const auto is_in_step = [&](long other, long at) {
    return other >= 0 && other < s.tokens && s.rows[other] == row && s.ends[other] - 1 == at;
  };
  const auto in_ring = [&](long at) {
    const long page = s.page_table[row * s.table_stride + at / s.page_size];
    return (T*)s.ring + (page * s.length + at % s.length) * s.channels;
  };
  const auto product = [&](const T* of, long i) {  // rounded as rings keep it
    T rounded[16];
    store(rounded, mul(load(of + i), load(of + 2 * s.channels + i)));
    return load(rounded);
  };
  const long count = std::min((long)s.width, position + 1);
  const T* kept[16] = {};  // of earlier tokens, those that are not in this step
  for (long back = 1; back < count; back++) {
    if (!is_in_step(t - back, position - back)) kept[back] = in_ring(position - back);
  }
  const long next = position + s.length;
  const bool stays = !(is_in_step(t + s.length, next) && next / s.page_size == position / s.page_size);
  T* const own = stays ? in_ring(position) : nullptr;
  T* const out = (T*)s.out + t * s.channels;
  for (long i = 0; i < s.channels; i += 16) {
    const Floats bx = product(token, i);
    Floats sum = mul(bx, load(taps + (s.width - 1) * s.channels + i));
    for (long back = 1; back < count; back++) {
      const Floats value = kept[back] ? load(kept[back] + i) : product(token - back * 3 * s.channels, i);
      sum = fma(value, load(taps + (s.width - 1 - back) * s.channels + i), sum);
    }
    if (s.bias) sum = add(sum, load((const T*)s.bias + i));
    store(out + i, mul(sum, load(token + s.channels + i)));
    if (own) store(own + i, bx);
  }
}

template <class T>
void short_convs(const ShortConv& s) {
  static thread_local std::vector<float> taps;  // [width, channels]
  taps.resize(s.width * s.channels);
  for (long i = 0; i < s.channels; i++) {
    for (long tap = 0; tap < s.width; tap++) {
      T one[16] = {((const T*)s.weight)[i * s.width + tap]};
      float number[16];
      store(number, load(one));
      taps[tap * s.channels + i] = number[0];
    }
  }
  const float* const of_all = taps.data();
#pragma omp parallel for if (s.tokens * s.channels > kSerial)
  for (long t = 0; t < s.tokens; t++) short_conv<T>(s, of_all, t);
}

}  // namespace

extern "C" {

void minisgl_delta_window(int is_half, const void* delta) {
  is_half ? windows<f16>(*(const Delta*)delta) : windows<bf16>(*(const Delta*)delta);
}

void minisgl_delta_fold(int is_half, const void* delta) {
  const Delta& d = *(const Delta*)delta;
#pragma omp parallel for schedule(dynamic) if (d.count * d.num_layers * d.v_heads * d.k_dim * d.v_dim > kSerial)
  for (long item = 0; item < d.count * d.num_layers * d.v_heads; item++) {
    static thread_local Scratch scratch;
    const long head = item % d.v_heads, layer = item / d.v_heads % d.num_layers, index = item / d.v_heads / d.num_layers;
    is_half ? fold<f16>(d, index, layer, head, scratch) : fold<bf16>(d, index, layer, head, scratch);
  }
}

void minisgl_short_conv(int is_half, const void* call) {
  is_half ? short_convs<f16>(*(const ShortConv*)call) : short_convs<bf16>(*(const ShortConv*)call);
}

}  // extern "C"
