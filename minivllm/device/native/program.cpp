// A step on a CPU: the operations of a model one after another, each shared by a few threads.
//
//   forward   ids, positions ─ embed ─ [ norm ─ product ─ attend ─ product + ─ norm ─ gate ─ product + ]* ─ pick ─ norm
//   sample    hidden ─ head ─ draw ─ what is accepted goes to the columns
//
// Everything is called with numbers and addresses only; who calls keeps the memory alive (native/program.py).
#include <cpuid.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <new>
#include <vector>

#include "kernels.h"
#include "recurrent.h"
#include "team.h"

// The C ABI of the native part.  This file is compiled for any x86-64: it says what the CPU has.
#define EXPORT extern "C" __attribute__((visibility("default")))

namespace minivllm {
namespace {

// ---- a program -----------------------------------------------------------------------------------------------------

enum Kind : int64_t {
  EMBED = 0, NORM = 1, PRODUCT = 2, ATTEND = 3, ADD = 4, PICK = 5, CAP = 6, GATE = 7, DELTA = 8, CONV = 9, KEEP = 10,
  SHRINK = 11, STORE = 12
};

// Low-rank products of adapters: y[o] += h[part of o] . b[place][o], where h[part] = a[place][part] x of each token.
struct LowRank {
  const char *a, *b;      // [places, parts, rank, inputs], [places, outputs, rank]
  const int32_t* ranks;   // of the adapter in each place, ``ranks_stride`` apart; 0: the layer is not changed
  const int64_t* starts;  // [parts + 1] first outputs of the parts, and the number of outputs
  int64_t format, parts, rank, inputs, outputs, ranks_stride;
  int64_t a_place, b_place;  // bytes between places
};

// All fields are 8 bytes wide; native/program.py:Op has the same ones in the same order.
struct Op {
  int64_t kind;
  int64_t in, out;  // registers
  // a matrix, or the table of an embedding
  int64_t format, n, k, group;
  const void* data;  // STORE: memory of hidden states [n, k].  DELTA: a DeltaLayer.  CONV, KEEP: a ring of ``n`` places; a token reads ``k`` inputs.  SHRINK: a LowRank
  const float *scale, *zero, *bias;
  int64_t adds;        // PRODUCT: what it gives is added to ``out``.  NORM: x is normed, then added to ``out``
  int64_t activation;  // of the gate; without a gate of the product
  int64_t gated;
  // of the norm of ``in`` before a product, or of NORM.  GATE: of each of ``heads``
  const float *norm_weight, *norm_bias;
  int64_t centered;
  double eps;
  double alpha;  // scale of what is added, of an embedding, of logits
  double cap;    // CAP, and of the scores of ATTEND (0: none)
  // ATTEND: ``in`` is q | k | v
  int64_t heads, kv_heads, dim_qk, dim_v, rope_dim, kv_group, window;
  const float *cos, *sin, *q_norm, *k_norm, *sinks;
  double softmax_scale;
  void *keys, *values;
  float *key_scales, *value_scales;  // of INT8, else null
  int64_t kv_format;
  const float* positions;  // EMBED: learned positions [.., k]
  int64_t positions_format, first_position;
  const LowRank* low_rank;  // PRODUCT: adapters whose h is in the register ``inner``, or null
  int64_t inner;
};

// Rows of ``width`` numbers, ``stride`` apart: one a token, or a part of those of another register.
struct Register {
  float* data;
  int64_t width, stride;
};

// Columns of core/worker/state.py:DeviceState, S slots.
struct Columns {
  int32_t* tokens;  // [S, longest]
  int64_t longest;
  const int32_t* table;  // [groups, S, blocks]
  int64_t slots, blocks, block;
  uint8_t* stopped;            // [S]
  const int64_t* rope_first;   // [S] or null
  int64_t* known;              // [S]
  const int64_t *end, *min_end, *seed, *sample, *n_eos;
  const int32_t* stop_ids;  // [S, per_row]
  int64_t per_row;
  const float* temperature;  // [S], of the sampler
  const int64_t* dropped;    // [groups, S] or null: tokens that the KV cache does not hold any more
  int64_t ahead;             // the input at a position is the token so many positions later; 1 for the pairs of a head
};

constexpr int64_t MANY = 64;             // tokens of a step from which its products are cut by tokens too
constexpr int64_t INPUTS = 1 << 16;      // of the tokens that meet the weights of a task at a time: 256 KiB
constexpr int64_t TOKENS_AT_ONCE = 32;   // of a row, from which its queries share the keys and values that they read

constexpr int64_t SHRUNK_AT_ONCE = 8;    // tokens of a task of SHRINK

constexpr int64_t LOGITS = 1, DRAW = 2;  // parts of SAMPLE
constexpr int32_t EOS = 1, STOP_ID = 2, LENGTH = 4, NOT_FINITE = 8, OVERSHOOT = 16, FAILED = 32;

struct Token {
  int64_t id, position, rope, slot;
  bool nobody;  // of a row that has ended: nothing is written for it
};

struct Row {
  int64_t slot, first, count;  // its tokens [first, first + count)
};

// Hidden states of the served model that the pairs of a drafter's head read, by the places of KV group 0.
// native/program.py:HeadStates has the same fields in the same order.
struct HeadStates {
  const void* memory;  // [places, width]
  int64_t format, width;
  float *in, *out;  // [pairs, width] that FORWARD reads, [rows, width] of its results
  int64_t most;     // the last pair that a row may have
  // [S]: rows of the served model that have ended; pairs of a slot in the KV cache of the head; drafts of its newest call
  const uint8_t* stopped;
  int64_t *read, *calls;
};

// Rows of one token of a step in which the drafts of a sequence follow its newest token.
struct DraftedRows {
  int64_t rows;
  const int64_t *slots, *computed, *draft;  // as StepPlan.slots, .computed and .draft

  // the first row behind the sequence whose newest token is in row ``head``
  int64_t end(int64_t head) const {
    int64_t r = head + 1;
    while (r < rows && draft[r] > 0) r++;
    return r;
  }
};

class Program {
 public:
  Program(const Kernels& kernels, DeltaRow* delta, int threads, int64_t most_tokens, const Columns& columns)
      : k_(kernels), delta_(delta), team_(threads), c_(columns), scratch_(threads) {
    tokens_.resize(most_tokens);
  }

  void add_register(float* data, int64_t width, int64_t stride) { registers_.push_back({data, width, stride}); }
  void add_op(const Op& op, bool sampling) { (sampling ? head_ : ops_).push_back(op); }

  // the recurrent states of the rows of the next step; who calls keeps them until its end
  void set_states(const StateRows& states) { states_ = states; }

  // rows of ``slots`` with ``q_len`` tokens each, of which ``computed`` are before; the tokens ``picked`` go on at PICK
  // ``places``: of the adapter of each token, -1 for none; null if no token has one
  void forward(int64_t rows, const int64_t* slots, const int64_t* q_len, const int64_t* computed, int64_t picks,
               const int64_t* picked, const int32_t* places) {
    rows_.clear();
    int64_t t = 0;
    for (int64_t r = 0; r < rows; r++) {
      rows_.push_back({slots[r], t, q_len[r]});
      for (int64_t i = 0; i < q_len[r]; i++, t++) {
        Token& token = tokens_[t];
        token.position = computed[r] + i;
        token.rope = token.position + (c_.rope_first ? c_.rope_first[slots[r]] : 0);
        token.slot = slots[r];
        token.id = c_.tokens[slots[r] * c_.longest + token.position + c_.ahead];
        token.nobody = c_.stopped[slots[r]];
      }
    }
    picks_ = picks;
    picked_ = picked;
    adapted_ = places != nullptr;
    if (adapted_) places_.assign(places, places + t);
    bool behind = false;  // PICK
    op_tokens_.clear();
    for (const Op& op : ops_) {
      op_tokens_.push_back(behind ? picks : t);
      behind |= op.kind == PICK;
    }
    run(ops_);
  }

  // tokens, counts and flags i32 [3, rows] of rows of ``slots`` whose hidden states are in the head's register.
  // ``draft``: as StepPlan.draft, 0 for the newest token of a sequence
  void sample(int64_t rows, const int64_t* slots, const int64_t* position, const int64_t* draft, int64_t parts,
              int32_t* out) {
    op_tokens_.assign(head_.size(), rows);
    if (parts & LOGITS) run(head_);
    if (!(parts & DRAW)) return;
    const Op& last = head_.back();
    const Register& logits = registers_[last.out];
    drawn_.resize(rows);
    largest_.resize(rows);
    team_.run(1, [&](int) { return int(rows); }, [&](int, int r, int) {
      float* x = logits.data + r * logits.stride;
      const int64_t slot = slots[r];
      if (position[r] < c_.min_end[slot])
        for (int64_t i = 0; i < c_.per_row; i++) {
          const int64_t id = c_.stop_ids[slot * c_.per_row + i];
          if (id >= 0 && id < logits.width) x[id] -= INFINITY;  // a NaN stays one
        }
      drawn_[r] = k_.argmax(x, logits.width, &largest_[r]);
      const float temperature = c_.temperature ? c_.temperature[slot] : 0.0f;
      if (temperature > 0 && std::isfinite(largest_[r])) {
        uint32_t a, b;
        key(c_.seed[slot], position[r], c_.sample[slot], &a, &b);
        drawn_[r] = k_.draw(x, logits.width, largest_[r], temperature, a, b);
      }
    });
    bool ended = false;  // before the first row of the sequence
    bool holds = true;   // the drafts so far were drawn, and no token was an end
    for (int64_t r = 0; r < rows; r++) {
      if (draft[r] == 0) {
        ended = c_.stopped[slots[r]];
        holds = true;
      }
      if (!holds) {
        out[r] = int32_t(drawn_[r]);
        out[rows + r] = 0;
        out[2 * rows + r] = ended ? OVERSHOOT : 0;
        continue;
      }
      const int32_t guess = c_.tokens[slots[r] * c_.longest + position[r]];  // the draft of the next row
      accept(r, rows, slots[r], position[r], out);
      holds = out[rows + r] && !out[2 * rows + r] && guess == out[r];
    }
  }

  // draws drafts of the sequences that have rows for them, at most so many; their numbers go to ``drafted``, one for each of
  // these sequences.  The drafts of a sequence end where the probability that all are right, by the head, falls below
  // ``least``.  If the first pass has more pairs than fit, the numbers are -1, and nothing changes
  void draft(const DraftedRows& d, const HeadStates& h, float least, int32_t* drafted) {
    struct Sequence {
      int64_t slot, known, wanted, index, last;  // ``index`` in ``drafted``, ``last``: its row of h.out
      float share;                               // probability that all its drafts are right
    };
    std::vector<Sequence> live;
    int64_t t = 0, count = 0;
    for (int64_t r = 0, end; r < d.rows; r = end) {
      end = d.end(r);
      if (end == r + 1) continue;
      live.push_back({d.slots[r], d.computed[r] + 1, end - r - 1, count++, 0, 1.0f});
      const int64_t known = live.back().known, pairs = known > 2 ? known - 1 : 1;
      t += pairs - (h.read[d.slots[r]] < pairs - 1 ? h.read[d.slots[r]] : pairs - 1);
    }
    if (t > int64_t(tokens_.size())) {
      for (int64_t i = 0; i < count; i++) drafted[i] = -1;
      return;
    }
    t = 0;
    std::vector<int64_t> lengths, before, last;
    for (Sequence& q : live) {
      const int64_t pairs = q.known > 2 ? q.known - 1 : 1, done = h.read[q.slot] < pairs - 1 ? h.read[q.slot] : pairs - 1;
      for (int64_t i = done; i < pairs; i++, t++)
        k_.load(h.memory, h.format, place(q.slot, i) * h.width, h.width, h.in + t * h.width);
      lengths.push_back(pairs - done);
      before.push_back(done);
      last.push_back(t - 1);
      h.read[q.slot] = q.known - 1;
      h.calls[q.slot] = q.wanted;
      drafted[q.index] = 0;
    }
    std::vector<int64_t> slots, position, none(live.size());
    std::vector<int32_t> drawn(3 * live.size());
    for (int64_t j = 0; !live.empty(); j++) {
      const int64_t rows = live.size();
      slots.clear();
      position.clear();
      for (int64_t r = 0; r < rows; r++) {
        const Sequence& q = live[r];
        slots.push_back(q.slot);
        position.push_back(q.known + j < c_.longest - 1 ? q.known + j : c_.longest - 1);
        c_.stopped[q.slot] = h.stopped[q.slot];  // a draft ends nothing
        if (!j) continue;
        const int64_t pair = (q.known > 2 ? q.known : 2) + j - 2;
        lengths[r] = 1;
        before[r] = pair < h.most ? pair : h.most;
        last[r] = r;
        std::memcpy(h.in + r * h.width, h.out + q.last * h.width, h.width * sizeof(float));
      }
      forward(rows, slots.data(), lengths.data(), before.data(), rows, last.data(), nullptr);
      sample(rows, slots.data(), position.data(), none.data(), LOGITS | DRAW, drawn.data());
      const Register& logits = registers_[head_.back().out];
      int64_t left = 0;
      for (int64_t r = 0; r < rows; r++) {
        Sequence q = live[r];
        // without a preceding hidden state a sequence of one token has no usable draft
        if (q.known < 2) continue;
        if (least > 0) q.share /= k_.mass(logits.data + r * logits.stride, logits.width, largest_[r]);
        if (!(q.share >= least)) continue;
        c_.tokens[slots[r] * c_.longest + position[r]] = drawn[r];
        drafted[q.index]++;
        q.last = r;
        if (drafted[q.index] < q.wanted) live[left++] = q;
      }
      live.resize(left);
    }
  }

  // FORWARD of the rows, of which each sequence with drafts has the first ``drafted``; the hidden states of all go on
  void forward_drafted(const DraftedRows& d, const int32_t* drafted) {
    std::vector<int64_t> slots, lengths, before, every;
    kept_.clear();
    for (int64_t r = 0, end; r < d.rows; r = end) {
      end = d.end(r);
      const int64_t count = end > r + 1 ? 1 + *drafted++ : 1;
      slots.push_back(d.slots[r]);
      lengths.push_back(count);
      before.push_back(d.computed[r]);
      for (int64_t i = 0; i < count; i++) {
        every.push_back(every.size());
        kept_.push_back(r + i);
      }
    }
    forward(slots.size(), slots.data(), lengths.data(), before.data(), every.size(), every.data(), nullptr);
  }

  // SAMPLE of the rows that ``forward_drafted`` has computed; ``out`` i32 [3, d.rows] is 0 for other rows
  void sample_drafted(const DraftedRows& d, int32_t* out) {
    const int64_t n = kept_.size();
    std::vector<int64_t> slots, position, draft;
    std::vector<int32_t> found(3 * n);
    for (int64_t r : kept_) {
      slots.push_back(d.slots[r]);
      position.push_back(d.computed[r] + 1);
      draft.push_back(d.draft[r]);
    }
    sample(n, slots.data(), position.data(), draft.data(), LOGITS | DRAW, found.data());
    std::memset(out, 0, 3 * d.rows * sizeof(int32_t));
    for (int64_t i = 0; i < n; i++)
      for (int64_t part = 0; part < 3; part++) out[part * d.rows + kept_[i]] = found[part * n + i];
  }

  // draws ``k`` drafts of each row, in the columns at ``known`` + 0 ... k - 1 and in ``out`` i32 [k, rows].  The ``q_len``
  // pairs behind the first ``computed`` of a row are computed first; their last one follows all known tokens
  void propose(int64_t rows, int64_t k, const int64_t* slots, const int64_t* q_len, const int64_t* computed,
               const int64_t* known, const HeadStates& h, int32_t* out) {
    std::vector<int64_t> at(4 * rows, 1);  // pairs of each row, pairs before them, positions of draws, number of a draft
    std::vector<int64_t> last(rows);       // pairs whose results are used
    std::vector<uint8_t> stopped(rows);
    std::vector<int32_t> drawn(3 * rows);
    int64_t *lengths = at.data(), *before = lengths + rows, *position = before + rows, *none = position + rows;
    int64_t t = 0;
    for (int64_t r = 0; r < rows; r++) {
      for (int64_t i = 0; i < q_len[r]; i++, t++)
        k_.load(h.memory, h.format, place(slots[r], computed[r] + i) * h.width, h.width, h.in + t * h.width);
      last[r] = t - 1;
      stopped[r] = c_.stopped[slots[r]];
      none[r] = 0;
    }
    for (int64_t j = 0; j < k; j++) {
      for (int64_t r = 0; r < rows; r++) {
        const int64_t pair = (known[r] > 2 ? known[r] : 2) + j - 2, end = known[r] + j;
        before[r] = pair < h.most ? pair : h.most;
        position[r] = end < c_.longest - 1 ? end : c_.longest - 1;
        c_.stopped[slots[r]] = stopped[r];  // a draft ends nothing
        if (!j) continue;
        last[r] = r;
        std::memcpy(h.in + r * h.width, h.out + r * h.width, h.width * sizeof(float));
      }
      forward(rows, slots, j ? lengths : q_len, j ? before : computed, rows, last.data(), nullptr);
      sample(rows, slots, position, none, LOGITS | DRAW, drawn.data());
      for (int64_t r = 0; r < rows; r++) {
        out[j * rows + r] = drawn[r];
        c_.tokens[slots[r] * c_.longest + position[r]] = drawn[r];
      }
    }
  }

 private:
  // the key of a row's noise, as core/worker/sampling.py:noise_bits says
  static void key(int64_t seed, int64_t position, int64_t sample, uint32_t* a_out, uint32_t* b_out) {
    const uint32_t words[4] = {uint32_t(seed), uint32_t(uint64_t(seed) >> 32), uint32_t(position), uint32_t(sample)};
    uint32_t a = 0x9E3779B9u, b = 0;
    for (uint32_t w : words) {
      a = (a ^ w) * 0xCC9E2D51u;
      a ^= a >> 16;
      b = (b + a) * 0x1B873593u;
    }
    *a_out = a;
    *b_out = b ^ (b >> 15);
  }

  // as device/worker/step.py:accept, of rows without a token of the host
  void accept(int64_t r, int64_t rows, int64_t slot, int64_t position, int32_t* out) {
    const bool bad = !std::isfinite(largest_[r]), stopped = c_.stopped[slot];
    const int32_t token = int32_t(drawn_[r]);
    int32_t flags = 0;
    if (bad) {
      flags = NOT_FINITE;
    } else {
      if (position >= c_.min_end[slot]) {
        for (int64_t i = 0; i < c_.per_row; i++)
          if (c_.stop_ids[slot * c_.per_row + i] == token) flags |= i < c_.n_eos[slot] ? EOS : STOP_ID;
      }
      if (position + 1 >= c_.end[slot]) flags |= LENGTH;
    }
    const bool taken = !stopped && !(flags & (FAILED | NOT_FINITE));
    if (stopped) flags = OVERSHOOT;
    if (taken) {
      c_.tokens[slot * c_.longest + position] = token;
      c_.known[slot] = position + 1;
    }
    c_.stopped[slot] = stopped || flags != 0;
    out[r] = token;
    out[rows + r] = taken;
    out[2 * rows + r] = flags;
  }

  struct Scratch {
    std::vector<float> normed, scores, heads, added;
    int64_t normed_for = -1;  // the operation whose normed rows are here
  };

  // Tasks of an operation: pieces of the outputs of a product, (row, KV head) of attention, tokens of the others.
  int tasks(const Op& op, int64_t tokens) const {
    if (!tokens) return 0;
    switch (op.kind) {
      case PRODUCT: {
        const int64_t n = op.gated ? op.n / 2 : op.n;
        return int((n + piece(op, tokens) - 1) / piece(op, tokens));
      }
      case ATTEND: return int(rows_.size() * (op.kv_heads / heads_of(op)));
      case PICK: return 1;
      case SHRINK: {
        if (!adapted_) return 0;
        return int((tokens + SHRUNK_AT_ONCE - 1) / SHRUNK_AT_ONCE * ((const LowRank*)op.data)->parts);
      }
      case DELTA: return int(states_.count * ((const DeltaLayer*)op.data)->key_heads);
      case CONV:
      case KEEP: return int(states_.count);
      default: return int(tokens);
    }
  }

  // outputs of a task: a few tasks a thread, none too small to be worth a call, in multiples of what a tile has.  With
  // many tokens its weights should stay in a core's cache
  int64_t piece(const Op& op, int64_t tokens) const {
    const int64_t n = op.gated ? op.n / 2 : op.n, share = n / (team_.count() * 4);
    const int64_t least = team_.count() == 1 ? n : 24, most = tokens > MANY ? 24 * 4 : 24 * 32;
    const int64_t wanted = share < least ? least : share > most ? most : share;
    return (wanted + 23) / 24 * 24;
  }

  void run(const std::vector<Op>& ops) {
    for (auto& s : scratch_) s.normed_for = -1;
    team_.run(
        int(ops.size()), [&](int p) { return tasks(ops[p], op_tokens_[p]); },
        [&](int p, int task, int thread) { execute(ops[p], p, task, thread, op_tokens_[p]); });
  }

  void execute(const Op& op, int number, int task, int thread, int64_t tokens) {
    switch (op.kind) {
      case EMBED: return embed(op, task);
      case NORM: return norm(op, task);
      case PRODUCT: return product(op, number, task, thread, tokens);
      case ATTEND: return attend(op, task, thread);
      case ADD: return k_.add(row(op.in, task), float(op.alpha), registers_[op.in].width, row(op.out, task));
      case PICK: return pick(op);
      case SHRINK: return shrink(op, number, task, thread, tokens);
      case CAP: return k_.soft_cap(row(op.out, task), float(op.cap), registers_[op.out].width);
      case GATE: return gate(op, task);
      case DELTA: return delta(op, task);
      case CONV: return convolve(op, task);
      case KEEP: return keep_row(k_, ring(op), states_, task, op.k - 1);
      case STORE: return store(op, task);
    }
  }

  float* row(int64_t which, int64_t token) const {
    return registers_[which].data + token * registers_[which].stride;
  }

  void embed(const Op& op, int64_t t) {
    float* out = row(op.out, t);
    k_.load(op.data, op.format, tokens_[t].id * op.k, op.k, out);
    if (op.alpha != 1)
      for (int64_t i = 0; i < op.k; i++) out[i] *= float(op.alpha);
    if (op.positions) {
      float* learned = one_row(op.k);
      k_.load(op.positions, op.positions_format, (tokens_[t].position + op.first_position) * op.k, op.k, learned);
      k_.add(learned, 1.0f, op.k, out);
    }
  }

  // this thread's memory for a row
  static float* one_row(int64_t width) {
    thread_local std::vector<float> memory;
    if (memory.size() < size_t(width)) memory.resize(width);
    return memory.data();
  }

  void norm(const Op& op, int64_t t) {
    const int64_t width = registers_[op.in].width;
    if (!op.adds) return k_.norm(row(op.in, t), op.norm_weight, op.norm_bias, width, float(op.eps), op.centered, row(op.out, t));
    float* y = one_row(width);
    k_.norm(row(op.in, t), op.norm_weight, op.norm_bias, width, float(op.eps), op.centered, y);
    k_.add(y, float(op.alpha), width, row(op.out, t));
  }

  // the rows of x, normed if the operation says so; each thread norms them for itself, which costs less than to wait
  const float* input(const Op& op, int number, int thread, int64_t tokens, int64_t* stride) {
    const Register& in = registers_[op.in];
    *stride = op.norm_weight ? in.width : in.stride;
    if (!op.norm_weight) return in.data;
    Scratch& s = scratch_[thread];
    if (s.normed_for != number) {
      if (s.normed.size() < size_t(tokens * in.width)) s.normed.resize(tokens * in.width);
      for (int64_t t = 0; t < tokens; t++)
        k_.norm(row(op.in, t), op.norm_weight, op.norm_bias, in.width, float(op.eps), op.centered, s.normed.data() + t * in.width);
      s.normed_for = number;
    }
    return s.normed.data();
  }

  void product(const Op& op, int number, int64_t task, int thread, int64_t tokens) {
    int64_t ldx;
    const float* x = input(op, number, thread, tokens, &ldx);
    const int64_t n = op.gated ? op.n / 2 : op.n, size = piece(op, tokens);
    const int64_t n0 = task * size, n1 = n0 + size < n ? n0 + size : n;
    const int64_t some = INPUTS / op.k / 4 * 4, step = tokens <= MANY ? tokens : some < 16 ? 16 : some;
    for (int64_t t = 0; t < tokens; t += step)
      product_part(op, x + t * ldx, ldx, t, tokens - t < step ? tokens - t : step, n0, n1, scratch_[thread]);
  }

  // outputs [n0, n1) of tokens [first, first + tokens), whose inputs are x
  void product_part(const Op& op, const float* x, int64_t ldx, int64_t first, int64_t tokens, int64_t n0, int64_t n1,
                    Scratch& s) {
    const Matrix w = {op.data, op.scale, op.zero, op.bias, op.format, op.n, op.k, op.group};
    const Register& out = registers_[op.out];
    const int64_t n = op.gated ? op.n / 2 : op.n, width = n1 - n0;
    if (!op.gated && !op.adds && op.activation == NO_ACTIVATION && op.alpha == 1) {
      k_.product(w, x, ldx, tokens, n0, n1, row(op.out, first), out.stride);
      return expand(op, first, tokens, n0, n1, row(op.out, first), out.stride, s);
    }
    // into memory of this thread, [tokens, width] once or twice
    const int64_t need = tokens * width * (op.gated ? 2 : 1);
    if (s.heads.size() < size_t(need)) s.heads.resize(need);
    float *a = s.heads.data(), *b = a + tokens * width;
    k_.product(w, x, ldx, tokens, n0, n1, a - n0, width);
    if (op.gated) k_.product(w, x, ldx, tokens, n + n0, n + n1, b - n - n0, width);
    expand(op, first, tokens, n0, n1, a - n0, width, s);
    if (op.gated) expand(op, first, tokens, n + n0, n + n1, b - n - n0, width, s);
    for (int64_t t = 0; t < tokens; t++) {
      float* y = a + t * width;
      if (op.activation != NO_ACTIVATION) k_.activate(y, op.gated ? b + t * width : nullptr, width, op.activation);
      float* to = row(op.out, first + t) + n0;
      if (!op.adds) {
        if (op.alpha == 1)
          std::memcpy(to, y, width * sizeof(float));
        else
          for (int64_t i = 0; i < width; i++) to[i] = y[i] * float(op.alpha);
      } else {
        k_.add(y, float(op.alpha), width, to);
      }
    }
  }

  // calls run(first, end, place) for the tokens [first, end) of one place, of all adapters with a rank
  template <class Run>
  void each_adapter(const LowRank& l, int64_t first, int64_t end, const Run& run) const {
    for (int64_t t = first; t < end;) {
      const int64_t begin = t, place = places_[t];
      while (t < end && places_[t] == place) t++;
      if (place >= 0 && l.ranks[place * l.ranks_stride] > 0) run(begin, t, place);
    }
  }

  // h of one part of the layer and some tokens; it is zero behind the rank of an adapter
  void shrink(const Op& op, int number, int64_t task, int thread, int64_t tokens) {
    const LowRank& l = *(const LowRank*)op.data;
    const int64_t part = task % l.parts, first = task / l.parts * SHRUNK_AT_ONCE;
    const int64_t end = first + SHRUNK_AT_ONCE < tokens ? first + SHRUNK_AT_ONCE : tokens;
    int64_t ldx;
    const float* x = input(op, number, thread, tokens, &ldx);
    for (int64_t t = first; t < end; t++) std::memset(row(op.out, t) + part * l.rank, 0, l.rank * sizeof(float));
    each_adapter(l, first, end, [&](int64_t begin, int64_t behind, int64_t place) {
      const int64_t size = l.format == F32 ? 4 : 2;
      const char* data = l.a + place * l.a_place + part * l.rank * l.inputs * size;
      const Matrix a = {data, nullptr, nullptr, nullptr, l.format, l.rank, l.inputs, l.inputs};
      k_.product(a, x + begin * ldx, ldx, behind - begin, 0, l.ranks[place * l.ranks_stride],
                 row(op.out, begin) + part * l.rank, registers_[op.out].stride);
    });
  }

  // y[t - first, o] += h . b for outputs o of [n0, n1) and the tokens [first, first + tokens)
  void expand(const Op& op, int64_t first, int64_t tokens, int64_t n0, int64_t n1, float* y, int64_t ldy, Scratch& s) {
    if (!op.low_rank || !adapted_) return;
    const LowRank& l = *op.low_rank;
    each_adapter(l, first, first + tokens, [&](int64_t begin, int64_t behind, int64_t place) {
      const Matrix b = {l.b + place * l.b_place, nullptr, nullptr, nullptr, l.format, l.outputs, l.rank, l.rank};
      for (int64_t part = 0; part < l.parts; part++) {
        const int64_t low = l.starts[part] > n0 ? l.starts[part] : n0;
        const int64_t high = l.starts[part + 1] < n1 ? l.starts[part + 1] : n1, width = high - low;
        if (width <= 0) continue;
        if (s.added.size() < size_t((behind - begin) * width)) s.added.resize((behind - begin) * width);
        k_.product(b, row(op.inner, begin) + part * l.rank, registers_[op.inner].stride, behind - begin, low, high,
                   s.added.data() - low, width);
        for (int64_t t = begin; t < behind; t++)
          k_.add(s.added.data() + (t - begin) * width, 1.0f, width, y + (t - first) * ldy + low);
      }
    });
  }

  // KV heads of a task: all where there are rows enough for the threads, so that the cache is read as it lies
  int64_t heads_of(const Op& op) const { return int64_t(rows_.size()) >= 2 * team_.count() ? op.kv_heads : 1; }

  // of one row and some KV heads: writes keys and values of its tokens, then attends for each of them
  void attend(const Op& op, int64_t task, int thread) {
    const int64_t count = heads_of(op), tasks = op.kv_heads / count, head = task % tasks * count;
    const Row& r = rows_[task / tasks];
    const int64_t group = op.heads / op.kv_heads, block = c_.block, queries = count * group;
    const int64_t line = op.kv_group * c_.slots + r.slot, dropped = c_.dropped ? c_.dropped[line] : 0;
    const int32_t* table = c_.table + line * c_.blocks;
    const int64_t q_width = op.heads * op.dim_qk, k_width = op.kv_heads * op.dim_qk;
    const bool nobody = tokens_[r.first].nobody;
    for (int64_t t = r.first; t < r.first + r.count; t++) {
      float *x = row(op.in, t), *k = x + q_width + head * op.dim_qk;
      const float* v = x + q_width + k_width + head * op.dim_v;
      for (int64_t h = 0; h < count; h++) prepare(op, k + h * op.dim_qk, op.k_norm, t);
      for (int64_t h = 0; h < queries; h++) prepare(op, x + (head * group + h) * op.dim_qk, op.q_norm, t);
      if (nobody) continue;
      const int64_t at = tokens_[t].position - dropped, slot = int64_t(table[at / block]) * block + at % block;
      const int64_t to = slot * op.kv_heads + head;
      if (op.key_scales) {
        for (int64_t h = 0; h < count; h++) {
          k_.quantize(k + h * op.dim_qk, op.dim_qk, (int8_t*)op.keys + (to + h) * op.dim_qk, op.key_scales + to + h);
          k_.quantize(v + h * op.dim_v, op.dim_v, (int8_t*)op.values + (to + h) * op.dim_v, op.value_scales + to + h);
        }
      } else {
        k_.store(k, op.kv_format, to * op.dim_qk, count * op.dim_qk, op.keys);
        k_.store(v, op.kv_format, to * op.dim_v, count * op.dim_v, op.values);
      }
    }
    if (r.count >= TOKENS_AT_ONCE && !nobody) {
      const Attention a = {op.keys,   op.values, op.key_scales, op.value_scales, table,
                           op.sinks ? op.sinks + head * group : nullptr, nullptr, op.kv_format, block,
                           op.kv_heads, head, count, op.dim_qk, op.dim_v, group, 0, tokens_[r.first].position - dropped, 0,
                           float(op.softmax_scale), float(op.cap)};
      return k_.attend_tokens(a, row(op.in, r.first) + head * group * op.dim_qk, registers_[op.in].stride, r.count,
                              op.window, row(op.out, r.first) + head * group * op.dim_v, registers_[op.out].stride);
    }
    Scratch& s = scratch_[thread];
    for (int64_t t = r.first; t < r.first + r.count; t++) {
      float* out = row(op.out, t) + head * group * op.dim_v;
      if (nobody) {
        std::memset(out, 0, queries * op.dim_v * sizeof(float));
        continue;
      }
      const int64_t last = tokens_[t].position - dropped, low = op.window ? last + 1 - op.window : 0, first = low > 0 ? low : 0;
      const int64_t room = (last - first + 1 + 63) / 64 * 64;
      if (s.scores.size() < size_t(queries * room)) s.scores.resize(queries * room * 2);
      const Attention a = {op.keys,     op.values, op.key_scales, op.value_scales,
                           table,       op.sinks ? op.sinks + head * group : nullptr,
                           s.scores.data(),  op.kv_format, block,     op.kv_heads, head, count,
                           op.dim_qk,   op.dim_v,  group,     first,  last, room,
                           float(op.softmax_scale), float(op.cap)};
      k_.attend(a, row(op.in, t) + head * group * op.dim_qk, out);
    }
  }

  void prepare(const Op& op, float* x, const float* norm_weight, int64_t t) {
    if (norm_weight) k_.norm(x, norm_weight, nullptr, op.dim_qk, float(op.eps), false, x);
    if (op.cos) k_.rotate(x, op.cos + tokens_[t].rope * op.rope_dim, op.sin + tokens_[t].rope * op.rope_dim, op.rope_dim);
  }

  // of a token at a position of a sequence in KV group 0
  int64_t place(int64_t slot, int64_t position) const {
    return int64_t(c_.table[slot * c_.blocks + position / c_.block]) * c_.block + position % c_.block;
  }

  // the results of the token that went on as number ``i``
  void store(const Op& op, int64_t i) {
    const Token& token = tokens_[picked_[i]];
    if (!token.nobody) k_.store(row(op.in, i), op.format, place(token.slot, token.position) * op.k, op.k, (void*)op.data);
  }

  // out = activation(out) * in, of which each head is normed first if there is a weight
  void gate(const Op& op, int64_t t) {
    const int64_t width = registers_[op.out].width, dim = width / op.heads;
    float* x = row(op.in, t);
    for (int64_t h = 0; op.norm_weight && h < op.heads; h++)
      k_.norm(x + h * dim, op.norm_weight, nullptr, dim, float(op.eps), false, x + h * dim);
    k_.activate(row(op.out, t), x, width, op.activation);
  }

  void delta(const Op& op, int64_t task) {
    const DeltaLayer& d = *(const DeltaLayer*)op.data;
    const Register &x = registers_[op.in], &ab = registers_[op.n], &out = registers_[op.out];
    const StepInputs in = {x.data, ab.data, out.data, F32, x.stride, ab.stride, out.stride};
    delta_(k_, d, states_, in, task / d.key_heads, task % d.key_heads);
  }

  void convolve(const Op& op, int64_t task) {
    const Register &x = registers_[op.in], &out = registers_[op.out];
    conv_row(k_, {op.data, op.n, out.width, op.format, op.k, op.scale, op.bias, x.data, out.data, x.stride, out.stride}, states_, task);
  }

  Ring ring(const Op& op) const {
    const Register& x = registers_[op.in];
    return {(void*)op.data, op.n, x.width, op.format, x.data, F32, x.stride};
  }

  // the tokens that draw move to the front of both registers, in order
  void pick(const Op& op) {
    for (int64_t i = 0; i < picks_; i++)
      for (int64_t which : {op.in, op.out})
        if (picked_[i] != i) std::memmove(row(which, i), row(which, picked_[i]), registers_[which].width * sizeof(float));
    for (int64_t i = 0; adapted_ && i < picks_; i++) places_[i] = places_[picked_[i]];
  }

  const Kernels& k_;
  DeltaRow* const delta_;
  StateRows states_ = {};
  Team team_;
  const Columns c_;
  std::vector<Scratch> scratch_;
  std::vector<Register> registers_;
  std::vector<Op> ops_, head_;
  std::vector<int64_t> op_tokens_;
  std::vector<Token> tokens_;
  std::vector<Row> rows_;
  std::vector<int32_t> places_;  // of the adapter of each token
  bool adapted_ = false;
  std::vector<int64_t> drawn_;
  std::vector<float> largest_;
  std::vector<int64_t> kept_;  // rows of a step with drafts that FORWARD has computed
  int64_t picks_ = 0;
  const int64_t* picked_ = nullptr;
};

// ---- what the CPU has ----------------------------------------------------------------------------------------------

bool has(uint32_t flags, uint32_t wanted) { return (flags & wanted) == wanted; }

// The registers that the operating system saves when it switches threads: an instruction of others must not run.
uint32_t saved_registers() {
  uint32_t low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

// By CPUID and not __builtin_cpu_supports: of that not all compilers know f16c, and some answer no to everything.
int32_t best_isa() {
  uint32_t a = 0, b = 0, basic = 0, d = 0, more = 0, c = 0;
  if (!__get_cpuid(1, &a, &b, &basic, &d) || !__get_cpuid_count(7, 0, &a, &more, &c, &d)) return 0;
  const uint32_t fma = 1u << 12, osxsave = 1u << 27, f16c = 1u << 29;  // leaf 1, ECX
  const uint32_t avx2 = 1u << 5, bmi2 = 1u << 8;                       // leaf 7, EBX
  const uint32_t f = 1u << 16, dq = 1u << 17, bw = 1u << 30, vl = 1u << 31;
  const uint32_t ymm = 0x06, zmm = 0xe6;  // bits of XCR0
  if (!has(basic, fma | osxsave | f16c) || !has(more, avx2 | bmi2) || !has(saved_registers(), ymm)) return 0;
  return has(more, f | dq | bw | vl) && has(saved_registers(), zmm) ? 2 : 1;
}

}  // namespace
}  // namespace minivllm

using minivllm::Program;

EXPORT int32_t minivllm_abi(void) { return 9; }

// the best instruction set of this CPU that kernels.cpp is compiled for: 0 none, 1 avx2, 2 avx512
EXPORT int32_t minivllm_isa(void) { return minivllm::best_isa(); }

EXPORT int64_t minivllm_op_size(void) { return sizeof(minivllm::Op); }

// null if there is no memory for it
EXPORT void* minivllm_program(int32_t isa, int32_t threads, int64_t most_tokens, const void* columns) {
  try {
    return new Program(minivllm::kernels_for(isa), minivllm::delta_for(isa), threads, most_tokens, *(const minivllm::Columns*)columns);
  } catch (const std::exception&) {  // no memory
    return nullptr;
  }
}

EXPORT void minivllm_register(void* program, float* data, int64_t width, int64_t stride) {
  ((Program*)program)->add_register(data, width, stride);
}

EXPORT void minivllm_op(void* program, const void* op, int32_t sampling) {
  ((Program*)program)->add_op(*(const minivllm::Op*)op, sampling != 0);
}

// box: rows R, picks P, then slots R, tokens of each R, tokens before them R, and the tokens that go on P
// places: of the adapter of each token, -1 for none; or null
EXPORT void minivllm_forward(void* program, const int64_t* box, const int32_t* places) {
  const int64_t r = box[0], p = box[1];
  const int64_t* at = box + 2;
  ((Program*)program)->forward(r, at, at + r, at + 2 * r, p, at + 3 * r, places);
}

// rows: a StateRows, whose arrays are read by the next minivllm_forward
EXPORT void minivllm_states(void* program, const void* rows) {
  ((Program*)program)->set_states(*(const minivllm::StateRows*)rows);
}

// box: rows N, parts (LOGITS, DRAW), then slots N, positions N, numbers of drafts N; out i32 [3, N]
EXPORT void minivllm_sample(void* program, const int64_t* box, int32_t* out) {
  const int64_t n = box[0], *at = box + 2;
  ((Program*)program)->sample(n, at, at + n, at + 2 * n, box[1], out);
}

// box: rows N, drafts K, then slots N, pairs of each N, pairs before them N, known tokens N; states: a HeadStates;
// out i32 [K, N]
EXPORT void minivllm_propose(void* program, const int64_t* box, const void* states, int32_t* out) {
  const int64_t n = box[0], *at = box + 2;
  ((Program*)program)->propose(n, box[1], at, at + n, at + 2 * n, at + 3 * n, *(const minivllm::HeadStates*)states, out);
}

// the rows of a box of rows R, then slots R, computed tokens R and numbers of drafts R
static minivllm::DraftedRows drafted_rows(const int64_t* box) {
  const int64_t n = box[0], *at = box + 1;
  return {n, at, at + n, at + 2 * n};
}

// box: of drafted_rows; states: a HeadStates; out i32, one for each sequence with drafts
EXPORT void minivllm_draft(void* program, const int64_t* box, const void* states, double least, int32_t* out) {
  ((Program*)program)->draft(drafted_rows(box), *(const minivllm::HeadStates*)states, float(least), out);
}

// box: of drafted_rows; drafted: what minivllm_draft gave
EXPORT void minivllm_forward_drafted(void* program, const int64_t* box, const int32_t* drafted) {
  ((Program*)program)->forward_drafted(drafted_rows(box), drafted);
}

// box: of drafted_rows; out i32 [3, R]
EXPORT void minivllm_sample_drafted(void* program, const int64_t* box, int32_t* out) {
  ((Program*)program)->sample_drafted(drafted_rows(box), out);
}

EXPORT void minivllm_free(void* program) { delete (Program*)program; }
