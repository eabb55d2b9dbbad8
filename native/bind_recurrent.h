// The arguments of the bindings of recurrent layers, and their checks.
#pragma once

#include <vector>

#include "bind_values.h"
#include "program.h"

namespace penstock {

// The states of a model.
struct States {
    std::vector<State> states;
};

inline void check_runs(const Runs& runs, int64_t tokens, int64_t places) {
    require(runs.starts[0] == 0 && runs.starts[runs.count] == tokens, "runs must go from 0 to the number of tokens");
    for (int32_t n = 0; n < runs.count; n++) {
        require(runs.starts[n] <= runs.starts[n + 1], "runs must ascend");
        require(runs.sources[n] >= kFromZero && runs.sources[n] < places, "a run reads a place that does not exist");
        require(runs.targets[n] >= 0 && runs.targets[n] < places, "a run writes a place that does not exist");
    }
}

inline Gate gate_kind_of(int kind) {
    require(kind >= 0 && kind <= static_cast<int>(Gate::gelu_new), "a gate must be 0 (sigmoid) or 1 (gelu_new)");
    return static_cast<Gate>(kind);
}

inline void check_group_norm(const GroupNorm& norm, int64_t width) {
    require(width % norm.group == 0, "the width of a gated norm must be whole groups");
    require(norm.period == width || norm.period == norm.group, "the weight of a gated norm is that of a group, or of all");
}

}  // namespace penstock
