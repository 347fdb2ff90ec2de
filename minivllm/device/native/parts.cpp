// Products and layers of steps that run part by part: each call shares one of them among the threads of a team.
#include <cstdint>
#include <new>
#include <stdexcept>
#include <vector>

#include "kernels.h"
#include "recurrent.h"
#include "team.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace minivllm {
namespace {

constexpr int64_t MOST_OUTPUTS = 96;  // of a task: its weights stay in a core's cache while the rows of x pass by
constexpr int64_t TILES = 24;         // a task has a multiple of this many outputs, so tiles are whole
constexpr int64_t INPUTS = 1 << 16;   // of the rows of x that meet the weights of a task at a time: 256 KiB

// y [m, n0:n1] of a format = x [m, k] times rows [n0, n1) of the matrix.  Rows of y are ``ldy`` numbers apart.
void shared_product(int32_t isa, Team& team, const Matrix& w, const float* x, int64_t m, int64_t n0, int64_t n1, void* y,
                    int64_t format, int64_t ldy) {
  const Kernels& kernels = kernels_for(isa);
  const int64_t outputs = n1 - n0, share = outputs / (team.count() * 4) / TILES * TILES;
  const int64_t piece = share < TILES ? TILES : share > MOST_OUTPUTS ? MOST_OUTPUTS : share;
  const int64_t some = INPUTS / w.k / 4 * 4, step = some < 16 ? 16 : some;
  team.run(
      1, [&](int) { return int((outputs + piece - 1) / piece); },
      [&](int, int task, int) {
        const int64_t first = task * piece, last = first + piece < outputs ? first + piece : outputs;
        const int64_t width = last - first;
        thread_local std::vector<float> sums;
        if (format != F32 && sums.size() < size_t(step * width)) sums.resize(step * width);
        for (int64_t row = 0; row < m; row += step) {
          const int64_t rows = m - row < step ? m - row : step;
          float* const to = format == F32 ? (float*)y + row * ldy + first : sums.data();
          kernels.product(w, x + row * w.k, w.k, rows, n0 + first, n0 + last, to - n0 - first, format == F32 ? ldy : width);
          for (int64_t i = 0; i < rows && format != F32; i++)
            kernels.store(to + i * width, format, (row + i) * ldy + first, width, y);
        }
      });
}

// A layer of a step: the tokens of the rows, then the rings.
void delta_step(int32_t isa, Team& team, const DeltaLayer& d, const StateRows& s, const StepInputs& in) {
  const Kernels& kernels = kernels_for(isa);
  DeltaRow* const compute = delta_for(isa);
  const int64_t channels = 2 * d.key_heads * d.key_dim + d.heads * d.value_dim;
  const Ring rings[2] = {{d.ring, d.places, channels, d.format, in.x, in.format, in.x_stride},
                         {d.gates, d.places, 2 * d.heads, d.format, in.ab, in.format, in.ab_stride}};
  team.run(
      2, [&](int phase) { return int(phase ? 2 * s.count : s.count * d.key_heads); },
      [&](int phase, int task, int) {
        if (phase)
          keep_row(kernels, rings[task % 2], s, task / 2, d.width - 1);
        else
          compute(kernels, d, s, in, task / d.key_heads, task % d.key_heads);
      });
}

}  // namespace
}  // namespace minivllm

using minivllm::Team;

// threads for the calls below; null if there is no memory
EXPORT void* minivllm_team(int32_t threads) {
  try {
    return new Team(threads);
  } catch (const std::exception&) {
    return nullptr;
  }
}

EXPORT void minivllm_free_team(void* team) { delete (Team*)team; }

// one product by one thread: y [m, n] = x [m, k] times the matrix, plus bias
EXPORT void minivllm_product(int32_t isa, const void* matrix, const float* x, int64_t m, float* y) {
  const minivllm::Matrix& w = *(const minivllm::Matrix*)matrix;
  minivllm::kernels_for(isa).product(w, x, w.k, m, 0, w.n, y, w.n);
}

EXPORT void minivllm_shared_product(void* team, int32_t isa, const void* matrix, const float* x, int64_t m, int64_t n0,
                                    int64_t n1, void* y, int64_t format, int64_t ldy) {
  minivllm::shared_product(isa, *(Team*)team, *(const minivllm::Matrix*)matrix, x, m, n0, n1, y, format, ldy);
}

EXPORT void minivllm_delta(void* team, int32_t isa, const void* layer, const void* rows, const void* inputs) {
  minivllm::delta_step(isa, *(Team*)team, *(const minivllm::DeltaLayer*)layer, *(const minivllm::StateRows*)rows,
                       *(const minivllm::StepInputs*)inputs);
}
