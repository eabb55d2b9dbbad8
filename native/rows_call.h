// The arguments of the row-wise kernels: plain pointers and sizes, not owned, and checked by the caller.
#pragma once

#include <cstdint>

#include "attention_call.h"
#include "linear_call.h"

namespace penstock {

enum class Norm : int32_t { rms = 0, layer = 1 };

// out = norm(stream + residual) * weight + bias + addend. If there is a residual, `stream + residual` is written back
// to `stream`, rounded to its element, before it is normalised; then `out` must be other memory. `addend` may be `out`.
// Without an addend `out` may be `stream`.
struct NormCall {
    int64_t rows;
    int64_t width;
    Rows stream;
    ConstRows residual;
    ConstRows weight;  // one row
    ConstRows bias;    // one row; layer_norm only
    float eps;
    Rows out;
    ConstRows addend{};  // RMS norms only: what the norm after a branch is added to
};

// Normalises queries per head, rotates them and writes them to `q_out`; normalises and rotates keys and stores them in
// the cache; stores values. Parts with null pointers are left out: `q`; `k` and `v` together; the norms; without `cos`,
// the rotation. The first `rotary_dim` elements of a head are rotated, in halves; the others are unchanged.
struct RotaryCall {
    int64_t tokens;
    ConstRows q, k, v;  // [tokens][heads][head_dim]; strides between tokens, so that all may be views of one fused row
    Rows q_out;
    KvCache cache;  // kv_heads and head_dim are always set; the rest if there is `k`
    int32_t q_heads;
    const int64_t* write_slots;  // [tokens], block * block_size + offset, all different
    const int64_t* positions;    // [tokens] rows of the tables; null: token t has row t
    const float* cos;            // [.][rotary_dim / 2]
    const float* sin;
    ConstRows q_norm, k_norm;  // [head_dim] weights of RMS norms
    float eps;
    int32_t rotary_dim = 0;  // even; 0: head_dim
};

// out[rows][width] from x[rows][width]; for activations whose names end in `_and_mul`, from x[rows][2 * width], whose
// first half gates the second.
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

// out[i] = x[i] if bit i of `allowed` is set, counting from the lowest bit of each byte; else -inf, or NaN if x[i] is
// NaN.
struct RuleOutCall {
    int64_t width;
    const float* x;
    const uint8_t* allowed;  // [divide_up(width, 8)]
    float* out;              // may be `x`
};

// Chooses a token for each row of logits [rows][vocabulary], fp32; `stride` counts floats from one row to the next.
struct SampleCall {
    int64_t rows;
    int64_t vocabulary;
    const float* logits;
    int64_t stride;
    const float* temperature;  // this and the next five: [rows]; 0 is greedy, and the four below are not read
    const int32_t* top_k;      // 0 takes all
    const double* top_p;       // 1 takes all
    const float* min_p;        // 0 takes all
    const double* uniform;     // in [0, 1)
    const uint8_t* wants_logprob;
    int64_t* tokens;  // results; meaningless in rows that failed
    float* logprobs;
    uint8_t* failed;
    double* normalizers;  // if a log probability is wanted: that of any token is its logit less this, rounded once
    float* scratch;  // [rows][vocabulary], not used if all rows are greedy
};

}  // namespace penstock
