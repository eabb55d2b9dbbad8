// The kernels of one instruction set, as a table; each isa_*.cpp includes this under its own macro and flags.
#pragma once

#include "activation.h"
#include "attention.h"
#include "block_kernels.h"
#include "experts.h"
#include "kernel_table.h"
#include "latent_attention.h"
#include "linear_bf16.h"
#include "linear_f32.h"
#include "linear_f8.h"
#include "lookup.h"
#include "norm.h"
#include "recurrent.h"
#include "rope.h"
#include "sampler.h"
#include "simd.h"

namespace penstock {
inline namespace PENSTOCK_ISA_NAMESPACE {

template <Kind... kinds>
constexpr void set_block_forms(KernelTable& table) {
    ((table.linears[int(kinds)] = {BlockKernels<kinds>::linear, BlockKernels<kinds>::prepare, BlockKernels<kinds>::lookup}),
     ...);
}

constexpr KernelTable table_named(const char* isa) {
    KernelTable table{};
    table.isa = isa;
    table.linears[int(Kind::bf16)] = {linear_bf16, prepare_bf16, lookup_bf16};
    table.linears[int(Kind::f32)] = {linear_f32, prepare_f32, lookup_f32};
    table.linears[int(Kind::f8)] = {linear_f8, prepare_f8, lookup_f8};
    set_block_forms<Kind::q4, Kind::q8, Kind::q5, Kind::q2k, Kind::q3k, Kind::q4k, Kind::q5k, Kind::q6k, Kind::nl4,
                    Kind::mx4, Kind::nl4k, Kind::nl4k16, Kind::z4, Kind::z4w>(table);

    table.attention = attention_of_any;
    table.rotate_and_store = rotate_and_store;
    table.rms_norm = rms_norm;
    table.layer_norm = layer_norm;
    table.silu_and_mul = silu_and_mul;
    table.gelu_new_and_mul = gelu_new_and_mul;
    table.gelu_and_mul = gelu_and_mul;
    table.clamped_swiglu_and_mul = clamped_swiglu_and_mul;
    table.gelu_new = gelu_new;
    table.gelu = gelu;
    table.relu = relu;
    table.scale = scale;
    table.sample = sample;
    table.rule_out = rule_out;

    table.route = route;
    table.scatter = scatter;
    table.gate_rows = gate_rows;

    table.short_convolution = short_convolution;
    table.recurrence = recurrence;
    table.gated_norm = gated_norm;
    table.gate_columns = gate_columns;
    table.regroup = regroup;
    return table;
}

}  // namespace PENSTOCK_ISA_NAMESPACE
}  // namespace penstock
