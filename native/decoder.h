// The whole forward of a decoder (nn/decoder.py, models/gpt2.py) as one call: the kernels in the order in which Python
// would call them, without the way through Python between them, which costs as much as a small kernel. Which kernels
// these are, where families differ, is data of the plan.
//
// The stream of hidden states stays fp32 from the embedding to the last norm; so does what passes between projections,
// but for those with bf16 weights, which are met by bf16. Nothing is owned, nothing is allocated, and the caller has
// checked everything.
#pragma once

#include <cstdint>
#include <vector>

#include "attention_call.h"
#include "kernel_table.h"
#include "layout.h"
#include "linear_call.h"

namespace penstock {

class Pool;

struct Projection {
    Kind kind;
    int64_t outputs;
    int64_t inputs;
    const uint8_t* weight;  // packed
    ConstRows bias;
};

struct NormWeights {
    ConstRows weight;  // one row
    ConstRows bias;    // one row, or absent; layer norms only
};

struct DecoderLayer {
    NormWeights attention_norm, mlp_norm;  // [hidden]
    ConstRows q_norm, k_norm;              // [head_dim], or absent
    Projection qkv;                        // queries, keys, values
    Projection output;
    Projection gate_up;  // gates, then ups; ups alone where no gates weigh them
    Projection down;
};

struct DecoderPlan {
    int64_t hidden;
    int64_t inner;  // width between gate_up and down
    int32_t q_heads;
    int32_t kv_heads;
    int32_t head_dim;
    float eps;  // of every norm
    Norm norms;  // the kind of all but q_norm and k_norm, which are of RMS
    Activation activation;
    Element qkv_element;  // of queries, keys and values as they are projected, before they are rotated and stored
    NormWeights norm;
    const float* cos;  // [num_positions][head_dim / 2]; null: queries and keys are not rotated
    const float* sin;
    int64_t num_positions;  // 0 without rotation
    std::vector<DecoderLayer> layers;

    int64_t q_width() const { return int64_t(q_heads) * head_dim; }
    bool gated() const { return activation == Activation::silu_and_mul; }
    int64_t up_width() const { return gated() ? 2 * inner : inner; }  // outputs of gate_up
    int64_t qkv_width() const { return q_width() + 2 * int64_t(kv_heads) * head_dim; }
};

// One step: what LinearCall, RotaryCall and AttentionCall say, for all layers.
struct DecoderStep {
    int64_t tokens;
    float* stream;  // [tokens][hidden]: the embeddings; used up
    Rows out;       // [tokens][hidden], after the last norm
    const int64_t* positions;
    const int64_t* write_slots;
    const uintptr_t* keys;  // an address a layer
    const uintptr_t* values;
    KvCache cache;  // of every layer, but for its addresses
    int32_t rows;
    const int32_t* q_start;
    const int32_t* kv_len;
    const int32_t* block_table;
    int64_t table_width;
    float scale;
    uint8_t* scratch;  // decoder_scratch() bytes, 64-byte aligned; undefined before and after
    int64_t scratch_bytes;
};

// Bytes of scratch for a step whose longest context has `longest` positions, on so many threads.
int64_t decoder_scratch(const DecoderPlan& plan, int64_t tokens, int32_t rows, int32_t longest, int threads);

void run_decoder(const DecoderPlan& plan, const DecoderStep& step, const KernelTable& kernels, Pool& pool);

}  // namespace penstock
