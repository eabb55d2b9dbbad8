// Activations as int8: each group of 32 of each row on its own scale, so that no row depends on its neighbours.
//
// x = scale * code with code = nearest(x * (127 / m)), ties to even, and scale = m / 127, m being the largest
// magnitude. Where m is below 2^-100 the scale is 0; where it is infinite or NaN the scale is NaN, and with it every
// output of the row. The scratch that holds this is drawn in layout.h.
#pragma once

#include "linear_tiles.h"

namespace penstock {
inline namespace PENSTOCK_ISA_NAMESPACE {

struct QuantizedRows {
    uint8_t* scratch;
    int64_t stride;  // bytes
    int64_t groups;
    int64_t codes_bytes;

    const int8_t* codes(int64_t row) const { return reinterpret_cast<const int8_t*>(scratch + row * stride); }
    float* scales(int64_t row) const { return reinterpret_cast<float*>(scratch + row * stride + codes_bytes); }
    // For each group: what the kernel adds for the part of the weight that all inputs share. Its meaning is the
    // kernel's.
    float* offsets(int64_t row) const { return scales(row) + groups; }
    int32_t* whole_offsets(int64_t row) const { return reinterpret_cast<int32_t*>(scales(row) + groups); }
};

inline QuantizedRows quantized_rows(const LinearCall& call, Kind kind) {
    const int64_t groups = groups_of(call.inputs);
    return {call.scratch, scratch_stride(kind, call.inputs), groups, groups * kGroup};
}

struct Scale {
    float forward;  // from codes to numbers
    float inverse;
};

inline Scale scale_for(uint32_t largest_magnitude) {
    const float largest = float_of(largest_magnitude);
    if (largest_magnitude >= 0x7f800000u) return {float_of(0x7fc00000u), 0.0f};
    if (largest < 0x1p-100f) return {0.0f, 0.0f};
    return {largest / 127.0f, 127.0f / largest};
}

// One group of a row, zeros beyond its end.
PENSTOCK_INLINE void load_group(const ConstRows& x, int64_t row, int64_t k, int64_t inputs, float* to) {
    for (int half = 0; half < kGroup; half += kLanes) {
        const int64_t left = larger(0, smaller(kLanes, inputs - k - half));
        store(to + half, left ? load_elements(x, row, k + half, int(left)) : zero());
    }
}

// Bits of the largest magnitude: as integers they are ordered like the numbers, with infinity and then NaN on top.
PENSTOCK_INLINE uint32_t largest_magnitude(const float* group) {
#if defined(PENSTOCK_AVX512)
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    const __m512i low = _mm512_and_si512(_mm512_loadu_si512(group), magnitude);
    const __m512i high = _mm512_and_si512(_mm512_loadu_si512(group + kLanes), magnitude);
    return _mm512_reduce_max_epu32(_mm512_max_epu32(low, high));
#else
    uint32_t largest = 0;
    for (int i = 0; i < kGroup; i++) {
        const uint32_t magnitude = bits_of(group[i]) & 0x7fffffffu;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
#endif
}

// Codes of a group, and their sum. Adding 1.5 * 2^23 leaves the nearest integer in the lowest bits.
PENSTOCK_INLINE int32_t encode_group(const float* group, float inverse, int8_t* to) {
#if defined(PENSTOCK_AVX512)
    const __m512 by = _mm512_set1_ps(inverse);
    const __m512i low = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(group), by));
    const __m512i high = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(group + kLanes), by));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(low));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + kLanes), _mm512_cvtepi32_epi8(high));
    return _mm512_reduce_add_epi32(_mm512_add_epi32(low, high));
#else
    int32_t sum = 0;
    for (int i = 0; i < kGroup; i++) {
        const int32_t code = int32_t(bits_of(group[i] * inverse + 12582912.0f)) - 0x4b400000;
        to[i] = int8_t(code);
        sum += int8_t(code);
    }
    return sum;
#endif
}

// One scale a group; `offset(scale, sum of codes)` becomes the group's offset.
template <class Offset, class Store>
void quantize_groups(const LinearCall& call, const QuantizedRows& to, int64_t row, Store* offsets,
                     const Offset& offset) {
    float group[kGroup];
    int8_t* codes = reinterpret_cast<int8_t*>(to.scratch + row * to.stride);
    for (int64_t g = 0; g < to.groups; g++) {
        load_group(call.x, row, g * kGroup, call.inputs, group);
        const Scale scale = scale_for(largest_magnitude(group));
        const int32_t sum = encode_group(group, scale.inverse, codes + g * kGroup);
        to.scales(row)[g] = scale.forward;
        offsets[g] = offset(scale.forward, sum);
    }
}

}  // namespace PENSTOCK_ISA_NAMESPACE
}  // namespace penstock
