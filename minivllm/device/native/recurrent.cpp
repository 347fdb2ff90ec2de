// The gated delta rule, compiled once for each instruction set.
//
// The tokens of a row are computed one after another, so the bits of a token do not depend on the other tokens of its
// step.  A state [key_dim, value_dim] of 128 x 128 numbers stays in the second-level cache between two tokens.
#include "recurrent.h"

#include <cmath>
#include <vector>

#include "simd.h"

namespace minivllm {
namespace ISA {

constexpr float EPS = 1e-6f;  // of the norm of queries and keys

// V vectors of a value: S <- keep * S + k (v - keep * S^T k)^T * write, out = S^T q
template <int V>
static void advance_part(float* state, int64_t stride, const float* q, const float* k, const float* v, int64_t key_dim,
                         float keep, float write, float* out) {
  Vec read[V], error[V], total[V];
#pragma GCC unroll 8
  for (int j = 0; j < V; j++) read[j] = total[j] = zero();
  for (int64_t i = 0; i < key_dim; i++) {
    const Vec by = all(k[i]);
#pragma GCC unroll 8
    for (int j = 0; j < V; j++) read[j] = fma(load(state + i * stride + j * LANES), by, read[j]);
  }
  const Vec kept = all(keep), share = all(write);
#pragma GCC unroll 8
  for (int j = 0; j < V; j++) error[j] = mul(sub(load(v + j * LANES), mul(read[j], kept)), share);
  for (int64_t i = 0; i < key_dim; i++) {
    const Vec key = all(k[i]), query = all(q[i]);
#pragma GCC unroll 8
    for (int j = 0; j < V; j++) {
      float* at = state + i * stride + j * LANES;
      const Vec next = fma(key, error[j], mul(load(at), kept));
      store(at, next);
      total[j] = fma(next, query, total[j]);
    }
  }
#pragma GCC unroll 8
  for (int j = 0; j < V; j++) store(out + j * LANES, total[j]);
}

// one number of a value, as above
static void advance_one(float* state, int64_t stride, const float* q, const float* k, float v, int64_t key_dim,
                        float keep, float write, float* out) {
  float read = 0, total = 0;
  for (int64_t i = 0; i < key_dim; i++) read = std::fma(state[i * stride], k[i], read);
  const float error = (v - read * keep) * write;
  for (int64_t i = 0; i < key_dim; i++) {
    state[i * stride] = std::fma(k[i], error, state[i * stride] * keep);
    total = std::fma(state[i * stride], q[i], total);
  }
  *out = total;
}

static void advance(float* state, const float* q, const float* k, const float* v, int64_t key_dim, int64_t value_dim,
                    float keep, float write, float* out) {
  int64_t j = 0;
  for (; j + 8 * LANES <= value_dim; j += 8 * LANES)
    advance_part<8>(state + j, value_dim, q, k, v + j, key_dim, keep, write, out + j);
  for (; j + LANES <= value_dim; j += LANES)
    advance_part<1>(state + j, value_dim, q, k, v + j, key_dim, keep, write, out + j);
  for (; j < value_dim; j++) advance_one(state + j, value_dim, q, k, v[j], key_dim, keep, write, out + j);
}

// x divided by its length, times ``scale``
static void unit(float* x, int64_t dim, float scale) {
  Vec squares = zero();
  int64_t i = 0;
  for (; i + LANES <= dim; i += LANES) squares = fma(load(x + i), load(x + i), squares);
  float total = sum(squares);
  for (; i < dim; i++) total = std::fma(x[i], x[i], total);
  const float by = scale / std::sqrt(total + EPS);
  for (i = 0; i + LANES <= dim; i += LANES) store(x + i, mul(load(x + i), all(by)));
  for (; i < dim; i++) x[i] *= by;
}

static float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// The inputs of a row that a task reads: of the queries and keys of a key head, and of the values of its value heads.
struct Part {
  int64_t at, width;
};

// Numbers of a format as the ring would return them.
static void load_rounded(const Kernels& k, const void* x, int64_t format, int64_t at, int64_t width, int64_t rounded,
                         float* y) {
  k.load(x, format, at, width, y);
  if (format == rounded) return;
  thread_local std::vector<uint16_t> memory;
  if (memory.size() < size_t(width)) memory.resize(width);
  k.store(y, rounded, 0, width, memory.data());
  k.load(memory.data(), rounded, 0, width, y);
}

// causal convolution and silu of ``width`` channels from ``channel`` on; ``taps``[lag] are the inputs
static void convolve(const Kernels& k, const DeltaLayer& d, int64_t channels, int64_t channel, int64_t width,
                     const float* const* taps, float* out) {
  int64_t c = 0;
  for (; c + LANES <= width; c += LANES) {
    Vec total = zero();
    for (int64_t lag = 0; lag < d.width; lag++)
      total = fma(load(taps[lag] + c), load(d.conv + lag * channels + channel + c), total);
    store(out + c, total);
  }
  for (; c < width; c++) {
    float total = 0;
    for (int64_t lag = 0; lag < d.width; lag++)
      total = std::fma(taps[lag][c], d.conv[lag * channels + channel + c], total);
    out[c] = total;
  }
  k.activate(out, nullptr, width, SILU);
}

void delta_row(const Kernels& k, const DeltaLayer& d, const StateRows& s, const StepInputs& in, int64_t row,
               int64_t key) {
  const int64_t repeat = d.heads / d.key_heads, dk = d.key_dim, dv = d.value_dim, size = dk * dv;
  const int64_t channels = 2 * d.key_heads * dk + d.heads * dv, own = 2 * dk + repeat * dv;
  const Part parts[3] = {{key * dk, dk}, {(d.key_heads + key) * dk, dk},
                         {2 * d.key_heads * dk + key * repeat * dv, repeat * dv}};
  const int64_t index = s.rows[row], start = s.start[row], token = s.cu_q[row], n = s.cu_q[row + 1] - token;
  const bool drafts = s.drafts[row];
  const int64_t fold = folded(s, row), begin = start - fold, count = n + fold;
  if (!count) return;
  const int64_t certain = drafts ? fold + (n < 1 ? n : 1) : count, stored = drafts ? fold : count;
  const int64_t head = key * repeat;

  thread_local std::vector<float> memory;
  const size_t need = (d.width + 1) * own + 2 * d.heads + dv + (drafts ? repeat * size : 0);
  if (memory.size() < need) memory.resize(need);
  float *window = memory.data(), *mixed = window + d.width * own, *ab = mixed + own, *out = ab + 2 * d.heads;
  float* kept = d.state + (index * d.heads + head) * size;
  float* state = drafts ? out + dv : kept;  // drafts do not change the stored state
  const size_t bytes = repeat * size * sizeof(float);
  if (!usable(s, row))
    for (int64_t i = 0; i < repeat * size; i++) state[i] = NAN;
  else if (begin == 0)
    std::memset(state, 0, bytes);
  else if (drafts)
    std::memcpy(state, kept, bytes);

  std::vector<const float*> taps(d.width);
  const auto input = [&](int64_t position) {
    float* to = window + (position + d.width) % d.width * own;
    if (position < 0) return (void)std::memset(to, 0, own * sizeof(float));
    const bool old = position < start;
    const int64_t at = old ? (index * d.places + position % d.places) * channels : (token + position - start) * in.x_stride;
    for (const Part& part : parts) {
      load_rounded(k, old ? d.ring : in.x, old ? d.format : in.format, at + part.at, part.width, d.format, to);
      to += part.width;
    }
  };
  for (int64_t lag = d.width - 1; lag >= 1; lag--) input(begin - lag);
  for (int64_t i = 0; i < count; i++) {
    const int64_t position = begin + i, now = token + position - start;
    input(position);
    if (position < start)
      k.load(d.gates, d.format, (index * d.places + position % d.places) * 2 * d.heads, 2 * d.heads, ab);
    else
      load_rounded(k, in.ab, in.format, now * in.ab_stride, 2 * d.heads, d.format, ab);
    int64_t first = 0;
    for (const Part& part : parts) {
      for (int64_t lag = 0; lag < d.width; lag++)
        taps[lag] = window + (position - lag + d.width) % d.width * own + first;
      convolve(k, d, channels, part.at, part.width, taps.data(), mixed + first);
      first += part.width;
    }
    unit(mixed, dk, 1.0f / std::sqrt(float(dk)));
    unit(mixed + dk, dk, 1.0f);
    for (int64_t h = 0; h < repeat; h++) {
      const int64_t which = head + h;
      const float keep = std::exp(-d.rates[which] * softplus(ab[d.heads + which] + d.dt_bias[which]));
      const float write = 1.0f / (1.0f + std::exp(-ab[which]));
      advance(state + h * size, mixed, mixed + dk, mixed + 2 * dk + h * dv, dk, dv, keep, write, out);
      if (i >= fold) k.store(out, in.format, now * in.out_stride + which * dv, dv, in.out);
    }
    if (drafts && i + 1 == stored) std::memcpy(kept, state, bytes);
    for (int64_t which = 0; which < COPIES && i < certain; which++)
      if (s.save_at[row * COPIES + which] == position + 1)
        std::memcpy(d.state + (s.save_to[row * COPIES + which] * d.heads + head) * size, state, bytes);
  }
}

}  // namespace ISA
}  // namespace minivllm
