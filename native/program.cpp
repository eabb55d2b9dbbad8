#include "program.h"

#include <algorithm>

namespace penstock {
namespace {

// What the operations of one layer add to the cost of a program.
struct LayerCounter {
    ProgramCost& total;
    int64_t bytes = 0;
    std::optional<Kind> kind = {};

    void multiply(int64_t weight_bytes, int64_t numbers) {
        bytes += weight_bytes;
        total.operations += 2 * numbers;
    }

    void add(const LinearOperation& by) {
        multiply(packed_bytes(by.kind, by.outputs, by.inputs), by.outputs * by.inputs);
        if (!kind) kind = by.kind;
    }

    void add(const ProjectHeadsOperation& by) {
        multiply(by.heads * by.weights.stride, by.heads * by.weights.outputs * by.weights.inputs);
    }

    void add(const ExpertsOperation& by) {
        const ExpertLayer& layer = by.layer;
        for (const WeightStack* stack : {&layer.gate_up, layer.ups ? &*layer.ups : nullptr, &layer.down}) {
            if (!stack) continue;
            multiply(layer.router.experts * stack->stride, layer.router.top_k * stack->outputs * stack->inputs);
        }
    }

    void add(const ConvolutionOperation& by) {
        multiply(by.filter.taps * by.filter.width * int64_t(sizeof(float)), by.filter.taps * by.filter.width);
        total.state += (by.filter.taps - 1) * by.filter.width;
    }

    // A scan decays, scales a value, multiplies, adds and reads; the delta rule also multiplies by the key and
    // subtracts.
    void add(const RecurrenceOperation& by) {
        total.operations += (by.rule.delta ? 8 : 5) * by.rule.state_size();
        total.state += by.rule.state_size();
    }

    void add(const AttendOperation& by) {
        const int64_t elements = int64_t(by.kv_heads) * by.head_dim;
        for (Sight& sight : total.sights) {
            if (sight.window == by.window) return void(sight.elements += elements);
        }
        total.sights.push_back({by.window, elements});
    }

    template <class Other>
    void add(const Other&) {}  // a few per cent
};

}  // namespace

ProgramCost program_cost(const Program& program) {
    ProgramCost total;
    for (size_t layer = 0; layer < program.layer_starts.size(); layer++) {
        const bool last = layer + 1 == program.layer_starts.size();
        const size_t end = last ? program.operations.size() : size_t(program.layer_starts[layer + 1]);
        LayerCounter counter{total};
        for (size_t i = size_t(program.layer_starts[layer]); i < end; i++) {
            std::visit([&](const auto& by) { counter.add(by); }, program.operations[i]);
        }
        if (counter.bytes <= total.layer_bytes) continue;
        total.layer_bytes = counter.bytes;
        total.kind = counter.kind.value_or(Kind::bf16);
    }
    return total;
}

}  // namespace penstock
