// How a step is shared out among threads whole: each takes a shard, some neighbouring tokens, from the first operation
// to the last.
//
// The other way, a share of every product for each thread, makes all of them wait for the slowest ten times a layer, and
// wait for memory or multiply all at once. It is left to steps of few tokens, where every thread would wait for the same
// weights, and to layers so large that the shared cache would not hold for one thread what another has read.
//
// A token's results do not depend on who computes its neighbours, but attention reads the keys and values of earlier
// tokens of its own sequence, and a recurrence the state after them: where a sequence is cut, the later shard waits in
// each layer for the earlier one to have stored its own. Shards are taken in ascending order, so whoever is waited for has begun.
#pragma once

#include <cstdint>

#include "program.h"

namespace penstock {

constexpr int kMostShards = 16;

// Neighbouring tokens of a step, and the sequences that they belong to as attention wants to be told of them.
struct Shard {
    int64_t token, tokens;
    int32_t row, rows;       // of the step's rows, of which it may have the first and the last in part
    const int32_t* q_start;  // [rows + 1], counted in tokens of the step
    const int32_t* kv_len;   // [rows]
    int waits_for;           // the first shard before it that has tokens of its first row; its own number if none
    uint8_t* attention_scratch;
    int64_t attention_scratch_bytes;
};

// How many layers one shard may be ahead of another.
int64_t layers_apart(const Program& program);

// Bytes of scratch that `share_out` wants for so many rows and shards.
int64_t shards_scratch(int32_t rows, int count);

// Shares a step out in `count` shards of nearly the same cost; false where it is better computed together. `scratch` is
// on a cache line.
bool share_out(const Program& program, const Step& step, int count, uint8_t* scratch, int64_t scratch_bytes,
               Shard* shards);

}  // namespace penstock
