// Programs as Python objects: built once from addresses and sizes, then run step by step.
//
// Every operation is checked when it is added. Everything in a step that kernels rely on is checked before the first of
// them runs.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "bind_recurrent.h"
#include "bind_values.h"
#include "checks.h"
#include "cpu.h"
#include "executor.h"
#include "team.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace penstock {
namespace {

// The caches that a step's operations read and write, and the number of blocks of each.
struct Caches {
    std::vector<KvCache> caches;
    std::vector<int64_t> num_blocks;

    void add(const Cache& cache) {
        caches.push_back(cache.cache);
        num_blocks.push_back(cache.num_blocks);
    }
};

Norm norm_kind_of(int kind) {
    require(kind >= 0 && kind <= static_cast<int>(Norm::layer), "a norm must be 0 (RMS) or 1 (layer norm)");
    return static_cast<Norm>(kind);
}

void check_columns(const Program& program, const Columns& columns) {
    require(columns.in >= 0 && size_t(columns.in) < program.registers.size(), "an operand names no register");
    const int64_t width = program.registers[size_t(columns.in)].width;
    require(columns.first >= 0 && columns.width >= 1 && columns.first + columns.width <= width,
            "an operand lies outside its register");
}

void make_program(Program* place, int64_t hidden) {
    require(hidden >= 1 && hidden <= kMostInputs, "hidden must be between 1 and 65536");
    new (place) Program{};
    place->registers = {{hidden, Element::f32, -1}, {hidden, Element::f32, -1}};
}

int add_area(Program& program, int64_t bytes) {
    require(bytes >= 1 && bytes < kMostRows, "an area has bytes");
    program.area_bytes.push_back(bytes);
    return int(program.area_bytes.size()) - 1;
}

int add_register(Program& program, int64_t width, int element, int area) {
    require(area >= 0 && size_t(area) < program.area_bytes.size(), "a register names no area");
    const Element of = element_of(element);
    require(width >= 1 && width * (of == Element::f32 ? 4 : 2) <= program.area_bytes[size_t(area)],
            "a register does not fit its area");
    program.registers.push_back({width, of, area});
    return int(program.registers.size()) - 1;
}

int add_input(Program& program, int64_t width) {
    require(width >= 1 && width < kMostRows, "an input has columns");
    program.registers.push_back({width, Element::f32, -1, program.inputs++});
    return int(program.registers.size()) - 1;
}

void begin_layer(Program& program) { program.layer_starts.push_back(int64_t(program.operations.size())); }

void add_norm(Program& program, int kind, const Columns& x, const Columns& out, const Vector& weight,
              const Vector* bias, float eps, bool adds, int64_t groups) {
    check_columns(program, x);
    check_columns(program, out);
    const Norm norm = norm_kind_of(kind);
    require(x.width == out.width, "a norm keeps its width");
    require(groups >= 1 && x.width % groups == 0, "a norm's groups are of one width");
    require(weight.address != 0, "the weight of a norm must be given");
    require(norm == Norm::layer ? !adds : bias == nullptr, "an RMS norm has no bias, and a layer norm adds to nothing");
    program.operations.push_back(NormOperation{norm, x, out, weight.rows(), one_row(bias), eps, adds, groups});
}

void add_linear(Program& program, const Columns& x, const Columns& out, const Weight& weight, const Vector* bias,
                bool adds, std::optional<int> gate) {
    check_columns(program, x);
    check_columns(program, out);
    const auto [kind, outputs, inputs, data] = weight;
    require(x.width == inputs && out.width == (gate ? outputs / 2 : outputs),
            "a weight does not have the sizes of its operands");
    require(!gate || (!adds && outputs % (2 * kPanel) == 0), "gates want whole panels, and add to nothing");
    program.operations.push_back(LinearOperation{x, out, kind, outputs, inputs, data, one_row(bias), adds,
                                                 gate_of(gate)});
}

void add_project_heads(Program& program, const Columns& x, const Columns& out, int heads, int64_t passed,
                       const WeightStack& weights) {
    check_columns(program, x);
    check_columns(program, out);
    require(heads >= 1 && passed >= 0, "there must be heads, and what passes must not be negative");
    require(x.width == heads * (passed + weights.inputs) && out.width == heads * (passed + weights.outputs),
            "the weights of heads do not have the sizes of their operands");
    require(x.in != out.in, "heads are not projected in place");
    program.operations.push_back(ProjectHeadsOperation{x, out, heads, passed, weights});
}

void add_activation(Program& program, int kind, const Columns& x, const Columns& out) {
    check_columns(program, x);
    check_columns(program, out);
    const Activation activation = activation_of(kind);
    require(x.width == (gates(activation) ? 2 * out.width : out.width), "an activation's widths do not fit");
    require(!gates(activation) || x.first == 0 || x.in != out.in, "gates are not computed in place");
    program.operations.push_back(ActivationOperation{activation, x, out});
}

void add_attend(Program& program, int cache, const Heads& heads, const Columns& q, const Columns* k, const Columns* v,
                const Columns& rotated, const Columns& out, const HeadNorms& norms, const Rotation* rotation,
                const ScoreRule& rule) {
    require(cache >= 0, "cache must not be negative");
    const bool latent = heads.value_dim > 0;
    for (const Columns* each : {&q, &rotated}) {
        check_columns(program, *each);
        require(each->width == int64_t(heads.queries) * heads.dim, "queries have a width of q_heads * head_dim");
    }
    check_columns(program, out);
    require(out.width == int64_t(heads.queries) * (latent ? heads.value_dim : heads.dim),
            "what comes out has the width of all heads' values");
    require(latent ? v == nullptr : (k == nullptr) == (v == nullptr),
            "keys and values are given together, and a latent cache has no values of its own");
    for (const Columns* each : {k, v}) {
        if (!each) continue;
        check_columns(program, *each);
        require(each->width == int64_t(heads.keys) * heads.dim, "keys and values have a width of kv_heads * head_dim");
    }
    require(!rotation || (rotation->cos && rotation->num_positions >= 1), "rotation wants cos and sin of some positions");
    const Rotation angles = rotation ? *rotation : Rotation{};
    require(angles.rotary_dim <= heads.dim, "rotation wants an even rotary_dim of at most head_dim");
    require(rule.ahead == 0 || !latent, "a latent cache is not read ahead");
    const Columns none{};
    program.operations.push_back(AttendOperation{cache,
                                                 heads.queries,
                                                 heads.keys,
                                                 heads.dim,
                                                 heads.value_dim,
                                                 q,
                                                 k ? *k : none,
                                                 v ? *v : none,
                                                 rotated,
                                                 out,
                                                 norms.q.rows(),
                                                 norms.k.rows(),
                                                 norms.eps,
                                                 angles.cos,
                                                 angles.sin,
                                                 angles.num_positions,
                                                 angles.rotary_dim,
                                                 rule.scale,
                                                 rule.softcap,
                                                 rule.window,
                                                 rule.sinks,
                                                 rule.ahead});
    program.looks_ahead = program.looks_ahead || rule.ahead > 0;
}

void add_experts(Program& program, const Columns& x, const Columns& logits, const Columns& out,
                 const ExpertLayer& layer, bool adds) {
    for (const Columns* each : {&x, &logits, &out}) check_columns(program, *each);
    require(x.width == layer.hidden() && out.width == layer.hidden() && logits.width == layer.router.experts,
            "experts do not have the sizes of their operands");
    program.operations.push_back(ExpertsOperation{x, logits, out, layer, adds});
}

void add_gate_rows(Program& program, const Columns& x, const Columns& logits, const Columns& out) {
    for (const Columns* each : {&x, &logits, &out}) check_columns(program, *each);
    require(x.width == out.width && logits.width == 1, "rows that are gated keep their width, and have one logit each");
    program.operations.push_back(GateRowsOperation{x, logits, out});
}

Columns optional_columns(const Columns* columns) { return columns ? *columns : Columns{}; }

void add_convolution(Program& program, int state, const Filter& filter, const Columns& x, const Columns* gate_in,
                     const Columns* gate_out, const Columns& out) {
    for (const Columns* each : {&x, gate_in, gate_out, &out}) {
        if (!each) continue;
        check_columns(program, *each);
        require(each->width == filter.width, "a convolution's operands are as wide as its filter");
    }
    require(state >= 0, "state must not be negative");
    program.operations.push_back(
        ConvolutionOperation{state, x, optional_columns(gate_in), optional_columns(gate_out), out, filter});
}

void add_recurrence(Program& program, int state, const Recurrence& rule, const Columns& q, const Columns& k,
                    const Columns& v, const Columns& a, const Columns* b, const Columns& out) {
    for (const Columns* each : {&q, &k, &v, &a, &out}) check_columns(program, *each);
    if (b) check_columns(program, *b);
    require(q.width == rule.key_width() && k.width == rule.key_width() && v.width == rule.value_width() &&
                out.width == rule.value_width() && a.width == rule.value_heads,
            "a recurrence does not have the sizes of its operands");
    require((b != nullptr) == rule.delta && (!b || b->width == rule.value_heads), "the delta rule wants b, a scan none");
    require(state >= 0, "state must not be negative");
    program.operations.push_back(RecurrenceOperation{state, q, k, v, a, optional_columns(b), out, rule});
}

void add_gated_norm(Program& program, const GroupNorm& norm, const Columns& x, const Columns& gate,
                    const Columns& out) {
    for (const Columns* each : {&x, &gate, &out}) check_columns(program, *each);
    require(x.width == gate.width && x.width == out.width, "a gated norm keeps its width");
    check_group_norm(norm, x.width);
    program.operations.push_back(GatedNormOperation{x, gate, out, norm});
}

void add_gate(Program& program, const Columns& x, const Columns& gate, const Columns& out, int kind) {
    for (const Columns* each : {&x, &gate, &out}) check_columns(program, *each);
    require(x.width == gate.width && x.width == out.width, "a gate keeps its width");
    program.operations.push_back(GateOperation{x, gate, out, gate_kind_of(kind)});
}

void add_scale(Program& program, const Columns& x, uintptr_t factor) {
    check_columns(program, x);
    require(factor != 0, "a factor must be given");
    program.operations.push_back(ScaleOperation{x, pointer<float>(factor)});
}

void add_regroup(Program& program, int64_t groups, const Columns& x, const Columns& out) {
    for (const Columns* each : {&x, &out}) check_columns(program, *each);
    require(groups >= 1 && x.width == out.width && x.width % (2 * groups) == 0, "halves of groups are of one width");
    require(x.in != out.in, "groups are not put in order in place");
    program.operations.push_back(RegroupOperation{x, out, groups});
}

void add_adapt(Program& program, const Columns& x, const Columns& out, int site) {
    for (const Columns* each : {&x, &out}) check_columns(program, *each);
    require(site >= 0, "site must not be negative");
    require(x.in != out.in, "adapters do not work in place");
    program.operations.push_back(AdaptOperation{x, out, site});
}

LowRank& site_of(Adapter& adapter, int site) {
    require(site >= 0 && size_t(site) < adapter.sites.size(), "an adapter has no such site");
    return adapter.sites[size_t(site)];
}

void make_adapter(Adapter* place, int sites) {
    require(sites >= 0 && sites < kMostRows, "there must be sites");
    new (place) Adapter{std::vector<LowRank>(size_t(sites))};
}

void set_down(Adapter& adapter, int site, const Weight& weight) {
    LowRank& of = site_of(adapter, site);
    require(weight.kind == Kind::bf16 || weight.kind == Kind::f32, "adapters have bf16 or f32 weights");
    require(of.outputs == 0, "a site has one first product");
    of.kind = weight.kind;
    of.outputs = weight.outputs;
    of.inputs = weight.inputs;
    of.down = weight.data;
}

void add_up(Adapter& adapter, int site, int64_t first, int64_t inner, const Weight& weight) {
    LowRank& of = site_of(adapter, site);
    require(weight.kind == of.kind, "both products of an adapter have weights of one kind");
    require(first >= 0 && inner >= 0 && inner + weight.inputs <= of.outputs,
            "a second product reads columns of what the first one gives");
    of.ups.push_back({first, inner, weight.outputs, weight.inputs, weight.data});
}

// Checks that the adapter has a site of the right sizes for every operation of the program. Returns the widest down(x).
int64_t check_adapter(const Program& program, const Adapter& adapter) {
    int64_t widest = 0;
    for (const Operation& operation : program.operations) {
        const auto* adapt = std::get_if<AdaptOperation>(&operation);
        if (!adapt) continue;
        require(size_t(adapt->site) < adapter.sites.size(), "an adapter lacks a site of the program");
        const LowRank& of = adapter.sites[size_t(adapt->site)];
        if (of.outputs == 0) continue;
        require(of.inputs == adapt->x.width, "an adapter does not have the sizes of its operands");
        for (const LowRank::Up& up : of.ups) {
            require(up.first + up.outputs <= adapt->out.width, "an adapter does not have the sizes of its operands");
        }
        widest = std::max(widest, of.outputs);
    }
    return widest;
}

// From now on scratch is large enough for such adapters.
void admit_adapter(Program& program, const Adapter& adapter) {
    program.inner = std::max(program.inner, check_adapter(program, adapter));
}

void make_adapted_tokens(AdaptedTokens* place, int64_t first, int64_t end, const Adapter& adapter) {
    require(0 <= first && first < end, "adapted tokens begin before they end");
    new (place) AdaptedTokens{first, end, &adapter};
}

// Checks that they are ascending, within the step, and of adapters that the program has admitted.
std::vector<AdaptedTokens> check_adapted(const Program& program, int64_t tokens, const nb::list& given) {
    std::vector<AdaptedTokens> adapted;
    int64_t end = 0;
    for (const nb::handle each : given) {
        const auto of = nb::cast<AdaptedTokens>(each);
        require(of.first >= end && of.end <= tokens, "adapted tokens are in order, and within the step");
        require(check_adapter(program, *of.adapter) <= program.inner, "an adapter was not admitted to the program");
        end = of.end;
        adapted.push_back(of);
    }
    return adapted;
}

int64_t scratch_bytes(const Program& program, const Cpu& cpu, int64_t tokens, int rows, int longest) {
    require(rows >= 0 && tokens >= rows && tokens < kMostRows && longest >= 0, "sizes must not be negative");
    return program_scratch(program, tokens, rows, longest, cpu.threads());
}

void make_step(Step* place, const RaggedRows& rows, uintptr_t positions, uintptr_t write_slots) {
    require(rows.rows == 0 || (positions && write_slots), "positions and write_slots must be given");
    new (place) Step{};
    place->tokens = rows.tokens;
    place->positions = pointer<int64_t>(positions);
    place->write_slots = pointer<int64_t>(write_slots);
    place->rows = rows.rows;
    place->q_start = rows.q_start;
    place->kv_len = rows.kv_len;
    place->block_table = rows.block_table;
    place->table_width = rows.table_width;
}

// Checks a step against the caches of all attention operations; a program has few kinds of caches.
void check_attention(const Program& program, const Step& step, const Caches& caches) {
    int64_t num_positions = INT64_MAX, num_blocks = INT64_MAX;
    int32_t block_size = 0, window = 1;  // the widest
    for (size_t i = 0; i < program.operations.size(); i++) {
        const AttendOperation* attend = program.attends(i);
        if (!attend) continue;
        require(size_t(attend->cache) < caches.caches.size(), "there must be keys and values for each layer");
        const KvCache& cache = caches.caches[size_t(attend->cache)];
        require(cache.kv_heads == attend->kv_heads && cache.head_dim == attend->head_dim &&
                    cache.value_dim == attend->value_dim,
                "a cache does not have the heads of its layer");
        require(block_size == 0 || cache.block_size == block_size, "the blocks of all caches must be of one size");
        block_size = cache.block_size;
        num_blocks = std::min(num_blocks, caches.num_blocks[size_t(attend->cache)]);
        window = window == 0 || attend->window == 0 ? 0 : std::max(window, attend->window);
        if (attend->cos) num_positions = std::min(num_positions, attend->num_positions);
    }
    if (block_size == 0) return;
    AttentionCall described{};
    described.cache.block_size = block_size;
    described.window = window;
    described.rows = step.rows;
    described.q_start = step.q_start;
    described.kv_len = step.kv_len;
    described.block_table = step.block_table;
    described.table_width = step.table_width;
    check_ragged_rows(described, step.tokens, num_blocks);
    check_slots(step.write_slots, step.tokens, num_blocks * block_size);
    if (num_positions != INT64_MAX) check_positions(step.positions, step.tokens, num_positions);
}

// Checks a step against the states of all recurrent operations.
void check_states(const Program& program, const Step& step, const States* states) {
    int64_t places = INT64_MAX;
    const auto check = [&](int32_t index, int64_t numbers) {
        require(states && size_t(index) < states->states.size(), "there must be a state for each layer that carries one");
        require(states->states[size_t(index)].numbers == numbers, "a state does not have the size of its layer's");
        places = std::min(places, states->states[size_t(index)].places);
    };
    for (const Operation& operation : program.operations) {
        if (const auto* convolution = std::get_if<ConvolutionOperation>(&operation)) {
            check(convolution->state, (convolution->filter.taps - 1) * convolution->filter.width);
        } else if (const auto* recurrence = std::get_if<RecurrenceOperation>(&operation)) {
            check(recurrence->state, recurrence->rule.state_size());
        }
    }
    if (places == INT64_MAX) return;
    require(step.runs.count >= 1, "a program that carries state wants runs");
    check_runs(step.runs, step.tokens, places);
}

// Inputs come in the order in which they were added.
std::vector<Rows> check_inputs(const Program& program, const nb::list& given) {
    require(nb::len(given) == size_t(program.inputs), "there must be rows for each input");
    std::vector<Rows> inputs;
    for (const Register& each : program.registers) {
        if (each.input < 0) continue;
        const Rows rows = nb::cast<Rows>(given[size_t(each.input)]);
        require(rows.data != nullptr && rows.stride == each.width && rows.element == Element::f32,
                "an input must be given, float32 and its rows next to each other");
        inputs.push_back(rows);
    }
    return inputs;
}

void run(const Program& program, const Cpu& cpu, const Step& described, const Caches& caches, const States* states,
         const Runs* runs, uintptr_t stream, const nb::list& inputs, const Rows& out, const Memory& scratch,
         const nb::list& adapted) {
    if (described.rows == 0) return;
    const int64_t width = program.registers[kOut].width;
    Step step = described;
    step.caches = caches.caches.data();
    if (states) step.states = states->states.data();
    if (runs) step.runs = *runs;
    step.stream = pointer<float>(stream);
    step.out = out;
    step.scratch = scratch.data();
    step.scratch_bytes = scratch.bytes;
    const std::vector<Rows> given = check_inputs(program, inputs);
    step.inputs = given.data();
    const std::vector<AdaptedTokens> tokens = check_adapted(program, step.tokens, adapted);
    step.adapted = tokens.data();
    step.adapted_count = int32_t(tokens.size());
    require(stream != 0, "stream must be given");
    require(out.data != nullptr && out.stride == width, "out must be given, its rows next to each other");
    check_attention(program, step, caches);
    check_states(program, step, states);
    require(scratch.holds(program_scratch(program, step.tokens, step.rows, 0, 1)),
            "scratch must be aligned to 64 bytes and have scratch_bytes()");
    nb::gil_scoped_release released;
    run_program(program, step, cpu.kernels(), cpu.pool());
}

}  // namespace
}  // namespace penstock

void bind_program(nb::module_& module) {
    using namespace penstock;
    nb::class_<Columns>(module, "Columns", "Neighbouring columns of a register.")
        .def(nb::init<int32_t, int64_t, int64_t>(), "register"_a, "first"_a, "width"_a);
    nb::class_<Caches>(module, "Caches", "Keys and values of every layer that has its own; memory must outlive it.")
        .def(nb::init<>())
        .def("add", &Caches::add, "cache"_a);
    nb::class_<Step>(module, "Step", "The rows of a step; tensors must outlive it.")
        .def("__init__", &make_step, "rows"_a, "positions"_a, "write_slots"_a);
    nb::class_<Adapter>(module, "Adapter", "What is added to projections, by site; weights must outlive it.")
        .def("__init__", &make_adapter, "sites"_a)
        .def("down", &set_down, "site"_a, "weight"_a, "The first product of a site.")
        .def("up", &add_up, "site"_a, "first"_a, "inner"_a, "weight"_a, "A second product of a site.");
    nb::class_<AdaptedTokens>(module, "AdaptedTokens", "Tokens [first, end) of a step have an adapter.")
        .def("__init__", &make_adapted_tokens, "first"_a, "end"_a, "adapter"_a, nb::keep_alive<1, 4>());
    nb::class_<ProgramCost>(module, "ProgramCost", "What a step costs, by which it is shared out among threads.")
        .def_ro("layer_bytes", &ProgramCost::layer_bytes, "Weights of the layer that has most of them.")
        .def_ro("operations", &ProgramCost::operations, "For a token, attention apart.")
        .def_ro("state", &ProgramCost::state, "Numbers of recurrent state that a row reads.");
    nb::class_<Program>(module, "Program", "A model's operations, and its whole forward as one call.")
        .def("__init__", &make_program, "hidden"_a)
        .def("area", &add_area, "bytes"_a, "An area of scratch with so many bytes for each token; gives its number.")
        .def("register", &add_register, "width"_a, "element"_a, "area"_a, "A register in an area; gives its number.")
        .def("input", &add_input, "width"_a, "A register that lies in memory which run() is given; gives its number.")
        .def("begin_layer", &begin_layer, "What is added from now on belongs to the next layer.")
        .def("norm", &add_norm, "kind"_a, "x"_a, "out"_a, "weight"_a, "bias"_a.none(), "eps"_a, "adds"_a,
             "groups"_a = 1)
        .def("linear", &add_linear, "x"_a, "out"_a, "weight"_a, "bias"_a.none(), "adds"_a, "gate"_a.none())
        .def("project_heads", &add_project_heads, "x"_a, "out"_a, "heads"_a, "passed"_a, "weights"_a)
        .def("activation", &add_activation, "kind"_a, "x"_a, "out"_a)
        .def("attend", &add_attend, "cache"_a, "heads"_a, "q"_a, "k"_a.none(), "v"_a.none(), "rotated"_a, "out"_a,
             "norms"_a, "rotation"_a.none(), "rule"_a)
        .def("experts", &add_experts, "x"_a, "logits"_a, "out"_a, "layer"_a, "adds"_a,
             "What `layer` reads must outlive it.")
        .def("gate_rows", &add_gate_rows, "x"_a, "logits"_a, "out"_a)
        .def("convolution", &add_convolution, "state"_a, "filter"_a, "x"_a, "gate_in"_a.none(), "gate_out"_a.none(),
             "out"_a)
        .def("recurrence", &add_recurrence, "state"_a, "rule"_a, "q"_a, "k"_a, "v"_a, "a"_a, "b"_a.none(), "out"_a)
        .def("gated_norm", &add_gated_norm, "norm"_a, "x"_a, "gate"_a, "out"_a)
        .def("gate", &add_gate, "x"_a, "gate"_a, "out"_a, "kind"_a)
        .def("scale", &add_scale, "x"_a, "factor"_a, "The number at `factor` must outlive it.")
        .def("regroup", &add_regroup, "groups"_a, "x"_a, "out"_a)
        .def("adapt", &add_adapt, "x"_a, "out"_a, "site"_a)
        .def("admit", &admit_adapter, "adapter"_a, "Check that an adapter fits, once before steps that have it.")
        .def("cost", &program_cost)
        .def("finish", [](Program& program) { program.sharing = sharing_of(program); }, "Once all is added.")
        .def("suits_team", [](const Program& program) { return program.sharing.has_value(); },
             "Whether threads may go through steps of few tokens as a team.")
        .def("scratch_bytes", &scratch_bytes, "cpu"_a, "tokens"_a, "rows"_a, "longest"_a,
             "Bytes of scratch with which run() is quickest.")
        .def("run", &run, "cpu"_a, "step"_a, "caches"_a, "states"_a.none(), "runs"_a.none(), "stream"_a,
             "inputs"_a, "out"_a, "scratch"_a, "adapted"_a,
             "From embeddings to what comes out; keys and values are stored, states go on.");
}
