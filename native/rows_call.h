// What the row-wise kernels are told: plain pointers and sizes. Nothing here is owned, and the caller has checked it.
#pragma once

#include <cstdint>

#include "attention_call.h"
#include "linear_call.h"

namespace penstock {

enum class Norm : int32_t { rms = 0, layer = 1 };

// out = norm(stream + residual) * weight + bias + addend. Where there is a residual, `stream + residual` is written back
// to `stream`, rounded to its element, before it is normed; then `out` must be memory of its own. `addend` may be `out`,
// which may be `stream` where there is no addend.
struct NormCall {
    int64_t rows;
    int64_t width;
    Rows stream;
    ConstRows residual;
    ConstRows weight;  // one row
    ConstRows bias;    // one row; layer_norm only
    float eps;
    Rows out;
    ConstRows addend{};  // RMS norms only: what a norm behind a branch is added to
};

// Queries are normed per head, rotated and written to `q_out`; keys are normed, rotated and stored in the cache; values
// are stored. Parts whose pointers are null do not happen: `q`; `k` and `v` together; the norms; rotation without
// `cos`. Of each head the first `rotary_dim` elements are rotated, in halves; the others pass through.
struct RotaryCall {
    int64_t tokens;
    ConstRows q, k, v;  // [tokens][heads][head_dim]; strides between tokens, so that all may be views of one fused row
    Rows q_out;
    KvCache cache;  // kv_heads and head_dim always; the rest where there is `k`
    int32_t q_heads;
    const int64_t* write_slots;  // [tokens], block * block_size + offset, all different
    const int64_t* positions;    // [tokens] rows of the tables; null: token t has row t
    const float* cos;            // [.][rotary_dim / 2]
    const float* sin;
    ConstRows q_norm, k_norm;  // [head_dim] weights of RMS norms
    float eps;
    int32_t rotary_dim = 0;  // even; 0: head_dim
};

// out[rows][width] of x[rows][width]; of those that end in `_and_mul`: of x[rows][2 * width], whose first half gates the
// second.
struct ActivationCall {
    int64_t rows;
    int64_t width;
    ConstRows x;
    Rows out;
};

// out = factor * x
struct ScaleCall {
    int64_t rows;
    int64_t width;
    ConstRows x;
    float factor;
    Rows out;  // may be `x`
};

// out[i] = x[i] where bit i of `allowed` is set, lowest bit of a byte first; else -inf, or NaN where x[i] is.
struct RuleOutCall {
    int64_t width;
    const float* x;
    const uint8_t* allowed;  // [divide_up(width, 8)]
    float* out;              // may be `x`
};

// One token a row of logits [rows][vocabulary] fp32; `stride` counts floats from one row to the next.
struct SampleCall {
    int64_t rows;
    int64_t vocabulary;
    const float* logits;
    int64_t stride;
    const float* temperature;  // [rows] each of these; 0 is greedy, and then those below are not read
    const int32_t* top_k;      // 0 takes all
    const double* top_p;       // 1 takes all
    const float* min_p;        // 0 takes all
    const double* uniform;     // in [0, 1)
    const uint8_t* wants_logprob;
    int64_t* tokens;  // results; of no meaning in rows that failed
    float* logprobs;
    uint8_t* failed;
    double* normalizers;  // where a log probability is wanted: any token's is its logit less this, rounded once
    float* scratch;  // [rows][vocabulary], untouched where all rows are greedy
};

}  // namespace penstock
