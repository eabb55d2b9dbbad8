// What lies where in the scratch of a step. One after the other, each on a cache line:
//
//     | areas of registers | of the linear kernels, or of experts, or of adapters | of attention |
//
// Where a step is shared out (shards.h), each shard has all but the last of them to itself, one shard after the other. A
// team (team.h) has areas of registers that its members share, then all but the last for each member, then the last.
#pragma once

#include <cstdint>

#include "program.h"

namespace penstock {

// All sizes are in bytes, and multiples of 64.

int64_t area_size(const Program& program, size_t area, int64_t tokens);
int64_t areas_size(const Program& program, int64_t tokens);

// Of adapters, for one token: down(x), and what the linear kernels want.
int64_t inner_stride(const Program& program);
int64_t adapters_linear_stride(const Program& program);

// All but that of attention, for so many tokens that threads compute together.
int64_t shard_scratch(const Program& program, int64_t tokens, int threads = 1);

// All shards together need more than the whole step by so much at most, for each shard: areas are rounded up, and
// experts need some memory for any number of tokens.
int64_t lost_by_sharing(const Program& program);

// All but that of attention, for a team.
int64_t team_scratch(const Program& program, int64_t tokens, int members);

// With which attention is quickest, in contexts of at most `longest` positions.
int64_t attention_scratch_of(const Program& program, int64_t tokens, int32_t rows, int32_t longest, int threads);

}  // namespace penstock
