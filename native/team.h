// How a team runs a program: with few tokens every thread walks all operations, and they meet only where one reads what
// another wrote.
//
// Products and attention are divided. Everything else takes so little time that every member computes it for itself,
// from shared registers into its own: norms, the rotation of queries, the conversion of rows for products. So no thread
// waits while another prepares data that all then fetch from its cache; if cores do not share a cache, fetching takes
// longer than computing.
#pragma once

#include <optional>

#include "program.h"

namespace penstock {

// Whether a team of `threads` threads computes a step of `tokens` tokens faster than kernel by kernel.
bool worth_a_team(int64_t tokens, int threads);

// How a team runs a program; nothing if it cannot: if operations have a state or choose experts, or if a member could
// overwrite what a slower one still reads.
std::optional<Sharing> sharing_of(const Program& program);

}  // namespace penstock
