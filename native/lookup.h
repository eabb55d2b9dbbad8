// Rows of packed weights as plain numbers, so that an embedding tied to the head is stored once.
//
// Row `id` is lane id % 16 of panel id / 16; the linear kernels' files draw the layouts. The numbers are those that
// the formats define, rounded once if they are stored as bfloat16.
#pragma once

#include "dot_lanes.h"
#include "linear_f8.h"
#include "linear_tiles.h"

namespace penstock {
inline namespace PENSTOCK_ISA_NAMESPACE {

// `number(panel, lane, k)` is the number of input k.
template <class Number>
void look_up(const LookupCall& call, Kind kind, Pool& pool, const Number& number) {
    const int64_t bytes = panel_bytes(kind, call.inputs);
    each_row(call.count, call.inputs, pool, [&](int64_t i) {
        const uint8_t* panel = call.weight + call.ids[i] / kPanel * bytes;
        const int64_t lane = call.ids[i] % kPanel, start = i * call.out.stride;
        for (int64_t k = 0; k < call.inputs; k++) {
            if (call.out.element == Element::f32) {
                static_cast<float*>(call.out.data)[start + k] = number(panel, lane, k);
            } else {
                static_cast<bf16*>(call.out.data)[start + k] = to_bf16(number(panel, lane, k));
            }
        }
    });
}

PENSTOCK_INLINE uint16_t load_u16(const uint8_t* p) {
    uint16_t bits;
    memcpy(&bits, p, sizeof bits);
    return bits;
}

inline void lookup_bf16(const LookupCall& call, Pool& pool) {
    look_up(call, Kind::bf16, pool, [](const uint8_t* panel, int64_t lane, int64_t k) {
        return to_float(bf16{load_u16(panel + k / 2 * 64 + lane * 4 + k % 2 * 2)});
    });
}

inline void lookup_f32(const LookupCall& call, Pool& pool) {
    look_up(call, Kind::f32, pool, [](const uint8_t* panel, int64_t lane, int64_t k) {
        float number;
        memcpy(&number, panel + k * 64 + lane * 4, sizeof number);
        return number;
    });
}

inline void lookup_f8(const LookupCall& call, Pool& pool) {
    look_up(call, Kind::f8, pool, [](const uint8_t* panel, int64_t lane, int64_t k) {
        const uint8_t* unit = panel + k / kF8Unit * 16 * (kF8Unit + 4);
        float scale;
        memcpy(&scale, unit + lane * 4, sizeof scale);
        return kE4m3.number[unit[64 + k % kF8Unit / 4 * 64 + f8_place(lane, k % 4)]] * scale;
    });
}

}  // namespace PENSTOCK_ISA_NAMESPACE
}  // namespace penstock
