// The row-wise parts of a mixture of experts: choosing experts, and adding up their outputs.
#pragma once

#include "elements.h"
#include "experts_call.h"

namespace penstock {
inline namespace PENSTOCK_ISA_NAMESPACE {

PENSTOCK_INLINE f32x16 sigmoid(f32x16 x) { return div(broadcast(1.0f), add(broadcast(1.0f), exp(sub(zero(), x)))); }

inline void sigmoid_scores(const RouteCall& call, int64_t row, float* scores) {
    const int experts = call.router.experts;
    for (int i = 0; i < experts; i += kLanes) {
        store_at(scores, i, experts, sigmoid(load_row(call.logits, row, i, experts)));
    }
}

// Relative to the largest logit, so that nothing overflows. A NaN or +inf among the logits makes every score NaN.
inline void softmax_scores(const RouteCall& call, int64_t row, float* scores) {
    const int experts = call.router.experts;
    const f32x16 nothing = broadcast(float_of(0xff800000u));  // -inf, whose exponential is 0
    const auto logits = [&](int i) {
        const int count = experts - i < kLanes ? experts - i : kLanes;
        return select(first_lanes(count), load_row(call.logits, row, i, experts), nothing);
    };
    f32x16 largest = nothing, sum = zero();
    for (int i = 0; i < experts; i += kLanes) largest = max(largest, logits(i));
    largest = broadcast(reduce_max(largest));
    for (int i = 0; i < experts; i += kLanes) {
        const f32x16 score = exp(sub(logits(i), largest));
        store_at(scores, i, experts, score);
        sum = add(sum, score);
    }
    sum = broadcast(reduce_add(sum));
    for (int i = 0; i < experts; i += kLanes) store_at(scores, i, experts, div(load_at(scores, i, experts), sum));
}

// Whether an expert with `a` is chosen before one with `b`; NaN comes first.
PENSTOCK_INLINE bool is_above(float a, float b) { return a > b || (a != a && b == b); }

// Chooses the top_k highest of keys[experts], of equal ones the lower index; sorted by index.
inline void choose(const float* keys, int experts, int top_k, int32_t* chosen) {
    int taken = 0;
    for (int e = 0; e < experts; e++) {
        if (taken == top_k && !is_above(keys[e], keys[chosen[top_k - 1]])) continue;
        int at = taken < top_k ? taken++ : top_k - 1;
        for (; at > 0 && is_above(keys[e], keys[chosen[at - 1]]); at--) chosen[at] = chosen[at - 1];
        chosen[at] = e;
    }
    for (int i = 1; i < top_k; i++) {
        const int32_t expert = chosen[i];
        int at = i;
        for (; at > 0 && chosen[at - 1] > expert; at--) chosen[at] = chosen[at - 1];
        chosen[at] = expert;
    }
}

// The keys of experts outside the router's highest groups become -inf.
inline void keep_groups(const Router& router, float* keys) {
    float heights[kMostExperts];
    int32_t chosen[kMostExperts];
    const int size = router.experts / router.groups;
    for (int group = 0; group < router.groups; group++) {
        const float* of = keys + group * size;
        int32_t highest[2];
        choose(of, size, router.bias ? 2 : 1, highest);
        heights[group] = router.bias ? of[highest[0]] + of[highest[1]] : of[highest[0]];
    }
    choose(heights, router.groups, router.top_groups, chosen);
    for (int group = 0, next = 0; group < router.groups; group++) {
        if (next < router.top_groups && chosen[next] == group) {
            next++;
            continue;
        }
        for (int e = group * size; e < (group + 1) * size; e++) keys[e] = float_of(0xff800000u);  // -inf
    }
}

inline void weigh(const Router& router, const float* scores, const int32_t* chosen, float* weights) {
    float sum = 0.0f;
    for (int j = 0; j < router.top_k; j++) sum += scores[chosen[j]];
    const float whole = router.normalise ? sum + 1e-20f : 1.0f;  // as in DeepSeek-V3: sigmoids may all be 0
    for (int j = 0; j < router.top_k; j++) weights[j] = scores[chosen[j]] / whole * router.scale;
    if (!router.expert_scale) return;
    for (int j = 0; j < router.top_k; j++) weights[j] *= router.expert_scale[chosen[j]];
}

inline void route(const RouteCall& call, Pool& pool) {
    const Router& router = call.router;
    const int experts = router.experts;
    run_rows(pool, call.rows, 8 * int64_t(experts), [&](int64_t row) {
        float scores[kMostExperts], keys[kMostExperts];
        (router.scoring == Scoring::sigmoid ? sigmoid_scores : softmax_scores)(call, row, scores);
        for (int i = 0; i < experts; i += kLanes) {
            const f32x16 logits = load_row(call.logits, row, i, experts), score = load_at(scores, i, experts);
            store_at(keys, i, experts, router.bias ? add(score, load_at(router.bias, i, experts)) : logits);
        }
        int32_t* chosen = call.chosen + row * router.top_k;
        if (router.groups > 1) keep_groups(router, keys);
        choose(keys, experts, router.top_k, chosen);
        weigh(router, scores, chosen, call.weights + row * router.top_k);
    });
}

// Threads divide columns, never rows, so a row's terms are added in the order of the call.
inline void scatter(const ScatterCall& call, Pool& pool) {
    constexpr int64_t kTaskElements = 8192, kLeastColumns = 64, kTasksAThread = 2;
    int64_t tasks = call.count * call.width / kTaskElements;
    tasks = tasks < pool.threads() * kTasksAThread ? tasks : pool.threads() * kTasksAThread;
    int64_t each = tasks > 1 ? (call.width + tasks - 1) / tasks : call.width;
    each = (each + kLeastColumns - 1) / kLeastColumns * kLeastColumns;
    pool.run(int((call.width + each - 1) / each), [&](int task) {
        const int64_t first = task * each;
        const int columns = int(call.width - first < each ? call.width - first : each);
        for (int64_t i = 0; i < call.count; i++) {
            const float* from = call.x + i * call.width + first;
            float* to = call.to + call.ids[i] * call.width + first;
            const f32x16 weight = broadcast(call.weights[i]);
            for (int c = 0; c < columns; c += kLanes) {
                store_at(to, c, columns, add(load_at(to, c, columns), mul(weight, load_at(from, c, columns))));
            }
        }
    });
}

inline void gate_rows(const GateRowsCall& call, Pool& pool) {
    const int width = int(call.width);
    run_rows(pool, call.rows, call.width, [&](int64_t row) {
        f32x16 gate = broadcast(1.0f);
        if (call.logits.data) gate = sigmoid(broadcast(lane0(load_row(call.logits, row, 0, 1))));
        for (int i = 0; i < width; i += kLanes) {
            const f32x16 gated = mul(gate, load_row(call.x, row, i, width));
            const bool added = call.residual.data != nullptr;
            store_row(call.out, row, i, width, added ? add(load_row(call.residual, row, i, width), gated) : gated);
        }
    });
}

}  // namespace PENSTOCK_ISA_NAMESPACE
}  // namespace penstock
