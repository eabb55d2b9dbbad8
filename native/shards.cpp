#include "shards.h"

#include <algorithm>

namespace penstock {
namespace {

constexpr int64_t kSharedBytes = 8 << 20;      // of weights: a quarter of a shared cache
constexpr int64_t kOperationsAnElement = 80;  // while attention reads an element of a key and of its value

constexpr int64_t bytes_for_rows(int32_t rows) { return round_up((2 * int64_t(rows) + 1) * int64_t(sizeof(int32_t)), 64); }

// With fewer tokens, a shard is not worth reading all weights, of which each thread would otherwise read half: 4-bit
// weights are read fastest, and tiles are multiplied faster than their weights are read (ADR 55).
int64_t least_tokens(int64_t rows_of_a_tile, Kind kind) {
    if (rows_of_a_tile > 1) return 6 * rows_of_a_tile;
    return block_form(kind).inputs != 0 && kind != Kind::q8 ? 4 : 8;
}

// The cost of a token, in elements of keys that attention reads with their values. A number of a recurrent state, which
// the first token of a row reads, has as many bytes as such an element with its value.
int64_t cost_of(const ProgramCost& program, const Step& step, int32_t row, int64_t token) {
    const int32_t seen = step.kv_len[row] - int32_t(step.q_start[row + 1] - token) + 1;
    int64_t elements = program.operations / kOperationsAnElement;
    for (const Sight& sight : program.sights) elements += sight.elements * (seen - window_start(sight.window, seen));
    return elements + (token == step.q_start[row] ? program.state : 0);
}

// Writes the rows of tokens [shard.token, shard.token + shard.tokens) to `memory`; `row` has the first token.
void describe_rows(const Step& step, int32_t row, int32_t* memory, Shard& shard) {
    const int64_t end = shard.token + shard.tokens;
    shard.row = row;
    shard.rows = 0;
    for (int32_t r = row; r < step.rows && step.q_start[r] < end; r++) shard.rows++;
    int32_t *q_start = memory, *kv_len = memory + shard.rows + 1;
    for (int32_t i = 0; i < shard.rows; i++) {
        const int64_t row_end = step.q_start[row + i + 1];
        q_start[i] = std::max(step.q_start[row + i], int32_t(shard.token));
        kv_len[i] = step.kv_len[row + i] - int32_t(std::max<int64_t>(row_end - end, 0));
    }
    q_start[shard.rows] = int32_t(end);
    shard.q_start = q_start;
    shard.kv_len = kv_len;
}

}  // namespace

int64_t layers_apart(const Program& program) {
    return std::max<int64_t>(1, kSharedBytes / std::max<int64_t>(1, program_cost(program).layer_bytes));
}

int64_t shards_scratch(int32_t rows, int count) {
    return count * (bytes_for_rows(rows) + int64_t(attention_scratch(rows)));
}

bool share_out(const Program& program, const Step& step, const KernelTable& kernels, int count, uint8_t* scratch,
               int64_t scratch_bytes, Shard* shards) {
    if (count < 2 || count > kMostShards || program.layer_starts.empty()) return false;
    const ProgramCost cost = program_cost(program);
    const int64_t rows_of_a_tile = kernels.linears[int(cost.kind)].rows_of_a_tile;
    if (step.tokens < count * least_tokens(rows_of_a_tile, cost.kind) || cost.layer_bytes > kSharedBytes) return false;
    if (scratch_bytes < shards_scratch(step.rows, count)) return false;
    int64_t whole = 0;
    for (int32_t row = 0; row < step.rows; row++) {
        for (int64_t t = step.q_start[row]; t < step.q_start[row + 1]; t++) whole += cost_of(cost, step, row, t);
    }
    int64_t ends[kMostShards], token = 0, spent = 0;
    int32_t row = 0;
    for (int i = 0; i < count; i++) {
        for (; token < step.tokens && (i == count - 1 || spent * count < whole * (i + 1)); token++) {
            spent += cost_of(cost, step, row, token);
            if (token + 1 == step.q_start[row + 1]) row++;
        }
        // The end of the nearest tile, since part of a tile takes as long as all of it.
        const int64_t begin = i == 0 ? 0 : ends[i - 1], half = rows_of_a_tile / 2;
        ends[i] = i == count - 1 ? token : begin + (token - begin + half) / rows_of_a_tile * rows_of_a_tile;
    }
    row = 0;
    for (int i = 0; i < count; i++) {
        Shard& shard = shards[i];
        shard.token = i == 0 ? 0 : ends[i - 1];
        shard.tokens = ends[i] - shard.token;
        if (shard.tokens <= 0) return false;  // the shard before it costs more than a share
        while (step.q_start[row + 1] <= shard.token) row++;
        describe_rows(step, row, reinterpret_cast<int32_t*>(scratch), shard);
        shard.attention_scratch = scratch + bytes_for_rows(step.rows);
        shard.attention_scratch_bytes = int64_t(attention_scratch(step.rows));
        scratch = shard.attention_scratch + shard.attention_scratch_bytes;
        shard.waits_for = i;
        while (shard.waits_for > 0 && shards[shard.waits_for - 1].row + shards[shard.waits_for - 1].rows > shard.row) {
            shard.waits_for--;
        }
    }
    return true;
}

}  // namespace penstock
