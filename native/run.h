// Runs a program's operations in order, for all or some tokens of a step: by the threads of a pool together, by one
// thread alone, or by a team (team.h).
#pragma once

#include <algorithm>

#include "kernel_table.h"
#include "kv_prefetcher.h"
#include "pool.h"
#include "program.h"
#include "shards.h"
#include "step_scratch.h"
#include "team.h"

namespace penstock {

inline int64_t element_size(Element element) { return element == Element::f32 ? sizeof(float) : sizeof(uint16_t); }

inline Rows from_token(const Rows& rows, int64_t token) {
    return {static_cast<uint8_t*>(rows.data) + token * rows.stride * element_size(rows.element), rows.stride, rows.element};
}

inline Rows from_column(const Rows& rows, int64_t column) {
    return {static_cast<uint8_t*>(rows.data) + column * element_size(rows.element), rows.stride, rows.element};
}

inline ConstRows read(const Rows& rows) { return {rows.data, rows.stride, rows.element}; }

// What a run by a member of a team has besides.
struct Membership {
    const Sharing& sharing;
    uint8_t* shared;  // the registers that all members share; others lie in the member's own scratch
    Pool& alone;      // a pool of one thread
};

// The operations of one step for one shard of it.
class Run {
public:
    // Requires all the memory of `step_scratch.h` at `scratch`, except attention's. A team member's pool is its team's.
    Run(const Program& program, const Step& step, const KernelTable& kernels, Pool& pool, const Shard& shard,
        uint8_t* scratch, KvPrefetcher* prefetcher, const Membership* member = nullptr)
        : program_(program), step_(step), kernels_(kernels), pool_(pool), shard_(shard), scratch_(scratch),
          kernel_scratch_(scratch + areas_size(program, shard.tokens)), prefetcher_(prefetcher), member_(member),
          inner_stride_(inner_stride(program)), adapters_stride_(adapters_linear_stride(program)) {}

    // Calls others.stored() after the keys and values of this shard are in the cache, others.await() before a state is
    // read, and others.publish() after it is written; continues when they return.
    template <class Others>
    void operate(const Operation& operation, const Others& others) const {
        std::visit([&](const auto& by) { compute(by, others); }, operation);
    }

private:
    Rows rows(const Columns& columns) const {
        const Register& in = program_.registers[size_t(columns.in)];
        Rows whole{nullptr, in.width, in.element};
        if (columns.in == kStream) {
            whole = from_token({step_.stream, in.width, Element::f32}, shard_.token);
        } else if (columns.in == kOut) {
            whole = from_token(step_.out, shard_.token);
        } else if (in.input >= 0) {
            whole = from_token(step_.inputs[in.input], shard_.token);
        } else {
            uint8_t* area = member_ && !member_->sharing.own[size_t(columns.in)] ? member_->shared : scratch_;
            for (int32_t i = 0; i < in.area; i++) area += area_size(program_, size_t(i), shard_.tokens);
            whole.data = area;
        }
        whole.data = static_cast<uint8_t*>(whole.data) + columns.first * element_size(whole.element);
        return whole;
    }

    template <class By, class Others>
    void compute(const By& by, const Others&) const {
        compute(by);
    }

    template <class Others>
    void compute(const ConvolutionOperation& by, const Others& others) const {
        others.await();
        kernels_.short_convolution({stretch(), by.filter, read(rows(by.x)), optional(by.gate_in), optional(by.gate_out),
                                    step_.states[by.state].data, rows(by.out)},
                                   pool_);
        others.publish();
    }

    template <class Others>
    void compute(const RecurrenceOperation& by, const Others& others) const {
        others.await();
        kernels_.recurrence({stretch(), by.rule, read(rows(by.q)), read(rows(by.k)), read(rows(by.v)), read(rows(by.a)),
                             optional(by.b), step_.states[by.state].data, rows(by.out)},
                            pool_);
        others.publish();
    }

    // Calls run(pool) for an operation that writes `out` and takes almost no time: in a team every member runs it for
    // itself, or one member does if `out` is shared.
    template <class RunOn>
    void write(const Columns& out, const RunOn& run) const {
        if (!member_) return run(pool_);
        if (member_->sharing.own[size_t(out.in)]) return run(member_->alone);
        pool_.run(1, [&](int) { run(member_->alone); });
    }

    void compute(const NormOperation& by) const {
        write(by.out, [&](Pool& pool) { normalise(by, pool); });
    }

    void normalise(const NormOperation& by, Pool& pool) const {
        const int64_t width = by.x.width / by.groups;
        for (int64_t i = 0; i < by.groups; i++) {
            const Rows out = rows({by.out.in, by.out.first + i * width, width});
            NormCall call{shard_.tokens, width, rows({by.x.in, by.x.first + i * width, width}), {}, by.weight, by.bias,
                          by.eps, out};
            if (by.adds) call.addend = read(out);
            norm_kernel(kernels_, by.kind)(call, pool);
        }
    }

    void compute(const LinearOperation& by) const {
        const Rows out = rows(by.out);
        LinearCall call{shard_.tokens, by.outputs, by.inputs, read(rows(by.x)), by.weight, by.bias,
                        by.adds ? read(out) : ConstRows{}, out, kernel_scratch_, by.gate, prefetcher_};
        if (member_ && !multiplied_as_it_lies(by.kind, by.inputs, call.x.element)) {
            prepare_kernel(kernels_, by.kind)(call, member_->alone);
            call.prepared = true;
        }
        linear_kernel(kernels_, by.kind)(call, pool_);
    }

    // One thread computes a head, which is too little work for more.
    void compute(const ProjectHeadsOperation& by) const {
        const WeightStack& weights = by.weights;
        const Rows x = rows(by.x), out = rows(by.out);
        const int tasks = std::min(pool_.threads(), by.heads);
        const int64_t scratch = shard_.tokens * scratch_stride(weights.kind, weights.inputs);
        pool_.run(tasks, [&](int task) {
            Pool alone(1);
            for (int64_t head = task; head < by.heads; head += tasks) {
                const Rows from = from_column(x, head * (by.passed + weights.inputs));
                const Rows to = from_column(out, head * (by.passed + weights.outputs));
                if (by.passed > 0) kernels_.gate_rows({shard_.tokens, by.passed, read(from), {}, {}, to}, alone);
                const LinearCall call{shard_.tokens, weights.outputs, weights.inputs,
                                      read(from_column(from, by.passed)), weights.of(head), {}, {},
                                      from_column(to, by.passed), kernel_scratch_ + task * scratch, {},
                                      prefetcher_};
                linear_kernel(kernels_, weights.kind)(call, alone);
            }
        });
    }

    // One thread computes an adapter with few tokens, several at once: their products are too small to divide.
    void compute(const AdaptOperation& by) const {
        constexpr int64_t kFewTokens = 8;
        int64_t tokens = 0;
        for (int32_t i = 0; i < step_.adapted_count; i++) tokens += mine(step_.adapted[i]).tokens;
        if (tokens == 0) return;
        if (pool_.threads() == 1 || tokens > kFewTokens * step_.adapted_count) {
            for (int32_t i = 0; i < step_.adapted_count; i++) adapt_tokens(by, step_.adapted[i], pool_);
        } else {
            pool_.run(step_.adapted_count, [&](int i) {
                Pool alone(1);
                adapt_tokens(by, step_.adapted[i], alone);
            });
        }
    }

    // The part of the tokens that is in this shard; `first` counts from the shard's first token.
    struct Span {
        int64_t token, tokens;
    };
    Span mine(const AdaptedTokens& of) const {
        const int64_t first = std::max(of.first, shard_.token), end = std::min(of.end, shard_.token + shard_.tokens);
        return {first - shard_.token, std::max<int64_t>(0, end - first)};
    }

    void adapt_tokens(const AdaptOperation& by, const AdaptedTokens& of, Pool& pool) const {
        const LowRank& update = of.adapter->sites[size_t(by.site)];
        const Span span = mine(of);
        if (span.tokens == 0 || update.outputs == 0) return;
        const Rows x = from_token(rows(by.x), span.token), out = from_token(rows(by.out), span.token);
        const Element element = update.kind == Kind::bf16 ? Element::bf16 : Element::f32;
        const Rows inner{kernel_scratch_ + span.token * inner_stride_, inner_stride_ / element_size(element), element};
        uint8_t* scratch = kernel_scratch_ + shard_.tokens * inner_stride_ + span.token * adapters_stride_;
        const LinearCall down{span.tokens,  update.outputs, update.inputs, read(x), update.down, {}, {}, inner,
                              scratch,      {}};
        linear_kernel(kernels_, update.kind)(down, pool);
        for (const LowRank::Up& up : update.ups) {
            const Rows to = from_column(out, up.first);
            const LinearCall call{span.tokens, up.outputs, up.inputs, read(from_column(inner, up.inner)), up.weight, {},
                                  read(to), to, scratch, {}};
            linear_kernel(kernels_, update.kind)(call, pool);
        }
    }

    void compute(const ActivationOperation& by) const {
        write(by.out, [&](Pool& pool) {
            activation_kernel(kernels_, by.kind)({shard_.tokens, by.out.width, read(rows(by.x)), rows(by.out)}, pool);
        });
    }

    void compute(const ExpertsOperation& by) const {
        const Rows out = rows(by.out);
        run_experts({by.layer, shard_.tokens, read(rows(by.x)), read(rows(by.logits)),
                     by.adds ? read(out) : ConstRows{}, out, kernel_scratch_, prefetcher_},
                    kernels_, pool_);
    }

    void compute(const GateRowsOperation& by) const {
        const Rows out = rows(by.out);
        kernels_.gate_rows({shard_.tokens, by.out.width, read(rows(by.x)), read(rows(by.logits)), read(out), out}, pool_);
    }

    ConstRows optional(const Columns& columns) const { return columns.width ? read(rows(columns)) : ConstRows{}; }

    Stretch stretch() const { return {shard_.token, shard_.tokens, step_.runs}; }

    void compute(const GatedNormOperation& by) const {
        kernels_.gated_norm({shard_.tokens, by.x.width, by.norm, read(rows(by.x)), read(rows(by.gate)), rows(by.out)},
                            pool_);
    }

    void compute(const GateOperation& by) const {
        write(by.out, [&](Pool& pool) {
            kernels_.gate_columns(
                {shard_.tokens, by.x.width, read(rows(by.x)), read(rows(by.gate)), rows(by.out), by.kind}, pool);
        });
    }

    void compute(const ScaleOperation& by) const {
        write(by.x, [&](Pool& pool) {
            kernels_.scale({shard_.tokens, by.x.width, read(rows(by.x)), *by.factor, rows(by.x)}, pool);
        });
    }

    void compute(const RegroupOperation& by) const {
        write(by.out, [&](Pool& pool) {
            kernels_.regroup({shard_.tokens, by.groups, by.x.width / (2 * by.groups), read(rows(by.x)), rows(by.out)},
                             pool);
        });
    }

    template <class Others>
    void compute(const AttendOperation& by, const Others& others) const {
        const KvCache& cache = step_.caches[by.cache];
        const Rows q = rows(by.rotated), mixed = rows(by.out);
        const RotaryCall call{shard_.tokens, read(rows(by.q)), optional(by.k), optional(by.v), q, cache, by.q_heads,
                              step_.write_slots + shard_.token, step_.positions + shard_.token, by.cos, by.sin,
                              by.q_norm, by.k_norm, by.eps, by.rotary_dim};
        if (member_) {
            rotate_for_all(call);
        } else {
            kernels_.rotate_and_store(call, pool_);
        }
        others.stored();
        // `q_start` counts from the first token of the step.
        const Rows step_q = from_token(q, -shard_.token), step_mixed = from_token(mixed, -shard_.token);
        kernels_.attention({read(step_q), step_mixed, cache, by.q_heads, shard_.rows, shard_.q_start, shard_.kv_len,
                            step_.block_table + shard_.row * step_.table_width, step_.table_width, by.scale,
                            shard_.attention_scratch, size_t(shard_.attention_scratch_bytes), by.softcap, by.window,
                            by.sinks, by.ahead},
                           pool_);
    }

    // Every member rotates queries for itself; the last one stores keys and values.
    void rotate_for_all(const RotaryCall& call) const {
        RotaryCall queries = call, stored = call;
        queries.k = queries.v = {};
        stored.q = {};
        pool_.run(pool_.threads(), [&](int mine) {
            kernels_.rotate_and_store(queries, member_->alone);
            if (mine == pool_.threads() - 1 && call.k.data) kernels_.rotate_and_store(stored, member_->alone);
        });
    }

    const Program& program_;
    const Step& step_;
    const KernelTable& kernels_;
    Pool& pool_;
    const Shard& shard_;
    uint8_t* scratch_;
    uint8_t* kernel_scratch_;
    KvPrefetcher* prefetcher_;  // or null
    const Membership* member_;  // or null
    int64_t inner_stride_, adapters_stride_;  // bytes of adapters' scratch for one token
};

}  // namespace penstock
