// The layout of a step's scratch, each part on a cache line:
//
//     | areas of registers | linear kernels, experts or adapters | attention |
//
// If a step is divided into shards (shards.h), each shard has all parts but the last to itself, one shard after the
// other. A team (team.h) has areas of registers that its members share, then all parts but the last for each member,
// then the last.
#pragma once

#include <cstdint>

#include "program.h"

namespace penstock {

// All sizes are in bytes, and multiples of 64.

int64_t area_size(const Program& program, size_t area, int64_t tokens);
int64_t areas_size(const Program& program, int64_t tokens);

// Adapters' scratch for one token: down(x), and that of the linear kernels.
int64_t inner_stride(const Program& program);
int64_t adapters_linear_stride(const Program& program);

// All but attention's, for `tokens` tokens that the threads compute together.
int64_t shard_scratch(const Program& program, int64_t tokens, int threads = 1);

// The most that each shard adds to the scratch of the whole step: areas are rounded up, and experts need some memory
// for any number of tokens.
int64_t lost_by_sharing(const Program& program);

// All but attention's, for a team.
int64_t team_scratch(const Program& program, int64_t tokens, int members);

// Attention's scratch, enough for its fastest way, in contexts of at most `longest` positions.
int64_t attention_scratch_of(const Program& program, int64_t tokens, int32_t rows, int32_t longest, int threads);

}  // namespace penstock
