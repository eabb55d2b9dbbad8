// Linear with float32 weights and activations, and fp32 sums: for models whose weights must not be rounded.
//
// The packed weight, panel after panel of 16 outputs:
//
//     panel 0:  | input 0: o0, o1, ..., o15 | input 1: o0, ..., o15 | ... | input K - 1 |
//     panel 1:  ...                                                       4 bytes an element
//
// Order of a sum: inputs ascending, each product added by a fused multiply-add if the machine has it.
#pragma once

#include "linear_tiles.h"

namespace penstock {
inline namespace PENSTOCK_ISA_NAMESPACE {

struct LinearF32 {
#if defined(PENSTOCK_AVX512)
    static constexpr int kRows = 6, kPanels = 4, kFewRows = 8;  // 24 sums, 4 weights, 1 activation: 29 of 32 registers
#elif defined(PENSTOCK_ISA_AVX2)
    static constexpr int kRows = 6, kPanels = 1, kFewRows = 6;  // 12 sums, 2 weights, 1 activation: 15 of 16 registers
#else
    static constexpr int kRows = 2, kPanels = 1, kFewRows = 2;
#endif
    static constexpr bool kEvenTiles = true, kPanelsInTurn = false;
    const LinearCall& call;
    const float* x;
    int64_t x_stride;

    Block block() const { return {call.rows, panels_of(call.outputs)}; }

    template <int R, int P>
    void tile(int64_t row, int64_t panel, const Turn& turn) const {
        const int64_t bytes = panel_bytes(Kind::f32, call.inputs);
        WeightsAhead<R, P> ahead(call, bytes, turn);
        const uint8_t* weight[P];
        PENSTOCK_UNROLL for (int p = 0; p < P; p++) weight[p] = panel_at<P>(call, panel, p, bytes);
        const float* rows = x + row * x_stride;
        f32x16 sum[R][P];
        PENSTOCK_UNROLL for (int r = 0; r < R; r++) {
            PENSTOCK_UNROLL for (int p = 0; p < P; p++) sum[r][p] = zero();
        }
        for (int64_t k = 0; k < call.inputs; k++) {
            const int64_t early = ahead.next_early();
            if (k % 4 == 0) PENSTOCK_PREFETCH_FAR(take_prefetch(call, 1, rows));
            f32x16 w[P];
            PENSTOCK_UNROLL for (int p = 0; p < P; p++) {
                const uint8_t* at = weight[p] + k * 64;
                w[p] = load(reinterpret_cast<const float*>(at));
                ahead.ask(at, early);
            }
            PENSTOCK_UNROLL for (int r = 0; r < R; r++) {
                const f32x16 activation = broadcast(rows[r * x_stride + k]);
                PENSTOCK_UNROLL for (int p = 0; p < P; p++) sum[r][p] = fma(w[p], activation, sum[r][p]);
            }
        }
        TileSums<R, P>(sum).finish_tile(call, row, panel);
    }
};

inline void prepare_f32(const LinearCall& call, Pool& pool) {
    float* widened = reinterpret_cast<float*>(call.scratch);
    const int64_t stride = scratch_stride(Kind::f32, call.inputs) / int64_t(sizeof(float));
    each_row(call.rows, call.inputs, pool, [&](int64_t row) {
        for (int64_t k = 0; k < call.inputs; k += kLanes) {
            const int count = int(smaller(kLanes, call.inputs - k));
            store_at(widened + row * stride + k, 0, count, load_elements(call.x, row, k, count));
        }
    });
}

inline void linear_f32(const LinearCall& call, Pool& pool) {
    if (!call.prepared && multiplied_as_it_lies(Kind::f32, call.inputs, call.x.element)) {
        return split_tiles(LinearF32{call, static_cast<const float*>(call.x.data), call.x.stride}, call, pool);
    }
    if (!call.prepared) prepare_f32(call, pool);
    const int64_t stride = scratch_stride(Kind::f32, call.inputs) / int64_t(sizeof(float));
    split_tiles(LinearF32{call, reinterpret_cast<const float*>(call.scratch), stride}, call, pool);
}

}  // namespace PENSTOCK_ISA_NAMESPACE
}  // namespace penstock
