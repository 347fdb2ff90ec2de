// What a step on a CPU is computed with: one table of functions for each instruction set.
//
// Activations are float32 [rows, width], one row a token.  A weight lies as its module has it, [outputs, inputs] row by
// row, in one of the formats below, and is converted to float32 in registers: a product reads it once for all rows.
#pragma once
#include <cstdint>

namespace minivllm {

// How the numbers of a matrix, or of a KV cache, are stored.
enum Format : int64_t { F32 = 0, BF16 = 1, F16 = 2, INT8 = 3, INT4 = 4 };

// MLP activations in the order of core/interfaces/decoder.py:ACTIVATIONS, none, and that of gates.
enum Activation : int64_t { SILU = 0, GELU = 1, GELU_TANH = 2, RELU = 3, RELU2 = 4, NO_ACTIVATION = 5, SIGMOID = 6 };

// A matrix [n, k] of weights.
//   INT8  int8 [n, k],      scale f32 [n]:                     w = q * scale
//   INT4  uint8 [n, k / 2], scale f32 [n, k / group], zero likewise or null (8):  w = (q - zero) * scale
//         byte j of the 16 of block b: input 32 b + j in the low nibble, input 32 b + 16 + j in the high one
struct Matrix {
  const void* data;
  const float* scale;
  const float* zero;
  const float* bias;  // [n] or null
  int64_t format, n, k, group;
};

// Attention of KV heads [head, head + count), each with its queries, over positions [first, last] of a sequence.
struct Attention {
  const void *keys, *values;  // [blocks, block, kv_heads, dim]
  const float *key_scales, *value_scales;  // [blocks, block, kv_heads] of INT8, else null
  const int32_t* table;       // block of each block-sized piece of the sequence
  const float* sinks;         // of these queries, or null
  float* scores;              // [count * queries, room], scratch
  int64_t format, block, kv_heads, head, count, dim_qk, dim_v, queries, first, last, room;
  float scale, cap;  // cap 0: none
};

struct Kernels {
  // y[m, n0:n1] of rows [0, m): x [m, k] times the matrix, plus bias
  void (*product)(const Matrix& w, const float* x, int64_t ldx, int64_t m, int64_t n0, int64_t n1, float* y,
                  int64_t ldy);
  // x [width] -> y, RMSNorm or (centered) LayerNorm; y may be x.  bias may be null
  void (*norm)(const float* x, const float* weight, const float* bias, int64_t width, float eps, bool centered,
               float* y);
  // y += alpha * x
  void (*add)(const float* x, float alpha, int64_t width, float* y);
  // x = activation(x) in place, times up unless that is null
  void (*activate)(float* x, const float* up, int64_t width, int64_t activation);
  // rotates the first ``dim`` of a head by rows of the tables
  void (*rotate)(float* x, const float* cos, const float* sin, int64_t dim);
  // width numbers of a format to float32 and back
  void (*load)(const void* x, int64_t format, int64_t at, int64_t width, float* y);
  void (*store)(const float* x, int64_t format, int64_t at, int64_t width, void* y);
  // x [width] as int8 and its scale, the greatest magnitude / 127; see plugins/kvformat/scaled.py
  void (*quantize)(const float* x, int64_t width, int8_t* y, float* scale);
  // q [count * queries, dim_qk] -> out [count * queries, dim_v]
  void (*attend)(const Attention& a, const float* q, float* out);
  // the same for ``tokens`` tokens of a sequence, the first at position ``a.last``, each with a window of positions or
  // 0 for all; a.first, a.scores and a.room are not read.  The heads of a token are ``ldq`` and ``ldo`` numbers apart
  void (*attend_tokens)(const Attention& a, const float* q, int64_t ldq, int64_t tokens, int64_t window, float* out,
                        int64_t ldo);
  // x = cap * tanh(x / cap)
  void (*soft_cap)(float* x, float cap, int64_t width);
  // the largest, and the lowest index that has it; a NaN is the largest
  int64_t (*argmax)(const float* x, int64_t width, float* largest);
  // argmax of (x - largest) / temperature + Gumbel noise of the key (a, b); see core/worker/sampling.py:noise_bits
  int64_t (*draw)(const float* x, int64_t width, float largest, float temperature, uint32_t a, uint32_t b);
  // the sum of exp(x - largest), which is 1 / the largest probability
  float (*mass)(const float* x, int64_t width, float largest);
};

const Kernels& kernels_avx2();
const Kernels& kernels_avx512();

// The kernels of an instruction set, as ``minivllm_isa`` numbers them.
static inline const Kernels& kernels_for(int32_t isa) { return isa == 2 ? kernels_avx512() : kernels_avx2(); }

}  // namespace minivllm
