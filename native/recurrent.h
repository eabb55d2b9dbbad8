// Recurrent layers: short convolutions, the gated delta rule, selective scans, and the gates and norms around them.
//
// A state goes from token to token in order of position, in fp32, so nothing depends on how a sequence is cut into
// runs. Threads divide channels, or heads and columns of values; each thread takes all tokens of its part in order.
#pragma once

#include "activation.h"
#include "elements.h"
#include "recurrent_call.h"

namespace penstock {
inline namespace PENSTOCK_ISA_NAMESPACE {

// The work of `part` for each token of a stretch; a stretch may have no tokens.
PENSTOCK_INLINE int64_t part_work(const Stretch& stretch, int64_t part) {
    return (stretch.tokens < 1 ? 1 : stretch.tokens) * part;
}

// Taps are added oldest first, each by a fused multiply-add.
inline void short_convolution(const ConvolutionCall& call, Pool& pool) {
    const Filter& filter = call.filter;
    const int width = int(filter.width), before = filter.taps - 1;
    const int64_t parts = (width + kLanes - 1) / kLanes, size = int64_t(before) * width;
    run_rows(pool, parts, part_work(call.stretch, int64_t(filter.taps) * kLanes), [&](int64_t part) {
        const int at = int(part) * kLanes;
        f32x16 seen[kMostTaps], weight[kMostTaps];
        for (int l = 0; l <= before; l++) weight[l] = load_at(filter.weight + int64_t(l) * width, at, width);
        const f32x16 bias = filter.bias ? load_at(filter.bias, at, width) : zero();
        call.stretch.each_run([&](int64_t begin, int64_t end, int32_t source, int32_t target) {
            const float* from = call.state + (source == kFromZero ? 0 : source) * size;
            for (int l = 0; l < before; l++) {
                seen[l] = source == kFromZero ? zero() : load_at(from + int64_t(l) * width, at, width);
            }
            for (int64_t t = begin; t < end; t++) {
                f32x16 x = load_row(call.x, t, at, width);
                if (call.gate_in.data) x = mul(load_row(call.gate_in, t, at, width), x);
                f32x16 sum = bias;
                for (int l = 0; l < before; l++) sum = fma(weight[l], seen[l], sum);
                sum = fma(weight[before], x, sum);
                for (int l = 0; l + 1 < before; l++) seen[l] = seen[l + 1];
                seen[before - 1] = x;
                if (filter.silu) sum = silu(sum);
                if (call.gate_out.data) sum = mul(load_row(call.gate_out, t, at, width), sum);
                store_row(call.out, t, at, width, sum);
            }
            float* to = call.state + target * size;
            for (int l = 0; l < before; l++) store_at(to + int64_t(l) * width, at, width, seen[l]);
        });
    });
}

// log(1 + e^x) = max(x, 0) + log1p(e^-|x|), in which nothing overflows. With y = e^-|x|, log1p(y) = 2 atanh(z) for
// z = y / (2 + y), at most 1/3: the series of atanh, whose first omitted term is 2e-9 of the sum.
PENSTOCK_INLINE f32x16 softplus(f32x16 x) {
    const f32x16 y = exp(sub(zero(), abs(x))), z = div(y, add(broadcast(2.0f), y)), square = mul(z, z);
    f32x16 sum = broadcast(1.0f / 15.0f);
    PENSTOCK_UNROLL
    for (int odd = 13; odd >= 1; odd -= 2) sum = fma(sum, square, broadcast(1.0f / float(odd)));
    return add(max(zero(), x), mul(add(z, z), sum));
}

// Element `i` of a row in every lane.
PENSTOCK_INLINE f32x16 element_of_row(const ConstRows& rows, int64_t row, int64_t i) {
    return broadcast(lane0(load_row(rows, row, int(i), int(i) + 1)));
}

// 1 / sqrt(sum x^2 + 1e-6) (Qwen3-Next's `l2norm`, as in flash-linear-attention)
PENSTOCK_INLINE f32x16 inverse_length(const ConstRows& head, int64_t row, int dim) {
    f32x16 squares = zero();
    for (int i = 0; i < dim; i += kLanes) {
        const f32x16 x = load_row(head, row, i, dim);
        squares = fma(x, x, squares);
    }
    return div(broadcast(1.0f), sqrt(broadcast(reduce_add(squares) + 1e-6f)));
}

// Stores a head of `dim` numbers, scaled, to `to`, padded to whole vectors.
PENSTOCK_INLINE void take_head(const ConstRows& head, int64_t row, int dim, f32x16 scale, float* to) {
    for (int i = 0; i < dim; i += kLanes) store(to + i, mul(load_row(head, row, i, dim), scale));
}

// A token's step of a head: its key and query, how much of the state remains, and how much is written.
struct TokenStep {
    alignas(64) float query[kMostStateDim], key[kMostStateDim];
    f32x16 decay;
    f32x16 amount;  // sigmoid(b) of the delta rule, the step of a scan
};

PENSTOCK_INLINE void take_step(const RecurrenceCall& call, int64_t head, int64_t t, TokenStep& to) {
    const Recurrence& rule = call.rule;
    const int keys = rule.key_dim;
    const int64_t first = rule.key_head(head) * keys;
    const ConstRows q = columns_from(call.q, first), k = columns_from(call.k, first);
    f32x16 step = softplus(add(element_of_row(call.a, t, head), broadcast(rule.step_bias[head])));
    f32x16 of_query = broadcast(1.0f), of_key = broadcast(1.0f);
    if (rule.delta) {
        to.amount = sigmoid_weighted(broadcast(1.0f), element_of_row(call.b, t, head));
        of_query = div(inverse_length(q, t, keys), sqrt(broadcast(float(keys))));
        of_key = inverse_length(k, t, keys);
    } else {
        step = max(broadcast(rule.least_step), min(broadcast(rule.most_step), step));  // a NaN passes in this order
        to.amount = step;
    }
    to.decay = exp(sub(zero(), mul(exp(broadcast(rule.a_log[head])), step)));
    take_head(q, t, keys, of_query, to.query);
    take_head(k, t, keys, of_key, to.key);
}

// One token of a head in V neighbouring vectors of values, from column `at` on. Sums go over keys, ascending; sums of
// different vectors are independent. `whole`: no vector extends beyond the values.
template <int V, bool whole>
PENSTOCK_INLINE void advance(const Recurrence& rule, const TokenStep& by, const ConstRows& v, const Rows& out, int64_t t,
                             float* state, int at, f32x16 skip) {
    const int keys = rule.key_dim, values = rule.value_dim;
    const auto load_state = [&](const float* of_key, int c) {
        return whole ? load(of_key + at + c * kLanes) : load_at(of_key, at + c * kLanes, values);
    };
    f32x16 value[V], written[V], sum[V];
    PENSTOCK_UNROLL
    for (int c = 0; c < V; c++) {
        value[c] = load_row(v, t, at + c * kLanes, values);
        written[c] = mul(by.amount, value[c]);
        sum[c] = zero();
    }
    if (rule.delta) {
        for (int i = 0; i < keys; i++) {
            const f32x16 key = broadcast(by.key[i]);
            PENSTOCK_UNROLL
            for (int c = 0; c < V; c++) sum[c] = fma(key, load_state(state + int64_t(i) * values, c), sum[c]);
        }
        PENSTOCK_UNROLL
        for (int c = 0; c < V; c++) {
            written[c] = mul(by.amount, sub(value[c], mul(by.decay, sum[c])));
            sum[c] = zero();
        }
    }
    for (int i = 0; i < keys; i++) {
        float* of_key = state + int64_t(i) * values;
        const f32x16 key = broadcast(by.key[i]), query = broadcast(by.query[i]);
        PENSTOCK_UNROLL
        for (int c = 0; c < V; c++) {
            const f32x16 s = fma(key, written[c], mul(by.decay, load_state(of_key, c)));
            if (whole) {
                store(of_key + at + c * kLanes, s);
            } else {
                store_at(of_key, at + c * kLanes, values, s);
            }
            sum[c] = fma(query, s, sum[c]);
        }
    }
    PENSTOCK_UNROLL
    for (int c = 0; c < V; c++) {
        if (rule.skip) sum[c] = fma(skip, value[c], sum[c]);
        store_row(out, t, at + c * kLanes, values, sum[c]);
    }
}

// Copies the columns [first, last) of a head's state from `from`, or sets them to 0 if it is null.
PENSTOCK_INLINE void begin_state(float* state, const float* from, const Recurrence& rule, int first, int last) {
    const size_t bytes = size_t(last - first) * sizeof(float);
    for (int i = 0; i < rule.key_dim; i++) {
        const int64_t at = int64_t(i) * rule.value_dim + first;
        if (from) {
            memcpy(state + at, from + at, bytes);
        } else {
            memset(state + at, 0, bytes);
        }
    }
}

// The gated delta rule (Yang et al. 2024, equation 10) and selective scans (Dao and Gu 2024, section 6).
inline void recurrence(const RecurrenceCall& call, Pool& pool) {
    constexpr int kVectors = 4, kBlock = kVectors * kLanes;
    const Recurrence& rule = call.rule;
    const int values = rule.value_dim;
    const int64_t blocks = (values + kBlock - 1) / kBlock, head_size = int64_t(rule.key_dim) * values;
    const int64_t work = part_work(call.stretch, int64_t(rule.key_dim) * kBlock * 4);
    run_rows(pool, blocks * rule.value_heads, work, [&](int64_t part) {
        const int64_t head = part / blocks;
        const int first = int(part % blocks) * kBlock, last = first + kBlock < values ? first + kBlock : values;
        const ConstRows v = columns_from(call.v, head * values);
        const Rows out = columns_from(call.out, head * values);
        const f32x16 skip = broadcast(rule.skip ? rule.skip[head] : 0.0f);
        TokenStep step;
        call.stretch.each_run([&](int64_t begin, int64_t end, int32_t source, int32_t target) {
            const auto place = [&](int32_t at) { return call.state + at * rule.state_size() + head * head_size; };
            float* state = place(target);
            if (source != target) begin_state(state, source == kFromZero ? nullptr : place(source), rule, first, last);
            for (int64_t t = begin; t < end; t++) {
                take_step(call, head, t, step);
                if (last - first == kBlock) {
                    advance<kVectors, true>(rule, step, v, out, t, state, first, skip);
                } else {
                    for (int at = first; at < last; at += kLanes) {
                        advance<1, false>(rule, step, v, out, t, state, at, skip);
                    }
                }
            }
        });
    });
}

// Each result is rounded once, at the end.
inline void gated_norm(const GatedNormCall& call, Pool& pool) {
    const GroupNorm& norm = call.norm;
    const int group = int(norm.group);
    run_rows(pool, call.rows, 2 * call.width, [&](int64_t row) {
        for (int64_t first = 0; first < call.width; first += group) {
            const ConstRows x = columns_from(call.x, first), gate = columns_from(call.gate, first);
            const Rows out = columns_from(call.out, first);
            const auto value = [&](int i) {
                const f32x16 of = load_row(x, row, i, group);
                return norm.gate_first ? mul(of, silu(load_row(gate, row, i, group))) : of;
            };
            f32x16 squares = zero();
            for (int i = 0; i < group; i += kLanes) {
                const f32x16 of = value(i);
                squares = fma(of, of, squares);
            }
            const f32x16 mean = broadcast(reduce_add(squares) / float(group) + norm.eps);
            const f32x16 inverse = div(broadcast(1.0f), sqrt(mean));
            const float* weight = norm.weight + first % norm.period;
            for (int i = 0; i < group; i += kLanes) {
                f32x16 scaled = mul(mul(value(i), inverse), load_at(weight, i, group));
                if (!norm.gate_first) scaled = mul(scaled, silu(load_row(gate, row, i, group)));
                store_row(out, row, i, group, scaled);
            }
        }
    });
}

inline void gate_columns(const GateCall& call, Pool& pool) {
    const int width = int(call.width);
    const bool by_gelu = call.kind == Gate::gelu_new;
    run_rows(pool, call.rows, call.width, [&](int64_t row) {
        for (int i = 0; i < width; i += kLanes) {
            const f32x16 x = load_row(call.x, row, i, width), gate = load_row(call.gate, row, i, width);
            store_row(call.out, row, i, width, by_gelu ? mul(gelu_by_tanh(gate), x) : sigmoid_weighted(x, gate));
        }
    });
}

inline void regroup(const RegroupCall& call, Pool& pool) {
    const int dim = int(call.dim);
    run_rows(pool, call.rows, 2 * call.groups * call.dim, [&](int64_t row) {
        for (int64_t each = 0; each < 2 * call.groups; each++) {  // the halves of all groups in their order in memory
            const ConstRows x = columns_from(call.x, each * dim);
            const Rows out = columns_from(call.out, (each % 2 * call.groups + each / 2) * dim);
            for (int i = 0; i < dim; i += kLanes) store_row(out, row, i, dim, load_row(x, row, i, dim));
        }
    });
}

}  // namespace PENSTOCK_ISA_NAMESPACE
}  // namespace penstock
