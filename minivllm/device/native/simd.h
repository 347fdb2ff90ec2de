// Vectors of float32 in the registers of the instruction set that is compiled for.
#pragma once
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace minivllm {
namespace ISA {

#ifdef __AVX512F__
constexpr int LANES = 16;
using Vec = __m512;
using IVec = __m512i;
static inline Vec zero() { return _mm512_setzero_ps(); }
static inline Vec all(float x) { return _mm512_set1_ps(x); }
static inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
static inline void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
static inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
static inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
static inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
static inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
static inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
static inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
static inline Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
static inline Vec round(Vec a) { return _mm512_roundscale_ps(a, 0); }
static inline float sum(Vec a) { return _mm512_reduce_add_ps(a); }
static inline float largest(Vec a) { return _mm512_reduce_max_ps(a); }
static inline Vec from_int(IVec a) { return _mm512_cvtepi32_ps(a); }
static inline IVec to_int(Vec a) { return _mm512_cvtps_epi32(a); }
static inline IVec iall(int32_t x) { return _mm512_set1_epi32(x); }
static inline IVec iadd(IVec a, IVec b) { return _mm512_add_epi32(a, b); }
static inline IVec isub(IVec a, IVec b) { return _mm512_sub_epi32(a, b); }
static inline IVec imul(IVec a, IVec b) { return _mm512_mullo_epi32(a, b); }
static inline IVec ixor(IVec a, IVec b) { return _mm512_xor_si512(a, b); }
static inline IVec iand(IVec a, IVec b) { return _mm512_and_si512(a, b); }
static inline IVec ior(IVec a, IVec b) { return _mm512_or_si512(a, b); }
template <int N> static inline IVec shl(IVec a) { return _mm512_slli_epi32(a, N); }
template <int N> static inline IVec shr(IVec a) { return _mm512_srli_epi32(a, N); }
static inline IVec bits(Vec a) { return _mm512_castps_si512(a); }
static inline Vec as_float(IVec a) { return _mm512_castsi512_ps(a); }
static inline IVec lanes() { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
// a where x > y, else b
static inline Vec pick_greater(Vec x, Vec y, Vec a, Vec b) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, y, _CMP_GT_OQ), b, a);
}
static inline IVec ipick_greater(Vec x, Vec y, IVec a, IVec b) {
  return _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(x, y, _CMP_GT_OQ), b, a);
}
static inline IVec ipick_int(IVec x, IVec y, IVec a, IVec b) {
  return _mm512_mask_blend_epi32(_mm512_cmpgt_epi32_mask(x, y), b, a);
}
static inline bool any_nan(Vec x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q) != 0; }
static inline Vec load_bf16(const uint16_t* p) {
  return as_float(shl<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p))));
}
static inline Vec load_bf16_tight(const uint16_t* p) { return load_bf16(p); }
static inline Vec load_f16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
static inline Vec load_int8(const int8_t* p) {
  return from_int(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
static inline void store_bf16(uint16_t* p, IVec rounded) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(shr<16>(rounded)));
}
static inline void store_int8(int8_t* p, IVec x) { _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(x)); }
static inline void store_f16(uint16_t* p, Vec x) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
// out[i] = sum of the lanes of v[i] for i < COUNT (4, 8 or 16); the order of the additions is the same for each COUNT
template <int COUNT>
static inline void sums_of_some(const Vec* v, float* out) {
  constexpr int PAIRS = COUNT / 2, FOURS = COUNT / 4;
  Vec t[PAIRS], u[FOURS];
#pragma GCC unroll 8
  for (int i = 0; i < PAIRS; i++) t[i] = add(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
#pragma GCC unroll 4
  for (int i = 0; i < FOURS; i++) {
    __m512d a = _mm512_castps_pd(t[2 * i]), b = _mm512_castps_pd(t[2 * i + 1]);
    u[i] = add(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
  const Vec first = u[0], second = u[COUNT > 4 ? 1 : 0];
  const Vec a = add(_mm512_shuffle_f32x4(first, second, 0x88), _mm512_shuffle_f32x4(first, second, 0xdd));
  Vec b = a;
  if (COUNT == 16) {
    const Vec third = u[FOURS / 2], fourth = u[FOURS - 1];
    b = add(_mm512_shuffle_f32x4(third, fourth, 0x88), _mm512_shuffle_f32x4(third, fourth, 0xdd));
  }
  const Vec all = add(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  if (COUNT == 4)
    _mm_storeu_ps(out, _mm512_castps512_ps128(all));
  else if (COUNT == 8)
    _mm256_storeu_ps(out, _mm512_castps512_ps256(all));
  else
    store(out, all);
}
static inline void sums(const Vec* v, float* out) { sums_of_some<16>(v, out); }
// out[i] = sum of the lanes of v[i] for i < COUNT; ``out`` has room for the next multiple of LANES
template <int COUNT>
static inline void sums_of(const Vec* v, float* out) {
  constexpr int WHOLE = COUNT / LANES * LANES, REST = COUNT - WHOLE, SOME = REST > 8 ? 16 : REST > 4 ? 8 : 4;
#pragma GCC unroll 4
  for (int i = 0; i < WHOLE; i += LANES) sums(v + i, out + i);
  if (!REST) return;
  Vec part[SOME];
#pragma GCC unroll 16
  for (int i = 0; i < SOME; i++) part[i] = i < REST ? v[WHOLE + i] : zero();
  sums_of_some<SOME>(part, out + WHOLE);
}
#else
constexpr int LANES = 8;
using Vec = __m256;
using IVec = __m256i;
static inline Vec zero() { return _mm256_setzero_ps(); }
static inline Vec all(float x) { return _mm256_set1_ps(x); }
static inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
static inline void store(float* p, Vec x) { _mm256_storeu_ps(p, x); }
static inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
static inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
static inline Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
static inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
static inline Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
static inline Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
static inline Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
static inline Vec round(Vec a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static inline float sum(Vec a) {
  __m128 h = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  h = _mm_add_ps(h, _mm_movehl_ps(h, h));
  return _mm_cvtss_f32(_mm_add_ss(h, _mm_shuffle_ps(h, h, 1)));
}
static inline float largest(Vec a) {
  __m128 h = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  h = _mm_max_ps(h, _mm_movehl_ps(h, h));
  return _mm_cvtss_f32(_mm_max_ss(h, _mm_shuffle_ps(h, h, 1)));
}
static inline Vec from_int(IVec a) { return _mm256_cvtepi32_ps(a); }
static inline IVec to_int(Vec a) { return _mm256_cvtps_epi32(a); }
static inline IVec iall(int32_t x) { return _mm256_set1_epi32(x); }
static inline IVec iadd(IVec a, IVec b) { return _mm256_add_epi32(a, b); }
static inline IVec isub(IVec a, IVec b) { return _mm256_sub_epi32(a, b); }
static inline IVec imul(IVec a, IVec b) { return _mm256_mullo_epi32(a, b); }
static inline IVec ixor(IVec a, IVec b) { return _mm256_xor_si256(a, b); }
static inline IVec iand(IVec a, IVec b) { return _mm256_and_si256(a, b); }
static inline IVec ior(IVec a, IVec b) { return _mm256_or_si256(a, b); }
template <int N> static inline IVec shl(IVec a) { return _mm256_slli_epi32(a, N); }
template <int N> static inline IVec shr(IVec a) { return _mm256_srli_epi32(a, N); }
static inline IVec bits(Vec a) { return _mm256_castps_si256(a); }
static inline Vec as_float(IVec a) { return _mm256_castsi256_ps(a); }
static inline IVec lanes() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
static inline Vec pick_greater(Vec x, Vec y, Vec a, Vec b) {
  return _mm256_blendv_ps(b, a, _mm256_cmp_ps(x, y, _CMP_GT_OQ));
}
static inline IVec ipick_greater(Vec x, Vec y, IVec a, IVec b) {
  return bits(_mm256_blendv_ps(as_float(b), as_float(a), _mm256_cmp_ps(x, y, _CMP_GT_OQ)));
}
static inline IVec ipick_int(IVec x, IVec y, IVec a, IVec b) {
  return _mm256_blendv_epi8(b, a, _mm256_cmpgt_epi32(x, y));
}
static inline bool any_nan(Vec x) { return _mm256_movemask_ps(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)) != 0; }
// Of the same eight numbers of bfloat16 in both halves, four each to the upper halves of float32.
alignas(32) static const int8_t SPREAD[32] = {-1, -1, 0, 1, -1, -1, 2,  3,  -1, -1, 4,  5,  -1, -1, 6,  7,
                                              -1, -1, 8, 9, -1, -1, 10, 11, -1, -1, 12, 13, -1, -1, 14, 15};
static inline Vec load_bf16(const uint16_t* p) {
  const IVec twice = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p));
  return as_float(_mm256_shuffle_epi8(twice, *(const IVec*)SPREAD));
}
// The same without a register for SPREAD, of which compilers would make one.
static inline Vec load_bf16_tight(const uint16_t* p) {
  IVec twice = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p));
  __asm__("vpshufb %1, %0, %0" : "+x"(twice) : "m"(*(const IVec*)SPREAD));
  return as_float(twice);
}
static inline Vec load_f16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
static inline Vec load_int8(const int8_t* p) {
  return from_int(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
static inline void store_bf16(uint16_t* p, IVec rounded) {
  IVec high = shr<16>(rounded);
  _mm_storeu_si128((__m128i*)p, _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1)));
}
static inline void store_int8(int8_t* p, IVec x) {
  const __m128i half = _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(half, half));
}
static inline void store_f16(uint16_t* p, Vec x) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
// out[i] = sum of the lanes of v[i]
static inline void sums(const Vec* v, float* out) {
  Vec t[4], u[2];
  for (int i = 0; i < 4; i++) t[i] = add(_mm256_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm256_unpackhi_ps(v[2 * i], v[2 * i + 1]));
  for (int i = 0; i < 2; i++) {
    __m256d a = _mm256_castps_pd(t[2 * i]), b = _mm256_castps_pd(t[2 * i + 1]);
    u[i] = add(_mm256_castpd_ps(_mm256_unpacklo_pd(a, b)), _mm256_castpd_ps(_mm256_unpackhi_pd(a, b)));
  }
  store(out, add(_mm256_permute2f128_ps(u[0], u[1], 0x20), _mm256_permute2f128_ps(u[0], u[1], 0x31)));
}
// out[i] = sum of the lanes of v[i] for i < COUNT; ``out`` has room for the next multiple of LANES
template <int COUNT>
static inline void sums_of(const Vec* v, float* out) {
#pragma GCC unroll 4
  for (int a = 0; a < COUNT; a += LANES) {
    Vec part[LANES];
#pragma GCC unroll 8
    for (int i = 0; i < LANES; i++) part[i] = a + i < COUNT ? v[a + i] : zero();
    sums(part, out + a);
  }
}
#endif

static inline float scalar(uint32_t x) {
  float y;
  std::memcpy(&y, &x, 4);
  return y;
}
static inline uint32_t word(float x) {
  uint32_t y;
  std::memcpy(&y, &x, 4);
  return y;
}

// The numbers of the formats that need no scale, one by one and in vectors; ``tight`` needs no register beside.
struct F32Numbers {
  using T = float;
  static Vec vec(const T* p) { return load(p); }
  static Vec tight(const T* p) { return load(p); }
  static float one(const T* p) { return *p; }
};
struct Bf16Numbers {
  using T = uint16_t;
  static Vec vec(const T* p) { return load_bf16(p); }
  static Vec tight(const T* p) { return load_bf16_tight(p); }
  static float one(const T* p) { return scalar(uint32_t(*p) << 16); }
};
struct F16Numbers {
  using T = uint16_t;
  static Vec vec(const T* p) { return load_f16(p); }
  static Vec tight(const T* p) { return load_f16(p); }
  static float one(const T* p) { return _cvtsh_ss(*p); }
};
struct Int8Numbers {
  using T = int8_t;
  static Vec vec(const T* p) { return load_int8(p); }
  static Vec tight(const T* p) { return load_int8(p); }
  static float one(const T* p) { return *p; }
};

// bfloat16 of float32 bits in the upper half, rounded to nearest, ties to even.  A NaN stays one.
static inline IVec rounded_bf16(Vec x) {
  IVec b = bits(x);
  IVec r = iadd(b, iadd(iall(0x7fff), iand(shr<16>(b), iall(1))));
  IVec quiet = ior(b, iall(0x00400000));
  return ipick_int(iand(b, iall(0x7fffffff)), iall(0x7f800000), quiet, r);  // a NaN is above infinity
}
static inline uint16_t one_bf16(float x) {
  uint32_t b = word(x);
  if ((b & 0x7fffffff) > 0x7f800000) return uint16_t((b | 0x00400000) >> 16);
  return uint16_t((b + 0x7fff + ((b >> 16) & 1)) >> 16);
}

// exp(x) for x <= 88, to about 1 unit in the last place: 2^n times a polynomial of the rest on [-ln 2 / 2, ln 2 / 2]
static inline Vec exp(Vec x) {
  x = min(all(88.7f), max(all(-104.0f), x));  // the second operand is what a NaN leaves
  Vec n = round(mul(x, all(1.44269504088896341f)));
  Vec r = fma(n, all(-0.693359375f), x);
  r = fma(n, all(2.12194440e-4f), r);
  Vec p = all(1.0f / 5040);
  p = fma(p, r, all(1.0f / 720));
  p = fma(p, r, all(1.0f / 120));
  p = fma(p, r, all(1.0f / 24));
  p = fma(p, r, all(1.0f / 6));
  p = fma(p, r, all(0.5f));
  p = fma(p, r, all(1.0f));
  p = fma(p, r, all(1.0f));
  // in two factors, so that results below the smallest normal number are right too
  IVec k = to_int(n), half = isub(shr<1>(iadd(k, iall(256))), iall(128)), rest = isub(k, half);
  Vec a = as_float(shl<23>(iadd(half, iall(127)))), b = as_float(shl<23>(iadd(rest, iall(127))));
  return mul(mul(p, a), b);
}

// log(x) for normal positive x, to about 1 unit in the last place
static inline Vec log(Vec x) {
  IVec b = bits(x);
  IVec e = isub(shr<23>(b), iall(127));
  Vec m = as_float(ior(iand(b, iall(0x007fffff)), iall(0x3f800000)));  // [1, 2)
  Vec big = all(1.41421356f);
  e = ipick_greater(m, big, iadd(e, iall(1)), e);
  m = pick_greater(m, big, mul(m, all(0.5f)), m);
  Vec n = from_int(e), f = sub(m, all(1.0f)), s = mul(f, f);
  Vec p = all(7.0376836292e-2f);
  p = fma(p, f, all(-1.1514610310e-1f));
  p = fma(p, f, all(1.1676998740e-1f));
  p = fma(p, f, all(-1.2420140846e-1f));
  p = fma(p, f, all(1.4249322787e-1f));
  p = fma(p, f, all(-1.6668057665e-1f));
  p = fma(p, f, all(2.0000714765e-1f));
  p = fma(p, f, all(-2.4999993993e-1f));
  p = fma(p, f, all(3.3333331174e-1f));
  Vec y = mul(mul(p, f), s);
  y = fma(n, all(-2.12194440e-4f), y);
  y = fma(s, all(-0.5f), y);
  return fma(n, all(0.693359375f), add(f, y));
}

static inline Vec tanh(Vec x) {
  // from exp of twice the magnitude, bounded where the result is 1
  Vec a = min(all(9.5f), max(all(-9.5f), x));
  Vec e = exp(add(a, a));
  Vec y = div(sub(e, all(1.0f)), add(e, all(1.0f)));
  // near 0 the difference cancels: x - x^3 / 3 + 2 x^5 / 15
  Vec s = mul(x, x), small = mul(x, fma(s, fma(s, all(2.0f / 15), all(-1.0f / 3)), all(1.0f)));
  return pick_greater(all(0.0064f), s, small, y);
}

}  // namespace ISA
}  // namespace minivllm
