// Sizes of packed weights and of the scratch memory of a call, shared by pack.cpp, the kernels and Python.
//
// Every packed weight is a sequence of panels of 16 outputs; the last one is padded with zeros.
#pragma once

#include <cstdint>

namespace penstock {

// The block forms, q4, q8 and those from q5 to z4w, hold the blocks of GGUF, or integers with a zero point of their own
// (isa_blocks.h).
enum class Kind : int32_t {
    bf16 = 0,
    q4 = 1,
    q8 = 2,
    f32 = 3,
    q5 = 4,
    q2k = 5,
    q3k = 6,
    q4k = 7,
    q5k = 8,
    q6k = 9,
    nl4 = 10,
    mx4 = 11,
    nl4k = 12,
    nl4k16 = 13,
    z4 = 14,
    z4w = 15,
    f8 = 16,
};
constexpr int kKinds = 17;

// How a block form stores a panel: if it has a table, first a line with the numbers of its codes; then a sequence of
// units of `inputs` inputs, each
//
//     | fp16 fields of o0..o15, one field after the other | fields of a byte likewise | up to a whole line, in units of
//     | 128 and 256 inputs | groups of 32 inputs, each as its low bits and then its high bits |
//
// Low bits: parts of 64 bytes, four for each of o0 to o15; with 8 bits byte t of part c has the code of k = 4c + t;
// with 4 bits that of k = 8c + t in its low half and that of k = 8c + 4 + t in its high half; with 2 bits part c has
// k = 16c + t, + 4, + 8 and + 12 from the lowest bits on. High bits: one bit each, bit c of byte t for k = 4c + t; or
// two bits, like 2 low bits.
struct BlockForm {
    int64_t inputs;  // of a unit, 32, 128 or 256; 0: not a block form
    int64_t halves;  // fp16 fields of each output
    int64_t bytes;   // one-byte fields of each output
    int64_t low_bits, high_bits;
    bool table;  // the panel's first line: 16 signed bytes, the numbers of the codes, and their unit, a float

    constexpr int64_t panel_header() const { return table ? 64 : 0; }
    constexpr int64_t unit_header() const {
        const int64_t fields = halves * 32 + bytes * 16;
        return inputs > 32 ? (fields + 63) / 64 * 64 : fields;
    }
    constexpr int64_t group_bytes() const { return 16 * 32 * (low_bits + high_bits) / 8; }
    constexpr int64_t unit_bytes() const { return unit_header() + inputs / 32 * group_bytes(); }
    constexpr int64_t record_bytes() const { return 2 * halves + bytes; }  // bytes of one output's fields in a unit
};

constexpr BlockForm block_form(Kind kind) {
    switch (kind) {
        case Kind::q4: return {32, 2, 0, 4, 0, false};
        case Kind::q8: return {32, 1, 0, 8, 0, false};
        case Kind::q5: return {32, 2, 0, 4, 1, false};
        case Kind::q2k: return {256, 2, 32, 2, 0, false};
        case Kind::q3k: return {256, 1, 16, 2, 1, false};
        case Kind::q4k: return {256, 2, 16, 4, 0, false};
        case Kind::q5k: return {256, 2, 16, 4, 1, false};
        case Kind::q6k: return {256, 1, 16, 4, 2, false};
        case Kind::nl4: return {32, 1, 0, 4, 0, true};
        case Kind::mx4: return {32, 0, 1, 4, 0, true};
        case Kind::nl4k: return {256, 1, 8, 4, 0, true};
        case Kind::nl4k16: return {256, 1, 16, 4, 0, true};
        case Kind::z4: return {32, 1, 1, 4, 0, false};
        case Kind::z4w: return {128, 1, 1, 4, 0, false};
        default: return {0, 0, 0, 0, 0, false};
    }
}

constexpr int64_t kPanel = 16;   // outputs of a panel: the lanes of a vector
constexpr int64_t kGroup = 32;   // activations that share a scale if quantised, and the smallest part of a unit
constexpr int64_t kF8Unit = 128;  // inputs that share a scale in f8
constexpr int64_t kMostInputs = 1 << 16;                    // with more, an int8 sum could overflow 32 bits

constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return divide_up(a, b) * b; }

constexpr int64_t panels_of(int64_t outputs) { return divide_up(outputs, kPanel); }
constexpr int64_t groups_of(int64_t inputs) { return divide_up(inputs, kGroup); }

// The place of the code of input `k` and output `lane` in a line of f8, which has four inputs of a panel.
constexpr int64_t f8_place(int64_t lane, int64_t k) { return lane / 4 * 16 + k / 2 * 8 + lane % 4 * 2 + k % 2; }

constexpr int64_t panel_bytes(Kind kind, int64_t inputs) {
    switch (kind) {
        case Kind::bf16: return divide_up(inputs, 2) * kPanel * 4;
        case Kind::f32: return inputs * kPanel * 4;
        case Kind::f8: return divide_up(inputs, kF8Unit) * kPanel * 4 + divide_up(inputs, 4) * kPanel * 4;
        default: break;
    }
    const BlockForm form = block_form(kind);
    return form.panel_header() + divide_up(inputs, form.inputs) * form.unit_bytes();
}

constexpr int64_t packed_bytes(Kind kind, int64_t outputs, int64_t inputs) {
    return panels_of(outputs) * panel_bytes(kind, inputs);
}

// Bytes of scratch for one row. bf16: the row rounded to bfloat16, padded to an even number of elements; f8: the same,
// padded to a multiple of 4. f32: the row widened. The others:
//
//     | high bytes of the inputs, padded to whole groups | low bytes | scales | offsets | more offsets | fine? |
//
// of which the last four have 4 bytes, 4 bytes, 4 bytes and one bit per group (quantized_rows.h).
constexpr int64_t fine_words(int64_t inputs) { return divide_up(groups_of(inputs), 32); }
constexpr int64_t scratch_stride(Kind kind, int64_t inputs) {
    if (kind == Kind::bf16 || kind == Kind::f8) return round_up(inputs * 2, 64);
    if (kind == Kind::f32) return round_up(inputs * 4, 64);
    return round_up(groups_of(inputs) * (2 * kGroup + 3 * 4) + fine_words(inputs) * 4, 64);
}

}  // namespace penstock
