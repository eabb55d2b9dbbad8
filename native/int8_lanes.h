// Arithmetic of an int8 KV cache: heads rounded to int8, queries to int16, and their products as exact sums of
// integers.
//
// x = scale * code with code = nearest(x * (most / m)), ties to even, and scale = m / most, where m is the largest
// magnitude of the head and most is 127 or 32767. If m is below 2^-100 the scale is 0; if it is infinite or NaN the
// scale is NaN, and so is everything computed from the head.
//
// A sum over a head has at most 512 products of 32767 * 127: below 2^31, so no order can change it, and every
// instruction set gives the same bits.
#pragma once

#include "attention_call.h"
#include "simd.h"

namespace penstock {
inline namespace PENSTOCK_ISA_NAMESPACE {

// ---- rounding -----------------------------------------------------------------------------------------------------

// Codes of x[0 .. dim); returns the scale.
template <typename Code>
PENSTOCK_INLINE float encode_head(const float* x, int dim, float most, Code* to) {
    uint32_t largest_bits = 0;  // as integers, magnitudes have the order of the numbers, with infinity and NaN on top
    for (int d = 0; d < dim; d++) {
        const uint32_t magnitude = bits_of(x[d]) & 0x7fffffffu;
        largest_bits = magnitude > largest_bits ? magnitude : largest_bits;
    }
    const float largest = float_of(largest_bits);
    const bool finite = largest_bits < 0x7f800000u;
    if (!finite || largest < 0x1p-100f) {
        memset(to, 0, size_t(dim) * sizeof(Code));
        return finite ? 0.0f : float_of(0x7fc00000u);
    }
    const float inverse = most / largest;
    // Adding 1.5 * 2^23 leaves the nearest integer in the lowest bits.
    for (int d = 0; d < dim; d++) to[d] = Code(int32_t(bits_of(x[d] * inverse + 12582912.0f)) - 0x4b400000);
    return largest / most;
}

// A query for `add_products`: word w of a key, k[4w .. 4w + 3], is multiplied by words 2w and 2w + 1 of the query,
//
//     q[4w] q[4w + 2] | q[4w + 1] q[4w + 3]      as int16, zeros beyond the head
//
// because a shift separates the even bytes of a word from the odd ones.
PENSTOCK_INLINE float encode_query(const float* x, int dim, uint32_t* to) {
    int16_t codes[kMostHeadDim + 4];
    const float scale = encode_head(x, dim, 32767.0f, codes);
    memset(codes + dim, 0, 4 * sizeof(int16_t));
    const auto pair = [&](int low, int high) { return uint32_t(uint16_t(codes[low])) | uint32_t(codes[high]) << 16; };
    for (int d = 0; d < dim; d += 4) {
        to[d / 2] = pair(d, d + 2);
        to[d / 2 + 1] = pair(d + 1, d + 3);
    }
    return scale;
}

// ---- products -----------------------------------------------------------------------------------------------------

// `Sums`: a sum in each of 16 lanes. `Bytes`: 16 words of 4 codes, as int16.
#if defined(PENSTOCK_AVX512)

struct Sums {
    __m512i v;
};
struct Bytes {
    __m512i even, odd;
};

PENSTOCK_INLINE Sums no_sum() { return {_mm512_setzero_si512()}; }
PENSTOCK_INLINE f32x16 to_floats(Sums a) { return {_mm512_cvtepi32_ps(a.v)}; }
PENSTOCK_INLINE Bytes load_bytes(const uint32_t* p) {
    const __m512i words = _mm512_loadu_si512(p);
    return {_mm512_srai_epi16(_mm512_slli_epi16(words, 8), 8), _mm512_srai_epi16(words, 8)};
}
PENSTOCK_INLINE Sums add_products(Sums sum, uint32_t even, uint32_t odd, Bytes bytes) {
    const __m512i first = _mm512_set1_epi32(int(even)), second = _mm512_set1_epi32(int(odd));
#if defined(PENSTOCK_ISA_AVX512_BF16)  // which has VNNI
    return {_mm512_dpwssd_epi32(_mm512_dpwssd_epi32(sum.v, first, bytes.even), second, bytes.odd)};
#else
    const __m512i both = _mm512_add_epi32(_mm512_madd_epi16(first, bytes.even), _mm512_madd_epi16(second, bytes.odd));
    return {_mm512_add_epi32(sum.v, both)};
#endif
}

#elif defined(PENSTOCK_ISA_AVX2)

struct Sums {
    __m256i low, high;
};
struct Bytes {
    __m256i even_low, even_high, odd_low, odd_high;
};

PENSTOCK_INLINE Sums no_sum() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
PENSTOCK_INLINE f32x16 to_floats(Sums a) { return {_mm256_cvtepi32_ps(a.low), _mm256_cvtepi32_ps(a.high)}; }
PENSTOCK_INLINE Bytes load_bytes(const uint32_t* p) {
    const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8));
    return {_mm256_srai_epi16(_mm256_slli_epi16(low, 8), 8), _mm256_srai_epi16(_mm256_slli_epi16(high, 8), 8),
            _mm256_srai_epi16(low, 8), _mm256_srai_epi16(high, 8)};
}
PENSTOCK_INLINE Sums add_products(Sums sum, uint32_t even, uint32_t odd, Bytes bytes) {
    const __m256i first = _mm256_set1_epi32(int(even)), second = _mm256_set1_epi32(int(odd));
    const auto both = [&](__m256i of_even, __m256i of_odd) {
        return _mm256_add_epi32(_mm256_madd_epi16(first, of_even), _mm256_madd_epi16(second, of_odd));
    };
    return {_mm256_add_epi32(sum.low, both(bytes.even_low, bytes.odd_low)),
            _mm256_add_epi32(sum.high, both(bytes.even_high, bytes.odd_high))};
}

#else

struct Sums {
    int32_t lane[kLanes];
};
struct Bytes {
    int8_t byte[kLanes][4];
};

PENSTOCK_INLINE Sums no_sum() { return {}; }
PENSTOCK_INLINE f32x16 to_floats(Sums a) {
    return each([&](int i) { return float(a.lane[i]); });
}
PENSTOCK_INLINE Bytes load_bytes(const uint32_t* p) {
    Bytes bytes;
    memcpy(&bytes, p, sizeof bytes);
    return bytes;
}
PENSTOCK_INLINE Sums add_products(Sums sum, uint32_t even, uint32_t odd, Bytes bytes) {
    const int32_t q0 = int16_t(even), q1 = int16_t(odd), q2 = int16_t(even >> 16), q3 = int16_t(odd >> 16);
    for (int i = 0; i < kLanes; i++) {
        const int8_t* k = bytes.byte[i];
        sum.lane[i] += q0 * k[0] + q1 * k[1] + q2 * k[2] + q3 * k[3];
    }
    return sum;
}

#endif

// The first n words; the others are 0.
PENSTOCK_INLINE Bytes load_bytes(const uint32_t* p, int n) {
    uint32_t words[kLanes] = {};
    memcpy(words, p, size_t(n) * sizeof(uint32_t));
    return load_bytes(words);
}

}  // namespace PENSTOCK_ISA_NAMESPACE
}  // namespace penstock
