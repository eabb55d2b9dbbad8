// Recurrent layers one operation at a time, and their arguments for programs.
//
// Everything that kernels rely on is checked before they run.
#include "bind_recurrent.h"

#include <nanobind/nanobind.h>

#include <initializer_list>

#include "cpu.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace penstock {
namespace {

constexpr int64_t kMostWidth = int64_t{1} << 24;  // of a recurrent layer: the product of heads and their sizes

void make_runs(Runs* place, int count, uintptr_t starts, uintptr_t sources, uintptr_t targets) {
    require(count >= 1 && starts && sources && targets, "runs must be given");
    new (place) Runs{count, pointer<int32_t>(starts), pointer<int32_t>(sources), pointer<int32_t>(targets)};
}

void make_filter(Filter* place, int taps, int64_t width, uintptr_t weight, uintptr_t bias, bool silu) {
    require(taps >= 2 && taps <= kMostTaps, "taps must be between 2 and 64");
    require(width >= 1 && width <= kMostWidth && weight != 0, "a filter has channels and a weight");
    new (place) Filter{taps, width, pointer<float>(weight), pointer<float>(bias), silu};
}

void make_recurrence(Recurrence* place, bool delta, int key_heads, int value_heads, int key_dim, int value_dim,
                     uintptr_t a_log, uintptr_t step_bias, uintptr_t skip, float least_step, float most_step, bool tiled) {
    require(key_heads >= 1 && value_heads >= 1 && value_heads % key_heads == 0,
            "value_heads must be a multiple of key_heads");
    require(key_dim >= 1 && key_dim <= kMostStateDim, "key_dim must be between 1 and 1024");
    require(value_dim >= 1 && int64_t(value_heads) * value_dim <= kMostWidth, "values must be at most 2^24 wide");
    require(a_log && step_bias, "a_log and step_bias must be given");
    new (place) Recurrence{delta, key_heads, value_heads, key_dim, value_dim, pointer<float>(a_log),
                           pointer<float>(step_bias), pointer<float>(skip), least_step, most_step, tiled};
}

void make_group_norm(GroupNorm* place, int64_t group, uintptr_t weight, int64_t period, float eps, bool gate_first) {
    require(group >= 1 && group <= kMostWidth && period >= 1 && weight != 0, "a gated norm has groups and a weight");
    new (place) GroupNorm{group, pointer<float>(weight), period, eps, gate_first};
}

void add_state(States& states, uintptr_t address, int64_t places, int64_t numbers) {
    require(address != 0 && places >= 1 && places < kMostRows && numbers >= 1, "a state has places");
    states.states.push_back({pointer<float>(address), places, numbers});
}

// The state of a call outside a program, which must be the only one in `states`.
float* state_of(const States& states, int64_t numbers, const Runs& runs, int64_t tokens) {
    require(states.states.size() == 1 && states.states[0].numbers == numbers,
            "a state does not have the size of its layer's");
    require(tokens >= 0 && tokens < kMostRows, "tokens must be between 0 and 2^31 - 1");
    check_runs(runs, tokens, states.states[0].places);
    return states.states[0].data;
}

// Without rows nothing is read; a state may still be copied.
void check_each(std::initializer_list<ConstRows> all, int64_t rows, int64_t width, const char* otherwise) {
    for (const ConstRows& each : all) {
        if (rows > 0) check_rows(each, rows, width, otherwise);
    }
}

void convolve(const Cpu& cpu, const Filter& filter, int64_t tokens, const Rows& x, const Rows* gate_in,
              const Rows* gate_out, const States& states, const Runs& runs, const Rows& out) {
    float* state = state_of(states, (filter.taps - 1) * filter.width, runs, tokens);
    const ConvolutionCall call{{0, tokens, runs}, filter, reading(&x), reading(gate_in), reading(gate_out), state, out};
    check_each({call.x, reading(&out)}, tokens, filter.width, "x and out must be given, as wide as the filter");
    check_optional_rows(call.gate_in, tokens, filter.width, "gates must be as wide as the filter");
    check_optional_rows(call.gate_out, tokens, filter.width, "gates must be as wide as the filter");
    nb::gil_scoped_release released;
    cpu.kernels().short_convolution(call, cpu.pool());
}

void recur(const Cpu& cpu, const Recurrence& rule, int64_t tokens, const Rows& q, const Rows& k, const Rows& v,
           const Rows& a, const Rows* b, const States& states, const Runs& runs, const Rows& out) {
    float* state = state_of(states, rule.state_size(), runs, tokens);
    const RecurrenceCall call{{0, tokens, runs}, rule, reading(&q), reading(&k), reading(&v), reading(&a), reading(b),
                              state, out};
    require((b != nullptr) == rule.delta, "the delta rule wants b, a scan none");
    check_each({call.q, call.k}, tokens, rule.key_width(), "q and k must be given, as wide as their heads");
    check_each({call.v, reading(&out)}, tokens, rule.value_width(), "v and out must be given, as wide as their heads");
    check_each({call.a}, tokens, rule.value_heads, "a must be given, with a number for each head");
    check_optional_rows(call.b, tokens, rule.value_heads, "b must have a number for each head");
    nb::gil_scoped_release released;
    cpu.kernels().recurrence(call, cpu.pool());
}

void norm_gated(const Cpu& cpu, const GroupNorm& norm, int64_t rows, int64_t width, const Rows& x, const Rows& gate,
                const Rows& out) {
    require(rows >= 0 && rows < kMostRows && width >= 1 && width <= kMostWidth, "sizes are out of range");
    check_group_norm(norm, width);
    const GatedNormCall call{rows, width, norm, reading(&x), reading(&gate), out};
    check_each({call.x, call.gate, reading(&out)}, rows, width, "x, gate and out must be given, of one width");
    nb::gil_scoped_release released;
    cpu.kernels().gated_norm(call, cpu.pool());
}

void gate_by(const Cpu& cpu, int64_t rows, int64_t width, const Rows& x, const Rows& gate, const Rows& out, int kind) {
    require(rows >= 0 && rows < kMostRows && width >= 1 && width <= kMostWidth, "sizes are out of range");
    const GateCall call{rows, width, reading(&x), reading(&gate), out, gate_kind_of(kind)};
    check_each({call.x, call.gate, reading(&out)}, rows, width, "x, gate and out must be given, of one width");
    nb::gil_scoped_release released;
    cpu.kernels().gate_columns(call, cpu.pool());
}

}  // namespace
}  // namespace penstock

void bind_recurrent(nb::module_& module, nb::class_<penstock::Cpu>& cpu) {
    using namespace penstock;
    nb::class_<Runs>(module, "Runs", "Which tokens continue which state; tensors must outlive it.")
        .def("__init__", &make_runs, "count"_a, "starts"_a, "sources"_a, "targets"_a);
    nb::class_<Filter>(module, "Filter", "The filters of a short convolution, [taps][width] float32; a bias of 0 is absent.")
        .def("__init__", &make_filter, nb::kw_only(), "taps"_a, "width"_a, "weight"_a, "bias"_a, "silu"_a);
    nb::class_<Recurrence>(module, "Recurrence", "Sizes and weights of a delta rule or a selective scan; a skip of 0 is absent.")
        .def("__init__", &make_recurrence, nb::kw_only(), "delta"_a, "key_heads"_a, "value_heads"_a, "key_dim"_a,
             "value_dim"_a, "a_log"_a, "step_bias"_a, "skip"_a, "least_step"_a, "most_step"_a, "tiled"_a);
    nb::class_<GroupNorm>(module, "GroupNorm", "An RMS norm of groups of columns, with a weight [period] float32.")
        .def("__init__", &make_group_norm, nb::kw_only(), "group"_a, "weight"_a, "period"_a, "eps"_a, "gate_first"_a);
    nb::class_<States>(module, "States", "The recurrent states of a model; memory must outlive it.")
        .def(nb::init<>())
        .def("add", &add_state, "address"_a, "places"_a, "numbers"_a);
    cpu.def("short_convolution", &convolve, "filter"_a, "tokens"_a, "x"_a, "gate_in"_a.none(), "gate_out"_a.none(),
            "states"_a, "runs"_a, "out"_a, "out = gate_out * f(convolution of gate_in * x); states go on.");
    cpu.def("recurrence", &recur, "rule"_a, "tokens"_a, "q"_a, "k"_a, "v"_a, "a"_a, "b"_a.none(), "states"_a, "runs"_a,
            "out"_a, "A gated delta rule or a selective scan; states go on.");
    cpu.def("gated_norm", &norm_gated, "norm"_a, "rows"_a, "width"_a, "x"_a, "gate"_a, "out"_a,
            "A norm of groups and SiLU of a gate, in either order.");
    cpu.def("gate_columns", &gate_by, "rows"_a, "width"_a, "x"_a, "gate"_a, "out"_a, "kind"_a,
            "out = x * f(gate).");
}
