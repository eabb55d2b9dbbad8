// Linear with int8 weights, one scale an output, and activations quantised to int8, one scale a row.
//
// The packed weight, panel after panel of 16 outputs (codes are 128 above the weight; K is filled up to a multiple of
// 4):
//
//     | quad 0: o0 k0..k3, o1 k0..k3, ..., o15 k0..k3 | quad 1 | ... | quad K/4 - 1 | scales of o0..o15, fp32 |
//
// out = (sum of code * x - 128 * sum of x) * scale of the row * scale of the output. The sums are integers and exact.
#pragma once

#include "dot_lanes.h"
#include "quantized_rows.h"

namespace penstock {
inline namespace PENSTOCK_ISA_NAMESPACE {

struct LinearInt8 {
#if defined(PENSTOCK_ISA_AVX512_BF16)
    // 16 sums, 2 weights, 1 activation. Larger tiles look better on paper, but compilers then move the sums around.
    static constexpr int kRows = 8, kPanels = 2, kFewRows = 6;
#elif defined(PENSTOCK_AVX512)
    static constexpr int kRows = 4, kPanels = 2, kFewRows = 4;
#else
    static constexpr int kRows = 2, kPanels = 1, kFewRows = 2;
#endif
    const LinearCall& call;
    QuantizedRows x;

    template <int R, int P>
    void tile(int64_t row, int64_t panel) const {
        const int64_t quads = divide_up(call.inputs, 4), bytes = panel_bytes(Kind::int8, call.inputs);
        const uint8_t* weight = call.weight + panel * bytes;
        const int8_t* rows = x.codes(row);
        i32x16 sum[R][P];
        PENSTOCK_UNROLL for (int r = 0; r < R; r++) {
            PENSTOCK_UNROLL for (int p = 0; p < P; p++) sum[r][p] = broadcast_i32(0);
        }
        for (int64_t k = 0; k < quads; k++) {
            Codes w[P];
            PENSTOCK_UNROLL for (int p = 0; p < P; p++) {
                const uint8_t* at = weight + p * bytes + k * 64;
                w[p] = load_codes(at);
                fetch_ahead<P>(at);
            }
            PENSTOCK_UNROLL for (int r = 0; r < R; r++) {
                const Quad quad = load_quad(rows + r * x.stride + 4 * k);
                PENSTOCK_UNROLL for (int p = 0; p < P; p++) sum[r][p] = dot(sum[r][p], w[p], quad);
            }
        }
        alignas(64) float done[R * P * kLanes];
        PENSTOCK_UNROLL for (int p = 0; p < P; p++) {
            const f32x16 scale = load(reinterpret_cast<const float*>(weight + p * bytes + quads * 64));
            PENSTOCK_UNROLL for (int r = 0; r < R; r++) {
                const i32x16 excess = broadcast_i32(128 * x.whole_offsets(row + r)[0]);
                const f32x16 exact = to_f32(sub(sum[r][p], excess));
                store(done + (r * P + p) * kLanes, mul(mul(exact, broadcast(x.scales(row + r)[0])), scale));
            }
        }
        finish(call, row, R, panel, P, done);
    }
};

inline void linear_int8(const LinearCall& call, Pool& pool) {
    const QuantizedRows x = quantized_rows(call, Kind::int8);
    each_row(call.rows, call.inputs, pool, [&](int64_t row) { quantize_whole(call, x, row); });
    split_tiles(LinearInt8{call, x}, call, pool);
}

}  // namespace PENSTOCK_ISA_NAMESPACE
}  // namespace penstock
