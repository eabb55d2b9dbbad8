// The arguments of a mixture of experts: weights and sizes of a layer, and the rows of a call. Plain pointers and
// sizes, not owned, and checked by the caller.
#pragma once

#include <cstdint>
#include <optional>

#include "layout.h"
#include "linear_call.h"
#include "rows_call.h"

namespace penstock {

class Pool;
struct KernelTable;

constexpr int32_t kMostExperts = 1024;

enum class Scoring : int32_t { softmax = 0, sigmoid = 1 };

// Chooses the experts of a token, and their weights.
//
// Scores are softmax or sigmoid of the logits. The top_k experts of the highest logits are chosen, or of the highest
// score + bias if there is a bias; ties go to the lower index. A NaN ranks above all numbers, so that it is noticed. If
// experts form groups of equally many neighbours, only experts of the `top_groups` highest groups are chosen. A group
// ranks by its highest expert, or with a bias by the sum of its two highest (DeepSeek-AI 2024, V2 section 2.1.3 and V3
// section 2.1.2); ties go to the lower index too. The weight of a chosen expert is its score, divided by the sum of the
// chosen scores if `normalise`, times `scale`, times `expert_scale` of that expert if there is one.
struct Router {
    int32_t experts;  // up to kMostExperts
    int32_t top_k;    // up to `experts`
    Scoring scoring;
    bool normalise;
    float scale;
    const float* bias;  // [experts], or null
    const float* expert_scale = nullptr;  // [experts], or null
    int32_t groups = 1;      // a divisor of `experts`
    int32_t top_groups = 1;  // up to `groups`
};

struct RouteCall {
    int64_t rows;
    Router router;
    ConstRows logits;  // [rows][experts]
    int32_t* chosen;   // [rows][top_k], ascending in each row
    float* weights;    // [rows][top_k]
};

// to[ids[i], :] += weights[i] * x[i, :] for i in ascending order; the product is rounded, then the sum.
struct ScatterCall {
    int64_t count;
    int64_t width;
    const float* x;      // [count][width]
    const int32_t* ids;  // [count], may repeat
    const float* weights;
    float* to;  // [.][width]
};

// out = residual + sigmoid(logit of the row) * x. Without logits the factor is 1, without a residual nothing is added.
// `out` may be the memory of `x` or of `residual`.
struct GateRowsCall {
    int64_t rows;
    int64_t width;
    ConstRows x;
    ConstRows logits;  // [rows][1], or absent
    ConstRows residual;
    Rows out;
};

// Weights [outputs, inputs] of all experts, in the same form; expert e begins at `weight + e * stride`.
struct WeightStack {
    Kind kind;
    int64_t outputs;
    int64_t inputs;
    const uint8_t* weight;
    int64_t stride;  // bytes
    const float* bias = nullptr;  // [experts][outputs], `bias_stride` floats from one expert to the next; or null
    int64_t bias_stride = 0;

    const uint8_t* of(int64_t expert) const { return weight + expert * stride; }
    ConstRows bias_of(int64_t expert) const {
        return bias ? ConstRows{bias + expert * bias_stride, outputs, Element::f32} : ConstRows{};
    }
};

struct ExpertLayer {
    Router router;
    Activation activation;
    WeightStack gate_up;  // gates, then ups; only gates if `ups` is given, only ups if nothing is gated
    WeightStack down;
    std::optional<WeightStack> ups = {};  // in a form other than that of the gates

    int64_t hidden() const { return down.outputs; }
    int64_t inner() const { return down.inputs; }
};

// out[t] = residual[t] + the sum over the experts chosen for row t of weight * down(activation(gate_up(x[t]))).
// Projections add their bias if they have one.
//
// Sums over experts are fp32, start at zero and go by ascending expert. The residual is added to the finished sum,
// which is then rounded to the element of `out`. `out` may be the memory of `x` or of `residual`. A row's bits depend
// only on its own x, logits and residual.
struct ExpertsCall {
    const ExpertLayer& layer;
    int64_t rows;
    ConstRows x;         // [rows][hidden]
    ConstRows logits;    // [rows][experts]
    ConstRows residual;  // [rows][hidden], or absent
    Rows out;            // [rows][hidden]
    uint8_t* scratch;    // experts_scratch() bytes on a cache line; undefined before and after
    KvPrefetcher* prefetcher = nullptr;  // as in LinearCall: only in a call by one thread
};

// Bytes of scratch for a call of `rows` rows on a pool of `threads` threads. For one thread that is `a + rows * b`,
// with constants a and b of the layer, both multiples of 64; more threads never need less. So shards of a step, each on
// a thread of its own, need the scratch of the whole step and `a` for each shard but one.
int64_t experts_scratch(const ExpertLayer& layer, int64_t rows, int threads);

// Reads the weights of each chosen expert once, and of no other. Returns the number of chosen experts.
int64_t run_experts(const ExpertsCall& call, const KernelTable& kernels, Pool& pool);

}  // namespace penstock
