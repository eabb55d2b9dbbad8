#include "parts.h"

#include <algorithm>

#include "decoder.h"

namespace penstock {
namespace {

constexpr int64_t kSharedBytes = 8 << 20;     // of weights: a quarter of what a shared cache has
constexpr int64_t kProductsAPosition = 40;    // weights are multiplied in the time in which attention reads one element

constexpr int64_t bytes_for_rows(int32_t rows) { return round_up((2 * int64_t(rows) + 1) * int64_t(sizeof(int32_t)), 64); }

template <class Of>
int64_t sum_of(const DecoderLayer& layer, const Of& of) {
    return of(layer.qkv) + of(layer.output) + of(layer.gate_up) + of(layer.down);
}

int64_t bytes_of(const DecoderLayer& layer) {
    return sum_of(layer, [](const Projection& by) { return packed_bytes(by.kind, by.outputs, by.inputs); });
}

// Fewer tokens in a part do not make up for reading all weights where half of them would do: 4-bit ones are read soonest.
int64_t least_tokens(const DecoderPlan& plan) { return plan.layers[0].qkv.kind == Kind::q4 ? 4 : 8; }

// What a token costs in a layer, in positions that attention reads.
struct Costs {
    int64_t products;

    explicit Costs(const DecoderPlan& plan) {
        const int64_t weights = sum_of(plan.layers[0], [](const Projection& by) { return by.outputs * by.inputs; });
        products = weights / (kProductsAPosition * plan.kv_heads * plan.head_dim);
    }
    int64_t of(const DecoderStep& step, int32_t row, int64_t token) const {
        return products + step.kv_len[row] - (step.q_start[row + 1] - token) + 1;
    }
};

// The rows of tokens [part.token, part.token + part.tokens), of which `row` has the first; told to `memory`.
void describe_rows(const DecoderStep& step, int32_t row, int32_t* memory, Part& part) {
    const int64_t end = part.token + part.tokens;
    part.row = row;
    part.rows = 0;
    for (int32_t r = row; r < step.rows && step.q_start[r] < end; r++) part.rows++;
    int32_t *q_start = memory, *kv_len = memory + part.rows + 1;
    for (int32_t i = 0; i < part.rows; i++) {
        const int64_t row_end = step.q_start[row + i + 1];
        q_start[i] = std::max(step.q_start[row + i], int32_t(part.token));
        kv_len[i] = step.kv_len[row + i] - int32_t(std::max<int64_t>(row_end - end, 0));
    }
    q_start[part.rows] = int32_t(end);
    part.q_start = q_start;
    part.kv_len = kv_len;
}

}  // namespace

int64_t layers_apart(const DecoderPlan& plan) {
    return std::max<int64_t>(1, kSharedBytes / std::max<int64_t>(1, bytes_of(plan.layers[0])));
}

int64_t parts_scratch(int32_t rows, int count) {
    return count * (bytes_for_rows(rows) + int64_t(attention_scratch(rows)));
}

bool split_step(const DecoderPlan& plan, const DecoderStep& step, int count, uint8_t* scratch, int64_t scratch_bytes,
                Part* parts) {
    if (count < 2 || count > kMostParts || plan.layers.empty() || step.tokens < count * least_tokens(plan)) return false;
    if (bytes_of(plan.layers[0]) > kSharedBytes || scratch_bytes < parts_scratch(step.rows, count)) return false;
    const Costs costs(plan);
    int64_t whole = 0;
    for (int32_t row = 0; row < step.rows; row++) {
        for (int64_t t = step.q_start[row]; t < step.q_start[row + 1]; t++) whole += costs.of(step, row, t);
    }
    int64_t token = 0, spent = 0;
    int32_t row = 0;
    for (int i = 0; i < count; i++) {
        Part& part = parts[i];
        part.token = token;
        const int32_t first_row = row;
        for (; token < step.tokens && (i == count - 1 || spent * count < whole * (i + 1)); token++) {
            spent += costs.of(step, row, token);
            if (token + 1 == step.q_start[row + 1]) row++;
        }
        part.tokens = token - part.token;
        if (part.tokens == 0) return false;  // the one before it is dearer than a share
        describe_rows(step, first_row, reinterpret_cast<int32_t*>(scratch), part);
        part.attention_scratch = scratch + bytes_for_rows(step.rows);
        part.attention_scratch_bytes = int64_t(attention_scratch(step.rows));
        scratch = part.attention_scratch + part.attention_scratch_bytes;
        part.waits_for = i;
        while (part.waits_for > 0 && parts[part.waits_for - 1].row + parts[part.waits_for - 1].rows > part.row) {
            part.waits_for--;
        }
    }
    return true;
}

}  // namespace penstock
