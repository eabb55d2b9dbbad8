#include "program.h"

#include <algorithm>

namespace penstock {

LayerCost costliest_layer(const Program& program) {
    LayerCost most{0, 0, 1, 0, Kind::bf16};
    for (size_t layer = 0; layer < program.layer_starts.size(); layer++) {
        const bool last = layer + 1 == program.layer_starts.size();
        const size_t end = last ? program.operations.size() : size_t(program.layer_starts[layer + 1]);
        LayerCost cost{0, 0, 1, 0, Kind::bf16};
        bool first = true;
        for (size_t i = size_t(program.layer_starts[layer]); i < end; i++) {
            if (const auto* linear = std::get_if<LinearOperation>(&program.operations[i])) {
                cost.weight_bytes += packed_bytes(linear->kind, linear->outputs, linear->inputs);
                cost.weights += linear->outputs * linear->inputs;
                if (first) cost.kind = linear->kind;
                first = false;
            } else if (const auto* heads = std::get_if<ProjectHeadsOperation>(&program.operations[i])) {
                cost.weight_bytes += heads->heads * heads->weights.stride;
                cost.weights += heads->heads * heads->weights.outputs * heads->weights.inputs;
            } else if (const auto* experts = std::get_if<ExpertsOperation>(&program.operations[i])) {
                for (const WeightStack* stack : {&experts->layer.gate_up, &experts->layer.down}) {
                    cost.weight_bytes += experts->layer.router.experts * stack->stride;
                    cost.weights += experts->layer.router.top_k * stack->outputs * stack->inputs;
                }
            } else if (const AttendOperation* attend = program.attends(i)) {
                cost.kv_width = std::max<int64_t>(1, int64_t(attend->kv_heads) * attend->head_dim);
                cost.window = attend->window;
            }
        }
        if (layer == 0 || cost.weight_bytes > most.weight_bytes) most = cost;
    }
    return most;
}

}  // namespace penstock
