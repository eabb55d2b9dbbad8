// Normalisation of rows, summed in fp32: 16 lanes (element i in lane i mod 16, ascending), then across lanes.
#pragma once

#include "elements.h"
#include "rows_call.h"

namespace penstock {
inline namespace PENSTOCK_ISA_NAMESPACE {

// Elements [i, i + 16) of the stream, after adding the residual.
PENSTOCK_INLINE f32x16 advance_stream(const NormCall& call, int64_t row, int i, int width) {
    f32x16 x = load_row(call.stream, row, i, width);
    if (!call.residual.data) return x;
    x = add(x, load_row(call.residual, row, i, width));
    store_row(call.stream, row, i, width, x);
    return call.stream.element == Element::f32 ? x : load_row(call.stream, row, i, width);  // as rounded in the stream
}

// x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019, equation 4); rounded once, at the end.
inline void rms_norm(const NormCall& call, Pool& pool) {
    const int width = int(call.width);
    run_rows(pool, call.rows, call.width, [&](int64_t row) {
        f32x16 squares = zero();
        for (int i = 0; i < width; i += kLanes) {
            const f32x16 x = advance_stream(call, row, i, width);
            squares = fma(x, x, squares);
        }
        const f32x16 mean = broadcast(reduce_add(squares) / float(width) + call.eps);
        const f32x16 inverse = div(broadcast(1.0f), sqrt(mean));
        for (int i = 0; i < width; i += kLanes) {
            const f32x16 unit = mul(load_row(call.stream, row, i, width), inverse);
            const f32x16 scaled = mul(unit, load_row(call.weight, 0, i, width));
            const f32x16 out = call.addend.data ? add(load_row(call.addend, row, i, width), scaled) : scaled;
            store_row(call.out, row, i, width, out);
        }
    });
}

// (x - mean) / sqrt(var + eps) * weight + bias with the biased variance (Ba et al. 2016), in two passes over x.
inline void layer_norm(const NormCall& call, Pool& pool) {
    const int width = int(call.width);
    run_rows(pool, call.rows, call.width, [&](int64_t row) {
        f32x16 sum = zero();
        for (int i = 0; i < width; i += kLanes) sum = add(sum, advance_stream(call, row, i, width));
        const f32x16 mean = broadcast(reduce_add(sum) / float(width));
        f32x16 squares = zero();
        for (int i = 0; i < width; i += kLanes) {
            f32x16 x = sub(load_row(call.stream, row, i, width), mean);
            if (width - i < kLanes) x = select(first_lanes(width - i), x, zero());
            squares = fma(x, x, squares);
        }
        const f32x16 variance = broadcast(reduce_add(squares) / float(width) + call.eps);
        const f32x16 inverse = div(broadcast(1.0f), sqrt(variance));
        for (int i = 0; i < width; i += kLanes) {
            const f32x16 unit = mul(sub(load_row(call.stream, row, i, width), mean), inverse);
            const f32x16 scaled = mul(unit, load_row(call.weight, 0, i, width));
            const f32x16 out = call.bias.data ? add(scaled, load_row(call.bias, 0, i, width)) : scaled;
            store_row(call.out, row, i, width, out);
        }
    });
}

}  // namespace PENSTOCK_ISA_NAMESPACE
}  // namespace penstock
