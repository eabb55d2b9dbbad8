// Activations as int8: each row (or each group of 32 of a row) on its own scale, so that no row depends on its
// neighbours.
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
    return {call.scratch, scratch_stride(kind, call.inputs), kind == Kind::int8 ? 1 : groups, groups * kGroup};
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
    uint32_t largest = 0;
    for (int i = 0; i < kGroup; i++) {
        const uint32_t magnitude = bits_of(group[i]) & 0x7fffffffu;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
}

// Codes of a group, and their sum. Adding 1.5 * 2^23 leaves the nearest integer in the lowest bits.
PENSTOCK_INLINE int32_t encode_group(const float* group, float inverse, int8_t* to) {
    int32_t sum = 0;
    for (int i = 0; i < kGroup; i++) {
        const int32_t code = int32_t(bits_of(group[i] * inverse + 12582912.0f)) - 0x4b400000;
        to[i] = int8_t(code);
        sum += int8_t(code);
    }
    return sum;
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

// One scale for the row; its offset is the sum of its codes.
inline void quantize_whole(const LinearCall& call, const QuantizedRows& to, int64_t row) {
    float group[kGroup];
    int8_t* codes = reinterpret_cast<int8_t*>(to.scratch + row * to.stride);
    uint32_t largest = 0;
    for (int64_t k = 0; k < call.inputs; k += kGroup) {
        load_group(call.x, row, k, call.inputs, group);
        const uint32_t magnitude = largest_magnitude(group);
        largest = magnitude > largest ? magnitude : largest;
    }
    const Scale scale = scale_for(largest);
    int32_t sum = 0;
    for (int64_t k = 0; k < call.inputs; k += kGroup) {
        load_group(call.x, row, k, call.inputs, group);
        sum += encode_group(group, scale.inverse, codes + k);
    }
    to.scales(row)[0] = scale.forward;
    to.whole_offsets(row)[0] = sum;
}

}  // namespace PENSTOCK_ISA_NAMESPACE
}  // namespace penstock
