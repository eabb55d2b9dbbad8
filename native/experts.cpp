// A mixture of experts: tokens are grouped by expert, and the weights of each expert are multiplied by all of its
// tokens at once, by the kernels of all other packed weights.
//
// Exactness: these kernels give a row the same bits whatever the other rows are. The outputs of a token's experts are
// added by ascending expert, whichever thread computed them: pairs of expert and token are sorted by expert, then by
// token, and added in that order.
#include <algorithm>
#include <cstring>
#include <utility>

#include "experts_call.h"
#include "kernel_table.h"
#include "pool.h"

namespace penstock {
namespace {

// The most pairs whose experts may be computed at the same time, which keeps all their outputs until they are added up:
// a prefill of 256 tokens with 8 experts. One expert after the other, with five waits in each, took some processes a
// fifth longer there.
constexpr int64_t kMostPairsApart = 2048;

// Whether the kernel that multiplies by gates and ups also applies the gates.
bool gates_in_place(const ExpertLayer& layer) {
    return gates(layer.activation) && layer.inner() % kPanel == 0 && !layer.ups;
}

// The number of rows that are multiplied before the next ones reuse their memory.
int64_t rows_at_once(const ExpertLayer& layer, int64_t rows, int threads) {
    return threads == 1 ? rows : std::max(rows, std::min(rows * layer.router.top_k, kMostPairsApart));
}

// The layout of scratch:
//
//     | chosen [T][k] | weights [T][k] | tokens of the pairs [T * k] | their weights [T * k] | where each expert's pairs
//     end [E] | sums [T][hidden] | prepared x [T] | x prepared for ups [T] | gathered x [R] | gates and ups
//     [R][2 * inner] | inner [R][inner] | outputs [R][hidden] | prepared inner [R] |
//
// with R = rows_at_once(). Prepared rows are in the form that linear kernels multiply: a token's row is prepared once
// for all its experts, and once more if ups have another form than gates. Every row gets whole cache lines, so that the
// size grows evenly.
struct Areas {
    // Offsets in bytes.
    int64_t weights, pair_tokens, pair_weights, ends, sums, prepared, prepared_ups, x, wide, inner, said, linear, end;
    int64_t x_stride;  // bytes from one gathered row to the next, at least
};

// The width of gates and ups together, or of the input of an activation without gates.
int64_t wide_width(const ExpertLayer& layer) { return (gates(layer.activation) ? 2 : 1) * layer.inner(); }

Areas areas(const ExpertLayer& layer, int64_t rows, int threads) {
    const int64_t at_once = rows_at_once(layer, rows, threads), pair_numbers = rows * round_up(layer.router.top_k * 4, 64);
    const int64_t x_stride = scratch_stride(layer.gate_up.kind, layer.gate_up.inputs);
    const int64_t ups_stride = layer.ups ? scratch_stride(layer.ups->kind, layer.ups->inputs) : 0;
    const auto room = [](int64_t count, int64_t width) { return count * round_up(width * 4, 64); };
    Areas at{};
    at.weights = pair_numbers;
    at.pair_tokens = at.weights + pair_numbers;
    at.pair_weights = at.pair_tokens + pair_numbers;
    at.ends = at.pair_weights + pair_numbers;
    at.sums = at.ends + round_up(layer.router.experts * 4, 64);
    at.prepared = at.sums + room(rows, layer.hidden());
    at.prepared_ups = at.prepared + rows * x_stride;
    at.x = at.prepared_ups + rows * ups_stride;
    at.x_stride = std::max(x_stride, ups_stride);
    at.wide = at.x + at_once * at.x_stride;  // rows that are multiplied in place are no longer than prepared ones
    at.inner = at.wide + (gates_in_place(layer) ? 0 : room(at_once, wide_width(layer)));
    at.said = at.inner + room(at_once, layer.inner());
    at.linear = at.said + room(at_once, layer.hidden());
    at.end = at.linear + at_once * scratch_stride(layer.down.kind, layer.down.inputs);
    return at;
}

int64_t row_bytes(int64_t elements, Element element) {
    return elements * int64_t(element == Element::f32 ? sizeof(float) : sizeof(uint16_t));
}

// Rows to be multiplied: as they are, or prepared.
struct Given {
    const uint8_t* data;
    int64_t stride, bytes;  // from one row to the next; of one row
    bool prepared;
};

// The pairs of one expert.
struct Share {
    int32_t expert;
    int64_t first, count;
};

struct Run {
    const ExpertsCall& call;
    const KernelTable& kernels;
    Areas at;
    Given given, given_to_ups;  // the second if ups have another form

    template <class T>
    T* area(int64_t offset) const {
        return reinterpret_cast<T*>(call.scratch + offset);
    }
    int32_t* pair_tokens() const { return area<int32_t>(at.pair_tokens); }
    float* pair_weights() const { return area<float>(at.pair_weights); }

    void route(Pool& pool) const {
        kernels.route({call.rows, call.layer.router, call.logits, area<int32_t>(0), area<float>(at.weights)}, pool);
        sort_pairs();
    }

    void sort_pairs() const {
        const Router& router = call.layer.router;
        const int32_t* chosen = area<int32_t>(0);
        int32_t* ends = area<int32_t>(at.ends);
        std::fill(ends, ends + router.experts, 0);
        for (int64_t pair = 0; pair < call.rows * router.top_k; pair++) ends[chosen[pair]]++;
        int32_t begin = 0;
        for (int32_t e = 0; e < router.experts; e++) begin += std::exchange(ends[e], begin);
        for (int64_t pair = 0; pair < call.rows * router.top_k; pair++) {
            const int32_t place = ends[chosen[pair]]++;  // moves from the begin of the expert's pairs to their end
            pair_tokens()[place] = int32_t(pair / router.top_k);
            pair_weights()[place] = area<float>(at.weights)[pair];
        }
    }

    Share share(int32_t expert) const {
        const int32_t* ends = area<int32_t>(at.ends);
        const int64_t first = expert == 0 ? 0 : ends[expert - 1];
        return {expert, first, ends[expert] - first};
    }

    // The rows of these pairs: in place if they are contiguous, else copied to `place` of their area.
    Given gather(const Given& from, const Share& of, int64_t place, Pool& pool) const {
        const int32_t* tokens = pair_tokens() + of.first;
        const auto row = [&](int64_t i) { return from.data + tokens[i] * from.stride; };
        const int64_t bytes = from.bytes;
        if (tokens[of.count - 1] - tokens[0] + 1 == of.count) return {row(0), from.stride, bytes, from.prepared};
        uint8_t* to = area<uint8_t>(at.x) + place * at.x_stride;
        constexpr int64_t kTaskBytes = 1 << 15;
        const int64_t each = divide_up(kTaskBytes, bytes);
        pool.run(int(divide_up(of.count, each)), [&](int task) {
            const int64_t last = std::min(of.count, (task + 1) * each);
            for (int64_t i = task * each; i < last; i++) std::memcpy(to + i * bytes, row(i), size_t(bytes));
        });
        return {to, bytes, bytes, from.prepared};
    }

    // `scratch` is written only if x is neither prepared nor multiplied as it is.
    void multiply(const WeightStack& stack, const Share& of, const ConstRows& x, const Rows& out, uint8_t* scratch,
                  std::optional<Activation> gate, bool prepared, Pool& pool) const {
        const LinearCall product{of.count, stack.outputs, stack.inputs, x,       stack.of(of.expert), stack.bias_of(of.expert), {},
                                 out,      scratch,       gate,         call.prefetcher, prepared};
        linear_kernel(kernels, stack.kind)(product, pool);
    }

    void multiply_given(const WeightStack& stack, const Given& from, const Share& of, int64_t place, const Rows& out,
                        std::optional<Activation> gate, Pool& pool) const {
        const Given rows = gather(from, of, place, pool);
        const ConstRows x{rows.data, rows.stride / row_bytes(1, call.x.element), call.x.element};
        multiply(stack, of, x, out, const_cast<uint8_t*>(rows.data), gate, rows.prepared, pool);
    }

    // Writes an expert's outputs for its tokens to `place` of their area.
    void ask(const Share& of, int64_t place, Pool& pool) const {
        const ExpertLayer& layer = call.layer;
        const Element element = layer.down.kind == Kind::bf16 ? Element::bf16 : Element::f32;  // as it is multiplied
        const Rows inner{area<uint8_t>(at.inner) + place * row_bytes(layer.inner(), element), layer.inner(), element};
        if (gates_in_place(layer)) {
            multiply_given(layer.gate_up, given, of, place, inner, layer.activation, pool);
        } else {
            const int64_t width = wide_width(layer);
            float* wide = area<float>(at.wide) + place * width;
            multiply_given(layer.gate_up, given, of, place, {wide, width, Element::f32}, {}, pool);
            if (layer.ups) {
                const Rows ups{wide + layer.inner(), width, Element::f32};
                multiply_given(*layer.ups, given_to_ups, of, place, ups, {}, pool);
            }
            const ConstRows made{wide, width, Element::f32};
            activation_kernel(kernels, layer.activation)({of.count, layer.inner(), made, inner}, pool);
        }
        const Rows said{area<float>(at.said) + place * layer.hidden(), layer.hidden(), Element::f32};
        uint8_t* scratch = area<uint8_t>(at.linear) + place * scratch_stride(layer.down.kind, layer.down.inputs);
        multiply(layer.down, of, {inner.data, inner.stride, element}, said, scratch, {}, false, pool);
    }

    void add(const Share& of, int64_t place, Pool& pool) const {
        const int64_t hidden = call.layer.hidden();
        kernels.scatter({of.count, hidden, area<float>(at.said) + place * hidden, pair_tokens() + of.first,
                         pair_weights() + of.first, area<float>(at.sums)},
                        pool);
    }

    // All threads compute one expert after the other.
    void together(Pool& pool) const {
        for (int32_t expert = 0; expert < call.layer.router.experts; expert++) {
            const Share of = share(expert);
            if (of.count == 0) continue;
            ask(of, 0, pool);
            add(of, 0, pool);
        }
    }

    // Each expert is computed by one thread, so threads wait only for the end of all. `asked` are the experts with
    // tokens, those with most tokens first, so that little is left for a single thread at the end.
    void apart(const int32_t* asked, int64_t count, Pool& pool) const {
        pool.run(int(count), [&](int i) {
            Pool alone(1);
            const Share of = share(asked[i]);
            ask(of, of.first, alone);
        });
        add({0, 0, call.rows * call.layer.router.top_k}, 0, pool);
    }

    // Whether threads would finish at about the same time if each took whole experts.
    bool divides_evenly(int64_t asked, int64_t largest, int threads) const {
        constexpr int64_t kRowsAPass = 8;  // reading a weight takes as long as multiplying about this many rows by it
        const int64_t pairs = call.rows * call.layer.router.top_k, rounds = divide_up(asked, threads);
        return 8 * rounds * threads <= 9 * asked && (largest + kRowsAPass) * threads <= pairs + kRowsAPass * asked;
    }

    void finish(Pool& pool) const {
        const int64_t hidden = call.layer.hidden();
        kernels.gate_rows({call.rows, hidden, {area<float>(at.sums), hidden, Element::f32}, {}, call.residual, call.out},
                          pool);
    }
};

// Prepares rows that are not multiplied as they are, once; later each of their experts takes a copy.
Given given_rows(const ExpertsCall& call, const WeightStack& stack, uint8_t* prepared, const KernelTable& kernels,
                 Pool& pool) {
    if (multiplied_as_it_lies(stack.kind, stack.inputs, call.x.element)) {
        return {static_cast<const uint8_t*>(call.x.data), row_bytes(call.x.stride, call.x.element),
                row_bytes(stack.inputs, call.x.element), false};
    }
    const int64_t stride = scratch_stride(stack.kind, stack.inputs);
    prepare_kernel(kernels, stack.kind)(
        {call.rows, stack.outputs, stack.inputs, call.x, stack.weight, {}, {}, {}, prepared, {}}, pool);
    return {prepared, stride, stride, true};
}

}  // namespace

int64_t experts_scratch(const ExpertLayer& layer, int64_t rows, int threads) { return areas(layer, rows, threads).end; }

int64_t run_experts(const ExpertsCall& call, const KernelTable& kernels, Pool& pool) {
    if (call.rows == 0) return 0;
    const Areas at = areas(call.layer, call.rows, pool.threads());
    const ExpertLayer& layer = call.layer;
    Run run{call, kernels, at, given_rows(call, layer.gate_up, call.scratch + at.prepared, kernels, pool), {}};
    if (layer.ups) run.given_to_ups = given_rows(call, *layer.ups, call.scratch + at.prepared_ups, kernels, pool);
    run.route(pool);
    int32_t asked[kMostExperts];
    int64_t count = 0, largest = 0;
    for (int32_t expert = 0; expert < call.layer.router.experts; expert++) {
        const int64_t tokens = run.share(expert).count;
        if (tokens > 0) asked[count++] = expert;
        largest = std::max(largest, tokens);
    }
    std::memset(run.area<float>(run.at.sums), 0, size_t(call.rows * call.layer.hidden()) * sizeof(float));
    const bool fits = call.rows * call.layer.router.top_k <= kMostPairsApart;
    if (pool.threads() > 1 && fits && run.divides_evenly(count, largest, pool.threads())) {
        const auto has_more = [&](int32_t a, int32_t b) { return run.share(a).count > run.share(b).count; };
        std::stable_sort(asked, asked + count, has_more);
        run.apart(asked, count, pool);
    } else {
        run.together(pool);
    }
    run.finish(pool);
    return count;
}

}  // namespace penstock
