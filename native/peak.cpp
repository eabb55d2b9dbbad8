// Compiled once for each instruction set, with the flags of its kernels; PENSTOCK_PEAK names the table.
#include "peak.h"

#include "block_lanes.h"
#if defined(PENSTOCK_ISA_AVX512_AMX)
#include "amx_tiles.h"
#endif

namespace penstock {
inline namespace PENSTOCK_ISA_NAMESPACE {
namespace {

// A tile of sums like those of the linear kernels: each row times each panel of sixteen outputs. Enough sums for a
// latency of 4 cycles at 2 products per cycle, and few enough for 16 registers if a sum takes two.
#if defined(PENSTOCK_AVX512)
constexpr int kRows = 6, kPanels = 2;
#else
constexpr int kRows = 4, kPanels = 1;
#endif
#if defined(PENSTOCK_ISA_AVX2)
constexpr int kCodeRows = 3;  // for products of codes: each needs one more register, and their sums have no latency
#else
constexpr int kCodeRows = kRows;
#endif
constexpr int64_t kProducts = kPanels * kLanes;  // of a row
constexpr int kLine = 64 / sizeof(float);
constexpr int kAhead = 64;  // lines: the outstanding requests with which one thread keeps memory busy

struct Operands {
    alignas(64) uint8_t weights[kPanels][64] = {};
    alignas(64) uint8_t rows[kRows][4] = {};
};

// Tells the compiler that the memory may have changed, so that it does not move loads, and their products, out of the
// loop.
PENSTOCK_INLINE const Operands& anew(const Operands& operands) {
    const Operands* place = &operands;
#if defined(__GNUC__) || defined(__clang__)
    asm volatile("" : "+r"(place) : : "memory");
#endif
    return *place;
}

struct Fp32 {
    using Sum = f32x16;
    static constexpr int rows = kRows;
    static constexpr int64_t ops = kProducts * 2;
    PENSTOCK_INLINE static Sum nothing() { return zero(); }
    PENSTOCK_INLINE static f32x16 weights(const uint8_t* p) { return load(reinterpret_cast<const float*>(p)); }
    PENSTOCK_INLINE static f32x16 row(const uint8_t* p) { return broadcast(*reinterpret_cast<const float*>(p)); }
    PENSTOCK_INLINE static Sum product(Sum sum, f32x16 w, f32x16 x) { return fma(w, x, sum); }
    PENSTOCK_INLINE static f32x16 whole(Sum sum) { return sum; }
};

#if defined(PENSTOCK_ISA_AVX512_BF16)
struct Bf16 : Fp32 {
    static constexpr int64_t ops = kProducts * 4;
    PENSTOCK_INLINE static Pairs weights(const uint8_t* p) { return load_weight_pairs(p); }
    PENSTOCK_INLINE static Pair row(const uint8_t* p) { return load_pair(reinterpret_cast<const bf16*>(p)); }
    PENSTOCK_INLINE static Sum product(Sum sum, const Pairs& w, const Pair& x) { return dot(sum, w, x); }
};
#else
using Bf16 = Fp32;  // since numbers can be widened once for many products
#endif

// Codes of few bits: their products are the fastest on machines without instructions for whole bytes.
struct Int8 {
    using Sum = ShortSum;
    static constexpr int rows = kCodeRows;
    static constexpr int64_t ops = kProducts * 8;
    PENSTOCK_INLINE static Sum nothing() { return begin_short(0); }
    PENSTOCK_INLINE static Nibbles weights(const uint8_t* p) { return load_bytes(p); }
    PENSTOCK_INLINE static auto row(const uint8_t* p) { return load_nibble_quad(reinterpret_cast<const int8_t*>(p)); }
    template <class Q>
    PENSTOCK_INLINE static Sum product(Sum sum, const Nibbles& w, const Q& x) { return dot(sum, w, x); }
    PENSTOCK_INLINE static f32x16 whole(Sum sum) { return to_f32(concluded(sum)); }
};

template <class Form>
int64_t products(int64_t rounds) {
    const Operands operands;
    typename Form::Sum sums[Form::rows][kPanels];
    PENSTOCK_UNROLL
    for (int k = 0; k < Form::rows; k++) {
        PENSTOCK_UNROLL for (int p = 0; p < kPanels; p++) sums[k][p] = Form::nothing();
    }
    for (int64_t i = 0; i < rounds; i++) {
        const Operands& now = anew(operands);
        decltype(Form::weights(nullptr)) weights[kPanels];
        PENSTOCK_UNROLL for (int p = 0; p < kPanels; p++) weights[p] = Form::weights(now.weights[p]);
        PENSTOCK_UNROLL
        for (int k = 0; k < Form::rows; k++) {
            const auto row = Form::row(now.rows[k]);
            PENSTOCK_UNROLL for (int p = 0; p < kPanels; p++) sums[k][p] = Form::product(sums[k][p], weights[p], row);
        }
    }
    f32x16 total = zero();
    PENSTOCK_UNROLL
    for (int k = 0; k < Form::rows; k++) {
        PENSTOCK_UNROLL for (int p = 0; p < kPanels; p++) total = add(total, Form::whole(sums[k][p]));
    }
    volatile float kept = reduce_add(total);
    (void)kept;
    return rounds * Form::rows * Form::ops;
}

#if defined(PENSTOCK_ISA_AVX512_AMX)
// Two tiles of rows times two of weights.
int64_t products_of_pairs(int64_t rounds) {
    constexpr int kTileRows = 16, kTileBytes = 64;
    alignas(64) static const uint8_t operands[kTileRows * kTileBytes] = {};
    const TileShape whole{kTileRows, kTileBytes};
    const AmxTiles tiles({whole, whole, whole, whole, whole, whole, whole, whole});
    for (int64_t i = 0; i < rounds; i++) {
        _tile_loadd(4, operands, kTileBytes);
        _tile_loadd(5, operands, kTileBytes);
        _tile_loadd(6, operands, kTileBytes);
        _tile_loadd(7, operands, kTileBytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    return rounds * 4 * kTileRows * kLanes * kTileBytes;
}
#else
int64_t products_of_pairs(int64_t rounds) { return products<Bf16>(rounds); }
#endif

float read(const float* numbers, int64_t lines) {
    f32x16 sums[4] = {zero(), zero(), zero(), zero()};
    int64_t i = 0;
    for (; i + 4 <= lines; i += 4) {
        PENSTOCK_UNROLL
        for (int k = 0; k < 4; k++) {
            const float* line = numbers + (i + k) * kLine;
            PENSTOCK_PREFETCH_FAR(line + kAhead * kLine);  // has no effect beyond the end
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
const Peak PENSTOCK_PEAK = {PENSTOCK_TEXT(PENSTOCK_ISA_NAMESPACE), products<Fp32>, products_of_pairs, products<Int8>, read};

}  // namespace penstock
