// What comes before and after the sums of a GEMM: shares of its rows, a norm; bias, activation and residual.

#pragma once

#include <omp.h>

#include <algorithm>
#include <atomic>

#include "vector.h"

namespace {

constexpr long kSerial = 1 << 15;  // numbers below which a second thread costs more than it saves

// Of what is left in parts of at most `most`, as equal as they can be, one.
inline long share_of(long left, long most) {
  if (left <= most) return left;  // without a division, which a tile of one row would notice
  const long parts = (left + most - 1) / most;
  return (left + parts - 1) / parts;
}

// run(item) for all items, by all threads. Each takes those of its own part one after the other, whose weights lie so, and
// are prefetched; then what is left of the parts of threads that other programs slow down.
template <class Run>
void in_parts(long items, const Run& run) {
  struct alignas(64) Part {
    std::atomic<long> next;
    long end;
  };
  constexpr int kMost = 64;
  Part parts[kMost];
  const int count = std::min(omp_get_max_threads(), kMost);
  for (int i = 0; i < count; i++) parts[i].next = items * i / count, parts[i].end = items * (i + 1) / count;
#pragma omp parallel
  for (int i = 0; i < count; i++) {
    Part& part = parts[(omp_get_thread_num() + i) % count];
    for (long item; (item = part.next.fetch_add(1, std::memory_order_relaxed)) < part.end;) run(item);
  }
}

template <class T>
Floats scale_of_norm(const T* x, float eps, long size) {
  Floats sum = zeros();
  for (long i = 0; i < size; i += 16) {
    const Floats v = load(x + i);
    sum = fma(v, v, sum);
  }
  return all(1.0f / __builtin_sqrtf(sum_of(sum) / size + eps));
}

// W: of weights, T or float.
template <class T, class W>
void norm_row(const T* x, const W* weight, float eps, long size, T* out) {
  const Floats scale = scale_of_norm(x, eps, size);
  for (long i = 0; i < size; i += 16) {
    store(out + i, mul(mul(load(x + i), scale), load(weight + i)));
  }
}

// x [rows, size] -> x / rms(x) * weight, to out.
template <class T, class W>
void rms_norm(const T* x, const W* weight, float eps, long rows, long size, T* out) {
#pragma omp parallel for if (rows * size > kSerial)
  for (long row = 0; row < rows; row++) norm_row(x + row * size, weight, eps, size, out + row * size);
}

enum Activation { kNone, kSilu, kGeluTanh, kSwigluOai };

inline Floats silu(Floats x) {
  const Floats e = exponential(sub(zeros(), x));
  return div(x, add(all(1.0f), e));
}

// x sigmoid(2 u): what 0.5 x (1 + tanh(u)) is.
inline Floats gelu_tanh(Floats x) {
  const Floats cube = mul(mul(x, x), x), minus_2u = mul(fma(cube, all(0.044715f), x), all(-2 * 0.7978845608f));
  return div(x, add(all(1.0f), exponential(minus_2u)));
}

inline Floats least(Floats a, Floats b) { return sub(zeros(), max(sub(zeros(), a), sub(zeros(), b))); }

// See torch_ops.activate_mul.
inline Floats swiglu_oai(Floats gate, Floats up) {
  const Floats limit = all(7.0f), g = least(gate, limit), u = max(least(up, limit), sub(zeros(), limit));
  const Floats e = exponential(mul(g, all(-1.702f)));
  return mul(div(g, add(all(1.0f), e)), add(u, all(1.0f)));
}

inline Floats gated(int activation, Floats gate, Floats up) {
  if (activation == kSwigluOai) return swiglu_oai(gate, up);
  return mul(activation == kSilu ? silu(gate) : gelu_tanh(gate), up);
}

template <class T, class Out>
struct Epilogue {
  const T *bias, *residual;  // bias: [outputs], or [2 * outputs] with an activation
  Out* out;                  // [rows, outputs]
  long rows, outputs;
  int activation, turns;  // turns: rows of gate and up alternate

  Epilogue from_row(long row, long count) const {
    Epilogue part = *this;
    part.out += row * outputs, part.rows = count;
    if (residual) part.residual += row * outputs;
    return part;
  }

  // Biases of `count` gates from n on, or of their ups.
  Floats gate_bias(long n, long count, bool up) const {
    if (!turns) return load(bias + (up ? outputs : 0) + n, count);
    T part[16] = {};
    for (long i = 0; i < count; i++) part[i] = bias[2 * (n + i) + up];
    return load(part);
  }
};

inline void store(float* p, Floats x, long count) {
  if (count >= 16) return store(p, x);
  float part[16];
  store(part, x);
  std::memcpy(p, part, count * sizeof(float));
}
inline Floats load(const float* p, long count) {
  if (count >= 16) return load(p);
  float part[16] = {};
  std::memcpy(part, p, count * sizeof(float));
  return load(part);
}

// Columns [begin, end) of the output, of sums [rows][stride] that begin with them; those of ups are `up` further.
template <class T, class Out>
void finish(const Epilogue<T, Out>& p, long begin, long end, const float* sums, long stride, long up) {
  for (long row = 0; row < p.rows; row++) {
    for (long n = begin; n < end; n += 16) {
      const long count = std::min(16L, end - n);
      const float* const sum = sums + row * stride + n - begin;
      const long at = row * p.outputs + n;
      Floats value = load(sum, count);
      if (p.activation) {
        Floats other = load(sum + up, count);
        if (p.bias) value = add(value, p.gate_bias(n, count, false)), other = add(other, p.gate_bias(n, count, true));
        value = gated(p.activation, value, other);
      } else if (p.bias) {
        value = add(value, load(p.bias + n, count));
      }
      if (p.residual) value = add(value, load(p.residual + at, count));
      store(p.out + at, value, count);
    }
  }
}

}  // namespace
