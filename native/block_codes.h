// How the codes of block forms are read: pair i of a group has its quads 2i and 2i + 1, for inputs 8i to 8i + 7.
//
// A policy of codes has: its bits; whether panels have tables; its bias, which is a code less its number; and a Sum of
// products, which begins at an offset if there is a bias, is added to pair by pair, and ends as 32-bit integers.
#pragma once

#include <type_traits>

#include "block_lanes.h"
#include "layout.h"

namespace penstock {
inline namespace PENSTOCK_ISA_NAMESPACE {

// The code of input `k` of a group.
template <Kind kKind>
PENSTOCK_INLINE int code_of(const uint8_t* group, int lane, int k) {
    constexpr BlockForm form = block_form(kKind);
    const int quad = k / 4, byte = lane * 4 + k % 4;
    const auto plane = [=](const uint8_t* lines, int bits) {
        const int quads = 8 / bits;  // per line
        return lines[quad / quads * 64 + byte] >> quad % quads * bits & ((1 << bits) - 1);
    };
    const int low = plane(group, int(form.low_bits));
    if constexpr (form.high_bits == 0) return low;
    else return low | plane(group + 64 * form.low_bits, int(form.high_bits)) << form.low_bits;
}

// Where the bits of pair i lie in planes, and how many new lines it reads.
template <int kLow, int kHigh>
struct PlaneLines {
    static constexpr int kLowBits = kLow, kHighBits = kHigh;
    static constexpr int low_lines(int i) { return kLow == 8 ? 2 : kLow == 4 || i % 2 == 0 ? 1 : 0; }
    static constexpr int64_t low_line(int i) { return i * kLow / 4 * 64; }
    static constexpr bool begins_high_line(int i) { return (kHigh == 1 && i == 0) || (kHigh == 2 && i % 2 == 0); }
    static constexpr int64_t high_line(int i) { return 64 * kLow + (kHigh == 2 ? i / 2 * 64 : 0); }
};

struct Unlisted {};

// Codes of 2 to 6 bits. If the products of a share, `kQuads` quads, add up to at most 16 bits, the sum has 16 bits;
// else it is widened after each pair.
template <int kLow, int kHigh, int kAbove, int kQuads>
struct PlaneCodes : PlaneLines<kLow, kHigh> {
    using Lines = PlaneLines<kLow, kHigh>;
    using Panel = Unlisted;
    static constexpr bool kTable = false;
    static constexpr int kBias = kAbove;
    // A lane has two products of a quad. Activations are -127 to 127. With a bias the sum begins at an offset, so its
    // bound is that of numbers and not of codes.
    static constexpr int kLargest = kAbove ? kAbove : (1 << (kLow + kHigh)) - 1;
    static constexpr bool kShort = kQuads * 2 * kLargest * 127 <= 32767;
    using Sum = std::conditional_t<kShort, ShortSum, i32x16>;
    struct Pair {
        Nibbles first, second;
    };

    static PENSTOCK_INLINE Panel load_panel(const uint8_t*) { return {}; }
    static PENSTOCK_INLINE int value(const uint8_t*, int code) { return code - kBias; }

    static PENSTOCK_INLINE Pair load(Panel, const uint8_t* group, int i) {
        Pair pair;
        if constexpr (kLow == 4) {
            load_nibbles(group + Lines::low_line(i), pair.first, pair.second);
        } else {
            const Nibbles four = load_bytes(group + Lines::low_line(i));
            pair = {field(four, i % 2 * 4, 3), field(four, i % 2 * 4 + 2, 3)};
        }
        if constexpr (kHigh > 0) {
            constexpr int mask = ((1 << kHigh) - 1) << kLow;
            const Nibbles high = load_bytes(group + Lines::high_line(i));
            const int at = kHigh == 2 ? i % 2 * 4 : i * 2;  // the place of the first quad's bits
            pair = {join(pair.first, high, at - kLow, mask), join(pair.second, high, at + kHigh - kLow, mask)};
        }
        return pair;
    }

    static PENSTOCK_INLINE int32_t offset(const int8_t* x, int count, int32_t sum) {
        return kShort ? short_offset(kBias, x, count, sum) : -kBias * sum;
    }
    static PENSTOCK_INLINE Sum begin(int32_t offset) {
        if constexpr (kShort) return begin_short(kBias ? offset : 0);
        else return broadcast_i32(kBias ? offset : 0);
    }
    template <int R, int P>
    static PENSTOCK_INLINE auto load_quad(const int8_t* p) {
        return load_nibble_quad_for<R, P>(p);
    }
    template <class Q>
    static PENSTOCK_INLINE Sum add(Sum sum, const Pair& pair, Q first, Q second) {
        if constexpr (kShort) return dot(dot(sum, pair.first, first), pair.second, second);
        else return dot_pair(sum, pair.first, first, pair.second, second);
    }
    static PENSTOCK_INLINE i32x16 concluded(Sum sum) {
        if constexpr (kShort) return penstock::PENSTOCK_ISA_NAMESPACE::concluded(sum);
        else return sum;
    }
};

// Codes of 4 bits from 0.
using NibbleCodes = PlaneCodes<4, 0, 0, 8>;

// Codes of a byte each, 128 above their numbers.
struct WholeCodes {
    using Sum = i32x16;
    static constexpr int kBias = 128;
    struct Pair {
        Codes first, second;
    };

    static PENSTOCK_INLINE int32_t offset(const int8_t*, int, int32_t sum) { return -kBias * sum; }
    static PENSTOCK_INLINE Sum begin(int32_t offset) { return broadcast_i32(offset); }
    template <int R, int P>
    static PENSTOCK_INLINE auto load_quad(const int8_t* p) {
        return load_quad_for<R, P>(p);
    }
    template <class Q>
    static PENSTOCK_INLINE Sum add(Sum sum, const Pair& pair, const Q& first, const Q& second) {
        return dot(dot(sum, pair.first, first), pair.second, second);
    }
    static PENSTOCK_INLINE i32x16 concluded(Sum sum) { return sum; }
};

struct ByteCodes : PlaneLines<8, 0>, WholeCodes {
    using Panel = Unlisted;
    static constexpr bool kTable = false;
    static PENSTOCK_INLINE Panel load_panel(const uint8_t*) { return {}; }
    static PENSTOCK_INLINE int value(const uint8_t*, int code) { return code - kBias; }
    static PENSTOCK_INLINE Pair load(Panel, const uint8_t* group, int i) {
        return {load_codes(group + low_line(i)), load_codes(group + low_line(i) + 64)};
    }
};

// Codes of 4 bits whose numbers are in the panel's first line.
struct TableCodes : PlaneLines<4, 0>, WholeCodes {
    using Panel = Steps;
    static constexpr bool kTable = true;
    static PENSTOCK_INLINE Panel load_panel(const uint8_t* panel) { return load_steps(panel); }
    static PENSTOCK_INLINE int value(const uint8_t* panel, int code) { return int8_t(panel[code]); }
    static PENSTOCK_INLINE Pair load(const Panel& steps, const uint8_t* group, int i) {
        Nibbles first, second;
        load_nibbles(group + low_line(i), first, second);
        return {penstock::PENSTOCK_ISA_NAMESPACE::look_up(steps, first), penstock::PENSTOCK_ISA_NAMESPACE::look_up(steps, second)};
    }
};

}  // namespace PENSTOCK_ISA_NAMESPACE
}  // namespace penstock
