// A model for the compiled executor: registers, caches, and a flat list of operations in the order in which they run.
// Python builds it once (bind_program.cpp) from the description that all readers share (nn/operations.py).
//
// A register is a matrix with a row for each token of a step. Register 0 is the stream of hidden states, register 1 the
// output, and inputs are other vectors that are looked up by a token's id: all are fp32 and the caller's memory. Other
// registers lie in scratch, where registers whose lifetimes do not overlap share an area. The input of a projection
// with bf16 weights is bf16, as it is multiplied. The input of any other projection is fp32; quantised weights round it
// once, to int8.
//
// Nothing here is owned. The executor knows operations, not layers: each is checked when it is added.
#pragma once

#include <cstdint>
#include <optional>
#include <variant>
#include <vector>

#include "attention_call.h"
#include "experts_call.h"
#include "layout.h"
#include "linear_call.h"
#include "recurrent_call.h"
#include "rows_call.h"

namespace penstock {

constexpr int32_t kStream = 0, kOut = 1;

struct Register {
    int64_t width;
    Element element;
    int32_t area;  // of scratch; -1 for the stream, the output and inputs
    int32_t input = -1;  // index into Step::inputs; -1 for other registers
};

// Neighbouring columns of a register.
struct Columns {
    int32_t in;
    int64_t first;
    int64_t width;
};

// Normalises each of `groups` parts of the columns separately, with the same weight.
struct NormOperation {
    Norm kind;
    Columns x, out;
    ConstRows weight, bias;  // one row; only layer norms may have a bias
    float eps;
    bool adds;  // to what `out` holds, fp32
    int64_t groups;
};

struct LinearOperation {
    Columns x, out;
    Kind kind;
    int64_t outputs, inputs;
    const uint8_t* weight;  // packed
    ConstRows bias;         // or absent
    bool adds;              // to what `out` holds
    std::optional<Activation> gate;  // out = gate(first half) * second half; or absent
};

// For each head: copies the first `passed` columns, and multiplies the others by the head's own weight.
struct ProjectHeadsOperation {
    Columns x, out;
    int32_t heads;
    int64_t passed;
    WeightStack weights;  // of all heads
};

struct ActivationOperation {
    Activation kind;
    Columns x, out;
};

// Normalises and rotates queries and keys, stores keys and values, and attends. A layer that reads another layer's
// cache has no `k` and `v` (width 0).
struct AttendOperation {
    int32_t cache;  // index into Step::caches
    int32_t q_heads, kv_heads, head_dim;
    int32_t value_dim;  // of a latent cache, whose values are a part of the keys and `v` has width 0; else 0
    Columns q, k, v;
    Columns rotated;         // receives the queries before attention; must not be `q`
    Columns out;
    ConstRows q_norm, k_norm;  // [head_dim], RMS; or absent
    float eps;
    const float* cos;  // [num_positions][rotary_dim / 2]; null: nothing is rotated
    const float* sin;
    int64_t num_positions;  // 0 without rotation
    int32_t rotary_dim;
    float scale;
    float softcap;       // 0: none
    int32_t window;      // 0: all positions
    const float* sinks;  // [q_heads], or null
    int32_t ahead;       // positions after its own that a token sees
};

// The output of each row's chosen experts.
struct ExpertsOperation {
    Columns x, logits, out;
    ExpertLayer layer;
    bool adds;  // to what `out` holds
};

// Adds x, times the sigmoid of each row's logit, to `out`.
struct GateRowsOperation {
    Columns x, logits, out;
};

// See ConvolutionCall; width 0 means no gate.
struct ConvolutionOperation {
    int32_t state;  // index into Step::states
    Columns x, gate_in, gate_out, out;
    Filter filter;
};

// See RecurrenceCall; width 0 means no `b`.
struct RecurrenceOperation {
    int32_t state;  // index into Step::states
    Columns q, k, v, a, b, out;
    Recurrence rule;
};

struct GatedNormOperation {
    Columns x, gate, out;
    GroupNorm norm;
};

// out = x * f(gate)
struct GateOperation {
    Columns x, gate, out;
    Gate kind;
};

// x is multiplied by *factor, in place.
struct ScaleOperation {
    Columns x;
    const float* factor;
};

// Columns [groups][2][dim] become [2][groups][dim], in another register.
struct RegroupOperation {
    Columns x, out;
    int64_t groups;
};

// Adds the adapters' products of x to `out`, for the tokens of a step that have an adapter.
struct AdaptOperation {
    Columns x, out;
    int32_t site;  // index into Adapter::sites
};

using Operation = std::variant<NormOperation, LinearOperation, ActivationOperation, AttendOperation, ExpertsOperation,
                               GateRowsOperation, ConvolutionOperation, RecurrenceOperation, GatedNormOperation,
                               GateOperation, ScaleOperation, RegroupOperation, ProjectHeadsOperation, AdaptOperation>;

// The part of an adapter at one projection: each `up` multiplies some columns of down(x) by its weight and adds the
// result to some columns of the projection's output. Both weights are bf16 or both f32, and so is down(x).
struct LowRank {
    struct Up {
        int64_t first, inner;     // its first column in the output, and in down(x)
        int64_t outputs, inputs;
        const uint8_t* weight;    // packed
    };

    Kind kind = Kind::f32;
    int64_t outputs = 0, inputs = 0;   // of down; without outputs nothing is added
    const uint8_t* down = nullptr;     // packed
    std::vector<Up> ups;
};

struct Adapter {
    std::vector<LowRank> sites;
};

// Tokens [first, end) of a step have this adapter.
struct AdaptedTokens {
    int64_t first, end;
    const Adapter* adapter;
};

// A recurrent state: `places` places of `numbers` numbers each.
struct State {
    float* data;
    int64_t places, numbers;
};

// Which registers each member of a team has its own copy of (team.h).
struct Sharing {
    std::vector<bool> own;  // by register
};

struct Program {
    std::vector<Register> registers;   // the first two as described above
    std::vector<int64_t> area_bytes;   // bytes of each area for one token
    std::vector<Operation> operations;
    std::vector<int64_t> layer_starts;  // the first operation of each layer, ascending

    int32_t inputs = 0;  // the number of registers that are inputs

    int64_t inner = 0;  // the widest down(x) of all admitted adapters

    std::optional<Sharing> sharing;  // how a team runs it; nothing if none can, or before all operations are added

    bool looks_ahead = false;  // whether tokens see positions after their own in any layer

    const AttendOperation* attends(size_t operation) const { return std::get_if<AttendOperation>(&operations[operation]); }
};

// What all attention operations with one window read of a position.
struct Sight {
    int32_t window;    // 0: all positions
    int64_t elements;  // of keys
};

// What a step costs, counted as in nn/cost.py: it decides how the step is divided among threads.
struct ProgramCost {
    int64_t layer_bytes = 0;  // weights of the largest layer, with all of its experts
    Kind kind = Kind::bf16;   // of that layer's first projection
    int64_t operations = 0;   // per token, two for each multiplication: projections, filters and recurrences
    int64_t state = 0;        // fp32 numbers of recurrent state that a row reads
    std::vector<Sight> sights;
};
ProgramCost program_cost(const Program& program);

// One step: ragged rows of tokens, laid end to end.
struct Step {
    int64_t tokens;
    const int64_t* positions;
    const int64_t* write_slots;
    int32_t rows;
    const int32_t* q_start;  // [rows + 1]
    const int32_t* kv_len;   // [rows]
    const int32_t* block_table;
    int64_t table_width;
    const KvCache* caches;
    const State* states;  // recurrent states, if the program has any, with their `runs`
    Runs runs;
    float* stream;     // [tokens][hidden]: the embeddings; overwritten
    const Rows* inputs;  // [tokens][.] fp32 for each of the program's inputs; overwritten
    const AdaptedTokens* adapted;  // ascending, without overlap
    int32_t adapted_count;
    Rows out;          // [tokens][hidden]
    uint8_t* scratch;  // program_scratch() bytes, 64-byte aligned; undefined before and after
    int64_t scratch_bytes;
};

}  // namespace penstock
