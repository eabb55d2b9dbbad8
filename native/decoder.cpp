// A decoder's kernels one after the other, over all tokens of a step together or part by part (parts.h).
#include "decoder.h"

#include <algorithm>
#include <atomic>

#include "parts.h"
#include "pool.h"
#include "rows_call.h"
#include "upcoming.h"

namespace penstock {
namespace {

// Scratch, one after the other, each on a cache line:
//
//     | normed [T][hidden] | wide [T][qkv or gates and ups] | inner [T][queries or inside] | mixed [T][heads * dim] |
//     | of the linear kernels | of attention |
//
// Where a step is split, each part has all but the last of them to itself, one part after the other.
//
// What goes into a projection with bf16 weights is bf16: so it is multiplied. What goes into another one is fp32; a
// quantised one rounds it once, to int8.
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

constexpr int64_t kLostByRounding = 4 * 64;  // bytes at most, for each part: the areas of all parts together are larger by it

Areas areas(const DecoderPlan& plan, int64_t tokens) {
    const auto rows = [&](int64_t width) { return round_up(tokens * width * int64_t(sizeof(float)), 64); };
    Areas at{};
    at.wide = rows(plan.hidden);
    at.inner = at.wide + rows(std::max(plan.qkv_width(), plan.up_width()));
    at.mixed = at.inner + rows(std::max(plan.q_width(), plan.inner));
    at.linear = at.mixed + rows(plan.q_width());
    at.attention = at.linear + tokens * linear_scratch(plan);  // strides are multiples of 64
    return at;
}

Rows from_token(const Rows& rows, int64_t token) {
    const int64_t bytes = token * rows.stride * int64_t(rows.element == Element::f32 ? sizeof(float) : sizeof(uint16_t));
    return {static_cast<uint8_t*>(rows.data) + bytes, rows.stride, rows.element};
}

// The kernels of one step for one part of it, told what they have in common.
struct Run {
    const DecoderPlan& plan;
    const DecoderStep& step;
    const KernelTable& kernels;
    Pool& pool;
    const Part& part;
    uint8_t* scratch;
    Areas at;
    Upcoming* upcoming;  // or null

    // Rows on their way through `by`, in or out.
    Rows rows(int64_t offset, int64_t width, const Projection& by) const {
        return {scratch + offset, width, by.kind == Kind::bf16 ? Element::bf16 : Element::f32};
    }
    Rows stream() const { return from_token({step.stream, plan.hidden, Element::f32}, part.token); }

    static ConstRows read(const Rows& rows) { return {rows.data, rows.stride, rows.element}; }
    static ConstRows columns_from(const Rows& rows, int64_t column) {
        const int64_t bytes = column * int64_t(rows.element == Element::f32 ? sizeof(float) : sizeof(uint16_t));
        return {static_cast<const uint8_t*>(rows.data) + bytes, rows.stride, rows.element};
    }

    void norm(const NormWeights& by, const Rows& out) const {
        const NormCall call{part.tokens, plan.hidden, stream(), {}, by.weight, by.bias, plan.eps, out};
        norm_kernel(kernels, plan.norms)(call, pool);
    }

    void project(const Projection& by, const Rows& x, const ConstRows& residual, const Rows& out) const {
        const LinearCall call{part.tokens, by.outputs, by.inputs, read(x),
                              by.weight,   by.bias,    residual,  out,     scratch + at.linear,
                              false,       upcoming};
        linear_kernel(kernels, by.kind)(call, pool);
    }

    // silu(gates) * ups of what `by` makes of x
    void project_gated(const Projection& by, const Rows& x, const Rows& out) const {
        const LinearCall call{part.tokens, by.outputs, by.inputs, read(x),
                              by.weight,   by.bias,    {},        out,     scratch + at.linear,
                              true,        upcoming};
        linear_kernel(kernels, by.kind)(call, pool);
    }

    // stream += by(x)
    void add(const Projection& by, const Rows& x) const { project(by, x, read(stream()), stream()); }

    // Calls stored() once the keys and values of this part lie in the cache, and goes on when it returns.
    template <class Stored>
    void attend(const DecoderLayer& layer, const KvCache& cache, const Stored& stored) const {
        const Rows normed = rows(0, plan.hidden, layer.qkv);
        const Rows qkv{scratch + at.wide, plan.qkv_width(), plan.qkv_element};
        const Rows q = rows(at.inner, plan.q_width(), layer.qkv), mixed = rows(at.mixed, plan.q_width(), layer.output);
        norm(layer.attention_norm, normed);
        project(layer.qkv, normed, {}, qkv);
        const ConstRows k = columns_from(qkv, plan.q_width());
        const ConstRows v = columns_from(qkv, plan.q_width() + int64_t(plan.kv_heads) * plan.head_dim);
        kernels.rotate_and_store({part.tokens, read(qkv), k, v, q, cache, plan.q_heads, step.write_slots + part.token,
                                  step.positions + part.token, plan.cos, plan.sin, layer.q_norm, layer.k_norm, plan.eps},
                                 pool);
        stored();
        // `q_start` counts the tokens of the step from its first.
        const Rows step_q = from_token(q, -part.token), step_mixed = from_token(mixed, -part.token);
        kernels.attention({read(step_q), step_mixed, cache, plan.q_heads, part.rows, part.q_start, part.kv_len,
                           step.block_table + part.row * step.table_width, step.table_width, step.scale,
                           part.attention_scratch, size_t(part.attention_scratch_bytes)},
                          pool);
        add(layer.output, mixed);
    }

    void mlp(const DecoderLayer& layer) const {
        const Rows normed = rows(0, plan.hidden, layer.gate_up), activated = rows(at.inner, plan.inner, layer.down);
        norm(layer.mlp_norm, normed);
        if (plan.gated() && plan.inner % kPanel == 0) {
            project_gated(layer.gate_up, normed, activated);
        } else {
            const Rows gate_up{scratch + at.wide, plan.up_width(), Element::f32};
            project(layer.gate_up, normed, {}, gate_up);
            activation_kernel(kernels, plan.activation)({part.tokens, plan.inner, read(gate_up), activated}, pool);
        }
        add(layer.down, activated);
    }

    template <class Stored>
    void layer(size_t i, const Stored& stored) const {
        KvCache cache = step.cache;
        cache.keys = reinterpret_cast<void*>(step.keys[i]);
        cache.values = reinterpret_cast<void*>(step.values[i]);
        attend(plan.layers[i], cache, stored);
        mlp(plan.layers[i]);
    }

    void last_norm() const { norm(plan.norm, from_token(step.out, part.token)); }
};

// Each part by a thread of its own, on a pool of one.
void run_parts(const DecoderPlan& plan, const DecoderStep& step, const KernelTable& kernels, Pool& pool,
               const Part* parts) {
    const int count = pool.threads();
    const int64_t layers = int64_t(plan.layers.size()), apart = layers_apart(plan);
    uint8_t* scratch[kMostParts];
    std::atomic<int64_t> stored[kMostParts], done[kMostParts];  // layers
    for (int i = 0; i < count; i++) {
        scratch[i] = i == 0 ? step.scratch : scratch[i - 1] + areas(plan, parts[i - 1].tokens).attention;
        stored[i].store(0, std::memory_order_relaxed);
        done[i].store(INT64_MAX, std::memory_order_relaxed);  // before it begins and after its end nobody waits for it
    }
    pool.run(count, [&](int mine) {
        Pool alone(1);
        const Part& part = parts[mine];
        Upcoming upcoming(step, part);
        const Run run{plan, step, kernels, alone, part, scratch[mine], areas(plan, part.tokens), &upcoming};
        upcoming.aim(0);
        for (int64_t i = 0; i < layers; i++) {
            done[mine].store(i, std::memory_order_relaxed);
            for (int other = 0; other < count; other++) {
                wait_until([&] { return done[other].load(std::memory_order_relaxed) >= i - apart; });
            }
            run.layer(size_t(i), [&] {
                stored[mine].store(i + 1, std::memory_order_release);
                for (int earlier = part.waits_for; earlier < mine; earlier++) {
                    wait_until([&] { return stored[earlier].load(std::memory_order_acquire) > i; });
                }
                if (i + 1 < layers) upcoming.aim(i + 1);
            });
        }
        done[mine].store(INT64_MAX, std::memory_order_relaxed);
        run.last_norm();
    });
}

}  // namespace

int64_t decoder_scratch(const DecoderPlan& plan, int64_t tokens, int32_t rows, int32_t longest, int threads) {
    const int64_t together = int64_t(attention_scratch_wanted(rows, tokens, plan.q_heads, plan.kv_heads, plan.head_dim,
                                                              longest, threads));
    const int64_t apart = threads == 1 ? 0 : threads * kLostByRounding + parts_scratch(rows, threads);
    return areas(plan, tokens).attention + std::max(together, apart);
}

void run_decoder(const DecoderPlan& plan, const DecoderStep& step, const KernelTable& kernels, Pool& pool) {
    const Areas at = areas(plan, step.tokens);
    const int64_t lost = pool.threads() * kLostByRounding, bytes = step.scratch_bytes - at.attention;
    Part parts[kMostParts];
    if (split_step(plan, step, pool.threads(), step.scratch + at.attention + lost, bytes - lost, parts)) {
        return run_parts(plan, step, kernels, pool, parts);
    }
    const Part whole{0, step.tokens, 0, step.rows, step.q_start, step.kv_len, 0, step.scratch + at.attention, bytes};
    const Run run{plan, step, kernels, pool, whole, step.scratch, at, nullptr};
    for (size_t i = 0; i < plan.layers.size(); i++) run.layer(i, [] {});
    run.last_norm();
}

}  // namespace penstock
