// The arguments of the kernels of recurrent layers: plain pointers and sizes, not owned, and checked by the caller.
#pragma once

#include <cstdint>

#include "linear_call.h"

namespace penstock {

constexpr int32_t kMostTaps = 64;
constexpr int32_t kMostStateDim = 1024;  // of keys
constexpr int32_t kFromZero = -1;

// Which tokens of a step continue which state (kernels/state_runs.py). Run n has the tokens [starts[n],
// starts[n + 1]), maybe none; its state is read from one place and written to another or the same. A run may read what
// the run before it wrote, so runs are computed in order.
struct Runs {
    int32_t count;
    const int32_t* starts;   // [count + 1], from 0
    const int32_t* sources;  // kFromZero: a state of zeros
    const int32_t* targets;
};

// The tokens [first, first + tokens) of a step, which are the rows of a call, and the runs of the whole step.
struct Stretch {
    int64_t first, tokens;
    Runs runs;

    // Calls run(begin, end, source, target) for the part of each run in this stretch, in order; begin and end are rows
    // of the call. If a run began before the stretch, its state so far is read from its target. A run without tokens
    // belongs to the stretch that has the token before it.
    template <class Run>
    void each_run(const Run& run) const {
        for (int32_t n = 0; n < runs.count; n++) {
            const int64_t begin = runs.starts[n], end = runs.starts[n + 1], last = first + tokens;
            const int64_t from = begin < first ? first : begin, to = end < last ? end : last;
            const bool empty = begin == end && (begin == 0 ? first == 0 : first < begin && begin <= last);
            if (from < to || empty) {
                run(from - first, to - first, from == begin ? runs.sources[n] : runs.targets[n], runs.targets[n]);
            }
        }
    }
};

// One filter for each of `width` channels.
struct Filter {
    int32_t taps;  // 2 to kMostTaps
    int64_t width;
    const float* weight;  // [taps][width], the newest last
    const float* bias;    // [width], or null
    bool silu;            // whether f below is SiLU or the identity
};

// out = gate_out * f(bias + sum_l weight[l] * (gate_in * x)[t - taps + 1 + l])
struct ConvolutionCall {
    Stretch stretch;
    Filter filter;
    ConstRows x, gate_in, gate_out;  // the gates may be absent
    float* state;                    // [places][taps - 1][width], the newest inputs, gated
    Rows out;
};

// For each head of values: S = decay * S + k (outer) w, out = q S (+ skip * v), where S is [key_dim][value_dim]. For
// the delta rule, w = sigmoid(b) * (v - k (decay * S)), q and k are divided by their lengths and q by sqrt(key_dim);
// for a selective scan, w = step * v. step = softplus(a + step_bias), within limits for scans; decay = exp(-exp(a_log)
// * step).
struct Recurrence {
    bool delta;
    int32_t key_heads, value_heads, key_dim, value_dim;  // value_heads is a multiple of key_heads
    const float* a_log;                                  // [value_heads], here and below
    const float* step_bias;
    const float* skip;  // or null
    float least_step, most_step;
    bool tiled;  // value head h has key head h % key_heads; if false, h / (value_heads / key_heads)

    int64_t key_width() const { return int64_t(key_heads) * key_dim; }
    int64_t value_width() const { return int64_t(value_heads) * value_dim; }
    int64_t state_size() const { return value_width() * key_dim; }
    int64_t key_head(int64_t head) const { return tiled ? head % key_heads : head / (value_heads / key_heads); }
};

struct RecurrenceCall {
    Stretch stretch;
    Recurrence rule;
    ConstRows q, k, v, a, b;  // [tokens][heads * dim]; a and b [tokens][value_heads]; b only for the delta rule
    float* state;             // [places][value_heads][key_dim][value_dim]
    Rows out;
};

// An RMS norm of each `group` neighbouring columns: norm(x) * weight * silu(gate), or norm(x * silu(gate)) * weight.
struct GroupNorm {
    int64_t group;
    const float* weight;  // [period]: column i has weight[i % period]
    int64_t period;       // the group, or the whole width
    float eps;
    bool gate_first;
};

struct GatedNormCall {
    int64_t rows, width;
    GroupNorm norm;
    ConstRows x, gate;
    Rows out;
};

enum class Gate : int32_t { sigmoid = 0, gelu_new = 1 };

// out = x * f(gate) with f by `kind`
struct GateCall {
    int64_t rows, width;
    ConstRows x, gate;
    Rows out;
    Gate kind;
};

// Columns [groups][2][dim] become [2][groups][dim].
struct RegroupCall {
    int64_t rows, groups, dim;
    ConstRows x;
    Rows out;
};

}  // namespace penstock
