// The rings of recurrent states, which hold the newest inputs of each row, and the layers that have nothing else.
#include <cmath>
#include <cstring>
#include <vector>

#include "recurrent.h"

namespace minivllm {

// Bytes of a number of a ring.
static int64_t bytes_of(int64_t format) { return format == F32 ? 4 : 2; }

void conv_row(const Kernels& k, const ShortConvolution& c, const StateRows& s, int64_t row) {
  const int64_t index = s.rows[row], start = s.start[row], token = s.cu_q[row], n = s.cu_q[row + 1] - token;
  const int64_t width = c.channels, bytes = width * bytes_of(c.format);
  thread_local std::vector<float> memory;
  if (memory.size() < size_t(3 * width)) memory.resize(3 * width);
  float *total = memory.data(), *old = total + width, *rounded = old + width;
  for (int64_t i = 0; i < n; i++) {
    float* x = c.inputs + (token + i) * c.stride;
    for (int64_t j = 0; j < width; j++) x[2 * width + j] *= x[j];
    k.store(x + 2 * width, c.format, 0, width, rounded);
    k.load(rounded, c.format, 0, width, x + 2 * width);
  }
  for (int64_t i = 0; i < n; i++) {
    const float* x = c.inputs + (token + i) * c.stride;
    for (int64_t j = 0; j < width; j++) total[j] = c.bias ? c.bias[j] : 0.0f;
    for (int64_t lag = 0; lag < c.width && lag <= start + i; lag++) {
      const float *weight = c.weight + lag * width, *in = x - lag * c.stride + 2 * width;
      if (lag > i) {
        k.load((const char*)c.ring + (index * c.places + (start + i - lag) % c.places) * bytes, c.format, 0, width, old);
        in = old;
      }
      for (int64_t j = 0; j < width; j++) total[j] += in[j] * weight[j];
    }
    float* out = c.out + (token + i) * c.out_stride;
    for (int64_t j = 0; j < width; j++) out[j] = usable(s, row) ? x[width + j] * total[j] : NAN;
  }
}

void keep_row(const Kernels& k, const Ring& ring, const StateRows& s, int64_t row, int64_t taps) {
  const int64_t index = s.rows[row], start = s.start[row], token = s.cu_q[row], n = s.cu_q[row + 1] - token;
  const int64_t begin = start - folded(s, row);
  const int64_t certain = s.drafts[row] ? (n < 1 ? n : 1) : n;
  const int64_t bytes = ring.width * bytes_of(ring.format);
  thread_local std::vector<float> wide;
  if (wide.size() < size_t(ring.width)) wide.resize(ring.width);
  const auto place = [&](int64_t state, int64_t position) {
    return (char*)ring.data + (state * ring.places + position % ring.places) * bytes;
  };
  const auto put = [&](int64_t position, char* to) {
    k.load(ring.inputs, ring.input_format, (token + position - start) * ring.stride, ring.width, wide.data());
    k.store(wide.data(), ring.format, 0, ring.width, to);
  };
  for (int64_t which = 0; which < COPIES; which++) {
    const int64_t at = s.save_at[row * COPIES + which], to = s.save_to[row * COPIES + which];
    if (at <= begin || at > start + certain) continue;
    for (int64_t p = at > taps ? at - taps : 0; p < at; p++) {
      if (p >= start)
        put(p, place(to, p));
      else
        std::memcpy(place(to, p), place(index, p), bytes);
    }
  }
  for (int64_t i = n > ring.places ? n - ring.places : 0; i < n; i++) put(start + i, place(index, start + i));
}

}  // namespace minivllm
