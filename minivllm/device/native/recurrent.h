// Layers with a recurrent state: what a step reads and writes of them.
//
// Reference: device/layers/delta_net.py:scan and core/interfaces/states.py, whose names these structs have.
#pragma once
#include <cstdint>

#include "kernels.h"

namespace minivllm {

constexpr int64_t COPIES = 2;  // core/interfaces/states.py:COPIES

// core/interfaces/states.py:StepStates of ``count`` rows.
struct StateRows {
  int64_t count;
  const int64_t* rows;
  const int32_t *start, *behind, *cu_q;
  const uint8_t* drafts;
  const int32_t* save_at;  // [count, COPIES]
  const int64_t* save_to;  // [count, COPIES]
};

// Whether a state is one of the row, and the tokens before the row's first one that it lacks.
//
// All rows that have ended share the null state.  Threads may write it at the same time, because no other row reads it.
static inline bool usable(const StateRows& s, int64_t row) { return s.behind[row] >= 0 && s.behind[row] <= s.start[row]; }
static inline int64_t folded(const StateRows& s, int64_t row) { return usable(s, row) ? s.behind[row] : 0; }

// The weights and the memory of a gated delta net.  ``format`` is that of the rings.
struct DeltaLayer {
  int64_t key_heads, heads, key_dim, value_dim, width, places, format;
  const float* conv;             // [width, channels], the newest input first
  const float *rates, *dt_bias;  // [heads]
  float* state;                  // [states, heads, key_dim, value_dim]
  void* ring;                    // [states, places, channels]
  void* gates;                   // [states, places, 2 * heads]
};

// The inputs and outputs of a step, numbers of ``format``.  Strides are numbers between two tokens.
struct StepInputs {
  const void *x, *ab;
  void* out;
  int64_t format, x_stride, ab_stride, out_stride;
};

// A ring of the newest inputs [states, places, width], and the inputs of a step that go there.
struct Ring {
  void* data;
  int64_t places, width, format;
  const void* inputs;
  int64_t input_format, stride;
};

// Compute the tokens of row ``row`` for key head ``key`` and its value heads: outputs, states and copies of states.
// It reads the rings and does not write them.
using DeltaRow = void(const Kernels& k, const DeltaLayer& d, const StateRows& s, const StepInputs& in, int64_t row,
                      int64_t key);

namespace avx2 {
DeltaRow delta_row;
}
namespace avx512 {
DeltaRow delta_row;
}
static inline DeltaRow* delta_for(int32_t isa) { return isa == 2 ? avx512::delta_row : avx2::delta_row; }

// Compute the tokens of a row of a gated short convolution (device/layers/short_conv.py), which end in ``out``.
//
// An input is b | c | x in float32.  Then x becomes b * x, as the ring of ``places`` states stores it.  ``weight``
// [width, channels] has the newest input first, ``bias`` is null or [channels].
struct ShortConvolution {
  const void* ring;  // [states, places, channels]
  int64_t places, channels, format, width;
  const float *weight, *bias;
  float *inputs, *out;
  int64_t stride, out_stride;
};
void conv_row(const Kernels& k, const ShortConvolution& c, const StateRows& s, int64_t row);

// Store the newest inputs of a row in its ring, and the ``taps`` inputs before each copy of a state in the copy's.
void keep_row(const Kernels& k, const Ring& ring, const StateRows& s, int64_t row, int64_t taps);

}  // namespace minivllm
