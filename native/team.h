// How a team goes through a program: with few tokens every thread walks all operations, and they meet only where one reads
// what another wrote.
//
// Products and attention are shared out. All else takes so little that every member computes it for itself, from what is
// shared into registers of its own: norms, the rotation of queries, the form in which rows are multiplied. So nobody waits
// while one thread prepares what all others then fetch from its cache, which takes longer than to compute it where cores
// do not share a cache.
#pragma once

#include <optional>

#include "program.h"

namespace penstock {

// Whether a step of so many tokens is better computed by a team of so many threads than kernel by kernel.
bool worth_a_team(int64_t tokens, int threads);

// How a team goes through a program; nothing if it cannot: where operations have a state or choose experts, or where a
// member could overwrite what a slower one still reads.
std::optional<Sharing> sharing_of(const Program& program);

}  // namespace penstock
