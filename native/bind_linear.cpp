// The linear kernels, look-ups and packing as Python functions.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "bind_values.h"
#include "checks.h"
#include "cpu.h"
#include "layout.h"
#include "linear_call.h"
#include "pack.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace penstock {
namespace {

void linear(const Cpu& cpu, int64_t rows, const Weight& weight, const Rows& x, const Vector* bias, const Rows* residual,
            const Rows& out, std::optional<int> gate, const Memory& scratch) {
    const auto [kind, outputs, inputs, data] = weight;
    require(rows >= 0 && rows < kMostRows, "rows must be between 0 and 2^31 - 1");
    if (rows == 0) return;
    const LinearCall call{rows,          outputs,           inputs, reading(&x),    data,
                          one_row(bias), reading(residual), out,    scratch.data(), gate_of(gate)};
    require(!gate || (outputs % (2 * kPanel) == 0 && residual == nullptr),
            "outputs of a gated product must be a multiple of 32, without a residual");
    check_rows(call.x, rows, inputs, "x must be given, with rows at least `inputs` apart");
    check_rows(call.out, rows, call.columns(), "out must be given, with rows at least its columns apart");
    check_optional_rows(call.residual, rows, outputs, "rows of residual must be at least `outputs` apart");
    require(multiplied_as_it_lies(kind, inputs, call.x.element) || scratch.holds(rows * scratch_stride(kind, inputs)),
            "scratch must be aligned to 64 bytes and have room for every row");
    nb::gil_scoped_release released;
    linear_kernel(cpu.kernels(), kind)(call, cpu.pool());
}

void lookup(const Cpu& cpu, const Weight& weight, int64_t count, uintptr_t ids, const Rows& out) {
    const auto [kind, outputs, inputs, data] = weight;
    require(count >= 0 && count < kMostRows, "count must be between 0 and 2^31 - 1");
    if (count == 0) return;
    const LookupCall call{count, inputs, outputs, pointer<int64_t>(ids), data, out};
    check_rows(call.out, count, inputs, "out must be given, with rows at least `inputs` apart");
    require(call.ids != nullptr, "ids must be given");
    for (int64_t i = 0; i < count; i++) {
        require(call.ids[i] >= 0 && call.ids[i] < outputs, "an id lies outside the table");
    }
    nb::gil_scoped_release released;
    lookup_kernel(cpu.kernels(), kind)(call, cpu.pool());
}

using PackNumbers = void (*)(const ConstRows&, int64_t, int64_t, uint8_t*, Pool&);

template <Kind kind, PackNumbers pack>
void pack_numbers(const Cpu& cpu, int64_t outputs, int64_t inputs, const Rows& weight, const Memory& to) {
    check_sizes(outputs, inputs);
    check_rows(weight, outputs, inputs, "weight must be given, with rows at least `inputs` apart");
    require(to.address != 0 && to.bytes == packed_bytes(kind, outputs, inputs), "to must have packed_bytes() bytes");
    nb::gil_scoped_release released;
    pack(reading(&weight), outputs, inputs, to.data(), cpu.pool());
}

using PackBlocks = void (*)(const uint8_t*, int64_t, int64_t, uint8_t*, Pool&);

template <Kind kind, int64_t block_bytes, PackBlocks pack>
void pack_blocks(const Cpu& cpu, int64_t outputs, int64_t inputs, const Memory& blocks, const Memory& to) {
    check_sizes(outputs, inputs);
    const int64_t count = outputs * groups_of(inputs);
    require(blocks.address != 0 && blocks.bytes == count * block_bytes,
            "blocks must be one for each 32 inputs of a row");
    require(to.address != 0 && to.bytes == packed_bytes(kind, outputs, inputs), "to must have packed_bytes() bytes");
    nb::gil_scoped_release released;
    if constexpr (block_bytes == kQ40Block) {
        require(q4_0_minima_exist(blocks.data(), count), "the scale of a Q4_0 block is not a number below 8192");
    }
    pack(blocks.data(), outputs, inputs, to.data(), cpu.pool());
}

void pack_fp8_rows(const Cpu& cpu, int64_t outputs, int64_t inputs, const Memory& blocks, const Memory& to) {
    check_sizes(outputs, inputs);
    require(blocks.address != 0 && blocks.bytes == outputs * f8_row_bytes(inputs),
            "blocks must be the scales and codes of each row");
    require(to.address != 0 && to.bytes == packed_bytes(Kind::f8, outputs, inputs), "to must have packed_bytes() bytes");
    nb::gil_scoped_release released;
    pack_f8(blocks.data(), outputs, inputs, to.data(), cpu.pool());
}

void pack_block_form(const Cpu& cpu, int kind, int64_t outputs, int64_t inputs, const Memory& codes,
                     const Memory& records, const Memory* table, const Memory& to) {
    const Kind of = kind_of(kind);
    const BlockForm form = block_form(of);
    check_weight(of, outputs, inputs);
    require(form.inputs != 0 && inputs % form.inputs == 0, "kind must be a block form, and inputs whole units of it");
    require(codes.address != 0 && codes.bytes == outputs * inputs, "codes must be a byte for each number");
    require(records.address != 0 && records.bytes == outputs * (inputs / form.inputs) * form.record_bytes(),
            "records must be the fields of each unit of each output");
    require(form.table == (table != nullptr) && (!table || (table->address != 0 && table->bytes == 64)),
            "table must be 64 bytes where the form has one");
    require(to.address != 0 && to.bytes == packed_bytes(of, outputs, inputs), "to must have packed_bytes() bytes");
    nb::gil_scoped_release released;
    pack_codes(of, outputs, inputs, {codes.data(), records.data(), table ? table->data() : nullptr}, to.data(),
               cpu.pool());
}

}  // namespace
}  // namespace penstock

void bind_linear(nb::module_& module, nb::class_<penstock::Cpu>& cpu) {
    using namespace penstock;
    cpu.def("linear", &linear, "rows"_a, "weight"_a, "x"_a, "bias"_a.none(), "residual"_a.none(), "out"_a, "gate"_a.none(),
            "scratch"_a, "out = x times a packed weight + bias + residual, or of it gate(first half) * second half.");
    cpu.def("lookup", &lookup, "weight"_a, "count"_a, "ids"_a, "out"_a, "Rows of a packed weight as numbers.");
    const auto numbers = [&cpu](const char* name, auto pack, const char* doc) {
        cpu.def(name, pack, "outputs"_a, "inputs"_a, "weight"_a, "to"_a, doc);
    };
    numbers("pack_bf16", &pack_numbers<Kind::bf16, pack_bf16>, "Pack rows of numbers, rounded to bfloat16.");
    numbers("pack_f32", &pack_numbers<Kind::f32, pack_f32>, "Pack rows of numbers as they are.");
    const auto blocks = [&cpu](const char* name, auto pack, const char* doc) {
        cpu.def(name, pack, "outputs"_a, "inputs"_a, "blocks"_a, "to"_a, doc);
    };
    blocks("pack_q4_0", &pack_blocks<Kind::q4, kQ40Block, pack_q4_0>, "Pack rows of GGUF Q4_0 blocks.");
    blocks("pack_q4_1", &pack_blocks<Kind::q4, kQ41Block, pack_q4_1>, "Pack rows of GGUF Q4_1 blocks.");
    blocks("pack_q8_0", &pack_blocks<Kind::q8, kQ80Block, pack_q8_0>, "Pack rows of GGUF Q8_0 blocks.");
    blocks("pack_fp8", &pack_fp8_rows, "Pack rows of FP8, each its scales and then its codes.");
    cpu.def("pack_codes", &pack_block_form, "kind"_a, "outputs"_a, "inputs"_a, "codes"_a, "records"_a, "table"_a.none(),
            "to"_a, "Pack the codes and scales of a block form.");
    module.def(
        "packed_bytes",
        [](int kind, int64_t outputs, int64_t inputs) {
            check_weight(kind_of(kind), outputs, inputs);
            return packed_bytes(kind_of(kind), outputs, inputs);
        },
        "kind"_a, "outputs"_a, "inputs"_a, "Bytes of a packed weight.");
    module.def(
        "scratch_bytes",
        [](int kind, int64_t inputs) {
            check_weight(kind_of(kind), 1, inputs);
            return scratch_stride(kind_of(kind), inputs);
        },
        "kind"_a, "inputs"_a, "Bytes of scratch that linear() needs for each row.");
}
