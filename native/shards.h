// How a whole step is divided among threads: each takes a shard, which is some neighbouring tokens, from the first
// operation to the last.
//
// If instead every thread computes a part of each product, all of them wait for the slowest ten times per layer, and
// all of them wait for memory, or multiply, at the same time. That is done only in steps of few tokens, where all
// threads would wait for the same weights, and with layers so large that the shared cache cannot keep the weights that
// one thread has read until another needs them.
//
// A token's results do not depend on which thread computes its neighbours. But attention reads the keys and values of
// earlier tokens of its sequence, and a recurrence reads the state after them. So if a sequence is cut, the later shard
// waits in each layer until the earlier one has stored its part. Shards are taken in ascending order, so a shard that
// others wait for has begun.
#pragma once

#include <cstdint>

#include "kernel_table.h"
#include "program.h"

namespace penstock {

constexpr int kMostShards = 16;

// Neighbouring tokens of a step, and their sequences in the form that attention takes.
struct Shard {
    int64_t token, tokens;
    int32_t row, rows;       // rows of the step; the first and the last may be partial
    const int32_t* q_start;  // [rows + 1], in tokens of the step
    const int32_t* kv_len;   // [rows]
    int waits_for;           // the first earlier shard with tokens of its first row; its own number if none
    uint8_t* attention_scratch;
    int64_t attention_scratch_bytes;
};

// How many layers one shard may be ahead of another.
int64_t layers_apart(const Program& program);

// Bytes of scratch that `share_out` needs for `rows` rows and `count` shards.
int64_t shards_scratch(int32_t rows, int count);

// Divides a step into `count` shards of nearly equal cost; returns false if the threads should compute it together.
// `scratch` is on a cache line.
bool share_out(const Program& program, const Step& step, const KernelTable& kernels, int count, uint8_t* scratch,
               int64_t scratch_bytes, Shard* shards);

}  // namespace penstock
