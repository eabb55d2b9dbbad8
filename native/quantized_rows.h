// Activations as integers: each group of 32 inputs of a row has its own scale, so no row depends on its neighbours.
//
// x = scale * code with code = nearest(x * (127 / m)), ties to even, and scale = m / 127, where m is the largest
// magnitude of the group. That is precise enough for most groups. But a few channels of a language model are far larger
// than all others (Dettmers et al. 2022), and with steps of that size their neighbours would lose their information. So
// a group is fine if m^2 > kOutlier times the mean of the row's m^2: its codes reach 32512 = 127 * 256 and are stored
// as 256 * high byte + low byte, both signed. Kernels sum the high bytes of all groups, then the low bytes of fine
// groups.
//
// If m is below 2^-80 the scale is 0; if it is infinite or NaN the scale is NaN, and so is every output of the row.
// layout.h draws the scratch that holds all this.
#pragma once

#include "linear_tiles.h"

namespace penstock {
inline namespace PENSTOCK_ISA_NAMESPACE {

constexpr float kOutlier = 8.0f;

struct QuantizedRows {
    uint8_t* scratch;
    int64_t stride;  // bytes
    int64_t groups;

    int8_t* high(int64_t row) const { return reinterpret_cast<int8_t*>(scratch + row * stride); }
    int64_t low_after_high() const { return groups * kGroup; }
    // The unit of high bytes; that of low bytes is 1 / 256 of it.
    float* scales(int64_t row) const { return reinterpret_cast<float*>(scratch + row * stride + 2 * groups * kGroup); }
    // The term for the part of the weight that all inputs share: in q4 the sum of a group's activations; in q8 -128
    // times the sum of its high bytes, and behind these, for all groups, -128 times the sum of the low bytes.
    float* offsets(int64_t row) const { return scales(row) + groups; }
    int32_t* whole_offsets(int64_t row) const { return reinterpret_cast<int32_t*>(scales(row) + groups); }
    // Bit g % 32 of word g / 32: whether group g is fine.
    uint32_t* fine(int64_t row) const { return reinterpret_cast<uint32_t*>(scales(row) + 3 * groups); }
    int64_t words() const { return divide_up(groups, 32); }

    // Calls visit(group) for each fine group, ascending.
    template <class Visit>
    PENSTOCK_INLINE void each_fine(int64_t row, const Visit& visit) const {
        for (int64_t word = 0; word < words(); word++) {
            uint32_t left = fine(row)[word];
            for (int64_t g = word * 32; left != 0; g++, left >>= 1) {
                if (left & 1) visit(g);
            }
        }
    }
};

// Addresses of a tile's rows, which lie `stride` bytes apart. One register serves three rows, since a load can add the
// stride once or twice; without this GCC computes or reloads an address for every row.
template <int R, class T>
class RowAddresses {
public:
    PENSTOCK_INLINE RowAddresses(const T* first, int64_t stride)
        : stride_(stride), base0_(bytes(first)), base1_(bytes(first) + 3 * stride), base2_(bytes(first) + 6 * stride) {
        static_assert(R <= 9, "");
#if defined(__GNUC__) || defined(__clang__)
        // Hides from the compiler how they depend on each other. Not an array: GCC would keep it in memory.
        if (R > 2) asm("" : "+r"(base0_));
        if (R > 3) asm("" : "+r"(base1_));
        if (R > 6) asm("" : "+r"(base2_));
#endif
    }

    PENSTOCK_INLINE const T* operator[](int r) const {
        const char* base = r < 3 ? base0_ : r < 6 ? base1_ : base2_;
        return reinterpret_cast<const T*>(base + r % 3 * stride_);
    }

private:
    PENSTOCK_INLINE static const char* bytes(const T* p) { return reinterpret_cast<const char*>(p); }

    int64_t stride_;
    const char *base0_, *base1_, *base2_;
};

// The register tiles (linear_tiles.h) of the kernel that multiplies codes.
struct CodeTiles {
#if defined(PENSTOCK_ISA_AVX512_BF16)
    static constexpr int kRows = 6, kPanels = 2, kFewRows = 8;
#elif defined(PENSTOCK_AVX512)
    static constexpr int kRows = 4, kPanels = 1, kFewRows = 4;
#elif defined(PENSTOCK_ISA_AVX2)
    static constexpr int kRows = 6, kPanels = 1, kFewRows = 6;  // 12 sums, 2 weights, 1 activation, 1 product: 16 registers
#else
    static constexpr int kRows = 1, kPanels = 1, kFewRows = 1;
#endif
    static constexpr bool kEvenTiles = false, kPanelsInTurn = kPanels == 1;
    // Bytes of the rows that are walked together (ADR 38): they stay in L2 if two panels are multiplied together, so
    // that a tile's rows are read half as often; else in L1.
    static constexpr int64_t kRowsBytes = kPanels > 1 ? 256 << 10 : 16 << 10;
    // How many of a tile's P panels are multiplied by a group together; the others follow when the sums of these have
    // been stored.
    template <int P>
    static constexpr int kTogether = kPanelsInTurn ? 1 : P;
};

inline QuantizedRows quantized_rows(const LinearCall& call, Kind kind) {
    return {call.scratch, scratch_stride(kind, call.inputs), groups_of(call.inputs)};
}

struct Scale {
    float forward;  // from high bytes to numbers
    float inverse;  // from numbers to codes
};

inline Scale scale_for(uint32_t largest_magnitude, bool fine) {
    const float largest = float_of(largest_magnitude);
    if (largest_magnitude >= 0x7f800000u) return {float_of(0x7fc00000u), 0.0f};
    if (largest < 0x1p-80f) return {0.0f, 0.0f};  // far from subnormal numbers
    return {largest * (1.0f / 127), (fine ? 127.0f * 256 : 127.0f) / largest};
}

// Sums of the bytes of a group.
struct ByteSums {
    int32_t high, low;
};

// One group of a row, padded with zeros: in place, or copied to `room`.
PENSTOCK_INLINE const float* group_of(const ConstRows& x, int64_t row, int64_t k, int64_t inputs, float* room) {
    if (x.element == Element::f32 && inputs - k >= kGroup) return static_cast<const float*>(x.data) + row * x.stride + k;
    for (int half = 0; half < kGroup; half += kLanes) {
        const int64_t left = larger(0, smaller(kLanes, inputs - k - half));
        store(room + half, left ? load_elements(x, row, k + half, int(left)) : zero());
    }
    return room;
}

// Bits of the largest magnitude: as integers they have the order of the numbers, with infinity and then NaN on top.
PENSTOCK_INLINE uint32_t largest_magnitude(const float* numbers) {
#if defined(PENSTOCK_AVX512)
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    __m512i largest = _mm512_and_si512(_mm512_loadu_si512(numbers), magnitude);
    for (int i = kLanes; i < kGroup; i += kLanes) {
        largest = _mm512_max_epu32(largest, _mm512_and_si512(_mm512_loadu_si512(numbers + i), magnitude));
    }
    return _mm512_reduce_max_epu32(largest);
#elif defined(PENSTOCK_ISA_AVX2)
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    __m256i largest = _mm256_setzero_si256();
    for (int i = 0; i < kGroup; i += 8) {
        const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(numbers + i));
        largest = _mm256_max_epu32(largest, _mm256_and_si256(bits, magnitude));
    }
    __m128i four = _mm_max_epu32(_mm256_castsi256_si128(largest), _mm256_extracti128_si256(largest, 1));
    four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4e));
    return uint32_t(_mm_cvtsi128_si32(_mm_max_epu32(four, _mm_shuffle_epi32(four, 0xb1))));
#else
    uint32_t largest = 0;
    for (int i = 0; i < kGroup; i++) {
        const uint32_t magnitude = bits_of(numbers[i]) & 0x7fffffffu;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
#endif
}

// Writes the codes of a group and returns their sum. Adding 1.5 * 2^23 leaves the nearest integer in the lowest bits.
PENSTOCK_INLINE int32_t encode(const float* numbers, float inverse, int8_t* to) {
#if defined(PENSTOCK_AVX512)
    __m512i sum = _mm512_setzero_si512();
    for (int i = 0; i < kGroup; i += kLanes) {
        const __m512i code = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(numbers + i), _mm512_set1_ps(inverse)));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm512_cvtepi32_epi8(code));
        sum = _mm512_add_epi32(sum, code);
    }
    return _mm512_reduce_add_epi32(sum);
#elif defined(PENSTOCK_ISA_AVX2)
    const __m256 by = _mm256_set1_ps(inverse);
    __m256i code[4];
    PENSTOCK_UNROLL for (int i = 0; i < 4; i++) code[i] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(numbers + 8 * i), by));
    const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(code[0], code[1]), _mm256_packs_epi32(code[2], code[3]));
    // Packing interleaves the halves of its arguments; this restores their order.
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permutevar8x32_epi32(bytes, order));
    const __m256i eight = _mm256_add_epi32(_mm256_add_epi32(code[0], code[1]), _mm256_add_epi32(code[2], code[3]));
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
#else
    int32_t sum = 0;
    for (int i = 0; i < kGroup; i++) {
        const int32_t code = int32_t(bits_of(numbers[i] * inverse + 12582912.0f)) - 0x4b400000;
        to[i] = int8_t(code);
        sum += int8_t(code);
    }
    return sum;
#endif
}

// The same for codes of two bytes.
PENSTOCK_INLINE ByteSums encode_fine(const float* numbers, float inverse, int8_t* high, int8_t* low) {
#if defined(PENSTOCK_AVX512)
    __m512i sum = _mm512_setzero_si512(), upper_sum = _mm512_setzero_si512();
    for (int i = 0; i < kGroup; i += kLanes) {
        const __m512i code = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(numbers + i), _mm512_set1_ps(inverse)));
        const __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(code, _mm512_set1_epi32(128)), 8);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(high + i), _mm512_cvtepi32_epi8(upper));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(low + i), _mm512_cvtepi32_epi8(code));  // code - 256 * upper
        sum = _mm512_add_epi32(sum, code);
        upper_sum = _mm512_add_epi32(upper_sum, upper);
    }
    const int32_t whole = _mm512_reduce_add_epi32(sum), upper = _mm512_reduce_add_epi32(upper_sum);
    return {upper, whole - 256 * upper};
#else
    ByteSums sums{0, 0};
    for (int i = 0; i < kGroup; i++) {
        const int32_t code = int32_t(bits_of(numbers[i] * inverse + 12582912.0f)) - 0x4b400000;
        const int32_t upper = (code + 128) >> 8;
        high[i] = int8_t(upper);
        low[i] = int8_t(code - 256 * upper);
        sums.high += upper;
        sums.low += code - 256 * upper;
    }
    return sums;
#endif
}

// Calls note(group, its scale, the sums of its bytes) for each group, in ascending order.
template <class Note>
void quantize_row(const LinearCall& call, const QuantizedRows& to, int64_t row, const Note& note) {
    float room[kGroup];
    float* scales = to.scales(row);
    float squares = 0.0f;
    for (int64_t g = 0; g < to.groups; g++) {
        scales[g] = float_of(largest_magnitude(group_of(call.x, row, g * kGroup, call.inputs, room)));  // until below
        squares += scales[g] * scales[g];
    }
    memset(to.fine(row), 0, size_t(to.words()) * sizeof(uint32_t));
    const float bound = kOutlier * squares / float(to.groups);
    for (int64_t g = 0; g < to.groups; g++) {
        const float* group = group_of(call.x, row, g * kGroup, call.inputs, room);
        const bool fine = scales[g] * scales[g] > bound;
        const Scale scale = scale_for(bits_of(scales[g]), fine);
        int8_t *high = to.high(row) + g * kGroup, *low = high + to.low_after_high();
        ByteSums sums{0, 0};
        if (fine) {
            sums = encode_fine(group, scale.inverse, high, low);
        } else {
            sums.high = encode(group, scale.inverse, high);
        }
        scales[g] = scale.forward;
        to.fine(row)[g / 32] |= uint32_t{fine} << g % 32;
        note(g, scale.forward, sums);
    }
}

}  // namespace PENSTOCK_ISA_NAMESPACE
}  // namespace penstock
