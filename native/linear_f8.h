// Linear with weights in FP8 (E4M3) as a file has them, a float32 scale for each 128 inputs of an output, and bfloat16
// activations; sums in fp32.
//
// The packed weight, panel after panel of 16 outputs; a panel is a sequence of units of 128 inputs, the last one cut
// off after whole lines (K is padded with zeros to a multiple of 4), each
//
//     | scales of o0..o15, fp32 | line 0: k = 0 to 3 | line 1: k = 4 to 7 | ... | line 31 |            64 bytes each
//
// and a line has, for each four outputs in turn, the codes of two inputs and then those of the next two:
//
//     | o0 k0 k1, o1 k0 k1, o2 k0 k1, o3 k0 k1 | o0 k2 k3, o1 k2 k3, o2 k2 k3, o3 k2 k3 | o4 k0 k1, ... |
//
// A code has a sign, 4 bits of exponent above -7, and 3 of fraction (Micikevicius et al. 2022, section 3): every code
// but NaN is a bfloat16 number, subnormal ones too, and products of two are exact in fp32. NaNs must not be packed. Order
// of a sum: in a unit, pairs of inputs ascending, each as in linear_bf16.h, in kChains sums that take turns and are
// added up at its end; then times the scale, units ascending.
#pragma once

#include "dot_lanes.h"
#include "linear_bf16.h"
#include "linear_tiles.h"

namespace penstock {
inline namespace PENSTOCK_ISA_NAMESPACE {

// The numbers of codes.
struct E4m3Numbers {
    float number[256];
    constexpr E4m3Numbers() : number() {
        for (int code = 0; code < 256; code++) {
            const int exponent = code >> 3 & 15, fraction = code & 7;
            float value = exponent ? float(8 + fraction) : float(2 * fraction);  // times 2^(exponent - 10)
            for (int e = exponent; e < 10; e++) value *= 0.5f;
            for (int e = exponent; e > 10; e--) value *= 2.0f;
            number[code] = code < 128 ? value : -value;
        }
    }
};
constexpr E4m3Numbers kE4m3;

// The numbers of a line: inputs 0 and 1, then inputs 2 and 3.
struct F8Line {
    Pairs first, second;
};

#if defined(PENSTOCK_AVX512) || defined(PENSTOCK_ISA_AVX2)
// The bytes of bfloat16 numbers, from tables of 16. The upper byte of a normal number is the code's upper half with the
// exponent's bias changed, and the lower byte is its lower half shifted up; for a subnormal code the difference from
// that is added. A code above 15 finds 0 in that table, because the highest bit of its index is set.
constexpr int8_t kUpper[16] = {0x3c,  0x3d,  0x3e,  0x3f,  0x40,  0x41,  0x42,  0x43,
                               -0x44, -0x43, -0x42, -0x41, -0x40, -0x3f, -0x3e, -0x3d};
constexpr int8_t kUpperBelow[16] = {-0x3c, -1, -1, -1};
constexpr int8_t kLowerBelow[16] = {0, -0x10, 0x60, -0x70, -0x40, -0x30, -0x20, -0x10};
#endif

#if defined(PENSTOCK_AVX512)
PENSTOCK_INLINE __m512i table_of(const int8_t (&bytes)[16]) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
}
PENSTOCK_INLINE Pairs pairs_of(__m512i numbers) {
#if defined(PENSTOCK_ISA_AVX512_BF16)
    return {(__m512bh)numbers};
#else
    return {{_mm512_castsi512_ps(_mm512_slli_epi32(numbers, 16))},
            {_mm512_castsi512_ps(_mm512_and_si512(numbers, _mm512_set1_epi32(int(0xffff0000u))))}};
#endif
}
PENSTOCK_INLINE F8Line load_f8_line(const uint8_t* p) {
    const __m512i codes = _mm512_loadu_si512(p);
    const __m512i below = _mm512_add_epi8(_mm512_and_si512(codes, _mm512_set1_epi8(0x7f)), _mm512_set1_epi8(0x70));
    const __m512i high = _mm512_and_si512(_mm512_srli_epi16(codes, 4), _mm512_set1_epi8(15));
    const __m512i low = _mm512_and_si512(_mm512_slli_epi16(codes, 4), _mm512_set1_epi8(-16));
    const __m512i upper = _mm512_add_epi8(_mm512_shuffle_epi8(table_of(kUpper), high),
                                          _mm512_shuffle_epi8(table_of(kUpperBelow), below));
    const __m512i lower = _mm512_add_epi8(low, _mm512_shuffle_epi8(table_of(kLowerBelow), below));
    return {pairs_of(_mm512_unpacklo_epi8(lower, upper)), pairs_of(_mm512_unpackhi_epi8(lower, upper))};
}

#elif defined(PENSTOCK_ISA_AVX2)
PENSTOCK_INLINE __m256i table_of(const int8_t (&bytes)[16]) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
}
PENSTOCK_INLINE Pairs pairs_of(__m256i low, __m256i high) {
    const __m256i upper = _mm256_set1_epi32(int(0xffff0000u));
    return {{_mm256_castsi256_ps(_mm256_slli_epi32(low, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(high, 16))},
            {_mm256_castsi256_ps(_mm256_and_si256(low, upper)), _mm256_castsi256_ps(_mm256_and_si256(high, upper))}};
}
struct F8Half {
    __m256i first, second;
};
PENSTOCK_INLINE F8Half load_f8_half(const uint8_t* p) {
    const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    const __m256i below = _mm256_add_epi8(_mm256_and_si256(codes, _mm256_set1_epi8(0x7f)), _mm256_set1_epi8(0x70));
    const __m256i high = _mm256_and_si256(_mm256_srli_epi16(codes, 4), _mm256_set1_epi8(15));
    const __m256i low = _mm256_and_si256(_mm256_slli_epi16(codes, 4), _mm256_set1_epi8(-16));
    const __m256i upper = _mm256_add_epi8(_mm256_shuffle_epi8(table_of(kUpper), high),
                                          _mm256_shuffle_epi8(table_of(kUpperBelow), below));
    const __m256i lower = _mm256_add_epi8(low, _mm256_shuffle_epi8(table_of(kLowerBelow), below));
    return {_mm256_unpacklo_epi8(lower, upper), _mm256_unpackhi_epi8(lower, upper)};
}
PENSTOCK_INLINE F8Line load_f8_line(const uint8_t* p) {
    const F8Half low = load_f8_half(p), high = load_f8_half(p + 32);
    return {pairs_of(low.first, high.first), pairs_of(low.second, high.second)};
}

#else
PENSTOCK_INLINE F8Line load_f8_line(const uint8_t* p) {
    const auto of = [=](int k) { return each([=](int lane) { return kE4m3.number[p[f8_place(lane, k)]]; }); };
    return {{of(0), of(1)}, {of(2), of(3)}};
}
#endif

struct LinearF8 {
    // Reading a line takes 13 instructions, and its products with a row two: so a tile has as many rows as registers
    // allow. If products take more, and activations must be widened too, two panels share the widened activations.
#if defined(PENSTOCK_ISA_AVX512_BF16)
    static constexpr int kRows = 8, kPanels = 1, kFewRows = 8, kChains = 2;  // 16 sums, 2 weights, 7 constants
#elif defined(PENSTOCK_AVX512)
    static constexpr int kRows = 6, kPanels = 2, kFewRows = 4, kChains = 2;
#elif defined(PENSTOCK_ISA_AVX2)
    static constexpr int kRows = 4, kPanels = 1, kFewRows = 4, kChains = 1;
#else
    static constexpr int kRows = 2, kPanels = 1, kFewRows = 2, kChains = 1;
#endif
    static constexpr bool kEvenTiles = true, kPanelsInTurn = kPanels == 1;
    const LinearCall& call;
    const bf16* x;
    int64_t x_stride;

    Block block() const { return {call.rows, panels_of(call.outputs)}; }

    template <int R, int P>
    void tile(int64_t row, int64_t panel, const Turn& turn) const {
        add_up_tile<R, P>(*this, Kind::f8, row, panel, turn);
    }

    // The sums of R rows and P panels, over all inputs.
    template <int R, int P, class Ahead>
    PENSTOCK_INLINE void add_up(int64_t row, const uint8_t* const (&weight)[P], Ahead& ahead, f32x16 (&total)[R][P]) const {
        const int64_t lines = divide_up(call.inputs, 4);
        const bf16* rows = x + row * x_stride;
        PENSTOCK_UNROLL for (int r = 0; r < R; r++) {
            PENSTOCK_UNROLL for (int p = 0; p < P; p++) total[r][p] = zero();
        }
        int64_t place = 0;  // bytes from the start of a panel
        for (int64_t line = 0; line < lines;) {
            const int64_t scales = place, last = smaller(lines, line + kF8Unit / 4), header_early = ahead.next_early();
            PENSTOCK_UNROLL for (int p = 0; p < P; p++) ahead.ask(weight[p] + scales, header_early);
            f32x16 sum[R][P][kChains];
            PENSTOCK_UNROLL for (int r = 0; r < R; r++) {
                PENSTOCK_UNROLL for (int p = 0; p < P; p++) {
                    PENSTOCK_UNROLL for (int c = 0; c < kChains; c++) sum[r][p][c] = zero();
                }
            }
            for (place += 64; line < last; line++, place += 64) {
                const int64_t early = ahead.next_early();
                PENSTOCK_PREFETCH_FAR(take_prefetch(call, 1, rows));
                F8Line w[P];
                PENSTOCK_UNROLL for (int p = 0; p < P; p++) {
                    w[p] = load_f8_line(weight[p] + place);
                    ahead.ask(weight[p] + place, early);
                }
                PENSTOCK_UNROLL for (int r = 0; r < R; r++) {
                    const bf16* four = rows + r * x_stride + 4 * line;
                    const Pair first = load_pair(four), second = load_pair(four + 2);
                    PENSTOCK_UNROLL for (int p = 0; p < P; p++) {
                        sum[r][p][0] = dot(sum[r][p][0], w[p].first, first);
                        sum[r][p][kChains - 1] = dot(sum[r][p][kChains - 1], w[p].second, second);
                    }
                }
            }
            PENSTOCK_UNROLL for (int p = 0; p < P; p++) {
                const f32x16 scale = load(reinterpret_cast<const float*>(weight[p] + scales));
                PENSTOCK_UNROLL for (int r = 0; r < R; r++) {
                    const f32x16 all = kChains == 1 ? sum[r][p][0] : add(sum[r][p][0], sum[r][p][kChains - 1]);
                    total[r][p] = fma(all, scale, total[r][p]);
                }
            }
        }
    }
};

// Rows as bfloat16, padded with zeros to whole lines.
inline void prepare_f8(const LinearCall& call, Pool& pool) {
    bf16* rounded = reinterpret_cast<bf16*>(call.scratch);
    const int64_t stride = scratch_stride(Kind::f8, call.inputs) / 2;
    each_row(call.rows, call.inputs, pool, [&](int64_t row) {
        round_row(call.x, row, call.inputs, rounded + row * stride);
        for (int64_t k = call.inputs; k % 4 != 0; k++) rounded[row * stride + k] = bf16{0};
    });
}

inline void linear_f8(const LinearCall& call, Pool& pool) {
    if (!call.prepared && multiplied_as_it_lies(Kind::f8, call.inputs, call.x.element)) {
        return split_tiles(LinearF8{call, static_cast<const bf16*>(call.x.data), call.x.stride}, call, pool);
    }
    if (!call.prepared) prepare_f8(call, pool);
    const int64_t stride = scratch_stride(Kind::f8, call.inputs) / 2;
    split_tiles(LinearF8{call, reinterpret_cast<const bf16*>(call.scratch), stride}, call, pool);
}

}  // namespace PENSTOCK_ISA_NAMESPACE
}  // namespace penstock
