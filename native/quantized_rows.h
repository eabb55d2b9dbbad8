// Activations as int8: each share of each row (16 or 32 inputs, see layout.h) on its own scale, so that no row depends on
// its neighbours.
//
// x = scale * code with code = nearest(x * (127 / m)), ties to even, and scale = m / 127, m being the largest
// magnitude; a fine code goes to 32512 = 127 * 256, and is kept as 256 * high byte + low byte, both signed. Where m is below 2^-100 the scale is 0; where it is infinite or NaN the scale is NaN, and with it every
// output of the row. The scratch that holds this is drawn in layout.h.
#pragma once

#include "linear_tiles.h"

namespace penstock {
inline namespace PENSTOCK_ISA_NAMESPACE {

struct QuantizedRows {
    uint8_t* scratch;
    int64_t stride;  // bytes
    int64_t groups;
    int64_t shares;  // of the row
    bool fine;

    const int8_t* codes(int64_t row) const { return reinterpret_cast<const int8_t*>(scratch + row * stride); }
    int64_t codes_bytes() const { return groups * kGroup; }  // how far low bytes are from high ones
    float* scales(int64_t row) const {
        return reinterpret_cast<float*>(scratch + row * stride + (fine ? 2 : 1) * codes_bytes());
    }
    // What the kernel adds for the part of the weight that all inputs share. Its meaning is the kernel's.
    float* offsets(int64_t row) const { return scales(row) + shares; }
    int32_t* whole_offsets(int64_t row) const { return reinterpret_cast<int32_t*>(scales(row) + shares); }
};

inline QuantizedRows quantized_rows(const LinearCall& call, Kind kind) {
    const int64_t groups = groups_of(call.inputs);
    const int64_t stride = scratch_stride(kind, call.inputs, call.fine);
    return {call.scratch, stride, groups, groups * shares_of_a_group(kind), call.fine};
}

struct Scale {
    float forward;  // from codes to numbers
    float inverse;
};

inline Scale scale_for(uint32_t largest_magnitude, float most = 127.0f) {
    const float largest = float_of(largest_magnitude);
    if (largest_magnitude >= 0x7f800000u) return {float_of(0x7fc00000u), 0.0f};
    if (largest < 0x1p-100f) return {0.0f, 0.0f};
    return {largest / most, most / largest};
}

// One group of a row, zeros beyond its end.
PENSTOCK_INLINE void load_group(const ConstRows& x, int64_t row, int64_t k, int64_t inputs, float* to) {
    for (int half = 0; half < kGroup; half += kLanes) {
        const int64_t left = larger(0, smaller(kLanes, inputs - k - half));
        store(to + half, left ? load_elements(x, row, k + half, int(left)) : zero());
    }
}

// Bits of the largest magnitude: as integers they are ordered like the numbers, with infinity and then NaN on top.
template <int share>
PENSTOCK_INLINE uint32_t largest_magnitude(const float* numbers) {
#if defined(PENSTOCK_AVX512)
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    __m512i largest = _mm512_and_si512(_mm512_loadu_si512(numbers), magnitude);
    for (int i = kLanes; i < share; i += kLanes) {
        largest = _mm512_max_epu32(largest, _mm512_and_si512(_mm512_loadu_si512(numbers + i), magnitude));
    }
    return _mm512_reduce_max_epu32(largest);
#else
    uint32_t largest = 0;
    for (int i = 0; i < share; i++) {
        const uint32_t magnitude = bits_of(numbers[i]) & 0x7fffffffu;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
#endif
}

// Codes of a share, and their sum. Adding 1.5 * 2^23 leaves the nearest integer in the lowest bits.
template <int share>
PENSTOCK_INLINE int32_t encode(const float* numbers, float inverse, int8_t* to) {
#if defined(PENSTOCK_AVX512)
    __m512i sum = _mm512_setzero_si512();
    for (int i = 0; i < share; i += kLanes) {
        const __m512i code = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(numbers + i), _mm512_set1_ps(inverse)));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm512_cvtepi32_epi8(code));
        sum = _mm512_add_epi32(sum, code);
    }
    return _mm512_reduce_add_epi32(sum);
#else
    int32_t sum = 0;
    for (int i = 0; i < share; i++) {
        const int32_t code = int32_t(bits_of(numbers[i] * inverse + 12582912.0f)) - 0x4b400000;
        to[i] = int8_t(code);
        sum += int8_t(code);
    }
    return sum;
#endif
}

// The same for fine codes of a whole group.
PENSTOCK_INLINE int32_t encode_fine(const float* numbers, float inverse, int8_t* high, int8_t* low) {
#if defined(PENSTOCK_AVX512)
    __m512i sum = _mm512_setzero_si512();
    for (int i = 0; i < kGroup; i += kLanes) {
        const __m512i code = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(numbers + i), _mm512_set1_ps(inverse)));
        const __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(code, _mm512_set1_epi32(128)), 8);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(high + i), _mm512_cvtepi32_epi8(upper));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(low + i), _mm512_cvtepi32_epi8(code));  // code - 256 * upper
        sum = _mm512_add_epi32(sum, code);
    }
    return _mm512_reduce_add_epi32(sum);
#else
    int32_t sum = 0;
    for (int i = 0; i < kGroup; i++) {
        const int32_t code = int32_t(bits_of(numbers[i] * inverse + 12582912.0f)) - 0x4b400000;
        const int32_t upper = (code + 128) >> 8;
        high[i] = int8_t(upper);
        low[i] = int8_t(code - 256 * upper);
        sum += code;
    }
    return sum;
#endif
}

// Calls note(share, its scale, the sum of its codes) for each, in ascending order.
template <Kind kind, class Note>
void quantize_row(const LinearCall& call, const QuantizedRows& to, int64_t row, const Note& note) {
    constexpr int shares = int(shares_of_a_group(kind)), share = int(kGroup) / shares;
    float group[kGroup];
    int8_t* codes = reinterpret_cast<int8_t*>(to.scratch + row * to.stride);
    for (int64_t g = 0; g < to.groups; g++) {
        load_group(call.x, row, g * kGroup, call.inputs, group);
        PENSTOCK_UNROLL for (int s = 0; s < shares; s++) {
            const Scale scale = scale_for(largest_magnitude<share>(group + s * share));
            const int32_t sum = encode<share>(group + s * share, scale.inverse, codes + g * kGroup + s * share);
            to.scales(row)[g * shares + s] = scale.forward;
            note(g * shares + s, scale.forward, sum);
        }
    }
}

// The same with fine codes and one share a group.
template <class Note>
void quantize_row_finely(const LinearCall& call, const QuantizedRows& to, int64_t row, const Note& note) {
    float group[kGroup];
    int8_t* codes = reinterpret_cast<int8_t*>(to.scratch + row * to.stride);
    for (int64_t g = 0; g < to.groups; g++) {
        load_group(call.x, row, g * kGroup, call.inputs, group);
        const Scale scale = scale_for(largest_magnitude<kGroup>(group), 32512.0f);
        int8_t* high = codes + g * kGroup;
        const int32_t sum = encode_fine(group, scale.inverse, high, high + to.codes_bytes());
        to.scales(row)[g] = scale.forward;
        note(g, scale.forward, sum);
    }
}

}  // namespace PENSTOCK_ISA_NAMESPACE
}  // namespace penstock
