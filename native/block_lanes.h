// Lane operations of the block forms beyond dot_lanes.h: codes from planes of bits, numbers from tables, and scales
// that are short integers.
//
// Here a Nibbles is any 64 bytes, and a code from planes is below 64: the sum of two products of bytes fits 16 bits.
#pragma once

#include "dot_lanes.h"

namespace penstock {
inline namespace PENSTOCK_ISA_NAMESPACE {

// E8M0: half of 2^(code - 127), as in ggml; codes 0 and 1 are subnormal.
PENSTOCK_INLINE float e8m0_to_float(uint8_t code) {
    return float_of(code < 2 ? 0x00200000u << code : uint32_t(code - 1) << 23);
}

#if defined(PENSTOCK_AVX512)
PENSTOCK_INLINE f32x16 load_u8(const uint8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
PENSTOCK_INLINE f32x16 load_i8(const uint8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
PENSTOCK_INLINE f32x16 load_e8m0(const uint8_t* p) {
    const __m512i code = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const __m512i normal = _mm512_slli_epi32(_mm512_sub_epi32(code, _mm512_set1_epi32(1)), 23);
    const __m512i below = _mm512_sllv_epi32(_mm512_set1_epi32(0x00200000), code);
    return {_mm512_castsi512_ps(_mm512_mask_mov_epi32(normal, _mm512_cmplt_epu32_mask(code, _mm512_set1_epi32(2)), below))};
}

PENSTOCK_INLINE __m512i shifted(__m512i bytes, int right) {
    return right >= 0 ? (__m512i)((__v32hu)bytes >> right) : (__m512i)((__v32hu)bytes << -right);
}
PENSTOCK_INLINE Nibbles load_bytes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
// Bits of each byte, shifted right (or left) and masked; and the same joined to lower bits.
PENSTOCK_INLINE Nibbles field(Nibbles bytes, int right, int mask) {
    return {_mm512_and_si512(shifted(bytes.v, right), _mm512_set1_epi8(char(mask)))};
}
PENSTOCK_INLINE Nibbles join(Nibbles low, Nibbles bytes, int right, int mask) {
    return {_mm512_ternarylogic_epi32(low.v, shifted(bytes.v, right), _mm512_set1_epi8(char(mask)), 0xf8)};  // a | b & c
}

struct Steps {
    __m512i v;
};
PENSTOCK_INLINE Steps load_steps(const uint8_t* p) {
    const __m128i steps = _mm_xor_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), _mm_set1_epi8(-128));
    return {_mm512_broadcast_i32x4(steps)};
}
#endif

#if defined(PENSTOCK_ISA_AVX512_BF16)
// The numbers of codes, plus 128.
PENSTOCK_INLINE Codes look_up(Steps steps, Nibbles codes) { return {_mm512_shuffle_epi8(steps.v, codes.v)}; }
template <class Q>
PENSTOCK_INLINE i32x16 dot_pair(i32x16 sum, Nibbles a, Q xa, Nibbles b, Q xb) {
    return dot(dot(sum, a, xa), b, xb);
}

#elif defined(PENSTOCK_AVX512)
PENSTOCK_INLINE Codes look_up(Steps steps, Nibbles codes) { return split(_mm512_shuffle_epi8(steps.v, codes.v)); }
PENSTOCK_INLINE i32x16 dot_pair(i32x16 sum, Nibbles a, NibbleQuad xa, Nibbles b, NibbleQuad xb) {
    const __m512i both = _mm512_add_epi16(_mm512_maddubs_epi16(a.v, xa.v), _mm512_maddubs_epi16(b.v, xb.v));
    return {_mm512_add_epi32(sum.v, _mm512_madd_epi16(both, _mm512_set1_epi16(1)))};
}

#elif defined(PENSTOCK_ISA_AVX2)
PENSTOCK_INLINE f32x16 load_u8(const uint8_t* p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return to_f32(i32x16{_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))});
}
PENSTOCK_INLINE f32x16 load_i8(const uint8_t* p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return to_f32(i32x16{_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))});
}
PENSTOCK_INLINE __m256 e8m0(__m256i code) {
    const __m256i normal = _mm256_slli_epi32(_mm256_sub_epi32(code, _mm256_set1_epi32(1)), 23);
    const __m256i below = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), code);
    const __m256i is_below = _mm256_cmpgt_epi32(_mm256_set1_epi32(2), code);
    return _mm256_castsi256_ps(_mm256_blendv_epi8(normal, below, is_below));
}
PENSTOCK_INLINE f32x16 load_e8m0(const uint8_t* p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {e8m0(_mm256_cvtepu8_epi32(bytes)), e8m0(_mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8)))};
}

PENSTOCK_INLINE __m256i shifted(__m256i bytes, int right) {
    return right >= 0 ? (__m256i)((__v16hu)bytes >> right) : (__m256i)((__v16hu)bytes << -right);
}
PENSTOCK_INLINE Nibbles load_bytes(const uint8_t* p) {
    const __m256i* halves = reinterpret_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(halves), _mm256_loadu_si256(halves + 1)};
}
PENSTOCK_INLINE Nibbles field(Nibbles bytes, int right, int mask) {
    const __m256i kept = _mm256_set1_epi8(char(mask));
    return {_mm256_and_si256(shifted(bytes.low, right), kept), _mm256_and_si256(shifted(bytes.high, right), kept)};
}
PENSTOCK_INLINE Nibbles join(Nibbles low, Nibbles bytes, int right, int mask) {
    const Nibbles above = field(bytes, right, mask);
    return {_mm256_or_si256(low.low, above.low), _mm256_or_si256(low.high, above.high)};
}

struct Steps {
    __m256i v;
};
PENSTOCK_INLINE Steps load_steps(const uint8_t* p) {
    const __m128i steps = _mm_xor_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), _mm_set1_epi8(-128));
    return {_mm256_broadcastsi128_si256(steps)};
}
PENSTOCK_INLINE Codes look_up(Steps steps, Nibbles codes) {
    return split(_mm256_shuffle_epi8(steps.v, codes.low), _mm256_shuffle_epi8(steps.v, codes.high));
}
PENSTOCK_INLINE __m256i dot_pair(__m256i sum, __m256i a, __m256i xa, __m256i b, __m256i xb) {
    const __m256i both = _mm256_add_epi16(_mm256_maddubs_epi16(a, xa), _mm256_maddubs_epi16(b, xb));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(both, _mm256_set1_epi16(1)));
}
PENSTOCK_INLINE i32x16 dot_pair(i32x16 sum, Nibbles a, NibbleQuad xa, Nibbles b, NibbleQuad xb) {
    return {dot_pair(sum.low, a.low, xa.v, b.low, xb.v), dot_pair(sum.high, a.high, xa.v, b.high, xb.v)};
}

#else
PENSTOCK_INLINE f32x16 load_u8(const uint8_t* p) {
    return each([=](int i) { return float(p[i]); });
}
PENSTOCK_INLINE f32x16 load_i8(const uint8_t* p) {
    return each([=](int i) { return float(int8_t(p[i])); });
}
PENSTOCK_INLINE f32x16 load_e8m0(const uint8_t* p) {
    return each([=](int i) { return e8m0_to_float(p[i]); });
}

PENSTOCK_INLINE Nibbles load_bytes(const uint8_t* p) { return load_codes(p); }
PENSTOCK_INLINE Nibbles field(Nibbles bytes, int right, int mask) {
    for (int i = 0; i < 64; i++) bytes.byte[i] = (right >= 0 ? bytes.byte[i] >> right : bytes.byte[i] << -right) & mask;
    return bytes;
}
PENSTOCK_INLINE Nibbles join(Nibbles low, Nibbles bytes, int right, int mask) {
    const Nibbles above = field(bytes, right, mask);
    for (int i = 0; i < 64; i++) low.byte[i] |= above.byte[i];
    return low;
}

struct Steps {
    uint8_t step[16];
};
PENSTOCK_INLINE Steps load_steps(const uint8_t* p) {
    Steps steps;
    for (int i = 0; i < 16; i++) steps.step[i] = p[i] ^ 0x80;
    return steps;
}
PENSTOCK_INLINE Codes look_up(Steps steps, Nibbles codes) {
    for (int i = 0; i < 64; i++) codes.byte[i] = steps.step[codes.byte[i]];
    return codes;
}
PENSTOCK_INLINE i32x16 dot_pair(i32x16 sum, const Nibbles& a, Quad xa, const Nibbles& b, Quad xb) {
    return dot(dot(sum, a, xa), b, xb);
}
#endif

}  // namespace PENSTOCK_ISA_NAMESPACE
}  // namespace penstock
