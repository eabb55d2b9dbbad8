// One table of kernels for each instruction set; a Cpu (cpu.h) holds one of them.
#pragma once

#include "attention_call.h"
#include "experts_call.h"
#include "layout.h"
#include "linear_call.h"
#include "recurrent_call.h"
#include "rows_call.h"

namespace penstock {

class Pool;

// The kernels of one form of weight.
struct LinearKernels {
    void (*linear)(const LinearCall& call, Pool& pool);
    // Converts call.x into call.scratch, as `linear` does before it multiplies. Reads nothing else of the call.
    void (*prepare)(const LinearCall& call, Pool& pool);
    void (*lookup)(const LookupCall& call, Pool& pool);
    int64_t rows_of_a_tile = 1;  // rows that `linear` multiplies in the time of one
};

struct KernelTable {
    const char* isa;

    LinearKernels linears[kKinds];  // by Kind

    void (*attention)(const AttentionCall& call, Pool& pool);
    void (*rotate_and_store)(const RotaryCall& call, Pool& pool);
    void (*rms_norm)(const NormCall& call, Pool& pool);
    void (*layer_norm)(const NormCall& call, Pool& pool);
    void (*silu_and_mul)(const ActivationCall& call, Pool& pool);
    void (*gelu_new_and_mul)(const ActivationCall& call, Pool& pool);
    void (*gelu_and_mul)(const ActivationCall& call, Pool& pool);
    void (*clamped_swiglu_and_mul)(const ActivationCall& call, Pool& pool);
    void (*gelu_new)(const ActivationCall& call, Pool& pool);
    void (*gelu)(const ActivationCall& call, Pool& pool);
    void (*relu)(const ActivationCall& call, Pool& pool);
    void (*scale)(const ScaleCall& call, Pool& pool);
    void (*sample)(const SampleCall& call, Pool& pool);
    void (*rule_out)(const RuleOutCall& call);

    void (*route)(const RouteCall& call, Pool& pool);
    void (*scatter)(const ScatterCall& call, Pool& pool);
    void (*gate_rows)(const GateRowsCall& call, Pool& pool);

    void (*short_convolution)(const ConvolutionCall& call, Pool& pool);
    void (*recurrence)(const RecurrenceCall& call, Pool& pool);
    void (*gated_norm)(const GatedNormCall& call, Pool& pool);
    void (*gate_columns)(const GateCall& call, Pool& pool);
    void (*regroup)(const RegroupCall& call, Pool& pool);
};

constexpr auto linear_kernel(const KernelTable& table, Kind kind) { return table.linears[int(kind)].linear; }
constexpr auto prepare_kernel(const KernelTable& table, Kind kind) { return table.linears[int(kind)].prepare; }
constexpr auto lookup_kernel(const KernelTable& table, Kind kind) { return table.linears[int(kind)].lookup; }

constexpr auto norm_kernel(const KernelTable& table, Norm norm) {
    return norm == Norm::layer ? table.layer_norm : table.rms_norm;
}

constexpr auto activation_kernel(const KernelTable& table, Activation activation) {
    switch (activation) {
        case Activation::gelu_new: return table.gelu_new;
        case Activation::gelu: return table.gelu;
        case Activation::relu: return table.relu;
        case Activation::gelu_new_and_mul: return table.gelu_new_and_mul;
        case Activation::gelu_and_mul: return table.gelu_and_mul;
        case Activation::clamped_swiglu_and_mul: return table.clamped_swiglu_and_mul;
        default: return table.silu_and_mul;
    }
}

extern const KernelTable portable_kernels;
extern const KernelTable avx2_kernels;
extern const KernelTable avx512_kernels;
extern const KernelTable avx512_bf16_kernels;
extern const KernelTable avx512_amx_kernels;

}  // namespace penstock
