// Products of short integers and of bfloat16 pairs, sixteen outputs at a time: the arithmetic of the linear kernels.
//
// A packed weight keeps, for each of sixteen outputs, four bytes (or two bfloat16) of neighbouring inputs:
//
//     | output 0: w[k] w[k+1] w[k+2] w[k+3] | output 1: w[k] .. w[k+3] | ... | output 15 |      64 bytes, one Codes
//     | output 0: w[k]        w[k+1]        | output 1                 | ... | output 15 |      64 bytes, one Pairs
//
// and every lane multiplies them by the same four bytes (two bfloat16) of one row of activations: a Quad (a Pair).
//
// Codes are unsigned and activations signed, as VNNI requires. Signed weights are stored plus 128, and the kernels
// subtract 128 times the sum of the row. All integer sums are exact, so all instruction sets agree. Nibbles are Codes
// of few bits, for which some machines have a faster way: products of bytes are added in pairs and kept in 16 bits (a
// ShortSum) for as many quads as fit.
#pragma once

#include "simd.h"

namespace penstock {
inline namespace PENSTOCK_ISA_NAMESPACE {

PENSTOCK_INLINE int32_t load_i32(const void* p) {
    int32_t bits;
    memcpy(&bits, p, sizeof bits);
    return bits;
}

// IEEE binary16 from its bits; subnormal numbers are multiples of 2^-24.
PENSTOCK_INLINE float f16_to_float(uint16_t half) {
    const uint32_t sign = uint32_t(half & 0x8000u) << 16, exponent = half >> 10 & 31u, fraction = half & 0x3ffu;
    if (exponent == 0) return float_of(sign | bits_of(float(fraction) * 0x1p-24f));
    if (exponent == 31) return float_of(sign | 0x7f800000u | fraction << 13);
    return float_of(sign | (exponent + 112u) << 23 | fraction << 13);
}

#if defined(PENSTOCK_AVX512)
struct i32x16 {
    __m512i v;
};
PENSTOCK_INLINE i32x16 broadcast_i32(int32_t x) { return {_mm512_set1_epi32(x)}; }
PENSTOCK_INLINE i32x16 add(i32x16 a, i32x16 b) { return {_mm512_add_epi32(a.v, b.v)}; }
PENSTOCK_INLINE f32x16 to_f32(i32x16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
PENSTOCK_INLINE f32x16 load_f16(const uint8_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
#endif

#if defined(PENSTOCK_ISA_AVX512_BF16)
struct Codes {
    __m512i v;
};
struct Quad {
    __m512i v;
};
PENSTOCK_INLINE Codes load_codes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
using Nibbles = Codes;
using ShortSum = i32x16;
PENSTOCK_INLINE i32x16 concluded(ShortSum sum) { return sum; }
PENSTOCK_INLINE void load_nibbles(const uint8_t* p, Nibbles& low, Nibbles& high) {
    const __m512i both = _mm512_loadu_si512(p);
    low.v = _mm512_and_si512(both, _mm512_set1_epi8(15));
    high.v = _mm512_and_si512(_mm512_srli_epi16(both, 4), _mm512_set1_epi8(15));
}
PENSTOCK_INLINE Quad load_quad(const int8_t* p) { return {_mm512_set1_epi32(load_i32(p))}; }
PENSTOCK_INLINE Quad load_nibble_quad(const int8_t* p) { return load_quad(p); }
PENSTOCK_INLINE i32x16 dot(i32x16 sum, Codes w, Quad x) {
#if defined(__GNUC__) && !defined(__clang__)
    // With the intrinsic GCC 12 copies the sum before and after: two moves per product, half the speed.
    asm("vpdpbusd %2, %1, %0" : "+v"(sum.v) : "v"(w.v), "v"(x.v));
    return sum;
#else
    return {_mm512_dpbusd_epi32(sum.v, w.v, x.v)};
#endif
}

// A quad that the product reads from memory itself: one instruction less if it is multiplied once.
struct QuadAt {
    const int8_t* p;
};
PENSTOCK_INLINE i32x16 dot(i32x16 sum, Codes w, QuadAt x) {
#if defined(__GNUC__) && !defined(__clang__)
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum.v) : "v"(w.v), "m"(*reinterpret_cast<const int8_t (*)[4]>(x.p)));
    return sum;
#else
    return dot(sum, w, load_quad(x.p));
#endif
}

struct Pairs {
    __m512bh v;
};
struct Pair {
    __m512bh v;
};
PENSTOCK_INLINE Pairs load_weight_pairs(const uint8_t* p) { return {(__m512bh)_mm512_loadu_si512(p)}; }
PENSTOCK_INLINE Pair load_pair(const bf16* p) { return {(__m512bh)_mm512_set1_epi32(load_i32(p))}; }
PENSTOCK_INLINE f32x16 dot(f32x16 sum, Pairs w, Pair x) { return {_mm512_dpbf16_ps(sum.v, x.v, w.v)}; }

#elif defined(PENSTOCK_AVX512)
// Even and odd bytes separately, widened to 16 bits: products, and sums of two products, are exact.
struct Codes {
    __m512i even, odd;
};
struct Quad {
    __m512i even, odd;
};
PENSTOCK_INLINE Codes split(__m512i bytes) {
    return {_mm512_and_si512(bytes, _mm512_set1_epi16(255)), _mm512_srli_epi16(bytes, 8)};
}
PENSTOCK_INLINE Codes load_codes(const uint8_t* p) { return split(_mm512_loadu_si512(p)); }
PENSTOCK_INLINE Quad load_quad(const int8_t* p) {
    const __m512i bytes = _mm512_set1_epi32(load_i32(p));
    return {_mm512_srai_epi16(_mm512_slli_epi16(bytes, 8), 8), _mm512_srai_epi16(bytes, 8)};
}
PENSTOCK_INLINE i32x16 dot(i32x16 sum, Codes w, Quad x) {
    const __m512i even = _mm512_madd_epi16(w.even, x.even), odd = _mm512_madd_epi16(w.odd, x.odd);
    return {_mm512_add_epi32(sum.v, _mm512_add_epi32(even, odd))};
}

// Nibbles are small enough for products of bytes: a pair is at most 2 * 15 * 127, so a group's eight pairs fit 16 bits.
struct Nibbles {
    __m512i v;
};
struct NibbleQuad {
    __m512i v;
};
struct ShortSum {
    __m512i v;
};
PENSTOCK_INLINE ShortSum begin_short(int32_t offset) { return {_mm512_set1_epi32(offset)}; }
PENSTOCK_INLINE i32x16 concluded(ShortSum sum) { return {_mm512_madd_epi16(sum.v, _mm512_set1_epi16(1))}; }
PENSTOCK_INLINE void load_nibbles(const uint8_t* p, Nibbles& low, Nibbles& high) {
    const __m512i both = _mm512_loadu_si512(p);
    low.v = _mm512_and_si512(both, _mm512_set1_epi8(15));
    high.v = _mm512_and_si512(_mm512_srli_epi16(both, 4), _mm512_set1_epi8(15));
}
PENSTOCK_INLINE NibbleQuad load_nibble_quad(const int8_t* p) { return {_mm512_set1_epi32(load_i32(p))}; }
PENSTOCK_INLINE ShortSum dot(ShortSum sum, Nibbles w, NibbleQuad x) {
    return {_mm512_add_epi16(sum.v, _mm512_maddubs_epi16(w.v, x.v))};
}

#elif defined(PENSTOCK_ISA_AVX2)
struct i32x16 {
    __m256i low, high;
};
PENSTOCK_INLINE i32x16 broadcast_i32(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
PENSTOCK_INLINE i32x16 add(i32x16 a, i32x16 b) {
    return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)};
}
PENSTOCK_INLINE f32x16 to_f32(i32x16 a) { return {_mm256_cvtepi32_ps(a.low), _mm256_cvtepi32_ps(a.high)}; }
PENSTOCK_INLINE f32x16 load_f16(const uint8_t* p) {
    const __m128i* halves = reinterpret_cast<const __m128i*>(p);
    return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
}

// Even and odd bytes separately, widened to 16 bits: products, and sums of two products, are exact. (The
// instruction that multiplies bytes directly saturates sums of two products.)
struct Codes {
    __m256i even_low, odd_low, even_high, odd_high;
};
struct Quad {
    __m256i even, odd;
};
PENSTOCK_INLINE Codes split(__m256i low, __m256i high) {
    const __m256i byte = _mm256_set1_epi16(255);
    return {_mm256_and_si256(low, byte), _mm256_srli_epi16(low, 8), _mm256_and_si256(high, byte),
            _mm256_srli_epi16(high, 8)};
}
PENSTOCK_INLINE Codes load_codes(const uint8_t* p) {
    const __m256i* halves = reinterpret_cast<const __m256i*>(p);
    return split(_mm256_loadu_si256(halves), _mm256_loadu_si256(halves + 1));
}
PENSTOCK_INLINE Quad load_quad(const int8_t* p) {
    const __m256i bytes = _mm256_set1_epi32(load_i32(p));
    return {_mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8), _mm256_srai_epi16(bytes, 8)};
}
PENSTOCK_INLINE __m256i dot(__m256i sum, __m256i even, __m256i odd, Quad x) {
    const __m256i products = _mm256_add_epi32(_mm256_madd_epi16(even, x.even), _mm256_madd_epi16(odd, x.odd));
    return _mm256_add_epi32(sum, products);
}
PENSTOCK_INLINE i32x16 dot(i32x16 sum, Codes w, Quad x) {
    return {dot(sum.low, w.even_low, w.odd_low, x), dot(sum.high, w.even_high, w.odd_high, x)};
}

// Nibbles are small enough for products of bytes: a pair is at most 2 * 15 * 127, so a group's eight pairs fit 16 bits.
struct Nibbles {
    __m256i low, high;
};
struct NibbleQuad {
    __m256i v;
};
struct ShortSum {
    __m256i low, high;
};
PENSTOCK_INLINE ShortSum begin_short(int32_t offset) { return {_mm256_set1_epi32(offset), _mm256_set1_epi32(offset)}; }
PENSTOCK_INLINE i32x16 concluded(ShortSum sum) {
    const __m256i one = _mm256_set1_epi16(1);
    return {_mm256_madd_epi16(sum.low, one), _mm256_madd_epi16(sum.high, one)};
}
PENSTOCK_INLINE void load_nibbles(const uint8_t* p, Nibbles& low, Nibbles& high) {
    const __m256i* halves = reinterpret_cast<const __m256i*>(p);
    const __m256i first = _mm256_loadu_si256(halves), second = _mm256_loadu_si256(halves + 1);
    const __m256i nibble = _mm256_set1_epi8(15);
    low = {_mm256_and_si256(first, nibble), _mm256_and_si256(second, nibble)};
    high = {_mm256_and_si256(_mm256_srli_epi16(first, 4), nibble),
            _mm256_and_si256(_mm256_srli_epi16(second, 4), nibble)};
}
PENSTOCK_INLINE NibbleQuad load_nibble_quad(const int8_t* p) { return {_mm256_set1_epi32(load_i32(p))}; }
PENSTOCK_INLINE ShortSum dot(ShortSum sum, Nibbles w, NibbleQuad x) {
    return {_mm256_add_epi16(sum.low, _mm256_maddubs_epi16(w.low, x.v)),
            _mm256_add_epi16(sum.high, _mm256_maddubs_epi16(w.high, x.v))};
}

#else
struct i32x16 {
    int32_t lane[kLanes];
};
PENSTOCK_INLINE i32x16 broadcast_i32(int32_t x) {
    i32x16 result;
    for (int i = 0; i < kLanes; i++) result.lane[i] = x;
    return result;
}
PENSTOCK_INLINE i32x16 add(i32x16 a, i32x16 b) {
    for (int i = 0; i < kLanes; i++) a.lane[i] += b.lane[i];
    return a;
}
PENSTOCK_INLINE f32x16 to_f32(i32x16 a) {
    return each([&](int i) { return float(a.lane[i]); });
}
PENSTOCK_INLINE f32x16 load_f16(const uint8_t* p) {
    return each([=](int i) { return f16_to_float(uint16_t(p[2 * i] | p[2 * i + 1] << 8)); });
}

struct Codes {
    uint8_t byte[64];
};
struct Quad {
    int8_t byte[4];
};
PENSTOCK_INLINE Codes load_codes(const uint8_t* p) {
    Codes codes;
    memcpy(codes.byte, p, sizeof codes.byte);
    return codes;
}
using Nibbles = Codes;
using ShortSum = i32x16;
PENSTOCK_INLINE i32x16 concluded(ShortSum sum) { return sum; }
PENSTOCK_INLINE void load_nibbles(const uint8_t* p, Nibbles& low, Nibbles& high) {
    for (int i = 0; i < 64; i++) {
        low.byte[i] = p[i] & 15;
        high.byte[i] = p[i] >> 4;
    }
}
PENSTOCK_INLINE Quad load_quad(const int8_t* p) { return {{p[0], p[1], p[2], p[3]}}; }
PENSTOCK_INLINE Quad load_nibble_quad(const int8_t* p) { return load_quad(p); }
PENSTOCK_INLINE i32x16 dot(i32x16 sum, const Codes& w, Quad x) {
    for (int i = 0; i < kLanes; i++) {
        const uint8_t* code = w.byte + 4 * i;
        sum.lane[i] += code[0] * x.byte[0] + code[1] * x.byte[1] + code[2] * x.byte[2] + code[3] * x.byte[3];
    }
    return sum;
}
#endif

// Ends the products of a row: the compiler must not start the next row's before this. Otherwise GCC loads the quads of
// all rows first, runs out of registers, and spills every product to the stack: half the speed with 16 registers.
#if defined(PENSTOCK_ISA_AVX2) && (defined(__GNUC__) || defined(__clang__))
template <class Sum>
PENSTOCK_INLINE void end_row(Sum& sum) {
    asm volatile("" : "+x"(sum.low), "+x"(sum.high));
}
#else
template <class Sum>
PENSTOCK_INLINE void end_row(Sum&) {}
#endif

// Where a ShortSum starts so that it ends `bias` times the sum of its activations lower. In 16 bits each lane has the
// share of its own bytes; sums may overflow 16 bits on the way, because the final sum fits.
#if defined(PENSTOCK_ISA_AVX2) || (defined(PENSTOCK_AVX512) && !defined(PENSTOCK_ISA_AVX512_BF16))
PENSTOCK_INLINE int32_t short_offset(int bias, const int8_t* x, int count, int32_t) {
    int32_t lower = 0, upper = 0;
    for (int i = 0; i < count; i += 4) {
        lower += x[i] + x[i + 1];
        upper += x[i + 2] + x[i + 3];
    }
    return int32_t(uint32_t(-bias * lower & 0xffff) | uint32_t(-bias * upper) << 16);
}
#else
PENSTOCK_INLINE ShortSum begin_short(int32_t offset) { return broadcast_i32(offset); }
PENSTOCK_INLINE int32_t short_offset(int bias, const int8_t*, int, int32_t sum) { return -bias * sum; }
#endif

// Quads of one of R rows, to be multiplied by the codes of P panels. With few rows memory bandwidth is the limit, and
// products that read their quads themselves were slower.
#if defined(PENSTOCK_ISA_AVX512_BF16)
template <int R, int P>
PENSTOCK_INLINE auto load_quad_for(const int8_t* p) {
    if constexpr (P == 1 && R > 4) return QuadAt{p};
    else return load_quad(p);
}
template <int R, int P>
PENSTOCK_INLINE auto load_nibble_quad_for(const int8_t* p) {
    return load_quad_for<R, P>(p);
}
#else
template <int R, int P>
PENSTOCK_INLINE auto load_quad_for(const int8_t* p) {
    return load_quad(p);
}
template <int R, int P>
PENSTOCK_INLINE auto load_nibble_quad_for(const int8_t* p) {
    return load_nibble_quad(p);
}
#endif

#if !defined(PENSTOCK_ISA_AVX512_BF16)
// Without bfloat16 products: widened to fp32, the even input first.
struct Pairs {
    f32x16 even, odd;
};
struct Pair {
    f32x16 even, odd;
};
PENSTOCK_INLINE Pairs load_weight_pairs(const uint8_t* p) {
    Pairs pairs;
    load_pairs(reinterpret_cast<const bf16*>(p), pairs.even, pairs.odd);
    return pairs;
}
#if defined(PENSTOCK_AVX512)
PENSTOCK_INLINE Pair load_pair(const bf16* p) {
    const __m512i both = _mm512_set1_epi32(load_i32(p));
    return {{_mm512_castsi512_ps(_mm512_slli_epi32(both, 16))},
            {_mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(int(0xffff0000))))}};
}
#elif defined(PENSTOCK_ISA_AVX2)
PENSTOCK_INLINE Pair load_pair(const bf16* p) {
    const __m256i both = _mm256_set1_epi32(load_i32(p));
    const __m256 even = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
    const __m256 odd = _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32(int(0xffff0000))));
    return {{even, even}, {odd, odd}};
}
#else
PENSTOCK_INLINE Pair load_pair(const bf16* p) { return {broadcast(to_float(p[0])), broadcast(to_float(p[1]))}; }
#endif
PENSTOCK_INLINE f32x16 dot(f32x16 sum, const Pairs& w, const Pair& x) {
    return fma(w.odd, x.odd, fma(w.even, x.even, sum));
}
#endif

}  // namespace PENSTOCK_ISA_NAMESPACE
}  // namespace penstock
