// A mixture of experts as a Python class: built once from addresses and sizes, then run on the rows of a call.
//
// Everything that kernels rely on is checked before the first of them runs.
#include <nanobind/nanobind.h>

#include <cstdint>

#include "bind_values.h"
#include "checks.h"
#include "cpu.h"
#include "experts_call.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace penstock {
namespace {

void make_router(Router* place, int experts, int top_k, int scoring, bool normalise, float scale, uintptr_t bias,
                 uintptr_t expert_scale, int groups, int top_groups) {
    require(experts >= 1 && experts <= kMostExperts, "experts must be between 1 and 1024");
    require(top_k >= 1 && top_k <= experts, "top_k must be between 1 and experts");
    require(scoring == 0 || scoring == 1, "scoring must be 0 (softmax) or 1 (sigmoid)");
    require(groups >= 1 && experts % groups == 0, "groups must divide experts");
    require(groups == 1 || bias == 0 || experts / groups >= 2, "with a bias a group must have at least two experts");
    require(top_groups >= 1 && top_groups <= groups && top_k <= top_groups * (experts / groups),
            "top_groups must be between 1 and groups, and hold top_k experts");
    new (place) Router{experts, top_k, static_cast<Scoring>(scoring), normalise, scale, pointer<float>(bias),
                       pointer<float>(expert_scale), groups, top_groups};
}

void make_stack(WeightStack* place, int kind, int64_t outputs, int64_t inputs, uintptr_t weight, int64_t stride,
                uintptr_t bias, int64_t bias_stride) {
    check_weight(kind_of(kind), outputs, inputs);
    require(weight != 0, "weight must be given");
    require(stride >= packed_bytes(kind_of(kind), outputs, inputs), "stride must be at least packed_bytes()");
    require(bias == 0 || bias_stride >= outputs, "bias_stride must be at least outputs");
    new (place) WeightStack{kind_of(kind), outputs, inputs, pointer<uint8_t>(weight), stride, pointer<float>(bias), bias_stride};
}

void make_layer(ExpertLayer* place, const Router& router, int activation, const WeightStack& gate_up,
                const WeightStack& down, const WeightStack* ups) {
    const Activation chosen = activation_of(activation);
    require(!ups || gates(chosen), "ups of their own must be weighed by gates");
    require(!ups || (ups->inputs == gate_up.inputs && ups->outputs == gate_up.outputs),
            "ups of their own must have the shape of the gates");
    const int64_t parts = gates(chosen) && !ups ? 2 : 1;
    require(gate_up.inputs == down.outputs, "gate_up must have as many inputs as down has outputs");
    require(gate_up.outputs == parts * down.inputs,
            "gate_up must have as many outputs as down has inputs, or twice as many where gates weigh the rest");
    new (place) ExpertLayer{router, chosen, gate_up, down, ups ? std::optional(*ups) : std::nullopt};
}

void check_row_count(int64_t rows, int64_t top_k) {
    require(rows >= 0 && rows * top_k < kMostRows, "rows times top_k must be between 0 and 2^31 - 1");
}

int64_t scratch_bytes(const Cpu& cpu, const ExpertLayer& layer, int64_t rows) {
    check_row_count(rows, layer.router.top_k);
    return experts_scratch(layer, rows, cpu.threads());
}

int64_t run(const Cpu& cpu, const ExpertLayer& layer, int64_t rows, const Rows& x, const Rows& logits,
            const Rows* residual, const Rows& out, const Memory& scratch) {
    check_row_count(rows, layer.router.top_k);
    const ExpertsCall call{layer, rows, reading(&x), reading(&logits), reading(residual), out, scratch.data()};
    if (rows == 0) return 0;
    check_rows(call.x, rows, layer.hidden(), "x must be given, with rows at least the hidden size apart");
    check_rows(call.logits, rows, layer.router.experts, "logits must be given, with rows at least `experts` apart");
    check_rows(call.out, rows, layer.hidden(), "out must be given, with rows at least the hidden size apart");
    check_optional_rows(call.residual, rows, layer.hidden(), "rows of residual must be at least the hidden size apart");
    require(scratch.holds(experts_scratch(layer, rows, cpu.threads())),
            "scratch must be aligned to 64 bytes and have expert_scratch_bytes()");
    nb::gil_scoped_release released;
    return run_experts(call, cpu.kernels(), cpu.pool());
}

void route_rows(const Cpu& cpu, const Router& router, int64_t rows, const Rows& logits, uintptr_t chosen,
                uintptr_t weights) {
    check_row_count(rows, router.top_k);
    const RouteCall call{rows, router, reading(&logits), pointer<int32_t>(chosen), pointer<float>(weights)};
    if (rows == 0) return;
    check_rows(call.logits, rows, router.experts, "logits must be given, with rows at least `experts` apart");
    require(chosen != 0 && weights != 0, "chosen and weights must be given");
    nb::gil_scoped_release released;
    cpu.kernels().route(call, cpu.pool());
}

void gate(const Cpu& cpu, int64_t rows, int64_t width, const Rows& x, const Rows* logits, const Rows* residual,
          const Rows& out) {
    require(rows >= 0 && rows < kMostRows, "rows must be between 0 and 2^31 - 1");
    require(width >= 1 && width < kMostRows, "width must be between 1 and 2^31 - 1");
    const GateRowsCall call{rows, width, reading(&x), reading(logits), reading(residual), out};
    if (rows == 0) return;
    check_rows(call.x, rows, width, "x must be given, with rows at least `width` apart");
    check_optional_rows(call.logits, rows, 1, "rows of logits must be at least 1 apart");
    check_optional_rows(call.residual, rows, width, "rows of residual must be at least `width` apart");
    check_rows(call.out, rows, width, "out must be given, with rows at least `width` apart");
    nb::gil_scoped_release released;
    cpu.kernels().gate_rows(call, cpu.pool());
}

}  // namespace
}  // namespace penstock

void bind_experts(nb::module_& module, nb::class_<penstock::Cpu>& cpu) {
    using namespace penstock;
    nb::class_<Router>(module, "Router", "Which experts a token goes to; a bias or expert_scale of 0 is absent, else [experts] float32.")
        .def("__init__", &make_router, nb::kw_only(), "experts"_a, "top_k"_a, "scoring"_a, "normalise"_a, "scale"_a, "bias"_a,
             "expert_scale"_a = 0, "groups"_a = 1, "top_groups"_a = 1);
    nb::class_<WeightStack>(module, "WeightStack", "Weights of all experts, packed alike, `stride` bytes apart; a bias of 0 is absent, else [experts][outputs], `bias_stride` floats apart.")
        .def("__init__", &make_stack, nb::kw_only(), "kind"_a, "outputs"_a, "inputs"_a, "weight"_a, "stride"_a,
             "bias"_a = 0, "bias_stride"_a = 0);
    nb::class_<ExpertLayer>(module, "ExpertLayer", "The experts of a layer; their weights must outlive it.")
        .def("__init__", &make_layer, nb::kw_only(), "router"_a, "activation"_a, "gate_up"_a, "down"_a,
             "ups"_a.none() = nb::none());
    cpu.def("route", &route_rows, "router"_a, "rows"_a, "logits"_a, "chosen"_a, "weights"_a,
            "Chosen experts [rows][top_k] int32, ascending, and their weights float32.");
    cpu.def("expert_scratch_bytes", &scratch_bytes, "layer"_a, "rows"_a, "Bytes of scratch that run_experts() needs.");
    cpu.def("run_experts", &run, "layer"_a, "rows"_a, "x"_a, "logits"_a, "residual"_a.none(), "out"_a, "scratch"_a,
            "out = residual + what the chosen experts make of x; returns how many experts' weights were read.");
    cpu.def("gate_rows", &gate, "rows"_a, "width"_a, "x"_a, "logits"_a.none(), "residual"_a.none(), "out"_a,
            "out = residual + sigmoid(logit of the row) * x.");
}
