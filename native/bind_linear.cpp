// The linear kernels, look-ups and packing as Python functions.
#include <nanobind/nanobind.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "checks.h"
#include "dispatch.h"
#include "layout.h"
#include "linear_call.h"
#include "pack.h"
#include "pool.h"

namespace nb = nanobind;

namespace penstock {
namespace {

void check_rows(const void* data, int64_t stride, int64_t rows, int64_t width, const char* otherwise) {
    require(data != nullptr && (rows <= 1 || stride >= width), otherwise);
}

using LookupKernel = void (*)(const LookupCall&, Pool&);

LookupKernel lookup_kernel(Kind kind) {
    const KernelTable& table = kernels();
    switch (kind) {
        case Kind::bf16: return table.lookup_bf16;
        case Kind::q4: return table.lookup_q4;
        case Kind::q8: return table.lookup_q8;
        case Kind::f32: return table.lookup_f32;
    }
    throw std::invalid_argument("no such kind");
}

void linear(int kind_number, int64_t outputs, int64_t inputs, uintptr_t weight, int64_t rows, uintptr_t x,
            int64_t x_stride, int x_element, uintptr_t bias, int bias_element, uintptr_t residual, int64_t residual_stride,
            int residual_element, uintptr_t out, int64_t out_stride, int out_element, bool gated,
            uintptr_t scratch, int64_t scratch_bytes) {
    const Kind kind = kind_of(kind_number);
    check_sizes(outputs, inputs);
    require(rows >= 0 && rows < int64_t{1} << 31, "rows must be between 0 and 2^31 - 1");
    if (rows == 0) return;
    const LinearCall call{
        rows,
        outputs,
        inputs,
        {pointer<void>(x), x_stride, element_of(x_element)},
        pointer<uint8_t>(weight),
        {pointer<void>(bias), 0, element_of(bias_element)},
        {pointer<void>(residual), residual_stride, element_of(residual_element)},
        {pointer<void>(out), out_stride, element_of(out_element)},
        pointer<uint8_t>(scratch),
        gated,
    };
    require(!gated || (outputs % (2 * kPanel) == 0 && residual == 0),
            "outputs of a gated product must be a multiple of 32, without a residual");
    check_rows(call.x.data, x_stride, rows, inputs, "x must be given, with rows at least `inputs` apart");
    check_rows(call.out.data, out_stride, rows, call.columns(), "out must be given, with rows at least its columns apart");
    require(call.weight != nullptr, "weight must be given");
    require(call.residual.data == nullptr || rows <= 1 || residual_stride >= outputs,
            "rows of residual must be at least `outputs` apart");
    // Rows that are float32, or bfloat16 pairs, already are read where they lie.
    const bool in_place = (kind == Kind::bf16 && call.x.element == Element::bf16 && inputs % 2 == 0) ||
                          (kind == Kind::f32 && call.x.element == Element::f32);
    require(in_place || (scratch != 0 && scratch % 64 == 0 && scratch_bytes >= rows * scratch_stride(kind, inputs)),
            "scratch must be aligned to 64 bytes and have room for every row");
    nb::gil_scoped_release released;
    linear_kernel(kernels(), kind)(call, pool());
}

void lookup(int kind_number, int64_t outputs, int64_t inputs, uintptr_t weight, int64_t count, uintptr_t ids,
            uintptr_t out, int64_t out_stride, int out_element) {
    const Kind kind = kind_of(kind_number);
    check_sizes(outputs, inputs);
    require(count >= 0 && count < int64_t{1} << 31, "count must be between 0 and 2^31 - 1");
    if (count == 0) return;
    const LookupCall call{count,
                          inputs,
                          outputs,
                          pointer<int64_t>(ids),
                          pointer<uint8_t>(weight),
                          {pointer<void>(out), out_stride, element_of(out_element)}};
    check_rows(call.out.data, out_stride, count, inputs, "out must be given, with rows at least `inputs` apart");
    require(call.weight != nullptr && call.ids != nullptr, "weight and ids must be given");
    for (int64_t i = 0; i < count; i++) {
        require(call.ids[i] >= 0 && call.ids[i] < outputs, "an id lies outside the table");
    }
    nb::gil_scoped_release released;
    lookup_kernel(kind)(call, pool());
}

using PackNumbers = void (*)(const ConstRows&, int64_t, int64_t, uint8_t*, Pool&);

template <Kind kind, PackNumbers pack>
void pack_numbers(int64_t outputs, int64_t inputs, uintptr_t weight, int64_t stride, int element, uintptr_t to,
                  int64_t to_bytes) {
    check_sizes(outputs, inputs);
    const ConstRows rows{pointer<void>(weight), stride, element_of(element)};
    check_rows(rows.data, stride, outputs, inputs, "weight must be given, with rows at least `inputs` apart");
    require(to != 0 && to_bytes == packed_bytes(kind, outputs, inputs), "to must have packed_bytes() bytes");
    nb::gil_scoped_release released;
    pack(rows, outputs, inputs, pointer<uint8_t>(to), pool());
}

using PackBlocks = void (*)(const uint8_t*, int64_t, int64_t, uint8_t*, Pool&);

template <Kind kind, int64_t block_bytes, PackBlocks pack>
void pack_blocks(int64_t outputs, int64_t inputs, uintptr_t blocks, int64_t blocks_bytes, uintptr_t to,
                 int64_t to_bytes) {
    check_sizes(outputs, inputs);
    const int64_t count = outputs * groups_of(inputs);
    require(blocks != 0 && blocks_bytes == count * block_bytes, "blocks must be one for each 32 inputs of a row");
    require(to != 0 && to_bytes == packed_bytes(kind, outputs, inputs), "to must have packed_bytes() bytes");
    nb::gil_scoped_release released;
    if constexpr (block_bytes == kQ40Block) {
        require(q4_0_minima_exist(pointer<uint8_t>(blocks), count),
                "the scale of a Q4_0 block is not a number below 8192");
    }
    pack(pointer<uint8_t>(blocks), outputs, inputs, pointer<uint8_t>(to), pool());
}

}  // namespace
}  // namespace penstock

void bind_linear(nb::module_& module) {
    using namespace penstock;
    module.def("linear", &linear, "out = x times a packed weight + bias + residual, or of it silu(first half) * second; addresses of 0 are absent.");
    module.def("lookup", &lookup, "Rows of a packed weight as numbers.");
    module.def("pack_bf16", &pack_numbers<Kind::bf16, pack_bf16>, "Pack rows of numbers, rounded to bfloat16.");
    module.def("pack_f32", &pack_numbers<Kind::f32, pack_f32>, "Pack rows of numbers as they are.");
    module.def("pack_q4_0", &pack_blocks<Kind::q4, kQ40Block, pack_q4_0>, "Pack rows of GGUF Q4_0 blocks.");
    module.def("pack_q4_1", &pack_blocks<Kind::q4, kQ41Block, pack_q4_1>, "Pack rows of GGUF Q4_1 blocks.");
    module.def("pack_q8_0", &pack_blocks<Kind::q8, kQ80Block, pack_q8_0>, "Pack rows of GGUF Q8_0 blocks.");
    module.def(
        "packed_bytes",
        [](int kind, int64_t outputs, int64_t inputs) {
            check_sizes(outputs, inputs);
            return packed_bytes(kind_of(kind), outputs, inputs);
        },
        "Bytes of a packed weight.");
    module.def(
        "scratch_bytes",
        [](int kind, int64_t inputs) {
            check_sizes(1, inputs);
            return scratch_stride(kind_of(kind), inputs);
        },
        "Bytes of scratch that linear() needs for each row.");
}
