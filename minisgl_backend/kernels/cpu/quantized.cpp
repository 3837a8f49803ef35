// GEMMs and mixtures of experts with weights of quantized checkpoints, and of 16 bits, as they lie: see formats.h.
//
// T: the number format of activations, bfloat16 or float16. A product takes the same steps however many rows there are.

#include <array>
#include <utility>
#include <vector>

#include "epilogue.h"
#include "integers.h"

namespace {

constexpr bool kWide = kRegisters == 32;
constexpr int kTileRows = 4;  // rows of weights of a tile
constexpr int kTileTokens = kWide ? 4 : 3;
constexpr long kBlock = 48;  // outputs whose sums are kept at once: a multiple of tiles and vectors
constexpr long kTokens = 64;  // likewise rows of activations

using Tile = void (*)(const Weight&, const long*, const Prepared&, long, float*);
using Tiles = std::array<std::array<Tile, kTileTokens>, kTileRows>;

template <class F, int R, int M>
constexpr Tile tile_of() {
  if constexpr (kWide || M == 1 || R <= kTileRows / 2) {
    return F::template tile<R, M>;
  } else {
    return nullptr;  // its sums do not fit in registers
  }
}
template <class F, int R, int... M>
constexpr std::array<Tile, kTileTokens> tiles_of_rows(std::integer_sequence<int, M...>) {
  return {tile_of<F, R, M + 1>()...};
}
template <class F, int... R>
constexpr Tiles tiles_of(std::integer_sequence<int, R...>) {
  return {tiles_of_rows<F, R + 1>(std::make_integer_sequence<int, kTileTokens>())...};
}

// A format's functions, with activations in T.
template <class T>
struct Format {
  long (*width)(const Weight&);  // bytes of a prepared row
  long (*scales)(const Weight&);
  void (*prepare)(const Weight&, const T*, uint8_t*, float*);
  void (*widen)(const Weight&, long, float*);
  Tiles tiles;
};

template <class F, class T>
constexpr Format<T> format() {
  using X = typename F::X;
  return {[](const Weight& w) { return F::width(w) * (long)sizeof(X); }, F::scales,
          [](const Weight& w, const T* x, uint8_t* out, float* scales) { F::prepare(w, x, (X*)out, scales); }, F::widen,
          tiles_of<F>(std::make_integer_sequence<int, kTileRows>())};
}

template <class T>
const Format<T>& format_of(const Weight& w) {
  static constexpr Format<T> kFormats[] = {format<Plain<bf16>, T>(), format<Plain<f16>, T>(), format<Fp8, T>(),
                                           format<Int8, T>(), format<Int4, T>(), format<Mxfp4, T>()};
  return kFormats[w.kind];
}

// Activations as a weight's format takes them.
template <class T>
class Activations {
 public:
  void prepare(const Weight& w, const T* x, const T* norm, float eps, long rows) {
    const auto& format = format_of<T>(w);
    const long stride = (format.width(w) + 63) / 64 * 64, count = format.scales(w);
    numbers_.resize(rows * stride + 64), scales_.resize(rows * count);
    uint8_t* const numbers = (uint8_t*)(((uintptr_t)numbers_.data() + 63) / 64 * 64);
    float* const scales = count ? scales_.data() : nullptr;
#pragma omp parallel for if (rows * w.size > kSerial)
    for (long row = 0; row < rows; row++) {
      static thread_local std::vector<T> normed;
      const T* source = x + row * w.size;
      if (norm) {
        normed.resize(w.size);
        norm_row(source, norm, eps, w.size, normed.data());
        source = normed.data();
      }
      format.prepare(w, source, numbers + row * stride, scales + row * count);
    }
    found_ = {numbers, scales, stride, count};
  }
  const Prepared& found() const { return found_; }

 private:
  std::vector<uint8_t> numbers_;
  std::vector<float> scales_;
  Prepared found_;
};

// Products of rows [begin, end) of a weight, at most kBlock, and rows [first, first + rows) of x, to
// sums[row * kBlock + n - begin]. Rows of the weight are `step` apart.
template <class T>
void products(const Weight& w, const Prepared& x, long first, long rows, long begin, long end, long start, long step,
              float* sums) {
  const Tiles& tiles = format_of<T>(w).tiles;
  float found[kTileRows * kTileTokens];
  long numbers[kTileRows];
  for (long n = begin, count; n < end; n += count) {
    count = std::min<long>(kWide || rows == 1 ? kTileRows : kTileRows / 2, end - n);
    for (long i = 0; i < count; i++) numbers[i] = start + (n + i) * step;
    for (long row = 0, m; row < rows; row += m) {
      m = share_of(rows - row, kTileTokens);
      tiles[count - 1][m - 1](w, numbers, x, first + row, found);
      for (long i = 0; i < count; i++)
        for (long r = 0; r < m; r++) sums[(row + r) * kBlock + n - begin + i] = found[i * m + r];
    }
  }
}

// Outputs [begin, end), at most kBlock, of rows [first, first + p.rows) of x, whose epilogue is p.
template <class T, class Out>
void outputs_of(const Weight& w, const Prepared& x, long first, const Epilogue<T, Out>& p, long begin, long end) {
  static thread_local std::vector<float> sums;
  sums.resize(2 * kTokens * kBlock);
  for (long row = 0; row < p.rows; row += kTokens) {
    const Epilogue<T, Out> part = p.from_row(row, std::min(kTokens, p.rows - row));
    if (!p.activation) {
      products<T>(w, x, first + row, part.rows, begin, end, 0, 1, sums.data());
    } else {
      const long step = p.turns ? 2 : 1, up = p.turns ? 1 : p.outputs;
      products<T>(w, x, first + row, part.rows, begin, end, 0, step, sums.data());
      products<T>(w, x, first + row, part.rows, begin, end, up, step, sums.data() + kTokens * kBlock);
    }
    finish(part, begin, end, sums.data(), kBlock, kTokens * kBlock);
  }
}

long block_of(long outputs) {  // of a thread's turn: a thread that other programs slow down takes fewer
  const long share = outputs / (16 * omp_get_max_threads()), granule = 12;
  return std::min(kBlock, std::max(granule, (share + granule - 1) / granule * granule));
}

template <class T>
void linear(const T* x, const Weight& w, const T* norm, float eps, Epilogue<T, T> p) {
  static thread_local Activations<T> activations;
  activations.prepare(w, x, norm, eps, p.rows);
  const Prepared prepared = activations.found();
  const long block = block_of(p.outputs);
  in_parts((p.outputs + block - 1) / block, [&](long item) {
    outputs_of(w, prepared, 0, p, item * block, std::min(p.outputs, (item + 1) * block));
  });
}

struct Mixture {  // as cpu/native.py fills it
  const Weight *gate_up, *down;
  const void *gate_up_bias, *down_bias;  // [experts, outputs], or null
  const int64_t* ids;                    // [tokens, picked]
  const float* weights;
  const void* residual;
  int64_t experts, tokens, picked, inner;  // inner: inputs of down
  int32_t activation, turns;               // turns: rows of gate and up alternate
};

template <class T>
void mixture(const T* x, const Mixture& p, T* out) {
  const long pairs = p.tokens * p.picked, hidden = p.gate_up->size, inner = p.inner;
  std::vector<long> ends(p.experts + 1), order(pairs), tokens(pairs), active;
  for (long i = 0; i < pairs; i++) ends[p.ids[i] + 1]++;
  for (long e = 0; e < p.experts; e++) {
    if (ends[e + 1]) active.push_back(e);
    ends[e + 1] += ends[e];
  }
  std::vector<long> next(ends);
  for (long i = 0; i < pairs; i++) order[next[p.ids[i]]++] = i;
  for (long i = 0; i < pairs; i++) tokens[i] = order[i] / p.picked;

  static thread_local Activations<T> first, second;
  static thread_local std::vector<T> between;
  static thread_local std::vector<float> sums;
  between.resize(pairs * inner), sums.resize(pairs * hidden);
  T* const gated = between.data();
  float* const summed = sums.data();

  first.prepare(*p.gate_up, x, nullptr, 0.0f, p.tokens);
  Prepared prepared = first.found();
  prepared.order = tokens.data();
  const auto each = [&](const Weight& weight, long outputs, const auto& run) {
    const long block = block_of(outputs * active.size()), blocks = (outputs + block - 1) / block;
    in_parts(blocks * active.size(), [&](long item) {
      const long expert = active[item / blocks], begin = item % blocks * block;
      run(weight.of_expert(expert), expert, begin, std::min(outputs, begin + block));
    });
  };
  each(*p.gate_up, inner, [&](const Weight& weight, long e, long begin, long end) {
    const T* bias = p.gate_up_bias ? (const T*)p.gate_up_bias + e * 2 * inner : nullptr;
    const Epilogue<T, T> epilogue = {
        bias, nullptr, gated + ends[e] * inner, ends[e + 1] - ends[e], inner, p.activation, p.turns};
    outputs_of(weight, prepared, ends[e], epilogue, begin, end);
  });
  second.prepare(*p.down, gated, nullptr, 0.0f, pairs);
  const Prepared inputs = second.found();
  each(*p.down, hidden, [&](const Weight& weight, long e, long begin, long end) {
    const T* bias = p.down_bias ? (const T*)p.down_bias + e * hidden : nullptr;
    const Epilogue<T, float> epilogue = {bias, nullptr, summed + ends[e] * hidden, ends[e + 1] - ends[e], hidden, 0, 0};
    outputs_of(weight, inputs, ends[e], epilogue, begin, end);
  });
  // Token by token, in the order of its choices: not in that of experts.
  std::vector<long> place(pairs);
  for (long i = 0; i < pairs; i++) place[order[i]] = i;
#pragma omp parallel for if (pairs * hidden > kSerial)
  for (long token = 0; token < p.tokens; token++) {
    for (long n = 0; n < hidden; n += 16) {
      Floats sum = zeros();
      for (long i = token * p.picked; i < (token + 1) * p.picked; i++)
        sum = fma(load(summed + place[i] * hidden + n), all(p.weights[i]), sum);
      if (p.residual) sum = add(sum, load((const T*)p.residual + token * hidden + n));
      store(out + token * hidden + n, sum);
    }
  }
}

}  // namespace

extern "C" {

// A GEMM with a weight [outputs, size], or [2 * outputs, size] with an activation. is_half: x, norm, bias, residual and out
// are float16, else bfloat16. Null pointers are not used.
void minisgl_quantized_linear(int is_half, const void* x, const Weight* weight, const void* norm, float eps,
                              const void* bias, const void* residual, int activation, long rows, long outputs,
                              void* out) {
  const auto run = [&](auto number) {
    using T = decltype(number);
    linear<T>((const T*)x, *weight, (const T*)norm, eps,
              {(const T*)bias, (const T*)residual, (T*)out, rows, outputs, activation, 0});
  };
  is_half ? run(f16()) : run(bf16());
}

// x [tokens, hidden] -> the weighted sum of the picked experts of each, plus the residual, to out.
void minisgl_mixture(int is_half, const void* x, const Mixture* call, void* out) {
  is_half ? mixture((const f16*)x, *call, (f16*)out) : mixture((const bf16*)x, *call, (bf16*)out);
}

// Rows [begin, end) of a weight as float32 [end - begin, size].
void minisgl_widen(const Weight* weight, long begin, long end, float* out) {
#pragma omp parallel for if ((end - begin) * weight->size > kSerial)
  for (long row = begin; row < end; row++)
    format_of<bf16>(*weight).widen(*weight, row, out + (row - begin) * weight->size);
}

// What follows the sums float32 [rows, stride] of outputs [begin, end), whose up halves are `up` further.
void minisgl_finish(int is_half, const float* sums, long stride, long up, const void* bias, const void* residual,
                    int activation, long rows, long outputs, long begin, long end, void* out) {
  const auto run = [&](auto number) {
    using T = decltype(number);
    const Epilogue<T, T> p = {(const T*)bias, (const T*)residual, (T*)out, rows, outputs, activation, 0};
#pragma omp parallel for if (rows * (end - begin) > kSerial)
    for (long row = 0; row < rows; row++) finish(p.from_row(row, 1), begin, end, sums + row * stride, stride, up);
  };
  is_half ? run(f16()) : run(bf16());
}

}  // extern "C"
