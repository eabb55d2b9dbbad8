// Linear with 4-bit weights in groups of 32 inputs, each with a scale and a minimum, and activations quantised alike, to
// 8 bits or finely to 16: then high bytes meet the weights first, and the sum goes on, times 256, with the low ones.
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
// Order of a sum: groups ascending; in each, first scale times the exact integer sum, then the minimum's share.
#pragma once

#include "dot_lanes.h"
#include "quantized_rows.h"

namespace penstock {
inline namespace PENSTOCK_ISA_NAMESPACE {

template <bool kFine>
struct LinearQ4 {
#if defined(PENSTOCK_ISA_AVX512_BF16)
    static constexpr int kRows = 6, kPanels = 2, kFewRows = 8;
#elif defined(PENSTOCK_AVX512)
    static constexpr int kRows = 8, kPanels = 1, kFewRows = 8;
#elif defined(PENSTOCK_ISA_AVX2)
    static constexpr int kRows = 2, kPanels = 1, kFewRows = 2;
#else
    static constexpr int kRows = 1, kPanels = 1, kFewRows = 1;
#endif
    const LinearCall& call;
    QuantizedRows x;

    template <int R, int P>
    void tile(int64_t row, int64_t panel) const {
        const int64_t bytes = panel_bytes(Kind::q4, call.inputs);
        const int64_t ahead = distance_ahead<P>(call, bytes);
        const uint8_t* weight[P];
        PENSTOCK_UNROLL for (int p = 0; p < P; p++) weight[p] = panel_at<P>(call, panel, p, bytes);
        const int8_t* codes = x.codes(row);
        const float *scales = x.scales(row), *offsets = x.offsets(row);
        const int64_t stride = x.stride, floats = x.stride / 4, bytes_apart = x.codes_bytes();
        f32x16 total[R][P];
        PENSTOCK_UNROLL for (int r = 0; r < R; r++) {
            PENSTOCK_UNROLL for (int p = 0; p < P; p++) total[r][p] = zero();
        }
        for (int64_t g = 0; g < x.groups; g++) {
            const int64_t group = g * kQ4Group;
            i32x16 whole[R][P];  // exact sums of the group
            PENSTOCK_UNROLL for (int part = 0; part < (kFine ? 2 : 1); part++) {  // high bytes, then low ones
                NibbleSum sum[R][P];
                PENSTOCK_UNROLL for (int r = 0; r < R; r++) {
                    PENSTOCK_UNROLL for (int p = 0; p < P; p++) {
                        sum[r][p] = part == 0 ? no_nibbles() : resumed(whole[r][p]);
                    }
                }
                PENSTOCK_UNROLL for (int c = 0; c < 4; c++) {
                    Nibbles low[P], high[P];
                    PENSTOCK_UNROLL for (int p = 0; p < P; p++) {
                        const uint8_t* at = weight[p] + group + c * 64;
                        load_nibbles(at, low[p], high[p]);
                        if (part == 0) fetch_ahead<P>(at + ahead);
                    }
                    PENSTOCK_UNROLL for (int r = 0; r < R; r++) {
                        const int8_t* eight = codes + part * bytes_apart + r * stride + g * kGroup + c * 8;
                        const auto first = load_nibble_quad(eight), second = load_nibble_quad(eight + 4);
                        PENSTOCK_UNROLL for (int p = 0; p < P; p++) {
                            sum[r][p] = dot(dot(sum[r][p], low[p], first), high[p], second);
                        }
                    }
                }
                PENSTOCK_UNROLL for (int r = 0; r < R; r++) {
                    PENSTOCK_UNROLL for (int p = 0; p < P; p++) {
                        whole[r][p] = part == 0 ? concluded(sum[r][p]) : concluded(sum[r][p], whole[r][p]);
                    }
                }
            }
            PENSTOCK_UNROLL for (int p = 0; p < P; p++) {
                const uint8_t* at = weight[p] + group + 256;
                fetch_ahead<P>(at + ahead);
                const f32x16 scale = load_f16(at), minimum = load_f16(at + 32);
                PENSTOCK_UNROLL for (int r = 0; r < R; r++) {
                    const f32x16 both = mul(scale, broadcast(scales[r * floats + g]));
                    total[r][p] = fma(to_f32(whole[r][p]), both, total[r][p]);
                    total[r][p] = fma(minimum, broadcast(offsets[r * floats + g]), total[r][p]);
                }
            }
        }
        finish_tile<R, P>(call, row, panel, total);
    }
};

inline void linear_q4(const LinearCall& call, Pool& pool) {
    const QuantizedRows x = quantized_rows(call, Kind::q4);
    each_row(call.rows, call.inputs, pool, [&](int64_t row) {
        float* offsets = x.offsets(row);  // what the activations of a group stand for, all together
        const auto note = [=](int64_t group, float scale, int32_t sum) { offsets[group] = scale * float(sum); };
        call.fine ? quantize_row_finely(call, x, row, note) : quantize_row<Kind::q4>(call, x, row, note);
    });
    call.fine ? split_tiles(LinearQ4<true>{call, x}, call, pool) : split_tiles(LinearQ4<false>{call, x}, call, pool);
}

}  // namespace PENSTOCK_ISA_NAMESPACE
}  // namespace penstock
