// A model as the compiled executor sees it: registers, caches, and a flat list of operations in the order in which they
// run. Made once from Python (bind_program.cpp), which describes a model in one way for every reader (nn/operations.py).
//
// A register is a matrix with a row for each token of a step. Register 0 is the stream of hidden states: fp32, and the
// caller's memory, as is register 1, what comes out. So are inputs, fp32: what else is looked up by a token's id. All
// others lie in scratch; registers whose lives do not overlap share an area of it. What goes into a projection with bf16 weights is bf16: so it is multiplied. What goes into
// another one is fp32; a quantised weight rounds it once, to int8.
//
// Nothing here is owned. No shape of layer is known: operations are checked one by one when they are added.
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
    int32_t area;  // of scratch; -1 for the stream, what comes out and inputs
    int32_t input = -1;  // index into Step::inputs; -1 for all but inputs
};

// Neighbouring columns of a register.
struct Columns {
    int32_t in;
    int64_t first;
    int64_t width;
};

// Of `groups` parts of the columns, each by itself and with the same weight.
struct NormOperation {
    Norm kind;
    Columns x, out;
    ConstRows weight, bias;  // one row; the bias of layer norms only, or absent
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

// Of each head, the first `passed` columns as they are, then what its own weight makes of the others.
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

// Norms and rotates queries and keys, stores keys and values, and attends. A layer that reads another one's cache has
// no `k` and `v` (width 0).
struct AttendOperation {
    int32_t cache;  // index into Step::caches
    int32_t q_heads, kv_heads, head_dim;
    int32_t value_dim;  // of a latent cache, where values are a part of the keys and `v` has no width; else 0
    Columns q, k, v;
    Columns rotated;         // where queries go before they attend; may not be `q`
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

// What the chosen experts of each row make of it.
struct ExpertsOperation {
    Columns x, logits, out;
    ExpertLayer layer;
    bool adds;  // to what `out` holds
};

// Adds x, weighted by the sigmoid of each row's logit, to what `out` holds.
struct GateRowsOperation {
    Columns x, logits, out;
};

// See ConvolutionCall; a gate of width 0 is absent.
struct ConvolutionOperation {
    int32_t state;  // index into Step::states
    Columns x, gate_in, gate_out, out;
    Filter filter;
};

// See RecurrenceCall; `b` of width 0 is absent.
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

// Adds to `out` what adapters make of x, of those tokens of a step that have one.
struct AdaptOperation {
    Columns x, out;
    int32_t site;  // index into Adapter::sites
};

using Operation = std::variant<NormOperation, LinearOperation, ActivationOperation, AttendOperation, ExpertsOperation,
                               GateRowsOperation, ConvolutionOperation, RecurrenceOperation, GatedNormOperation,
                               GateOperation, ScaleOperation, RegroupOperation, ProjectHeadsOperation, AdaptOperation>;

// What an adapter adds to one projection: of each `up`, its weight times some columns of down(x), to columns of what
// the projection writes. Both weights are bf16 or both f32, and so are the numbers between them.
struct LowRank {
    struct Up {
        int64_t first, inner;     // the first of its columns in the result, and in down(x)
        int64_t outputs, inputs;
        const uint8_t* weight;    // packed
    };

    Kind kind = Kind::f32;
    int64_t outputs = 0, inputs = 0;   // of down; no outputs: nothing is added
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

// A recurrent state: `places` of `numbers` each.
struct State {
    float* data;
    int64_t places, numbers;
};

// Which registers each member of a team has for itself (team.h).
struct Sharing {
    std::vector<bool> own;  // by register
};

struct Program {
    std::vector<Register> registers;   // the first two as said above
    std::vector<int64_t> area_bytes;   // of each area, for one token
    std::vector<Operation> operations;
    std::vector<int64_t> layer_starts;  // operations with which layers begin, ascending

    int32_t inputs = 0;  // registers that are inputs

    int64_t inner = 0;  // the widest down(x) of the adapters that it was shown

    std::optional<Sharing> sharing;  // how a team goes through it; nothing if none can, or before all is added

    bool looks_ahead = false;  // whether a token sees positions after its own anywhere

    const AttendOperation* attends(size_t operation) const { return std::get_if<AttendOperation>(&operations[operation]); }
};

// What all attention with one window reads of a position that a token sees.
struct Sight {
    int32_t window;    // 0: all positions
    int64_t elements;  // of keys
};

// What a step costs, as nn/cost.py counts it: what decides how the step is shared out.
struct ProgramCost {
    int64_t layer_bytes = 0;  // weights of the layer that has most of them, with all of its experts
    Kind kind = Kind::bf16;   // of that layer's first projection
    int64_t operations = 0;   // for a token, two for each multiplication: projections, filters and recurrences
    int64_t state = 0;        // numbers of recurrent state that a row reads, fp32
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
    const State* states;  // of a program that carries any; whose runs are `runs`
    Runs runs;
    float* stream;     // [tokens][hidden]: the embeddings; used up
    const Rows* inputs;  // [tokens][.] fp32 each, of the program's inputs; used up
    const AdaptedTokens* adapted;  // ascending, apart from each other
    int32_t adapted_count;
    Rows out;          // [tokens][hidden]
    uint8_t* scratch;  // program_scratch() bytes, 64-byte aligned; undefined before and after
    int64_t scratch_bytes;
};

}  // namespace penstock
