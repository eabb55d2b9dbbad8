// The scales and minima of block forms: for share `h` of group `j` of a unit, sixteen outputs at a time.
//
// Products of a float16 and a short integer are exact in float32, and so are products with the unit of a table, a power
// of two: nothing in the file is lost.
#pragma once

#include "block_lanes.h"

namespace penstock {
inline namespace PENSTOCK_ISA_NAMESPACE {

// The float16 fields of a unit: read in place, or widened to floats.
struct StoredHalves {
    const uint8_t* unit;
    PENSTOCK_INLINE void open(const uint8_t* at) { unit = at; }
    PENSTOCK_INLINE f32x16 operator[](int field) const { return load_f16(unit + 32 * field); }
};
template <int kFields>
struct WidenedHalves {
    alignas(64) float numbers[kFields * kLanes];
    PENSTOCK_INLINE void open(const uint8_t* unit) {
        for (int field = 0; field < kFields; field++) store(numbers + field * kLanes, load_f16(unit + 32 * field));
    }
    PENSTOCK_INLINE f32x16 operator[](int field) const { return load(numbers + field * kLanes); }
};

// A scale for each 32 inputs.
struct HalfScales {
    static constexpr int kShares = 1;
    static constexpr bool kMinima = false;
    static constexpr float kSign = 0.0f;
    template <class H>
    static PENSTOCK_INLINE f32x16 scale(const H& halves, const uint8_t*, const uint8_t*, int, int) { return halves[0]; }
};

// The same with a minimum that is added.
struct HalfScalesAndMinima {
    static constexpr int kShares = 1;
    static constexpr bool kMinima = true;
    static constexpr float kSign = 1.0f;
    template <class H>
    static PENSTOCK_INLINE f32x16 scale(const H& halves, const uint8_t*, const uint8_t*, int, int) { return halves[0]; }
    template <class H>
    static PENSTOCK_INLINE f32x16 minimum(const H& halves, const uint8_t*, int, int) { return halves[1]; }
};

// A scale for a unit, and the code of zero: the minimum, an integer times a float16, is exact.
struct ZeroPointScales {
    static constexpr int kShares = 1;
    static constexpr bool kMinima = true;
    static constexpr float kSign = -1.0f;
    template <class H>
    static PENSTOCK_INLINE f32x16 scale(const H& halves, const uint8_t*, const uint8_t*, int, int) { return halves[0]; }
    template <class H>
    static PENSTOCK_INLINE f32x16 minimum(const H& halves, const uint8_t* unit, int, int) {
        return mul(halves[0], load_u8(unit + 32));
    }
};

// The unit of which the numbers in a panel's table are multiples.
PENSTOCK_INLINE f32x16 table_unit(const uint8_t* panel) {
    float unit;
    memcpy(&unit, panel + 16, sizeof unit);
    return broadcast(unit);
}

struct TableHalfScales {
    static constexpr int kShares = 1;
    static constexpr bool kMinima = false;
    static constexpr float kSign = 0.0f;
    template <class H>
    static PENSTOCK_INLINE f32x16 scale(const H& halves, const uint8_t* panel, const uint8_t*, int, int) {
        return mul(halves[0], table_unit(panel));
    }
};

struct TableE8m0Scales {
    static constexpr int kShares = 1;
    static constexpr bool kMinima = false;
    static constexpr float kSign = 0.0f;
    template <class H>
    static PENSTOCK_INLINE f32x16 scale(const H&, const uint8_t* panel, const uint8_t* unit, int, int) {
        return mul(load_e8m0(unit), table_unit(panel));
    }
};

// A float16 for 256 inputs times a signed byte for each share.
template <int kOfGroup, bool kTable>
struct SignedSuperScales {
    static constexpr int kShares = kOfGroup;
    static constexpr bool kMinima = false;
    static constexpr float kSign = 0.0f;
    template <class H>
    static PENSTOCK_INLINE f32x16 scale(const H& halves, const uint8_t* panel, const uint8_t* unit, int j, int h) {
        const f32x16 scale = mul(halves[0], load_i8(unit + 32 + (j * kShares + h) * 16));
        return kTable ? mul(scale, table_unit(panel)) : scale;
    }
};

// The same with unsigned bytes, followed by those of minima, which have a float16 unit of their own and are subtracted.
template <int kOfGroup>
struct SuperScales {
    static constexpr int kShares = kOfGroup;
    static constexpr bool kMinima = true;
    static constexpr float kSign = -1.0f;
    template <class H>
    static PENSTOCK_INLINE f32x16 scale(const H& halves, const uint8_t*, const uint8_t* unit, int j, int h) {
        return mul(halves[0], load_u8(unit + 64 + (j * kShares + h) * 16));
    }
    template <class H>
    static PENSTOCK_INLINE f32x16 minimum(const H& halves, const uint8_t* unit, int j, int h) {
        return mul(halves[1], load_u8(unit + 64 + 128 * kShares + (j * kShares + h) * 16));
    }
};

}  // namespace PENSTOCK_ISA_NAMESPACE
}  // namespace penstock
