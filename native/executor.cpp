// A program's operations one after the other, over all tokens of a step together or shard by shard (shards.h).
#include "executor.h"

#include <algorithm>
#include <atomic>

#include "kv_prefetcher.h"
#include "pool.h"
#include "shards.h"

namespace penstock {
namespace {

// Scratch, one after the other, each on a cache line:
//
//     | areas of registers | of the linear kernels, or of experts, or of adapters | of attention |
//
// Where a step is shared out, each shard has all but the last of them to itself, one shard after the other.

int64_t area_size(const Program& program, size_t area, int64_t tokens) {
    return round_up(tokens * program.area_bytes[area], 64);
}

int64_t areas_size(const Program& program, int64_t tokens) {
    int64_t size = 0;
    for (size_t area = 0; area < program.area_bytes.size(); area++) size += area_size(program, area, tokens);
    return size;
}

int64_t linear_stride(const Program& program) {
    int64_t most = 0;
    for (const Operation& operation : program.operations) {
        if (const auto* linear = std::get_if<LinearOperation>(&operation)) {
            most = std::max(most, scratch_stride(linear->kind, linear->inputs));
        }
    }
    return most;
}

int64_t most_experts_scratch(const Program& program, int64_t tokens, int threads) {
    int64_t most = 0;
    for (const Operation& operation : program.operations) {
        if (const auto* experts = std::get_if<ExpertsOperation>(&operation)) {
            most = std::max(most, experts_scratch(experts->layer, tokens, threads));
        }
    }
    return most;
}

// Each thread has its own for one head after the other.
int64_t most_heads_scratch(const Program& program, int64_t tokens, int threads) {
    int64_t most = 0;
    for (const Operation& operation : program.operations) {
        if (const auto* heads = std::get_if<ProjectHeadsOperation>(&operation)) {
            const int64_t each = tokens * scratch_stride(heads->weights.kind, heads->weights.inputs);
            most = std::max(most, std::min(threads, heads->heads) * each);
        }
    }
    return most;
}

// Of adapters, for one token: down(x), and what the linear kernels want. Both are multiples of 64.
int64_t inner_stride(const Program& program) { return round_up(program.inner * int64_t(sizeof(float)), 64); }

int64_t adapters_linear_stride(const Program& program) {
    if (program.inner == 0) return 0;
    int64_t most = program.inner;
    for (const Operation& operation : program.operations) {
        if (const auto* adapt = std::get_if<AdaptOperation>(&operation)) most = std::max(most, adapt->x.width);
    }
    return std::max(scratch_stride(Kind::f32, most), scratch_stride(Kind::bf16, most));
}

int64_t shard_scratch(const Program& program, int64_t tokens, int threads = 1) {
    const int64_t kernels = std::max({tokens * linear_stride(program),  // strides are multiples of 64
                                      most_experts_scratch(program, tokens, threads),
                                      most_heads_scratch(program, tokens, threads),
                                      tokens * (inner_stride(program) + adapters_linear_stride(program))});
    return areas_size(program, tokens) + kernels;
}

// All shards together need more than the whole step by so much at most, for each shard: areas are rounded up, and
// experts need some memory for any number of tokens.
int64_t lost_by_sharing(const Program& program) {
    return int64_t(program.area_bytes.size()) * 64 + most_experts_scratch(program, 0, 1);
}

int64_t element_size(Element element) { return element == Element::f32 ? sizeof(float) : sizeof(uint16_t); }

Rows from_token(const Rows& rows, int64_t token) {
    return {static_cast<uint8_t*>(rows.data) + token * rows.stride * element_size(rows.element), rows.stride, rows.element};
}

Rows from_column(const Rows& rows, int64_t column) {
    return {static_cast<uint8_t*>(rows.data) + column * element_size(rows.element), rows.stride, rows.element};
}

ConstRows read(const Rows& rows) { return {rows.data, rows.stride, rows.element}; }

// The operations of one step for one shard of it.
class Run {
public:
    Run(const Program& program, const Step& step, const KernelTable& kernels, Pool& pool, const Shard& shard,
        uint8_t* scratch, KvPrefetcher* prefetcher)
        : program_(program), step_(step), kernels_(kernels), pool_(pool), shard_(shard), scratch_(scratch),
          kernel_scratch_(scratch + areas_size(program, shard.tokens)), prefetcher_(prefetcher),
          inner_stride_(inner_stride(program)), adapters_stride_(adapters_linear_stride(program)) {}

    // Calls others.stored() once the keys and values of this shard lie in the cache, others.await() before a state is
    // read and others.publish() once it is written; goes on when they return.
    template <class Others>
    void operate(const Operation& operation, const Others& others) const {
        if (const auto* linear = std::get_if<LinearOperation>(&operation)) {
            project(*linear);
        } else if (const auto* norm = std::get_if<NormOperation>(&operation)) {
            normalise(*norm);
        } else if (const auto* activation = std::get_if<ActivationOperation>(&operation)) {
            activate(*activation);
        } else if (const auto* experts = std::get_if<ExpertsOperation>(&operation)) {
            ask_experts(*experts);
        } else if (const auto* gate = std::get_if<GateRowsOperation>(&operation)) {
            gate_rows(*gate);
        } else if (const auto* convolution = std::get_if<ConvolutionOperation>(&operation)) {
            others.await();
            convolve(*convolution);
            others.publish();
        } else if (const auto* recurrence = std::get_if<RecurrenceOperation>(&operation)) {
            others.await();
            recur(*recurrence);
            others.publish();
        } else if (const auto* gated_norm = std::get_if<GatedNormOperation>(&operation)) {
            normalise_gated(*gated_norm);
        } else if (const auto* columns = std::get_if<GateOperation>(&operation)) {
            gate_columns(*columns);
        } else if (const auto* factor = std::get_if<ScaleOperation>(&operation)) {
            scale(*factor);
        } else if (const auto* groups = std::get_if<RegroupOperation>(&operation)) {
            regroup(*groups);
        } else if (const auto* heads = std::get_if<ProjectHeadsOperation>(&operation)) {
            project_heads(*heads);
        } else if (const auto* site = std::get_if<AdaptOperation>(&operation)) {
            adapt(*site);
        } else {
            attend(std::get<AttendOperation>(operation), others);
        }
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
            uint8_t* area = scratch_;
            for (int32_t i = 0; i < in.area; i++) area += area_size(program_, size_t(i), shard_.tokens);
            whole.data = area;
        }
        whole.data = static_cast<uint8_t*>(whole.data) + columns.first * element_size(whole.element);
        return whole;
    }

    void normalise(const NormOperation& by) const {
        const int64_t width = by.x.width / by.groups;
        for (int64_t i = 0; i < by.groups; i++) {
            const Rows out = rows({by.out.in, by.out.first + i * width, width});
            NormCall call{shard_.tokens, width, rows({by.x.in, by.x.first + i * width, width}), {}, by.weight, by.bias,
                          by.eps, out};
            if (by.adds) call.addend = read(out);
            norm_kernel(kernels_, by.kind)(call, pool_);
        }
    }

    void project(const LinearOperation& by) const {
        const Rows out = rows(by.out);
        const LinearCall call{shard_.tokens, by.outputs, by.inputs, read(rows(by.x)), by.weight, by.bias,
                              by.adds ? read(out) : ConstRows{}, out, kernel_scratch_, by.gate, prefetcher_};
        linear_kernel(kernels_, by.kind)(call, pool_);
    }

    // Each head by one thread: there is too little of it for more.
    void project_heads(const ProjectHeadsOperation& by) const {
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

    // Adapters with few tokens each by one thread, several at once: a product of theirs is too small to be shared out.
    void adapt(const AdaptOperation& by) const {
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

    // Those of the tokens that are in this shard; the first is counted from the shard's.
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

    void activate(const ActivationOperation& by) const {
        activation_kernel(kernels_, by.kind)({shard_.tokens, by.out.width, read(rows(by.x)), rows(by.out)}, pool_);
    }

    void ask_experts(const ExpertsOperation& by) const {
        const Rows out = rows(by.out);
        run_experts({by.layer, shard_.tokens, read(rows(by.x)), read(rows(by.logits)),
                     by.adds ? read(out) : ConstRows{}, out, kernel_scratch_, prefetcher_},
                    kernels_, pool_);
    }

    void gate_rows(const GateRowsOperation& by) const {
        const Rows out = rows(by.out);
        kernels_.gate_rows({shard_.tokens, by.out.width, read(rows(by.x)), read(rows(by.logits)), read(out), out}, pool_);
    }

    ConstRows optional(const Columns& columns) const { return columns.width ? read(rows(columns)) : ConstRows{}; }

    Stretch stretch() const { return {shard_.token, shard_.tokens, step_.runs}; }

    void convolve(const ConvolutionOperation& by) const {
        kernels_.short_convolution({stretch(), by.filter, read(rows(by.x)), optional(by.gate_in), optional(by.gate_out),
                                    step_.states[by.state].data, rows(by.out)},
                                   pool_);
    }

    void recur(const RecurrenceOperation& by) const {
        kernels_.recurrence({stretch(), by.rule, read(rows(by.q)), read(rows(by.k)), read(rows(by.v)), read(rows(by.a)),
                             optional(by.b), step_.states[by.state].data, rows(by.out)},
                            pool_);
    }

    void normalise_gated(const GatedNormOperation& by) const {
        kernels_.gated_norm({shard_.tokens, by.x.width, by.norm, read(rows(by.x)), read(rows(by.gate)), rows(by.out)},
                            pool_);
    }

    void gate_columns(const GateOperation& by) const {
        kernels_.gate_columns({shard_.tokens, by.x.width, read(rows(by.x)), read(rows(by.gate)), rows(by.out), by.kind},
                              pool_);
    }

    void scale(const ScaleOperation& by) const {
        kernels_.scale({shard_.tokens, by.x.width, read(rows(by.x)), *by.factor, rows(by.x)}, pool_);
    }

    void regroup(const RegroupOperation& by) const {
        kernels_.regroup({shard_.tokens, by.groups, by.x.width / (2 * by.groups), read(rows(by.x)), rows(by.out)}, pool_);
    }

    template <class Others>
    void attend(const AttendOperation& by, const Others& others) const {
        const KvCache& cache = step_.caches[by.cache];
        const Rows q = rows(by.rotated), mixed = rows(by.out);
        kernels_.rotate_and_store({shard_.tokens, read(rows(by.q)), optional(by.k), optional(by.v), q, cache, by.q_heads,
                                   step_.write_slots + shard_.token, step_.positions + shard_.token, by.cos, by.sin,
                                   by.q_norm, by.k_norm, by.eps, by.rotary_dim},
                                  pool_);
        others.stored();
        // `q_start` counts the tokens of the step from its first.
        const Rows step_q = from_token(q, -shard_.token), step_mixed = from_token(mixed, -shard_.token);
        kernels_.attention({read(step_q), step_mixed, cache, by.q_heads, shard_.rows, shard_.q_start, shard_.kv_len,
                            step_.block_table + shard_.row * step_.table_width, step_.table_width, by.scale,
                            shard_.attention_scratch, size_t(shard_.attention_scratch_bytes), by.softcap, by.window,
                            by.sinks, by.ahead},
                           pool_);
    }

    const Program& program_;
    const Step& step_;
    const KernelTable& kernels_;
    Pool& pool_;
    const Shard& shard_;
    uint8_t* scratch_;
    uint8_t* kernel_scratch_;
    KvPrefetcher* prefetcher_;  // or null
    int64_t inner_stride_, adapters_stride_;  // bytes of scratch of adapters, for one token
};

// How far the shards of a step are, for those who must wait for another.
class Progress {
public:
    explicit Progress(int shards) : shards_(shards) {
        for (int i = 0; i < shards; i++) {
            written_[i].store(0, std::memory_order_relaxed);
            layer_[i].store(INT64_MAX, std::memory_order_relaxed);  // nobody waits for a shard before it begins
        }
    }

    // No shard may be further ahead of another than the shared cache holds layers.
    void begin_layer(int mine, int64_t layer, int64_t apart) {
        layer_[mine].store(layer, std::memory_order_relaxed);
        for (int other = 0; other < shards_; other++) {
            wait_until([&] { return layer_[other].load(std::memory_order_relaxed) >= layer - apart; });
        }
    }

    // What later tokens read of `operation` is written for those of `mine`: keys and values, or a state.
    void publish(int mine, int64_t operation) { written_[mine].store(operation + 1, std::memory_order_release); }

    // Returns when it is for those of all from `first` on before `mine`.
    void await(int mine, int first, int64_t operation) {
        for (int earlier = first; earlier < mine; earlier++) {
            wait_until([&] { return written_[earlier].load(std::memory_order_acquire) > operation; });
        }
    }

    void end(int mine) { layer_[mine].store(INT64_MAX, std::memory_order_relaxed); }

private:
    int shards_;
    std::atomic<int64_t> written_[kMostShards], layer_[kMostShards];  // written_: operations from the first on
};

// What one shard tells the others of an operation, and waits for.
struct Neighbours {
    Progress& progress;
    KvPrefetcher& prefetcher;
    int mine, first;
    int64_t operation;

    void publish() const { progress.publish(mine, operation); }
    void await() const { progress.await(mine, first, operation); }
    void stored() const {
        publish();
        await();
        prefetcher.aim_at_next();
    }
};

struct Nobody {
    void publish() const {}
    void await() const {}
    void stored() const {}
};

// Each shard by a thread of its own, on a pool of one.
void run_shards(const Program& program, const Step& step, const KernelTable& kernels, Pool& pool, const Shard* shards) {
    const int count = pool.threads();
    const int64_t apart = layers_apart(program);
    uint8_t* scratch[kMostShards];
    for (int i = 0; i < count; i++) {
        scratch[i] = i == 0 ? step.scratch : scratch[i - 1] + shard_scratch(program, shards[i - 1].tokens);
    }
    Progress progress(count);
    pool.run(count, [&](int mine) {
        Pool alone(1);
        const Shard& shard = shards[mine];
        KvPrefetcher prefetcher(program, step, shard);
        const Run run(program, step, kernels, alone, shard, scratch[mine], &prefetcher);
        prefetcher.aim_at_next();
        int64_t layer = 0;
        for (size_t i = 0; i < program.operations.size(); i++) {
            if (layer < int64_t(program.layer_starts.size()) && program.layer_starts[size_t(layer)] == int64_t(i)) {
                progress.begin_layer(mine, layer++, apart);
            }
            run.operate(program.operations[i], Neighbours{progress, prefetcher, mine, shard.waits_for, int64_t(i)});
        }
        progress.end(mine);
    });
}

int64_t attention_scratch_of(const Program& program, int64_t tokens, int32_t rows, int32_t longest, int threads) {
    int64_t most = 0;
    for (size_t i = 0; i < program.operations.size(); i++) {
        if (const AttendOperation* attend = program.attends(i); attend && attend->value_dim > 0) {
            most = std::max(most, int64_t(attention_scratch(rows)));
        } else if (attend) {
            most = std::max(most, int64_t(attention_scratch_wanted(rows, tokens, attend->q_heads, attend->kv_heads,
                                                                   attend->head_dim, longest, threads,
                                                                   reach_of(attend->window, attend->ahead))));
        }
    }
    return most;
}

}  // namespace

int64_t program_scratch(const Program& program, int64_t tokens, int32_t rows, int32_t longest, int threads) {
    const int64_t together = attention_scratch_of(program, tokens, rows, longest, threads);
    const int64_t apart = threads == 1 ? 0 : threads * lost_by_sharing(program) + shards_scratch(rows, threads);
    return shard_scratch(program, tokens, threads) + std::max(together, apart);
}

void run_program(const Program& program, const Step& step, const KernelTable& kernels, Pool& pool) {
    const int64_t used = shard_scratch(program, step.tokens, pool.threads()), left = step.scratch_bytes - used;
    const int64_t lost = pool.threads() * lost_by_sharing(program);
    Shard shards[kMostShards];
    // Shards wait for those before them alone: where tokens look ahead, none could go on.
    const bool may_share = !program.looks_ahead;
    if (may_share && share_out(program, step, pool.threads(), step.scratch + used + lost, left - lost, shards)) {
        return run_shards(program, step, kernels, pool, shards);
    }
    const Shard whole{0, step.tokens, 0, step.rows, step.q_start, step.kv_len, 0, step.scratch + used, left};
    const Run run(program, step, kernels, pool, whole, step.scratch, nullptr);
    for (const Operation& operation : program.operations) run.operate(operation, Nobody{});
}

}  // namespace penstock
