// Linear with weights in the block forms of layout.h, and activations quantised in groups of 32, to 8 bits or, where
// they are outliers, to 16 (ADR 10). One tile for all forms: a form says how codes (block_codes.h) and the scales of
// its shares (block_scales.h) are read.
//
// A weight is code * scale - minimum, or (code - bias) * scale. Order of a sum: groups ascending; in each, its
// shares of 32 or 16 inputs ascending: first scale times the exact integer sum of high bytes, then the minimum's share.
// After all groups, scale / 256 times the exact sums of low bytes, again by ascending groups and shares.
#pragma once

#include "block_codes.h"
#include "block_scales.h"
#include "quantized_rows.h"

namespace penstock {
inline namespace PENSTOCK_ISA_NAMESPACE {

template <Kind kKind, class C, class S>
struct LinearBlocks : CodeTiles {
    static constexpr BlockForm kForm = block_form(kKind);
    static constexpr int64_t kHeader = kForm.unit_header(), kGroupBytes = kForm.group_bytes();
    static constexpr int kGroups = int(kForm.inputs / kGroup);  // of a unit
    static constexpr int kShares = S::kShares, kPairs = 4 / kShares;  // of quads of inputs, in a share
    static_assert(kForm.low_bits == C::kLowBits && kForm.high_bits == C::kHighBits && kForm.table == C::kTable, "");
    static_assert((C::kBias == 0) == S::kMinima, "a code without a minimum is above its number by the bias");
    // A tile of several panels has no registers for the fp16 fields of its units: it widens them once for all groups.
    template <int P>
    using Halves = std::conditional_t<(kPanels > 1 && P > 1 && kGroups > 1), WidenedHalves<int(kForm.halves)>, StoredHalves>;
    const LinearCall& call;
    QuantizedRows x;

    // As many rows as fit into a cache beside the panels by which they are multiplied. And no more panels than stay in
    // the L2 cache until the next rows come.
    Block block() const {
        constexpr int64_t kPanelsBytes = 128 << 10, kMostPanels = 8, kPair = 2;
        const int64_t row_bytes = x.groups * (kGroup + (1 + kShares) * int64_t(sizeof(float)));
        const int64_t pairs = kPanelsBytes / (kPair * panel_bytes(kKind, call.inputs));
        return {larger(1, kRowsBytes / row_bytes / kRows) * kRows, smaller(kMostPanels, larger(1, pairs) * kPair)};
    }

    template <int R, int P>
    void tile(int64_t row, int64_t panel, const Turn& turn) const {
        constexpr int T = kTogether<P>;
        const int64_t bytes = panel_bytes(kKind, call.inputs);
        WeightsAhead<R, P, kGroups == 1 ? 3 : 1> ahead(call, bytes, turn);
        const uint8_t* start[P];
        typename C::Panel table[P];
        PENSTOCK_UNROLL for (int p = 0; p < P; p++) {
            start[p] = panel_at<P>(call, panel, p, bytes);
            table[p] = C::load_panel(start[p]);
        }
        const int8_t* codes = x.high(row);
        const float *scales = x.scales(row), *offsets = x.offsets(row);
        const int32_t* whole_offsets = x.whole_offsets(row);
        const int64_t stride = x.stride, words = x.stride / 4;
        f32x16 total[R][P];
        PENSTOCK_UNROLL for (int r = 0; r < R; r++) {
            PENSTOCK_UNROLL for (int p = 0; p < P; p++) total[r][p] = zero();
        }
        int64_t unit = kForm.panel_header();  // bytes from the start of a panel
        for (int64_t g = 0; g < x.groups; unit += kForm.unit_bytes()) {
            const int64_t header_early = ahead.next_early();
            for (int64_t line = 0; line < kHeader; line += 64) {
                PENSTOCK_UNROLL for (int p = 0; p < P; p++) ahead.ask(start[p] + unit + line, header_early);
            }
            Halves<P> halves[P];
            if constexpr (P > 1) {
                PENSTOCK_UNROLL for (int p = 0; p < P; p++) halves[p].open(start[p] + unit);
            }
            for (int j = 0; j < kGroups; j++, g++) {
                const int64_t group = unit + kHeader + j * kGroupBytes;
                const int64_t early = ahead.next_early();
                const RowAddresses<R, int8_t> quads(codes + g * kGroup, stride);
                const uint8_t* next_lines = take_prefetch(call, 4, codes);
                PENSTOCK_UNROLL for (int from = 0; from < P; from += T) {
                    PENSTOCK_UNROLL for (int h = 0; h < kShares; h++) {
                        const int64_t share = g * kShares + h;
                        typename C::Sum sum[R][T];
                        PENSTOCK_UNROLL for (int r = 0; r < R; r++) {
                            // Created anew each time: GCC copies a sum of two registers through the stack, in four
                            // parts.
                            PENSTOCK_UNROLL for (int t = 0; t < T; t++) sum[r][t] = C::begin(whole_offsets[r * words + share]);
                        }
                        PENSTOCK_UNROLL for (int i = h * kPairs; i < (h + 1) * kPairs; i++) {
                            if (from == 0) PENSTOCK_PREFETCH_FAR(next_lines + i * 64);
                            typename C::Pair pair[T];
                            PENSTOCK_UNROLL for (int t = 0; t < T; t++) {
                                const uint8_t* at = start[from + t] + group;
                                pair[t] = C::load(table[from + t], at, i);
                                for (int n = 0; n < C::low_lines(i); n++) ahead.ask(at + C::low_line(i) + n * 64, early);
                                if (C::begins_high_line(i)) ahead.ask(at + C::high_line(i), early);
                            }
                            PENSTOCK_UNROLL for (int r = 0; r < R; r++) {
                                const int8_t* eight = quads[r] + i * 8;
                                const auto first = C::template load_quad<R, P>(eight);
                                const auto second = C::template load_quad<R, P>(eight + 4);
                                PENSTOCK_UNROLL for (int t = 0; t < T; t++) {
                                    sum[r][t] = C::add(sum[r][t], pair[t], first, second);
                                    end_row(sum[r][t]);
                                }
                            }
                        }
                        const RowAddresses<R, float> row_scales(scales + g, stride), row_offsets(offsets + share, stride);
                        PENSTOCK_UNROLL for (int t = 0; t < T; t++) {
                            const int p = from + t;
                            if constexpr (P == 1) halves[p].open(start[p] + unit);
                            const f32x16 scale = S::scale(halves[p], start[p], start[p] + unit, j, h);
                            PENSTOCK_UNROLL for (int r = 0; r < R; r++) {
                                const f32x16 both = mul(scale, broadcast(*row_scales[r]));
                                total[r][p] = fma(to_f32(C::concluded(sum[r][t])), both, total[r][p]);
                            }
                            if constexpr (S::kMinima) {
                                const f32x16 minimum = S::minimum(halves[p], start[p] + unit, j, h);
                                PENSTOCK_UNROLL for (int r = 0; r < R; r++) {
                                    const f32x16 offset = broadcast(*row_offsets[r]);
                                    total[r][p] = fma(minimum, offset, total[r][p]);
                                }
                            }
                        }
                    }
                }
            }
        }
        TileSums<R, P> sums(total);
        add_low_bytes(start, row, sums);
        sums.finish_tile(call, row, panel);
    }

    // Few groups have low bytes, so this is not part of the tile's loop, which needs every register.
    template <int R, int P>
    PENSTOCK_NOINLINE void add_low_bytes(const uint8_t* const (&start)[P], int64_t row, TileSums<R, P>& sums) const {
        for (int r = 0; r < R; r++) {
            x.each_fine(row + r, [&](int64_t g) {
                const int8_t* codes = x.high(row + r) + x.low_after_high() + g * kGroup;
                const f32x16 step = broadcast(x.scales(row + r)[g] * (1.0f / 256));
                const int64_t unit = kForm.panel_header() + g / kGroups * kForm.unit_bytes();
                const int j = int(g % kGroups);
                for (int h = 0; h < kShares; h++) {
                    for (int p = 0; p < P; p++) {
                        const auto table = C::load_panel(start[p]);
                        i32x16 whole = broadcast_i32(0);  // low bytes reach -128: a short sum holds only one pair
                        PENSTOCK_UNROLL for (int i = 0; i < 4; i++) {
                            if (i / kPairs != h) continue;
                            const auto pair = C::load(table, start[p] + unit + kHeader + j * kGroupBytes, i);
                            const int8_t* eight = codes + i * 8;
                            const auto first = C::template load_quad<1, 1>(eight);
                            const auto second = C::template load_quad<1, 1>(eight + 4);
                            typename C::Sum sum = C::begin(C::offset(eight, 8, sum_of(eight, 8)));
                            sum = C::add(sum, pair, first, second);
                            whole = penstock::PENSTOCK_ISA_NAMESPACE::add(whole, C::concluded(sum));
                        }
                        const f32x16 scale = mul(S::scale(StoredHalves{start[p] + unit}, start[p], start[p] + unit, j, h), step);
                        store(sums.at(r, p), fma(to_f32(whole), scale, load(sums.at(r, p))));
                    }
                }
            });
        }
    }

    static int32_t sum_of(const int8_t* codes, int count) {
        int32_t sum = 0;
        for (int i = 0; i < count; i++) sum += codes[i];
        return sum;
    }

    // The term for the part of the weight that all inputs of a share have in common: the sum of the inputs, with the
    // sign of the minimum; or the bias times the sum of their high bytes.
    static void note_offsets(const QuantizedRows& x, int64_t row, int64_t g, float scale, ByteSums whole) {
        ByteSums share = whole;
        for (int h = 0; h < kShares; h++) {
            if (kShares == 2) share = h == 0 ? first_half(x, row, g) : ByteSums{whole.high - share.high, whole.low - share.low};
            const int64_t at = g * kShares + h;
            if constexpr (S::kMinima) {
                x.offsets(row)[at] = S::kSign * (scale * (float(share.high) + float(share.low) * (1.0f / 256)));
            } else {
                constexpr int kWidth = kGroup / kShares;
                x.whole_offsets(row)[at] = C::offset(x.high(row) + g * kGroup + h * kWidth, kWidth, share.high);
            }
        }
    }

    static ByteSums first_half(const QuantizedRows& x, int64_t row, int64_t g) {
        const int8_t* high = x.high(row) + g * kGroup;
        const bool fine = x.fine(row)[g / 32] >> g % 32 & 1;
        return {sum_of(high, kGroup / 2), fine ? sum_of(high + x.low_after_high(), kGroup / 2) : 0};
    }

    static void quantize_rows(const LinearCall& call, Pool& pool) {
        const QuantizedRows x = quantized_rows(call, kKind);
        each_row(call.rows, call.inputs, pool, [&](int64_t row) {
            quantize_row(call, x, row, [=](int64_t group, float scale, ByteSums sums) {
                note_offsets(x, row, group, scale, sums);
            });
        });
    }

    static void multiply(const LinearCall& call, Pool& pool) {
        if (!call.prepared) quantize_rows(call, pool);
        split_tiles(LinearBlocks{{}, call, quantized_rows(call, kKind)}, call, pool);
    }

    // Rows as the numbers that the format defines.
    static void look_up_rows(const LookupCall& call, Pool& pool) {
        const int64_t bytes = panel_bytes(kKind, call.inputs);
        each_row(call.count, call.inputs, pool, [&](int64_t i) {
            const uint8_t* panel = call.weight + call.ids[i] / kPanel * bytes;
            const int lane = int(call.ids[i] % kPanel);
            constexpr int kWidth = kGroup / kShares;
            for (int64_t k = 0; k < call.inputs; k += kWidth) {
                const uint8_t* unit = panel + kForm.panel_header() + k / kForm.inputs * kForm.unit_bytes();
                const int j = int(k % kForm.inputs / kGroup), h = int(k % kGroup / kWidth);
                float scales[kLanes], minima[kLanes] = {};
                store(scales, S::scale(StoredHalves{unit}, panel, unit, j, h));
                if constexpr (S::kMinima) store(minima, S::minimum(StoredHalves{unit}, unit, j, h));
                for (int n = 0; n < kWidth && k + n < call.inputs; n++) {
                    const int code = code_of<kKind>(unit + kHeader + j * kGroupBytes, lane, h * kWidth + n);
                    const float number = float(C::value(panel, code)) * scales[lane];
                    put_number(call.out, i * call.out.stride + k + n, S::kMinima ? number + S::kSign * minima[lane] : number);
                }
            }
        });
    }

    static void put_number(const Rows& out, int64_t at, float number) {
        if (out.element == Element::f32) return put(static_cast<float*>(out.data) + at, number);
        put(static_cast<bf16*>(out.data) + at, number);
    }
};

}  // namespace PENSTOCK_ISA_NAMESPACE
}  // namespace penstock
