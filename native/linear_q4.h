// Linear with 4-bit weights in groups of 32 inputs, each with a scale and a minimum, and activations quantised alike, to
// 8 bits or, where they are outliers, to 16.
//
// The packed weight, panel after panel of 16 outputs; a panel is its groups one after the other, each
//
//     | 4 x 64 bytes: part c holds, for o0 to o15, four bytes: byte t = code of k = 8c + t      in its low half
//     |                                                              and of k = 8c + 4 + t in its high half
//     | scales of o0..o15, fp16 | minima of o0..o15, fp16 |                                320 bytes = 5 cache lines
//
// A weight is code * scale + minimum, as in GGUF's Q4_1; Q4_0 is the case minimum = -8 * scale. (ggml-common.h,
// `block_q4_0` and `block_q4_1`.)
//
// Order of a sum: groups ascending; in each, first scale times the exact integer sum of high bytes, then the minimum's
// share. Then scale / 256 times the exact sums of low bytes, groups ascending.
#pragma once

#include "dot_lanes.h"
#include "quantized_rows.h"

namespace penstock {
inline namespace PENSTOCK_ISA_NAMESPACE {

struct LinearQ4 : CodeTiles<8> {
    const LinearCall& call;
    QuantizedRows x;

    template <int R, int P>
    void tile(int64_t row, int64_t panel, const Turn& turn) const {
        const int64_t bytes = panel_bytes(Kind::q4, call.inputs);
        WeightsAhead<R, P> ahead(call, bytes, turn);
        const uint8_t* weight[P];
        PENSTOCK_UNROLL for (int p = 0; p < P; p++) weight[p] = panel_at<P>(call, panel, p, bytes);
        const int8_t* codes = x.high(row);
        const float *scales = x.scales(row), *offsets = x.offsets(row);
        const int64_t stride = x.stride, floats = x.stride / 4;
        f32x16 total[R][P];
        PENSTOCK_UNROLL for (int r = 0; r < R; r++) {
            PENSTOCK_UNROLL for (int p = 0; p < P; p++) total[r][p] = zero();
        }
        for (int64_t g = 0; g < x.groups; g++) {
            const int64_t group = g * kQ4Group;
            NibbleSum sum[R][P];
            PENSTOCK_UNROLL for (int r = 0; r < R; r++) {
                PENSTOCK_UNROLL for (int p = 0; p < P; p++) sum[r][p] = no_nibbles();
            }
            const int64_t early = ahead.next_early();
            const uint8_t* next_lines = take_prefetch(call, 4, codes);
            PENSTOCK_UNROLL for (int c = 0; c < 4; c++) {
                PENSTOCK_PREFETCH_FAR(next_lines + c * 64);
                Nibbles low[P], high[P];
                PENSTOCK_UNROLL for (int p = 0; p < P; p++) {
                    const uint8_t* at = weight[p] + group + c * 64;
                    load_nibbles(at, low[p], high[p]);
                    ahead.ask(at, early);
                }
                PENSTOCK_UNROLL for (int r = 0; r < R; r++) {
                    const int8_t* eight = codes + r * stride + g * kGroup + c * 8;
                    const auto first = load_nibble_quad_for<R, P>(eight), second = load_nibble_quad_for<R, P>(eight + 4);
                    PENSTOCK_UNROLL for (int p = 0; p < P; p++) {
                        sum[r][p] = dot(dot(sum[r][p], low[p], first), high[p], second);
                    }
                }
            }
            PENSTOCK_UNROLL for (int p = 0; p < P; p++) {
                const uint8_t* at = weight[p] + group + 256;
                ahead.ask(at, early);
                const f32x16 scale = load_f16(at), minimum = load_f16(at + 32);
                PENSTOCK_UNROLL for (int r = 0; r < R; r++) {
                    const f32x16 both = mul(scale, broadcast(scales[r * floats + g]));
                    total[r][p] = fma(to_f32(concluded(sum[r][p])), both, total[r][p]);
                    total[r][p] = fma(minimum, broadcast(offsets[r * floats + g]), total[r][p]);
                }
            }
        }
        TileSums<R, P> sums(total);
        add_low_bytes(weight, row, sums);
        sums.finish_tile(call, row, panel);
    }

    // Few groups have low bytes. Not part of the tile's own loop, which needs every register.
    template <int R, int P>
    PENSTOCK_NOINLINE void add_low_bytes(const uint8_t* const (&weight)[P], int64_t row, TileSums<R, P>& sums) const {
        for (int r = 0; r < R; r++) {
            x.each_fine(row + r, [&](int64_t g) {
                const int8_t* codes = x.high(row + r) + x.low_after_high() + g * kGroup;
                for (int p = 0; p < P; p++) {
                    const uint8_t* group = weight[p] + g * kQ4Group;
                    NibbleSum sum = no_nibbles();
                    for (int c = 0; c < 4; c++) {
                        Nibbles low, high;
                        load_nibbles(group + c * 64, low, high);
                        sum = dot(sum, low, load_nibble_quad(codes + c * 8));
                        sum = dot(sum, high, load_nibble_quad(codes + c * 8 + 4));
                    }
                    const f32x16 scale = mul(load_f16(group + 256), broadcast(x.scales(row + r)[g] * (1.0f / 256)));
                    store(sums.at(r, p), fma(to_f32(concluded(sum)), scale, load(sums.at(r, p))));
                }
            });
        }
    }
};

inline void prepare_q4(const LinearCall& call, Pool& pool) {
    const QuantizedRows x = quantized_rows(call, Kind::q4);
    each_row(call.rows, call.inputs, pool, [&](int64_t row) {
        float* offsets = x.offsets(row);
        quantize_row(call, x, row, [=](int64_t group, float scale, ByteSums sums) {
            offsets[group] = scale * (float(sums.high) + float(sums.low) * (1.0f / 256));
        });
    });
}

inline void linear_q4(const LinearCall& call, Pool& pool) {
    if (!call.prepared) prepare_q4(call, pool);
    split_tiles(LinearQ4{{}, call, quantized_rows(call, Kind::q4)}, call, pool);
}

}  // namespace PENSTOCK_ISA_NAMESPACE
}  // namespace penstock
