// Linear with 8-bit weights in groups of 32 inputs, each with a scale (GGUF's Q8_0), and activations quantised alike, to
// 8 bits or, where they are outliers, to 16.
//
// The packed weight, panel after panel of 16 outputs; a panel is its groups one after the other, each
//
//     | 8 x 64 bytes: part c holds, for o0 to o15, the codes of k = 4c to 4c + 3, 128 above the weight |
//     | scales of o0..o15, fp16 |                                                       544 bytes = 8.5 cache lines
//
// A weight is (code - 128) * scale. (ggml-common.h, `block_q8_0`.) Order of a sum: as in
// linear_q4.h, but for the minima.
#pragma once

#include "dot_lanes.h"
#include "quantized_rows.h"

namespace penstock {
inline namespace PENSTOCK_ISA_NAMESPACE {

struct LinearQ8 : CodeTiles<4> {
    const LinearCall& call;
    QuantizedRows x;

    template <int R, int P>
    void tile(int64_t row, int64_t panel, const Turn& turn) const {
        const int64_t bytes = panel_bytes(Kind::q8, call.inputs);
        WeightsAhead<R, P> ahead(call, bytes, turn);
        const uint8_t* weight[P];
        PENSTOCK_UNROLL for (int p = 0; p < P; p++) weight[p] = panel_at<P>(call, panel, p, bytes);
        const int8_t* codes = x.high(row);
        const float* scales = x.scales(row);
        const int32_t* offsets = x.whole_offsets(row);
        const int64_t stride = x.stride;
        f32x16 total[R][P];
        PENSTOCK_UNROLL for (int r = 0; r < R; r++) {
            PENSTOCK_UNROLL for (int p = 0; p < P; p++) total[r][p] = zero();
        }
        for (int64_t g = 0; g < x.groups; g++) {
            const int64_t group = g * kQ8Group;
            i32x16 sum[R][P];
            const RowAddresses<R, int32_t> row_offsets(offsets + g, stride);
            PENSTOCK_UNROLL for (int r = 0; r < R; r++) {
                const i32x16 offset = broadcast_i32(*row_offsets[r]);
                PENSTOCK_UNROLL for (int p = 0; p < P; p++) sum[r][p] = offset;
            }
            const int64_t early = ahead.next_early();
            const RowAddresses<R, int8_t> quads(codes + g * kGroup, stride);
            const uint8_t* next_lines = take_prefetch(call, 4, codes);
            PENSTOCK_UNROLL for (int c = 0; c < 8; c++) {
                if (c % 2 == 0) PENSTOCK_PREFETCH_FAR(next_lines + c / 2 * 64);
                Codes w[P];
                PENSTOCK_UNROLL for (int p = 0; p < P; p++) {
                    const uint8_t* at = weight[p] + group + c * 64;
                    w[p] = load_codes(at);
                    ahead.ask(at, early);
                }
                PENSTOCK_UNROLL for (int r = 0; r < R; r++) {
                    const auto quad = load_quad_for<R, P>(quads[r] + c * 4);
                    PENSTOCK_UNROLL for (int p = 0; p < P; p++) sum[r][p] = dot(sum[r][p], w[p], quad);
                }
            }
            const RowAddresses<R, float> row_scales(scales + g, stride);
            PENSTOCK_UNROLL for (int p = 0; p < P; p++) {
                const f32x16 scale = load_f16(weight[p] + group + 512);
                PENSTOCK_UNROLL for (int r = 0; r < R; r++) {
                    const f32x16 both = mul(scale, broadcast(*row_scales[r]));
                    total[r][p] = fma(to_f32(sum[r][p]), both, total[r][p]);
                }
            }
        }
        TileSums<R, P> sums(total);
        add_low_bytes(weight, row, sums);
        sums.finish_tile(call, row, panel);
    }

    // As in linear_q4.h.
    template <int R, int P>
    PENSTOCK_NOINLINE void add_low_bytes(const uint8_t* const (&weight)[P], int64_t row, TileSums<R, P>& sums) const {
        for (int r = 0; r < R; r++) {
            x.each_fine(row + r, [&](int64_t g) {
                const int8_t* codes = x.high(row + r) + x.low_after_high() + g * kGroup;
                for (int p = 0; p < P; p++) {
                    const uint8_t* group = weight[p] + g * kQ8Group;
                    i32x16 sum = broadcast_i32(x.whole_offsets(row + r)[x.groups + g]);
                    for (int c = 0; c < 8; c++) {
                        sum = dot(sum, load_codes(group + c * 64), load_quad(codes + c * 4));
                    }
                    const f32x16 scale = mul(load_f16(group + 512), broadcast(x.scales(row + r)[g] * (1.0f / 256)));
                    store(sums.at(r, p), fma(to_f32(sum), scale, load(sums.at(r, p))));
                }
            });
        }
    }
};

inline void prepare_q8(const LinearCall& call, Pool& pool) {
    const QuantizedRows x = quantized_rows(call, Kind::q8);
    each_row(call.rows, call.inputs, pool, [&](int64_t row) {
        int32_t* offsets = x.whole_offsets(row);
        quantize_row(call, x, row, [=](int64_t group, float, ByteSums sums) {
            offsets[group] = -128 * sums.high;
            offsets[x.groups + group] = -128 * sums.low;
        });
    });
}

inline void linear_q8(const LinearCall& call, Pool& pool) {
    if (!call.prepared) prepare_q8(call, pool);
    split_tiles(LinearQ8{{}, call, quantized_rows(call, Kind::q8)}, call, pool);
}

}  // namespace PENSTOCK_ISA_NAMESPACE
}  // namespace penstock
