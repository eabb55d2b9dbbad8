#include "decoder.h"

#include <algorithm>

#include "pool.h"
#include "rows_call.h"

namespace penstock {
namespace {

// Scratch, one after the other, each on a cache line:
//
//     | normed [T][hidden] | wide [T][qkv or gates and ups] | inner [T][queries or gated] | mixed [T][heads * dim] |
//     | of the linear kernels | of attention |
//
// What goes into a projection with bf16 weights is bf16: so it is multiplied. What goes into a quantised one is fp32, and
// is rounded once, to int8.
struct Areas {
    int64_t wide, inner, mixed, linear, attention;  // offsets in bytes
};

int64_t linear_scratch(const DecoderPlan& plan) {
    int64_t most = 0;
    for (const DecoderLayer& layer : plan.layers) {
        for (const Projection* of : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down}) {
            most = std::max(most, scratch_stride(of->kind, of->inputs));
        }
    }
    return most;
}

Areas areas(const DecoderPlan& plan, int64_t tokens) {
    const auto rows = [&](int64_t width) { return round_up(tokens * width * int64_t(sizeof(float)), 64); };
    Areas at{};
    at.wide = rows(plan.hidden);
    at.inner = at.wide + rows(std::max(plan.qkv_width(), 2 * plan.inner));
    at.mixed = at.inner + rows(std::max(plan.q_width(), plan.inner));
    at.linear = at.mixed + rows(plan.q_width());
    at.attention = at.linear + tokens * linear_scratch(plan);  // strides are multiples of 64
    return at;
}

// The kernels of one step, told what they have in common.
struct Run {
    const DecoderPlan& plan;
    const DecoderStep& step;
    const KernelTable& kernels;
    Pool& pool;
    Areas at;

    // Rows on their way through `by`, in or out.
    Rows rows(int64_t offset, int64_t width, const Projection& by) const {
        return {step.scratch + offset, width, by.kind == Kind::bf16 ? Element::bf16 : Element::f32};
    }
    Rows stream() const { return {step.stream, plan.hidden, Element::f32}; }

    static ConstRows read(const Rows& rows) { return {rows.data, rows.stride, rows.element}; }
    static ConstRows columns_from(const Rows& rows, int64_t column) {
        const int64_t bytes = column * int64_t(rows.element == Element::f32 ? sizeof(float) : sizeof(uint16_t));
        return {static_cast<const uint8_t*>(rows.data) + bytes, rows.stride, rows.element};
    }

    void norm(const ConstRows& weight, const Rows& out) const {
        kernels.rms_norm({step.tokens, plan.hidden, stream(), {}, weight, {}, plan.eps, out}, pool);
    }

    void project(const Projection& by, const Rows& x, const ConstRows& residual, const Rows& out) const {
        const LinearCall call{step.tokens, by.outputs, by.inputs, read(x),
                              by.weight,   by.bias,    residual,  out,     step.scratch + at.linear,
                              false};
        linear_kernel(kernels, by.kind)(call, pool);
    }

    // silu(gates) * ups of what `by` makes of x
    void project_gated(const Projection& by, const Rows& x, const Rows& out) const {
        const LinearCall call{step.tokens, by.outputs, by.inputs, read(x),
                              by.weight,   by.bias,    {},        out,     step.scratch + at.linear,
                              true};
        linear_kernel(kernels, by.kind)(call, pool);
    }

    // stream += by(x)
    void add(const Projection& by, const Rows& x) const { project(by, x, read(stream()), stream()); }

    void attend(const DecoderLayer& layer, const KvCache& cache) const {
        const Rows normed = rows(0, plan.hidden, layer.qkv);
        const Rows qkv{step.scratch + at.wide, plan.qkv_width(), Element::bf16};  // as keys and values are kept
        const Rows q = rows(at.inner, plan.q_width(), layer.qkv), mixed = rows(at.mixed, plan.q_width(), layer.output);
        norm(layer.attention_norm, normed);
        project(layer.qkv, normed, {}, qkv);
        const ConstRows k = columns_from(qkv, plan.q_width());
        const ConstRows v = columns_from(qkv, plan.q_width() + int64_t(plan.kv_heads) * plan.head_dim);
        kernels.rotate_and_store({step.tokens, read(qkv), k, v, q, cache, plan.q_heads, step.write_slots,
                                  step.positions, plan.cos, plan.sin, layer.q_norm, layer.k_norm, plan.eps},
                                 pool);
        kernels.attention({read(q), mixed, cache, plan.q_heads, step.rows, step.q_start, step.kv_len, step.block_table,
                           step.table_width, step.scale, step.scratch + at.attention,
                           size_t(step.scratch_bytes - at.attention)},
                          pool);
        add(layer.output, mixed);
    }

    void mlp(const DecoderLayer& layer) const {
        const Rows normed = rows(0, plan.hidden, layer.gate_up), gated = rows(at.inner, plan.inner, layer.down);
        norm(layer.mlp_norm, normed);
        if (plan.inner % kPanel == 0) {
            project_gated(layer.gate_up, normed, gated);
        } else {
            const Rows gate_up = rows(at.wide, 2 * plan.inner, layer.gate_up);
            project(layer.gate_up, normed, {}, gate_up);
            kernels.silu_and_mul({step.tokens, plan.inner, read(gate_up), gated}, pool);
        }
        add(layer.down, gated);
    }
};

}  // namespace

int64_t decoder_scratch(const DecoderPlan& plan, int64_t tokens, int32_t rows, int32_t longest, int threads) {
    return areas(plan, tokens).attention + int64_t(attention_scratch_wanted(rows, tokens, plan.q_heads, plan.kv_heads,
                                                                            plan.head_dim, longest, threads));
}

void run_decoder(const DecoderPlan& plan, const DecoderStep& step, const KernelTable& kernels, Pool& pool) {
    const Run run{plan, step, kernels, pool, areas(plan, step.tokens)};
    for (size_t i = 0; i < plan.layers.size(); i++) {
        KvCache cache = step.cache;
        cache.keys = reinterpret_cast<void*>(step.keys[i]);
        cache.values = reinterpret_cast<void*>(step.values[i]);
        run.attend(plan.layers[i], cache);
        run.mlp(plan.layers[i]);
    }
    run.norm(plan.norm, step.out);
}

}  // namespace penstock
