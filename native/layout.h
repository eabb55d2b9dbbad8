// Sizes of packed weights and of the scratch memory that a call needs: what pack.cpp, the kernels and Python agree on.
//
// Every packed weight is a row of panels of 16 outputs; the last one is filled up with zeros.
#pragma once

#include <cstdint>

namespace penstock {

enum class Kind : int32_t { bf16 = 0, q4 = 1, q8 = 2, f32 = 3 };

constexpr int64_t kPanel = 16;   // outputs of a panel: the lanes of a vector
constexpr int64_t kGroup = 32;   // inputs that share a scale in q4 and q8
constexpr int64_t kQ4Group = 16 * kGroup / 2 + 2 * 16 * 2;  // bytes of one group of one panel: codes, scales, minima
constexpr int64_t kQ8Group = 16 * kGroup + 16 * 2;          // codes, scales
constexpr int64_t kMostInputs = 1 << 16;                    // an int8 sum of more could leave 32 bits

constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return divide_up(a, b) * b; }

constexpr int64_t panels_of(int64_t outputs) { return divide_up(outputs, kPanel); }
constexpr int64_t groups_of(int64_t inputs) { return divide_up(inputs, kGroup); }

constexpr int64_t panel_bytes(Kind kind, int64_t inputs) {
    switch (kind) {
        case Kind::bf16: return divide_up(inputs, 2) * kPanel * 4;
        case Kind::q4: return groups_of(inputs) * kQ4Group;
        case Kind::q8: return groups_of(inputs) * kQ8Group;
        case Kind::f32: return inputs * kPanel * 4;
    }
    return 0;
}

constexpr int64_t packed_bytes(Kind kind, int64_t outputs, int64_t inputs) {
    return panels_of(outputs) * panel_bytes(kind, inputs);
}

// Bytes of scratch for one row. bf16: the row rounded to bfloat16, filled up to an even number. f32: the row widened.
// The others:
//
//     | high bytes of the inputs, zeros up to whole groups | low bytes | scales | offsets | more offsets | fine? |
//
// the last four of 4 bytes a group, of 4, of 4, and of one bit (quantized_rows.h).
constexpr int64_t fine_words(int64_t inputs) { return divide_up(groups_of(inputs), 32); }
constexpr int64_t scratch_stride(Kind kind, int64_t inputs) {
    if (kind == Kind::bf16) return round_up(inputs * 2, 64);
    if (kind == Kind::f32) return round_up(inputs * 4, 64);
    return round_up(groups_of(inputs) * (2 * kGroup + 3 * 4) + fine_words(inputs) * 4, 64);
}

}  // namespace penstock
