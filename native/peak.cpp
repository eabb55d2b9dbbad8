// Compiled once for each instruction set, with the flags of its kernels and PENSTOCK_PEAK naming the table.
#include "peak.h"

#include "dot_lanes.h"

namespace penstock {
inline namespace PENSTOCK_ISA_NAMESPACE {
namespace {

// A tile of sums as the linear kernels have: each row meets each panel of sixteen outputs. Enough of them for a latency
// of 4 cycles at 2 products a cycle, and few enough for 16 registers where a sum takes two.
#if defined(PENSTOCK_AVX512)
constexpr int kRows = 6;
#else
constexpr int kRows = 2;
#endif
constexpr int kPanels = 2;
constexpr int64_t kProducts = int64_t{kRows} * kPanels * kLanes;
constexpr int kLine = 64 / sizeof(float);
constexpr int kAhead = 64;  // lines: what one thread must have under way to keep memory busy

struct Operands {
    alignas(64) uint8_t weights[kPanels][64] = {};
    alignas(64) uint8_t rows[kRows][4] = {};
};

// What lies behind the pointer may have changed: loads may not leave the loop, nor the products of what they load.
PENSTOCK_INLINE const Operands& anew(const Operands& operands) {
    const Operands* place = &operands;
#if defined(__GNUC__) || defined(__clang__)
    asm volatile("" : "+r"(place) : : "memory");
#endif
    return *place;
}

struct Fp32 {
    using Sum = f32x16;
    static constexpr int64_t ops = kProducts * 2;
    PENSTOCK_INLINE static Sum nothing() { return zero(); }
    PENSTOCK_INLINE static f32x16 weights(const uint8_t* p) { return load(reinterpret_cast<const float*>(p)); }
    PENSTOCK_INLINE static f32x16 row(const uint8_t* p) { return broadcast(*reinterpret_cast<const float*>(p)); }
    PENSTOCK_INLINE static Sum product(Sum sum, f32x16 w, f32x16 x) { return fma(w, x, sum); }
    PENSTOCK_INLINE static f32x16 whole(Sum sum) { return sum; }
};

struct Bf16 : Fp32 {
    static constexpr int64_t ops = kProducts * 4;
    PENSTOCK_INLINE static Pairs weights(const uint8_t* p) { return load_weight_pairs(p); }
    PENSTOCK_INLINE static Pair row(const uint8_t* p) { return load_pair(reinterpret_cast<const bf16*>(p)); }
    PENSTOCK_INLINE static Sum product(Sum sum, const Pairs& w, const Pair& x) { return dot(sum, w, x); }
};

struct Int8 {
    using Sum = i32x16;
    static constexpr int64_t ops = kProducts * 8;
    PENSTOCK_INLINE static Sum nothing() { return broadcast_i32(0); }
    PENSTOCK_INLINE static Codes weights(const uint8_t* p) { return load_codes(p); }
    PENSTOCK_INLINE static Quad row(const uint8_t* p) { return load_quad(reinterpret_cast<const int8_t*>(p)); }
    PENSTOCK_INLINE static Sum product(Sum sum, const Codes& w, const Quad& x) { return dot(sum, w, x); }
    PENSTOCK_INLINE static f32x16 whole(Sum sum) { return to_f32(sum); }
};

template <class Form>
int64_t products(int64_t rounds) {
    const Operands operands;
    typename Form::Sum sums[kRows][kPanels];
    PENSTOCK_UNROLL
    for (int k = 0; k < kRows; k++) sums[k][0] = sums[k][1] = Form::nothing();
    for (int64_t i = 0; i < rounds; i++) {
        const Operands& now = anew(operands);
        const auto first = Form::weights(now.weights[0]), second = Form::weights(now.weights[1]);
        PENSTOCK_UNROLL
        for (int k = 0; k < kRows; k++) {
            const auto row = Form::row(now.rows[k]);
            sums[k][0] = Form::product(sums[k][0], first, row);
            sums[k][1] = Form::product(sums[k][1], second, row);
        }
    }
    f32x16 total = zero();
    PENSTOCK_UNROLL
    for (int k = 0; k < kRows; k++) total = add(total, add(Form::whole(sums[k][0]), Form::whole(sums[k][1])));
    volatile float kept = reduce_add(total);
    (void)kept;
    return rounds * Form::ops;
}

float read(const float* numbers, int64_t lines) {
    f32x16 sums[4] = {zero(), zero(), zero(), zero()};
    int64_t i = 0;
    for (; i + 4 <= lines; i += 4) {
        PENSTOCK_UNROLL
        for (int k = 0; k < 4; k++) {
            const float* line = numbers + (i + k) * kLine;
            PENSTOCK_PREFETCH_FAR(line + kAhead * kLine);  // beyond the end it does nothing
            sums[k] = add(sums[k], load(line));
        }
    }
    for (; i < lines; i++) sums[0] = add(sums[0], load(numbers + i * kLine));
    return reduce_add(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
}

}  // namespace
}  // namespace PENSTOCK_ISA_NAMESPACE

#define PENSTOCK_TEXT_OF(name) #name
#define PENSTOCK_TEXT(name) PENSTOCK_TEXT_OF(name)
const Peak PENSTOCK_PEAK = {PENSTOCK_TEXT(PENSTOCK_ISA_NAMESPACE), products<Fp32>, products<Bf16>, products<Int8>, read};

}  // namespace penstock
