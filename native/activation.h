// Activations of rows: every element by itself.
#pragma once

#include "elements.h"
#include "rows_call.h"

namespace penstock {
inline namespace PENSTOCK_ISA_NAMESPACE {

// x / (1 + exp(-x)); the quotient of a large negative x is -0, not NaN.
PENSTOCK_INLINE f32x16 sigmoid_weighted(f32x16 x, f32x16 exponent) {
    return div(x, add(broadcast(1.0f), exp(sub(zero(), exponent))));
}

// silu(gate) * up of rows [gate | up] (SwiGLU: Shazeer 2020, section 2); rounded once, at the end.
inline void silu_and_mul(const ActivationCall& call, Pool& pool) {
    const int width = int(call.width);
    const ConstRows gates = call.x;
    ConstRows ups = call.x;
    const int64_t bytes = call.width * (ups.element == Element::f32 ? sizeof(float) : sizeof(bf16));
    ups.data = static_cast<const uint8_t*>(ups.data) + bytes;
    run_rows(pool, call.rows, call.width, [&](int64_t row) {
        for (int i = 0; i < width; i += kLanes) {
            const f32x16 gate = load_row(gates, row, i, width);
            store_row(call.out, row, i, width, mul(sigmoid_weighted(gate, gate), load_row(ups, row, i, width)));
        }
    });
}

// GELU by tanh: x / 2 * (1 + tanh(u)), u = sqrt(2 / pi) (x + 0.044715 x^3) (Hendrycks and Gimpel 2016). Since
// 1 + tanh(u) = 2 / (1 + exp(-2 u)), no difference of near equals is taken.
inline void gelu_new(const ActivationCall& call, Pool& pool) {
    const int width = int(call.width);
    run_rows(pool, call.rows, call.width, [&](int64_t row) {
        for (int i = 0; i < width; i += kLanes) {
            const f32x16 x = load_row(call.x, row, i, width);
            const f32x16 cubic = fma(mul(broadcast(0.044715f), mul(x, x)), x, x);
            store_row(call.out, row, i, width, sigmoid_weighted(x, mul(broadcast(1.5957691216f), cubic)));
        }
    });
}

}  // namespace PENSTOCK_ISA_NAMESPACE
}  // namespace penstock
