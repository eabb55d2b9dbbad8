#include "step_scratch.h"

#include <algorithm>

namespace penstock {
namespace {

int64_t linear_stride(const Program& program) {
    int64_t most = 0;
    for (const Operation& operation : program.operations) {
        if (const auto* linear = std::get_if<LinearOperation>(&operation)) {
            most = std::max(most, scratch_stride(linear->kind, linear->inputs));
        }
    }
    return most;
}

int64_t most_experts_scratch(const Program& program, int64_t tokens, int threads) {
    int64_t most = 0;
    for (const Operation& operation : program.operations) {
        if (const auto* experts = std::get_if<ExpertsOperation>(&operation)) {
            most = std::max(most, experts_scratch(experts->layer, tokens, threads));
        }
    }
    return most;
}

// Each thread has scratch of its own, which its heads use in turn.
int64_t most_heads_scratch(const Program& program, int64_t tokens, int threads) {
    int64_t most = 0;
    for (const Operation& operation : program.operations) {
        if (const auto* heads = std::get_if<ProjectHeadsOperation>(&operation)) {
            const int64_t each = tokens * scratch_stride(heads->weights.kind, heads->weights.inputs);
            most = std::max(most, std::min(threads, heads->heads) * each);
        }
    }
    return most;
}

}  // namespace

int64_t area_size(const Program& program, size_t area, int64_t tokens) {
    return round_up(tokens * program.area_bytes[area], 64);
}

int64_t areas_size(const Program& program, int64_t tokens) {
    int64_t size = 0;
    for (size_t area = 0; area < program.area_bytes.size(); area++) size += area_size(program, area, tokens);
    return size;
}

int64_t inner_stride(const Program& program) { return round_up(program.inner * int64_t(sizeof(float)), 64); }

int64_t adapters_linear_stride(const Program& program) {
    if (program.inner == 0) return 0;
    int64_t most = program.inner;
    for (const Operation& operation : program.operations) {
        if (const auto* adapt = std::get_if<AdaptOperation>(&operation)) most = std::max(most, adapt->x.width);
    }
    return std::max(scratch_stride(Kind::f32, most), scratch_stride(Kind::bf16, most));
}

int64_t shard_scratch(const Program& program, int64_t tokens, int threads) {
    const int64_t kernels = std::max({tokens * linear_stride(program),  // strides are multiples of 64
                                      most_experts_scratch(program, tokens, threads),
                                      most_heads_scratch(program, tokens, threads),
                                      tokens * (inner_stride(program) + adapters_linear_stride(program))});
    return areas_size(program, tokens) + kernels;
}

int64_t lost_by_sharing(const Program& program) {
    return int64_t(program.area_bytes.size()) * 64 + most_experts_scratch(program, 0, 1);
}

int64_t team_scratch(const Program& program, int64_t tokens, int members) {
    return areas_size(program, tokens) + members * shard_scratch(program, tokens);
}

int64_t attention_scratch_of(const Program& program, int64_t tokens, int32_t rows, int32_t longest, int threads) {
    int64_t most = 0;
    for (size_t i = 0; i < program.operations.size(); i++) {
        if (const AttendOperation* attend = program.attends(i); attend && attend->value_dim > 0) {
            most = std::max(most, int64_t(attention_scratch(rows)));
        } else if (attend) {
            most = std::max(most, int64_t(attention_scratch_wanted(rows, tokens, attend->q_heads, attend->kv_heads,
                                                                   attend->head_dim, longest, threads,
                                                                   reach_of(attend->window, attend->ahead))));
        }
    }
    return most;
}

}  // namespace penstock
