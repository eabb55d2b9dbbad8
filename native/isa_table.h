// The kernels of one instruction set, as a table; each isa_*.cpp includes this under its own macro and flags.
#pragma once

#include "activation.h"
#include "attention.h"
#include "block_kernels.h"
#include "experts.h"
#include "kernel_table.h"
#include "linear_bf16.h"
#include "linear_f32.h"
#include "linear_q4.h"
#include "linear_q8.h"
#include "lookup.h"
#include "norm.h"
#include "rope.h"
#include "sampler.h"
#include "simd.h"

namespace penstock {
inline namespace PENSTOCK_ISA_NAMESPACE {

template <Kind kind>
constexpr void set_linear(KernelTable& table, void (*linear)(const LinearCall&, Pool&),
                          void (*prepare)(const LinearCall&, Pool&), void (*lookup)(const LookupCall&, Pool&)) {
    table.linear[int(kind)] = linear;
    table.prepare[int(kind)] = prepare;
    table.lookup[int(kind)] = lookup;
}

constexpr KernelTable table_named(const char* isa) {
    KernelTable table{};
    table.isa = isa;
    set_linear<Kind::bf16>(table, linear_bf16, prepare_bf16, lookup_bf16);
    set_linear<Kind::q4>(table, linear_q4, prepare_q4, lookup_q4);
    set_linear<Kind::q8>(table, linear_q8, prepare_q8, lookup_q8);
    set_linear<Kind::f32>(table, linear_f32, prepare_f32, lookup_f32);
    set_linear<Kind::q5>(table, linear_q5, prepare_q5, lookup_q5);
    set_linear<Kind::q2k>(table, linear_q2k, prepare_q2k, lookup_q2k);
    set_linear<Kind::q3k>(table, linear_q3k, prepare_q3k, lookup_q3k);
    set_linear<Kind::q4k>(table, linear_q4k, prepare_q4k, lookup_q4k);
    set_linear<Kind::q5k>(table, linear_q5k, prepare_q5k, lookup_q5k);
    set_linear<Kind::q6k>(table, linear_q6k, prepare_q6k, lookup_q6k);
    set_linear<Kind::nl4>(table, linear_nl4, prepare_nl4, lookup_nl4);
    set_linear<Kind::mx4>(table, linear_mx4, prepare_mx4, lookup_mx4);
    set_linear<Kind::nl4k>(table, linear_nl4k, prepare_nl4k, lookup_nl4k);
    set_linear<Kind::nl4k16>(table, linear_nl4k16, prepare_nl4k16, lookup_nl4k16);

    table.attention = attention;
    table.rotate_and_store = rotate_and_store;
    table.rms_norm = rms_norm;
    table.layer_norm = layer_norm;
    table.silu_and_mul = silu_and_mul;
    table.gelu_new_and_mul = gelu_new_and_mul;
    table.clamped_swiglu_and_mul = clamped_swiglu_and_mul;
    table.gelu_new = gelu_new;
    table.gelu = gelu;
    table.relu = relu;
    table.sample = sample;

    table.route = route;
    table.scatter = scatter;
    table.gate_rows = gate_rows;
    return table;
}

}  // namespace PENSTOCK_ISA_NAMESPACE
}  // namespace penstock
