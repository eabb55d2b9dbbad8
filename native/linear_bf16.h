// Linear with bfloat16 weights and activations, fp32 sums.
//
// The packed weight, panel after panel of 16 outputs (K is padded with a zero to an even number):
//
//     panel 0:  | pair 0: o0 k0 k1, o1 k0 k1, ..., o15 k0 k1 | pair 1: o0 k2 k3, ... | ... | pair K/2 - 1 |
//     panel 1:  ...                                                                       2 bytes an element
//
// Order of a sum: pairs of inputs ascending. Within a pair `vdpbf16ps` sets the order (odd first, subnormals as zero);
// other instruction sets add the even input first. With AMX, see linear_bf16_amx.h.
#pragma once

#include "dot_lanes.h"
#include "linear_bf16_amx.h"
#include "linear_tiles.h"

namespace penstock {
inline namespace PENSTOCK_ISA_NAMESPACE {

#if !defined(PENSTOCK_ISA_AVX512_AMX)
struct LinearBf16 {
#if defined(PENSTOCK_ISA_AVX512_BF16)
    static constexpr int kRows = 6, kPanels = 4, kFewRows = 8;  // 24 sums, 4 weights, 1 activation: 29 of 32 registers
#elif defined(PENSTOCK_AVX512)
    static constexpr int kRows = 6, kPanels = 2, kFewRows = 3;
#elif defined(PENSTOCK_ISA_AVX2)
    static constexpr int kRows = 4, kPanels = 1, kFewRows = 4;
#else
    static constexpr int kRows = 2, kPanels = 1, kFewRows = 2;
#endif
    static constexpr bool kEvenTiles = true;  // 32 rows as 6, 6, 5, 5, 5, 5 take 4 % less time than as 6 * 5 + 2
    static constexpr bool kPanelsInTurn = kPanels == 1;
    const LinearCall& call;
    const bf16* x;
    int64_t x_stride;

    Block block() const { return {call.rows, panels_of(call.outputs)}; }

    template <int R, int P>
    void tile(int64_t row, int64_t panel, const Turn& turn) const {
        add_up_tile<R, P>(*this, Kind::bf16, row, panel, turn);
    }

    // The sums of R rows and P panels, over all inputs.
    template <int R, int P, class Ahead>
    PENSTOCK_INLINE void add_up(int64_t row, const uint8_t* const (&weight)[P], Ahead& ahead, f32x16 (&sum)[R][P]) const {
        const bf16* rows = x + row * x_stride;
        PENSTOCK_UNROLL for (int r = 0; r < R; r++) {
            PENSTOCK_UNROLL for (int p = 0; p < P; p++) sum[r][p] = zero();
        }
        const int64_t pairs = divide_up(call.inputs, 2);
        for (int64_t k = 0; k < pairs; k++) {
            const int64_t early = ahead.next_early();
            if (k % 2 == 0) PENSTOCK_PREFETCH_FAR(take_prefetch(call, 1, rows));
            Pairs w[P];
            PENSTOCK_UNROLL for (int p = 0; p < P; p++) {
                const uint8_t* at = weight[p] + k * 64;
                w[p] = load_weight_pairs(at);
                ahead.ask(at, early);
            }
            PENSTOCK_UNROLL for (int r = 0; r < R; r++) {
                const Pair pair = load_pair(rows + r * x_stride + 2 * k);
                PENSTOCK_UNROLL for (int p = 0; p < P; p++) sum[r][p] = dot(sum[r][p], w[p], pair);
            }
        }
    }
};
#endif

// Converts rows to bfloat16, padded to an even number of elements.
inline void round_row(const ConstRows& x, int64_t row, int64_t inputs, bf16* to) {
    for (int64_t k = 0; k < inputs; k += kLanes) {
        const int count = int(smaller(kLanes, inputs - k));
        store_at(to + k, 0, count, load_elements(x, row, k, count));
    }
    if (inputs % 2) to[inputs] = bf16{0};
}

inline void prepare_bf16(const LinearCall& call, Pool& pool) {
    bf16* rounded = reinterpret_cast<bf16*>(call.scratch);
    const int64_t stride = scratch_stride(Kind::bf16, call.inputs) / 2;
    each_row(call.rows, call.inputs, pool,
             [&](int64_t row) { round_row(call.x, row, call.inputs, rounded + row * stride); });
}

inline void linear_bf16(const LinearCall& call, Pool& pool) {
    if (!call.prepared && multiplied_as_it_lies(Kind::bf16, call.inputs, call.x.element)) {
        return split_tiles(LinearBf16{call, static_cast<const bf16*>(call.x.data), call.x.stride}, call, pool);
    }
    if (!call.prepared) prepare_bf16(call, pool);
    const int64_t stride = scratch_stride(Kind::bf16, call.inputs) / 2;
    split_tiles(LinearBf16{call, reinterpret_cast<const bf16*>(call.scratch), stride}, call, pool);
}

}  // namespace PENSTOCK_ISA_NAMESPACE
}  // namespace penstock
