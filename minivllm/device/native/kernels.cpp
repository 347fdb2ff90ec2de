// The kernels, compiled once for each instruction set (ISA).
#include "kernels.h"

#include <cfloat>
#include <vector>

#include "simd.h"

namespace minivllm {
namespace ISA {

// ---- products ------------------------------------------------------------------------------------------------------
//
//            k ──►
//   x  MR rows │████│            a tile: MR x NR sums, a vector each, that stay in registers
//   w  NR rows │████│            while k runs; their lanes are added at the end
//
// A row of weights is read once for MR rows of x, so the decode of a few tokens reads weights at the memory's speed.

template <class N>
struct Plain {  // F32, BF16, F16, INT8: a vector of weights is a load and a conversion
  static constexpr int STEP = LANES;
  const Matrix& w;
  const typename N::T* data;
  explicit Plain(const Matrix& w) : w(w), data((const typename N::T*)w.data) {}
  template <int NR, bool TIGHT>
  void at(int64_t n, int64_t k, Vec (*out)[NR]) const {
    for (int j = 0; j < NR; j++) {
      const auto* p = data + (n + j) * w.k + k;
      out[0][j] = TIGHT ? N::tight(p) : N::vec(p);
    }
  }
  // The rows of the next tile come while this one is multiplied: each row is too short for the CPU to guess.
  template <int NR>
  void ahead(int64_t n, int64_t k) const {
    if ((k * sizeof(typename N::T)) % 64 == 0)
      for (int j = 0; j < NR; j++) _mm_prefetch((const char*)(data + (n + NR + j) * w.k + k), _MM_HINT_T1);
  }
  float one(int64_t n, int64_t k) const { return N::one(data + n * w.k + k); }
  float finish(int64_t n) const { return w.format == INT8 ? w.scale[n] : 1.0f; }
};

struct Nibbles {  // INT4: a block of 32 inputs
  static constexpr int STEP = 32;
  const Matrix& w;
  const uint8_t* data;
  explicit Nibbles(const Matrix& w) : w(w), data((const uint8_t*)w.data) {}
  template <int NR, bool TIGHT>
  void at(int64_t n, int64_t k, Vec (*out)[NR]) const {
    for (int j = 0; j < NR; j++) {
      const int64_t g = (n + j) * (w.k / w.group) + k / w.group;
      const float scale = w.scale[g], zero = w.zero ? w.zero[g] : 8.0f;
      const __m128i bytes = _mm_loadu_si128((const __m128i*)(data + ((n + j) * w.k + k) / 2));
#ifdef __AVX512F__
      // the sixteen weights that the group can have, looked up by nibble
      const Vec values = mul(sub(from_int(lanes()), all(zero)), all(scale));
      const IVec index = _mm512_cvtepu8_epi32(bytes);
      out[0][j] = _mm512_permutexvar_ps(index, values);  // by the low four bits
      out[1][j] = _mm512_permutexvar_ps(shr<4>(index), values);
#else
      const __m128i mask = _mm_set1_epi8(15);
      const __m128i low = _mm_and_si128(bytes, mask), high = _mm_and_si128(_mm_srli_epi16(bytes, 4), mask);
      const Vec z = all(zero), s = all(scale);
      out[0][j] = mul(sub(from_int(_mm256_cvtepu8_epi32(low)), z), s);
      out[1][j] = mul(sub(from_int(_mm256_cvtepu8_epi32(_mm_srli_si128(low, 8))), z), s);
      out[2][j] = mul(sub(from_int(_mm256_cvtepu8_epi32(high)), z), s);
      out[3][j] = mul(sub(from_int(_mm256_cvtepu8_epi32(_mm_srli_si128(high, 8))), z), s);
#endif
    }
  }
  template <int NR>
  void ahead(int64_t n, int64_t k) const {
    if (k % 128 == 0)
      for (int j = 0; j < NR; j++) _mm_prefetch((const char*)(data + ((n + NR + j) * w.k + k) / 2), _MM_HINT_T1);
  }
  float one(int64_t, int64_t) const { return 0; }  // k is a multiple of 32
  float finish(int64_t) const { return 1.0f; }
};

// Rows of x, and of weights, in a tile: as many sums as there are registers for.
#ifdef __AVX512F__
constexpr int ROWS = 6;
template <int MR> constexpr int columns() { return MR <= 2 ? 8 : MR <= 4 ? 6 : 4; }
#else
constexpr int ROWS = 4;
template <int MR> constexpr int columns() { return MR == 1 ? 6 : MR == 2 ? 4 : 3; }
#endif

// FIRST: of all rows of x these are the first that meet these weights
template <class W, int MR, int NR, bool FIRST>
static inline void tile(const W& weights, const float* x, int64_t ldx, int64_t n, float* y, int64_t ldy) {
  constexpr int VECS = W::STEP / LANES, COUNT = MR * NR, PADDED = (COUNT + LANES - 1) / LANES * LANES;
  const Matrix& w = weights.w;
  Vec total[COUNT];
#pragma GCC unroll 32
  for (int i = 0; i < COUNT; i++) total[i] = zero();
  const int64_t whole = w.k / W::STEP * W::STEP;
  for (int64_t k = 0; k < whole; k += W::STEP) {
    Vec v[VECS][NR];
    weights.template at<NR, MR == ROWS>(n, k, v);
    if (FIRST) weights.template ahead<NR>(n, k);
#pragma GCC unroll 4
    for (int s = 0; s < VECS; s++)
#pragma GCC unroll 8
      for (int i = 0; i < MR; i++) {
        const Vec in = load(x + i * ldx + k + s * LANES);
#pragma GCC unroll 8
        for (int j = 0; j < NR; j++) total[i * NR + j] = fma(v[s][j], in, total[i * NR + j]);
      }
  }
  float found[PADDED];
  sums_of<COUNT>(total, found);
  if (!w.bias && w.format != INT8 && whole == w.k) {
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++) std::memcpy(y + i * ldy + n, found + i * NR, NR * sizeof(float));
    return;
  }
  for (int j = 0; j < NR; j++) {
    const float scale = weights.finish(n + j), bias = w.bias ? w.bias[n + j] : 0.0f;
    for (int i = 0; i < MR; i++) {
      float value = found[i * NR + j];
      for (int64_t k = whole; k < w.k; k++) value += weights.one(n + j, k) * x[i * ldx + k];
      y[i * ldy + n + j] = value * scale + bias;
    }
  }
}

template <class W, int MR, bool FIRST>
static void rows(const W& weights, const float* x, int64_t ldx, int64_t n0, int64_t n1, float* y, int64_t ldy) {
  constexpr int NR = columns<MR>();
  int64_t n = n0;
  for (; n + NR <= n1; n += NR) tile<W, MR, NR, FIRST>(weights, x, ldx, n, y, ldy);
  for (; n < n1; n++) tile<W, MR, 1, FIRST>(weights, x, ldx, n, y, ldy);
}

// the first m rows of x, at most ROWS
template <class W, bool FIRST>
static void few(const W& weights, const float* x, int64_t ldx, int64_t m, int64_t n0, int64_t n1, float* y,
                int64_t ldy) {
  switch (m) {
    case 1: return rows<W, 1, FIRST>(weights, x, ldx, n0, n1, y, ldy);
    case 2: return rows<W, 2, FIRST>(weights, x, ldx, n0, n1, y, ldy);
    case 3: return rows<W, 3, FIRST>(weights, x, ldx, n0, n1, y, ldy);
    case 4: return rows<W, 4, FIRST>(weights, x, ldx, n0, n1, y, ldy);
    case 5: return rows<W, ROWS < 5 ? ROWS : 5, FIRST>(weights, x, ldx, n0, n1, y, ldy);
    default: return rows<W, ROWS, FIRST>(weights, x, ldx, n0, n1, y, ldy);
  }
}

constexpr int64_t STRIP = 24;  // rows of weights that stay in a core's cache while the rows of x pass by

template <class W>
static void product_of(const Matrix& w, const float* x, int64_t ldx, int64_t m, int64_t n0, int64_t n1, float* y,
                       int64_t ldy) {
  const W weights(w);
  const int64_t tiles = (m + ROWS - 1) / ROWS, some = (m + tiles - 1) / tiles;  // rows of a tile, about the same in all
  for (int64_t a = n0; a < n1; a += STRIP) {
    const int64_t b = a + STRIP < n1 ? a + STRIP : n1;
    few<W, true>(weights, x, ldx, some, a, b, y, ldy);
    for (int64_t i = some; i < m; i += some)
      few<W, false>(weights, x + i * ldx, ldx, m - i < some ? m - i : some, a, b, y + i * ldy, ldy);
  }
}

constexpr int64_t UNPACKED_FROM = 16;  // rows of x from which it pays to store a strip of nibbles as float32

// The same product, of which a strip is converted once and not once for each tile.  The sums have the same order.
static void product_of_nibbles(const Matrix& w, const float* x, int64_t ldx, int64_t m, int64_t n0, int64_t n1, float* y,
                               int64_t ldy) {
  constexpr int VECS = Nibbles::STEP / LANES;
  thread_local std::vector<float> strip;
  if (strip.size() < size_t(STRIP * w.k)) strip.resize(STRIP * w.k);
  const Nibbles weights(w);
  for (int64_t a = n0; a < n1; a += STRIP) {
    const int64_t b = a + STRIP < n1 ? a + STRIP : n1;
    for (int64_t n = a; n < b; n++)
      for (int64_t k = 0; k < w.k; k += Nibbles::STEP) {
        Vec v[VECS][1];
        weights.at<1, false>(n, k, v);
        for (int s = 0; s < VECS; s++) store(strip.data() + (n - a) * w.k + k + s * LANES, v[s][0]);
      }
    const Matrix numbers = {strip.data(), nullptr, nullptr, w.bias ? w.bias + a : nullptr, F32, b - a, w.k, w.k};
    product_of<Plain<F32Numbers>>(numbers, x, ldx, m, 0, b - a, y + a, ldy);
  }
}

static void product(const Matrix& w, const float* x, int64_t ldx, int64_t m, int64_t n0, int64_t n1, float* y,
                    int64_t ldy) {
  switch (w.format) {
    case F32: return product_of<Plain<F32Numbers>>(w, x, ldx, m, n0, n1, y, ldy);
    case BF16: return product_of<Plain<Bf16Numbers>>(w, x, ldx, m, n0, n1, y, ldy);
    case F16: return product_of<Plain<F16Numbers>>(w, x, ldx, m, n0, n1, y, ldy);
    case INT8: return product_of<Plain<Int8Numbers>>(w, x, ldx, m, n0, n1, y, ldy);
    default: break;
  }
  if (m < UNPACKED_FROM) return product_of<Nibbles>(w, x, ldx, m, n0, n1, y, ldy);
  return product_of_nibbles(w, x, ldx, m, n0, n1, y, ldy);
}

// ---- rows of activations -------------------------------------------------------------------------------------------

static void norm(const float* x, const float* weight, const float* bias, int64_t width, float eps, bool centered,
                 float* y) {
  const int64_t whole = width / LANES * LANES;
  float mean = 0;
  if (centered) {
    Vec total = zero();
    for (int64_t i = 0; i < whole; i += LANES) total = add(total, load(x + i));
    mean = sum(total);
    for (int64_t i = whole; i < width; i++) mean += x[i];
    mean /= float(width);
  }
  Vec total = zero();
  const Vec off = all(mean);
  for (int64_t i = 0; i < whole; i += LANES) {
    const Vec v = sub(load(x + i), off);
    total = fma(v, v, total);
  }
  float squares = sum(total);
  for (int64_t i = whole; i < width; i++) squares += (x[i] - mean) * (x[i] - mean);
  const float factor = 1.0f / std::sqrt(squares / float(width) + eps);
  const Vec by = all(factor);
  for (int64_t i = 0; i < whole; i += LANES) {
    Vec v = mul(mul(sub(load(x + i), off), by), load(weight + i));
    store(y + i, bias ? add(v, load(bias + i)) : v);
  }
  for (int64_t i = whole; i < width; i++) {
    const float v = (x[i] - mean) * factor * weight[i];
    y[i] = bias ? v + bias[i] : v;
  }
}

static void add_scaled(const float* x, float alpha, int64_t width, float* y) {
  int64_t i = 0;
  for (; i + LANES <= width; i += LANES) store(y + i, add(load(y + i), mul(load(x + i), all(alpha))));
  for (; i < width; i++) y[i] += x[i] * alpha;
}

static Vec activated(Vec x, int64_t activation) {
  const Vec one = all(1.0f), half = all(0.5f), none = zero();
  switch (activation) {
    case SILU: return div(x, add(one, exp(sub(none, x))));
    case GELU_TANH: {
      const Vec cube = mul(mul(x, x), x);
      const Vec inner = mul(all(0.79788456080286536f), fma(all(0.044715f), cube, x));
      return mul(mul(half, x), add(one, tanh(inner)));
    }
    case GELU: {
      float v[LANES];
      store(v, x);
      for (int i = 0; i < LANES; i++) v[i] = 0.5f * v[i] * (1.0f + std::erf(v[i] * 0.70710678118654752f));
      return load(v);
    }
    case SIGMOID: return div(one, add(one, exp(sub(none, x))));
    case RELU: return max(none, x);
    case RELU2: {
      const Vec kept = max(none, x);
      return mul(kept, kept);
    }
    default: return x;
  }
}

static void activate(float* x, const float* up, int64_t width, int64_t activation) {
  int64_t i = 0;
  for (; i + LANES <= width; i += LANES) {
    const Vec v = activated(load(x + i), activation);
    store(x + i, up ? mul(v, load(up + i)) : v);
  }
  if (i == width) return;
  float in[LANES] = {0}, out[LANES];
  for (int64_t j = i; j < width; j++) in[j - i] = x[j];
  store(out, activated(load(in), activation));
  for (int64_t j = i; j < width; j++) x[j] = up ? out[j - i] * up[j] : out[j - i];
}

static void rotate(float* x, const float* cos, const float* sin, int64_t dim) {
  const int64_t half = dim / 2;
  int64_t i = 0;
  for (; i + LANES <= half; i += LANES) {
    const Vec a = load(x + i), b = load(x + half + i);
    store(x + i, sub(mul(a, load(cos + i)), mul(b, load(sin + i))));
    store(x + half + i, add(mul(b, load(cos + half + i)), mul(a, load(sin + half + i))));
  }
  for (; i < half; i++) {
    const float a = x[i], b = x[half + i];
    x[i] = a * cos[i] - b * sin[i];
    x[half + i] = b * cos[half + i] + a * sin[half + i];
  }
}

template <class N>
static void load_as(const void* x, int64_t at, int64_t width, float* y) {
  const typename N::T* p = (const typename N::T*)x + at;
  int64_t i = 0;
  for (; i + LANES <= width; i += LANES) store(y + i, N::vec(p + i));
  for (; i < width; i++) y[i] = N::one(p + i);
}

static void load_numbers(const void* x, int64_t format, int64_t at, int64_t width, float* y) {
  switch (format) {
    case F32: return load_as<F32Numbers>(x, at, width, y);
    case BF16: return load_as<Bf16Numbers>(x, at, width, y);
    case F16: return load_as<F16Numbers>(x, at, width, y);
    default: return load_as<Int8Numbers>(x, at, width, y);
  }
}

static void store_numbers(const float* x, int64_t format, int64_t at, int64_t width, void* y) {
  int64_t i = 0;
  if (format == F32) {
    std::memcpy((float*)y + at, x, width * sizeof(float));
  } else if (format == BF16) {
    uint16_t* p = (uint16_t*)y + at;
    for (; i + LANES <= width; i += LANES) store_bf16(p + i, rounded_bf16(load(x + i)));
    for (; i < width; i++) p[i] = one_bf16(x[i]);
  } else {
    uint16_t* p = (uint16_t*)y + at;
    for (; i + LANES <= width; i += LANES) store_f16(p + i, load(x + i));
    for (; i < width; i++) p[i] = _cvtss_sh(x[i], 0);
  }
}

static void quantize(const float* x, int64_t width, int8_t* y, float* scale) {
  Vec most = zero(), strange = zero();
  int64_t i = 0;
  for (; i + LANES <= width; i += LANES) {
    const Vec v = load(x + i);
    most = max(max(v, sub(zero(), v)), most);
    strange = add(strange, mul(v, zero()));  // a NaN or an infinity leaves a NaN
  }
  float greatest = largest(most), rest = 0;
  for (; i < width; i++) {
    greatest = std::fabs(x[i]) > greatest ? std::fabs(x[i]) : greatest;
    rest += x[i] * 0;
  }
  if (any_nan(strange) || std::isnan(rest)) {
    *scale = NAN;
    std::memset(y, 0, width);
    return;
  }
  *scale = greatest / 127.0f;
  const float by = *scale > FLT_MIN ? *scale : FLT_MIN;
  for (i = 0; i + LANES <= width; i += LANES) store_int8(y + i, to_int(div(load(x + i), all(by))));
  for (; i < width; i++) y[i] = int8_t(std::nearbyint(x[i] / by));
}

static void soft_cap(float* x, float cap, int64_t width) {
  const Vec c = all(cap);
  int64_t i = 0;
  for (; i + LANES <= width; i += LANES) store(x + i, mul(c, tanh(div(load(x + i), c))));
  for (; i < width; i++) x[i] = cap * std::tanh(x[i] / cap);
}

// ---- attention -----------------------------------------------------------------------------------------------------

// A query times LANES keys, of the first ``whole`` dimensions.
template <class N>
static inline void many_scores(const float* q, const typename N::T* keys, int64_t stride, int64_t whole, float* out) {
  Vec total[LANES];
#pragma GCC unroll 16
  for (int j = 0; j < LANES; j++) total[j] = zero();
  for (int64_t d = 0; d < whole; d += LANES) {
    const Vec in = load(q + d);
#pragma GCC unroll 16
    for (int j = 0; j < LANES; j++) total[j] = fma(N::vec(keys + j * stride + d), in, total[j]);
  }
  sums(total, out);
}

// scores[0:n] of a query and the keys of consecutive slots
template <class N>
static void scores_of(const float* q, const typename N::T* keys, int64_t stride, int64_t n, int64_t dim, float* out) {
  const int64_t whole = dim / LANES * LANES;
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) many_scores<N>(q, keys + i * stride, stride, whole, out + i);
  for (; i < n; i++) {
    Vec total = zero();
    for (int64_t d = 0; d < whole; d += LANES) total = fma(N::vec(keys + i * stride + d), load(q + d), total);
    out[i] = sum(total);
  }
  for (i = 0; i < n && whole < dim; i++)
    for (int64_t d = whole; d < dim; d++) out[i] += N::one(keys + i * stride + d) * q[d];
}

// out[0:dim] += p[0:n] times the values of consecutive slots
template <class N, int VECS>
static void weighted(const float* p, const typename N::T* values, int64_t stride, int64_t n, float* out) {
  Vec total[VECS];
#pragma GCC unroll 8
  for (int d = 0; d < VECS; d++) total[d] = load(out + d * LANES);
  for (int64_t i = 0; i < n; i++) {
    const Vec by = all(p[i]);
#pragma GCC unroll 8
    for (int d = 0; d < VECS; d++) total[d] = fma(N::vec(values + i * stride + d * LANES), by, total[d]);
  }
  for (int d = 0; d < VECS; d++) store(out + d * LANES, total[d]);
}

template <class N>
static void weighted_any(const float* p, const typename N::T* values, int64_t stride, int64_t n, int64_t dim,
                         float* out) {
  int64_t d = 0;
  for (; d + 8 * LANES <= dim; d += 8 * LANES) weighted<N, 8>(p, values + d, stride, n, out + d);
  for (; d + 4 * LANES <= dim; d += 4 * LANES) weighted<N, 4>(p, values + d, stride, n, out + d);
  for (; d + LANES <= dim; d += LANES) weighted<N, 1>(p, values + d, stride, n, out + d);
  for (; d < dim; d++)
    for (int64_t i = 0; i < n; i++) out[d] += p[i] * N::one(values + i * stride + d);
}

// Part of each of n slots comes nearer: it is too short, and too far from the next, for the CPU to guess.
template <class T>
static void come(const T* x, int64_t stride, int64_t n, int64_t dim) {
  for (int64_t i = 0; i < n; i++)
    for (int64_t d = 0; d < dim; d += 64 / int64_t(sizeof(T))) _mm_prefetch((const char*)(x + i * stride + d), _MM_HINT_T1);
}

// scores or probabilities of ``count`` slots times the scales of their heads
static void scale_by(const Attention& a, const float* scales, int64_t slot, int64_t from, int64_t count) {
  for (int64_t h = 0; h < a.count * a.queries; h++) {
    float* s = a.scores + h * a.room + from;
    const float* by = scales + slot * a.kv_heads + a.head + h / a.queries;
    for (int64_t i = 0; i < count; i++) s[i] *= by[i * a.kv_heads];
  }
}

// Scores s [n] of head ``h`` to probabilities; what lies behind them, up to a whole vector, becomes 0.
static void soften(const Attention& a, int64_t h, float* s, int64_t n) {
  for (int64_t i = n; i < (n + LANES - 1) / LANES * LANES; i++) s[i] = -INFINITY;
  Vec peak = all(-INFINITY), bad = zero();
  for (int64_t i = 0; i < n; i += LANES) {
    Vec v = mul(load(s + i), all(a.scale));
    if (a.cap != 0) v = mul(all(a.cap), tanh(div(v, all(a.cap))));
    if (i + LANES > n) {  // the padding stays out
      float tail[LANES];
      store(tail, v);
      for (int64_t j = n - i; j < LANES; j++) tail[j] = -INFINITY;
      v = load(tail);
    }
    store(s + i, v);
    peak = max(v, peak);
  }
  float most = largest(peak);
  if (a.sinks && a.sinks[h] > most) most = a.sinks[h];
  Vec total = bad;
  for (int64_t i = 0; i < n; i += LANES) {
    Vec v = exp(sub(load(s + i), all(most)));
    if (i + LANES > n) {
      float tail[LANES];
      store(tail, v);
      for (int64_t j = n - i; j < LANES; j++) tail[j] = 0;
      v = load(tail);
    }
    store(s + i, v);
    total = add(total, v);
  }
  float mass = sum(total);
  if (a.sinks) mass += std::exp(a.sinks[h] - most);
  const Vec by = all(1.0f / mass);
  for (int64_t i = 0; i < n; i += LANES) store(s + i, mul(load(s + i), by));
}

template <class N>
static void attend_as(const Attention& a, const float* q, float* out) {
  using T = typename N::T;
  const int64_t n = a.last - a.first + 1, heads = a.count * a.queries;
  const int64_t ks = a.kv_heads * a.dim_qk, vs = a.kv_heads * a.dim_v;
  const T *keys = (const T*)a.keys + a.head * a.dim_qk, *values = (const T*)a.values + a.head * a.dim_v;
  // pieces of consecutive slots, a block or a part of one
  for (int64_t at = a.first; at <= a.last;) {
    const int64_t in = at % a.block, count = a.block - in < a.last - at + 1 ? a.block - in : a.last - at + 1;
    const int64_t slot = int64_t(a.table[at / a.block]) * a.block + in;
    if (at + count <= a.last) {
      const int64_t next = int64_t(a.table[(at + count) / a.block]) * a.block, left = a.last - at - count + 1;
      come(keys + next * ks, ks, left < a.block ? left : a.block, a.count * a.dim_qk);
    }
    come(values + slot * vs, vs, count, a.count * a.dim_v);
    for (int64_t h = 0; h < heads; h++)
      scores_of<N>(q + h * a.dim_qk, keys + slot * ks + h / a.queries * a.dim_qk, ks, count, a.dim_qk,
                   a.scores + h * a.room + at - a.first);
    if (a.key_scales) scale_by(a, a.key_scales, slot, at - a.first, count);
    at += count;
  }
  for (int64_t h = 0; h < heads; h++) {
    soften(a, h, a.scores + h * a.room, n);
    std::memset(out + h * a.dim_v, 0, a.dim_v * sizeof(float));
  }
  for (int64_t at = a.first; at <= a.last;) {
    const int64_t in = at % a.block, count = a.block - in < a.last - at + 1 ? a.block - in : a.last - at + 1;
    const int64_t slot = int64_t(a.table[at / a.block]) * a.block + in;
    if (a.value_scales) scale_by(a, a.value_scales, slot, at - a.first, count);
    for (int64_t h = 0; h < heads; h++)
      weighted_any<N>(a.scores + h * a.room + at - a.first, values + slot * vs + h / a.queries * a.dim_v, vs, count,
                      a.dim_v, out + h * a.dim_v);
    at += count;
  }
}

// ---- attention of many tokens: keys and values become float32 once for a block of queries, then the tiles of products --

constexpr int64_t QUERIES = 32;  // of a block
constexpr int64_t KEYS = 48;     // that are float32 at a time, so that they stay in the first-level cache

// keys or values x [slots, kv_heads, dim] of KV head ``head`` at positions [first, first + count) as float32
template <class N>
static void gather(const Attention& a, const void* x, const float* scales, int64_t head, int64_t dim, int64_t first,
                   int64_t count, float* y) {
  for (int64_t i = 0; i < count; i++, y += dim) {
    const int64_t at = first + i, line = (int64_t(a.table[at / a.block]) * a.block + at % a.block) * a.kv_heads + head;
    load_as<N>(x, line * dim, dim, y);
    for (int64_t d = 0; scales && d < dim; d++) y[d] *= scales[line];
  }
}

// MR rows of out, VECS vectors of each, += p [MR, n] times values [n, dim]
template <int MR, int VECS>
static inline void weigh(const float* p, int64_t ldp, const float* values, int64_t dim, int64_t n, float* out) {
  Vec total[MR][VECS];
#pragma GCC unroll 4
  for (int i = 0; i < MR; i++)
#pragma GCC unroll 4
    for (int d = 0; d < VECS; d++) total[i][d] = load(out + i * dim + d * LANES);
  for (int64_t k = 0; k < n; k++) {
    Vec v[VECS];
#pragma GCC unroll 4
    for (int d = 0; d < VECS; d++) v[d] = load(values + k * dim + d * LANES);
#pragma GCC unroll 4
    for (int i = 0; i < MR; i++) {
      const Vec by = all(p[i * ldp + k]);
#pragma GCC unroll 4
      for (int d = 0; d < VECS; d++) total[i][d] = fma(v[d], by, total[i][d]);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < MR; i++)
#pragma GCC unroll 4
    for (int d = 0; d < VECS; d++) store(out + i * dim + d * LANES, total[i][d]);
}

template <int MR>
static void weigh_rows(const float* p, int64_t ldp, const float* values, int64_t dim, int64_t n, float* out) {
  int64_t d = 0;
  for (; d + 2 * LANES <= dim; d += 2 * LANES) weigh<MR, 2>(p, ldp, values + d, dim, n, out + d);
  for (; d + LANES <= dim; d += LANES) weigh<MR, 1>(p, ldp, values + d, dim, n, out + d);
  for (; d < dim; d++)
    for (int64_t i = 0; i < MR; i++)
      for (int64_t k = 0; k < n; k++) out[i * dim + d] += p[i * ldp + k] * values[k * dim + d];
}

struct QueryBlock {
  std::vector<float> q, out, scores, numbers;
  void fit(const Attention& a, int64_t rows, int64_t room) {
    const int64_t dim = a.dim_qk > a.dim_v ? a.dim_qk : a.dim_v;
    if (q.size() < size_t(rows * a.dim_qk)) q.resize(rows * a.dim_qk);
    if (out.size() < size_t(rows * a.dim_v)) out.resize(rows * a.dim_v);
    if (scores.size() < size_t(rows * room)) scores.resize(rows * room);
    if (numbers.size() < size_t(KEYS * dim)) numbers.resize(KEYS * dim);
  }
};

// tokens [t, t + count) of KV head ``h`` of the task
template <class N>
static void attend_block(const Attention& a, int64_t h, const float* q, int64_t ldq, int64_t t, int64_t count,
                         int64_t window, float* out, int64_t ldo) {
  thread_local QueryBlock block;
  const int64_t head = a.head + h, group = a.queries, rows = count * group, last = a.last + t + count - 1;
  const int64_t low = window ? a.last + t + 1 - window : 0, first = low > 0 ? low : 0, n = last - first + 1;
  const int64_t room = (n + LANES + 63) / 64 * 64;
  block.fit(a, rows, room);
  float *scores = block.scores.data(), *numbers = block.numbers.data(), *sums = block.out.data();
  for (int64_t r = 0; r < rows; r++)
    std::memcpy(block.q.data() + r * a.dim_qk, q + (t + r / group) * ldq + (h * group + r % group) * a.dim_qk,
                a.dim_qk * sizeof(float));
  for (int64_t k = 0; k < n; k += KEYS) {
    const int64_t some = n - k < KEYS ? n - k : KEYS;
    gather<N>(a, a.keys, a.key_scales, head, a.dim_qk, first + k, some, numbers);
    const Matrix w = {numbers, nullptr, nullptr, nullptr, F32, some, a.dim_qk, a.dim_qk};
    product_of<Plain<F32Numbers>>(w, block.q.data(), a.dim_qk, rows, 0, some, scores + k, room);
  }
  for (int64_t r = 0; r < rows; r++) {
    float* s = scores + r * room;
    const int64_t own = a.last + t + r / group, from = window && own + 1 > window ? own + 1 - window : 0;
    const int64_t before = from - first, seen = own - from + 1;
    soften(a, h * group + r % group, s + before, seen);
    for (int64_t k = 0; k < before; k++) s[k] = 0;
    for (int64_t k = before + seen; k < n; k++) s[k] = 0;
  }
  std::memset(sums, 0, rows * a.dim_v * sizeof(float));
  for (int64_t k = 0; k < n; k += KEYS) {
    const int64_t some = n - k < KEYS ? n - k : KEYS;
    gather<N>(a, a.values, a.value_scales, head, a.dim_v, first + k, some, numbers);
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) weigh_rows<4>(scores + r * room + k, room, numbers, a.dim_v, some, sums + r * a.dim_v);
    for (; r < rows; r++) weigh_rows<1>(scores + r * room + k, room, numbers, a.dim_v, some, sums + r * a.dim_v);
  }
  for (int64_t r = 0; r < rows; r++)
    std::memcpy(out + (t + r / group) * ldo + (h * group + r % group) * a.dim_v, sums + r * a.dim_v,
                a.dim_v * sizeof(float));
}

template <class N>
static void attend_tokens_as(const Attention& a, const float* q, int64_t ldq, int64_t tokens, int64_t window, float* out,
                             int64_t ldo) {
  const int64_t some = QUERIES / a.queries > 1 ? QUERIES / a.queries : 1;
  for (int64_t h = 0; h < a.count; h++)
    for (int64_t t = 0; t < tokens; t += some)
      attend_block<N>(a, h, q, ldq, t, tokens - t < some ? tokens - t : some, window, out, ldo);
}

static void attend_tokens(const Attention& a, const float* q, int64_t ldq, int64_t tokens, int64_t window, float* out,
                          int64_t ldo) {
  switch (a.format) {
    case F32: return attend_tokens_as<F32Numbers>(a, q, ldq, tokens, window, out, ldo);
    case BF16: return attend_tokens_as<Bf16Numbers>(a, q, ldq, tokens, window, out, ldo);
    case INT8: return attend_tokens_as<Int8Numbers>(a, q, ldq, tokens, window, out, ldo);
    default: return attend_tokens_as<F16Numbers>(a, q, ldq, tokens, window, out, ldo);
  }
}

static void attend(const Attention& a, const float* q, float* out) {
  switch (a.format) {
    case F32: return attend_as<F32Numbers>(a, q, out);
    case BF16: return attend_as<Bf16Numbers>(a, q, out);
    case INT8: return attend_as<Int8Numbers>(a, q, out);
    default: return attend_as<F16Numbers>(a, q, out);
  }
}

// ---- draws ---------------------------------------------------------------------------------------------------------

// the lowest index of the largest value, given each lane's largest and its first vector
static int64_t first_best(const float* best, const int32_t* index, float* largest) {
  int at = 0;
  for (int i = 1; i < LANES; i++)
    if (best[i] > best[at] || (best[i] == best[at] && index[i] < index[at])) at = i;
  *largest = best[at];
  return index[at];
}

static int64_t argmax(const float* x, int64_t width, float* largest) {
  Vec best = all(-INFINITY), nan = zero();
  IVec at = iall(0), now = lanes();
  int64_t i = 0;
  for (; i + LANES <= width; i += LANES) {
    const Vec v = load(x + i);
    nan = add(nan, mul(v, zero()));  // a NaN or an infinity leaves a NaN
    at = ipick_greater(v, best, now, at);
    best = pick_greater(v, best, v, best);
    now = iadd(now, iall(LANES));
  }
  float found[LANES];
  int32_t index[LANES];
  store(found, best);
  std::memcpy(index, &at, sizeof index);
  int64_t chosen = first_best(found, index, largest);
  for (; i < width; i++)
    if (x[i] > *largest) chosen = i, *largest = x[i];
  if (any_nan(nan) || width % LANES)  // rare, or few: look for a NaN one by one
    for (int64_t j = any_nan(nan) ? 0 : width - width % LANES; j < width; j++)
      if (std::isnan(x[j])) {
        *largest = NAN;
        return j;
      }
  return chosen;
}

static IVec noise_bits(IVec lane, uint32_t a, uint32_t b) {
  IVec x = imul(lane, iall(int32_t(0x9E3779B9u)));
  x = ixor(x, shr<15>(x));
  x = ixor(x, iall(int32_t(a)));
  x = ixor(x, shr<16>(x));
  x = iadd(imul(x, iall(int32_t(0x7FEB352Du))), iall(int32_t(b)));
  x = ixor(x, shr<15>(x));
  x = imul(x, iall(int32_t(0x846CA68Bu)));
  return ixor(x, shr<16>(x));
}

// log1p(-u) for u in (0, 1): log of the rounded difference, and what the rounding lost
static Vec log_of_rest(Vec u) {
  const Vec y = sub(all(1.0f), u);
  const Vec lost = div(sub(sub(all(1.0f), y), u), y);
  // where u is small the logarithm is -u - u^2 / 2 - u^3 / 3
  const Vec series = mul(u, fma(u, fma(u, all(-1.0f / 3), all(-0.5f)), all(-1.0f)));
  return pick_greater(all(0.005f), u, series, add(log(y), lost));
}

static int64_t draw(const float* x, int64_t width, float largest, float temperature, uint32_t a, uint32_t b) {
  Vec best = all(-INFINITY);
  IVec at = iall(0), now = lanes();
  for (int64_t i = 0; i < width; i += LANES) {
    float tail[LANES];
    const float* p = x + i;
    if (i + LANES > width) {
      for (int64_t j = 0; j < LANES; j++) tail[j] = i + j < width ? p[j] : -INFINITY;
      p = tail;
    }
    Vec u = from_int(iand(noise_bits(now, a, b), iall(0x7fffffff)));
    u = min(mul(add(u, all(0.5f)), all(0x1p-31f)), all(1.0f - 0x1p-24f));
    const Vec gumbel = sub(zero(), log(sub(zero(), log_of_rest(u))));
    const Vec v = add(div(sub(load(p), all(largest)), all(temperature)), gumbel);
    at = ipick_greater(v, best, now, at);
    best = pick_greater(v, best, v, best);
    now = iadd(now, iall(LANES));
  }
  float found[LANES], most;
  int32_t index[LANES];
  store(found, best);
  std::memcpy(index, &at, sizeof index);
  return first_best(found, index, &most);
}

static float mass(const float* x, int64_t width, float largest) {
  Vec total = zero();
  int64_t i = 0;
  for (; i + LANES <= width; i += LANES) total = add(total, exp(sub(load(x + i), all(largest))));
  float found = sum(total);
  for (; i < width; i++) found += std::exp(x[i] - largest);
  return found;
}

}  // namespace ISA

#define NAME_OF(isa) kernels_##isa
#define NAMED(isa) NAME_OF(isa)
const Kernels& NAMED(ISA)() {
  using namespace ISA;
  static const Kernels table = {product,      norm,          add_scaled, activate, rotate, load_numbers,
                                store_numbers, quantize,      attend,        attend_tokens, soft_cap, argmax,   draw, mass};
  return table;
}

}  // namespace minivllm
