// Tokens of rows that need no more than a temperature: see sampling/gumbel.py for the noise, kernels/sampling/layout.py for
// the parameters. Tokens depend on a row's own logits, parameters and position alone.

#include <omp.h>

#include <algorithm>
#include <cmath>

#include "epilogue.h"

namespace {

constexpr int kTemperature = 0, kSeedLow = 7, kSeedHigh = 8;
constexpr uint32_t kGolden = 0x9E3779B9, kM0 = 0x7FEB352D, kM1 = 0x846CA68B;

inline uint32_t mix(uint32_t x) {
  x = (x ^ x >> 16) * kM0;
  x = (x ^ x >> 15) * kM1;
  return x ^ x >> 16;
}

struct Keys {
  uint32_t first, second;

  Keys(const int32_t* params, uint32_t position) {
    first = mix(mix(params[kSeedLow] ^ mix(position * kGolden + 1)) ^ params[kSeedHigh]);
    second = mix(first + kGolden);
  }
  float uniform(uint32_t token) const {
    uint32_t h = token * kGolden ^ first;
    h = ((h ^ h >> 16) * kM0) ^ second;
    h = (h ^ h >> 15) * kM1;
    h ^= h >> 16;
    return std::min(((float)(int32_t)(h & 0x7fffffff) + 0.5f) * 0x1p-31f, 1.0f - 0x1p-24f);
  }
};

inline float gumbel(float uniform) { return -std::log(-std::log1p(-uniform)); }

// Of one row: 16 numbers at i, with -infinity behind the last.
template <class T>
struct Row {
  const T* logits;
  long size;

  Floats at(long i) const {
    return first_of(load(logits + i, size - i), size - i, all(-std::numeric_limits<float>::infinity()));
  }
};

// The largest logit of a row and the first token that has it. False: there is a NaN, or no finite one.
template <class T>
bool most_likely(const Row<T>& row, float& top, int32_t& token) {
  Floats largest = all(-std::numeric_limits<float>::infinity());
  bool broken = false;
  for (long i = 0; i < row.size; i += 16) {
    const Floats values = row.at(i);
    broken |= any_nan(values);
    largest = max(largest, values);
  }
  top = max_of(largest);
  unsigned here = 0;
  long i = 0;
  for (; i < row.size && !here; i += 16) here = equal(row.at(i), all(top));
  token = here ? i - 16 + __builtin_ctz(here) : 0;
  return !broken && __builtin_isfinite(top);
}

// The token whose logit / temperature + noise is largest. Noise is computed of those alone that may win: it is below
// -log(uniform), so that few are left of the rest once a likely token's sum is known.
template <class T>
int32_t drawn(const Row<T>& row, const Keys& keys, float inverse, float top, int32_t likely) {
  int32_t token = likely;
  float best = -std::numeric_limits<float>::infinity(), bound = top * inverse + gumbel(keys.uniform(likely));
  for (long i = 0; i < row.size; i += 16) {
    float scores[16], limits[16], uniforms[16];
    const Floats scaled = mul(row.at(i), all(inverse));
    store(scores, scaled);
    store(limits, mul(exponential(sub(scaled, all(bound))), all(1.001f)));
    int some = 0;
    for (int j = 0; j < 16; j++) uniforms[j] = keys.uniform(i + j);
    for (int j = 0; j < 16; j++) some |= uniforms[j] < limits[j];
    if (!some) continue;
    for (int j = 0; j < 16; j++) {
      if (!(uniforms[j] < limits[j])) continue;
      const float sum = scores[j] + gumbel(uniforms[j]);
      if (sum > best) best = sum, token = i + j;
    }
    bound = std::max(bound, best);
  }
  return token;
}

template <class T>
void sample(const T* logits, long count, long size, const int32_t* rows, const int32_t* positions,
            const int32_t* all_params, long num_params, int32_t* out) {
#pragma omp parallel for if (count * size > kSerial)
  for (long i = 0; i < count; i++) {
    const Row<T> row = {logits + i * size, size};
    const int32_t* params = all_params + rows[i] * num_params;
    float temperature, top;
    std::memcpy(&temperature, params + kTemperature, sizeof temperature);
    out[count + i] = most_likely(row, top, out[i]);
    if (temperature != 0.0f && out[count + i])
      out[i] = drawn(row, Keys(params, positions[i]), 1.0f / temperature, top, out[i]);
  }
}

}  // namespace

// logits [count, size] -> out [2, count]: tokens, then 1 where a row's logits are finite, or -infinity in part, else 0.
// rows, positions [count]: of params [., num_params], and of the tokens.
extern "C" void minisgl_sample(int is_half, const void* logits, long count, long size, const int32_t* rows,
                               const int32_t* positions, const int32_t* params, long num_params, int32_t* out) {
  is_half ? sample((const f16*)logits, count, size, rows, positions, params, num_params, out)
          : sample((const bf16*)logits, count, size, rows, positions, params, num_params, out);
}
