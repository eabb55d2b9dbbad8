// Activations of rows, element by element.
#pragma once

#include "elements.h"
#include "rows_call.h"

namespace penstock {
inline namespace PENSTOCK_ISA_NAMESPACE {

// x / (1 + exp(-x)); the quotient of a large negative x is -0, not NaN.
PENSTOCK_INLINE f32x16 sigmoid_weighted(f32x16 x, f32x16 exponent) {
    return div(x, add(broadcast(1.0f), exp(sub(zero(), exponent))));
}

PENSTOCK_INLINE f32x16 silu(f32x16 x) { return sigmoid_weighted(x, x); }

// of(gate, up) of rows [gate | up]; rounded once, at the end.
template <class Of>
PENSTOCK_INLINE void each_gated(const ActivationCall& call, Pool& pool, const Of& of) {
    const int width = int(call.width);
    const ConstRows gates = call.x, ups = columns_from(call.x, call.width);
    run_rows(pool, call.rows, call.width, [&](int64_t row) {
        for (int i = 0; i < width; i += kLanes) {
            const f32x16 gate = load_row(gates, row, i, width);
            store_row(call.out, row, i, width, of(gate, load_row(ups, row, i, width)));
        }
    });
}

// silu(gate) * up (SwiGLU: Shazeer 2020, section 2)
inline void silu_and_mul(const ActivationCall& call, Pool& pool) {
    each_gated(call, pool, [](f32x16 gate, f32x16 up) { return mul(silu(gate), up); });
}

template <class Of>
PENSTOCK_INLINE void each_element(const ActivationCall& call, Pool& pool, const Of& of) {
    const int width = int(call.width);
    run_rows(pool, call.rows, call.width, [&](int64_t row) {
        for (int i = 0; i < width; i += kLanes) {
            store_row(call.out, row, i, width, of(load_row(call.x, row, i, width)));
        }
    });
}

// GELU by tanh: x / 2 * (1 + tanh(u)), u = sqrt(2 / pi) (x + 0.044715 x^3) (Hendrycks and Gimpel 2016). Since
// 1 + tanh(u) = 2 / (1 + exp(-2 u)), no two nearly equal numbers are subtracted.
PENSTOCK_INLINE f32x16 gelu_by_tanh(f32x16 x) {
    const f32x16 cubic = fma(mul(broadcast(0.044715f), mul(x, x)), x, x);
    return sigmoid_weighted(x, mul(broadcast(1.5957691216f), cubic));
}

inline void gelu_new(const ActivationCall& call, Pool& pool) {
    each_element(call, pool, [](f32x16 x) { return gelu_by_tanh(x); });
}

// gelu_new(gate) * up (GeGLU: Shazeer 2020, section 2)
inline void gelu_new_and_mul(const ActivationCall& call, Pool& pool) {
    each_gated(call, pool, [](f32x16 gate, f32x16 up) { return mul(gelu_by_tanh(gate), up); });
}

// g sigmoid(1.702 g) (u + 1), g = min(gate, 7), u = up clamped to [-7, 7]: the experts of gpt-oss. min and max
// take their arguments in this order so that a NaN passes.
PENSTOCK_INLINE f32x16 clamped_swiglu(f32x16 gate, f32x16 up) {
    const f32x16 most = broadcast(7.0f), g = min(most, gate), u = max(broadcast(-7.0f), min(most, up));
    return mul(sigmoid_weighted(g, mul(broadcast(1.702f), g)), add(u, broadcast(1.0f)));
}

inline void clamped_swiglu_and_mul(const ActivationCall& call, Pool& pool) {
    each_gated(call, pool, [](f32x16 gate, f32x16 up) { return clamped_swiglu(gate, up); });
}

// GELU by the normal distribution: x Phi(x) (Hendrycks and Gimpel 2016), as max(x, 0) - a Phi(-a) with a = |x|: again
// no two nearly equal numbers are subtracted.
//
// Phi(-a) = exp(-a^2 / 2) t q(t), t = 1 / (1 + 0.3 a), where q of degree 9 is the minimax fit for the relative error on
// [0, 14.5] (2e-8 with these coefficients); beyond it a Phi(-a) is too small for a float32. `a` is bounded so that
// infinities pass.
PENSTOCK_INLINE f32x16 gelu_by_normal(f32x16 x) {
    const f32x16 a = min(broadcast(16.0f), abs(x));  // arguments in this order let a NaN pass, here and below
    const f32x16 t = div(broadcast(1.0f), fma(broadcast(0.3f), a, broadcast(1.0f)));
    f32x16 q = broadcast(-0x1.51e514p-6f);
    q = fma(q, t, broadcast(0x1.cc8942p-4f));
    q = fma(q, t, broadcast(-0x1.d361a0p-3f));
    q = fma(q, t, broadcast(0x1.88c64ap-3f));
    q = fma(q, t, broadcast(-0x1.455180p-4f));
    q = fma(q, t, broadcast(0x1.89dbb6p-4f));
    q = fma(q, t, broadcast(0x1.411584p-4f));
    q = fma(q, t, broadcast(0x1.c38638p-4f));
    q = fma(q, t, broadcast(0x1.e9c422p-4f));
    q = fma(q, t, broadcast(0x1.ea3c98p-4f));
    const f32x16 tail = mul(mul(q, t), exp(mul(mul(broadcast(-0.5f), a), a)));  // Phi(-a)
    return sub(max(zero(), x), mul(a, tail));
}

inline void gelu(const ActivationCall& call, Pool& pool) {
    each_element(call, pool, [](f32x16 x) { return gelu_by_normal(x); });
}

// gelu(gate) * up (GeGLU: Shazeer 2020, section 2)
inline void gelu_and_mul(const ActivationCall& call, Pool& pool) {
    each_gated(call, pool, [](f32x16 gate, f32x16 up) { return mul(gelu_by_normal(gate), up); });
}

inline void relu(const ActivationCall& call, Pool& pool) {
    each_element(call, pool, [](f32x16 x) { return max(zero(), x); });
}

inline void scale(const ScaleCall& call, Pool& pool) {
    const int width = int(call.width);
    const f32x16 factor = broadcast(call.factor);
    run_rows(pool, call.rows, call.width, [&](int64_t row) {
        for (int i = 0; i < width; i += kLanes) {
            store_row(call.out, row, i, width, mul(factor, load_row(call.x, row, i, width)));
        }
    });
}

}  // namespace PENSTOCK_ISA_NAMESPACE
}  // namespace penstock
