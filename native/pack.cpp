// Packing, output by output: bytes are moved; numbers are rounded only when they become bfloat16.
#include "pack.h"

#include <cstring>

#include "pool.h"

namespace penstock {
namespace {

uint16_t load_u16(const uint8_t* p) {
    uint16_t bits;
    std::memcpy(&bits, p, sizeof bits);
    return bits;
}

void store_u16(uint8_t* p, uint16_t bits) { std::memcpy(p, &bits, sizeof bits); }

// Four codes that are neighbours in a row are also neighbours in a panel, so they are moved as one word.
uint32_t load_u32(const uint8_t* p) {
    uint32_t bits;
    std::memcpy(&bits, p, sizeof bits);
    return bits;
}

void store_u32(uint8_t* p, uint32_t bits) { std::memcpy(p, &bits, sizeof bits); }

// The same number in each byte of a word.
constexpr uint32_t in_each_byte(uint32_t byte) { return byte * 0x01010101u; }

// Rounds to bfloat16, to nearest, ties to even; a NaN stays a NaN.
uint16_t round_to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

uint16_t bf16_at(const ConstRows& weight, int64_t output, int64_t input) {
    const int64_t at = output * weight.stride + input;
    if (weight.element == Element::f32) return round_to_bf16(static_cast<const float*>(weight.data)[at]);
    return static_cast<const uint16_t*>(weight.data)[at];
}

float f32_at(const ConstRows& weight, int64_t output, int64_t input) {
    const int64_t at = output * weight.stride + input;
    if (weight.element == Element::f32) return static_cast<const float*>(weight.data)[at];
    const uint32_t bits = uint32_t(static_cast<const uint16_t*>(weight.data)[at]) << 16;
    float number;
    std::memcpy(&number, &bits, sizeof number);
    return number;
}

// -8 times an fp16 number, from its bits; false if that is not a finite fp16 number. Multiplying by 8 loses no digits.
bool minus_eight_times(uint16_t half, uint16_t& result) {
    const int sign = ~half & 0x8000;
    int exponent = half >> 10 & 31, digits = half & 0x3ff;
    if (exponent > 27) return false;  // infinite, NaN, or too large when multiplied by 8
    if (exponent > 0) {
        exponent += 3;
    } else {
        digits *= 8;  // a subnormal number is digits * 2^-24; with exponent 1 it is (1024 + digits) * 2^-24
        if (digits >= 1024) exponent = 1;
        for (; digits >= 2048; digits /= 2) exponent++;
        digits &= 0x3ff;
    }
    result = static_cast<uint16_t>(sign | exponent << 10 | digits);
    return true;
}

// Calls fill(panel, start of the panel) for every panel, each already zeroed.
template <class Fill>
void fill_panels(Kind kind, int64_t outputs, int64_t inputs, uint8_t* to, Pool& pool, const Fill& fill) {
    constexpr int64_t kMostTasks = 64;
    const int64_t panels = panels_of(outputs), bytes = panel_bytes(kind, inputs);
    const int64_t each = divide_up(panels, kMostTasks);
    pool.run(static_cast<int>(divide_up(panels, each)), [&](int task) {
        for (int64_t panel = task * each; panel < panels && panel < (task + 1) * each; panel++) {
            std::memset(to + panel * bytes, 0, static_cast<size_t>(bytes));
            fill(panel, to + panel * bytes);
        }
    });
}

// The number of a panel's outputs that are not padding.
int64_t lanes_of(int64_t panel, int64_t outputs) {
    return outputs - panel * kPanel < kPanel ? outputs - panel * kPanel : kPanel;
}

// Calls fill(block, group of the panel, lane) for every block of every output.
template <class Fill>
void fill_groups(Kind kind, const uint8_t* blocks, int64_t block_bytes, int64_t outputs, int64_t inputs, uint8_t* to,
                 Pool& pool, const Fill& fill) {
    const int64_t groups = groups_of(inputs), group_bytes = panel_bytes(kind, inputs) / groups;
    fill_panels(kind, outputs, inputs, to, pool, [&](int64_t panel, uint8_t* start) {
        for (int64_t lane = 0; lane < lanes_of(panel, outputs); lane++) {
            const uint8_t* row = blocks + (panel * kPanel + lane) * groups * block_bytes;
            for (int64_t g = 0; g < groups; g++) fill(row + g * block_bytes, start + g * group_bytes, lane);
        }
    });
}

// GGUF's sixteen bytes pair number i with i + 16; ours pair k with k + 4 in each run of eight.
void repack_nibbles(const uint8_t* from, uint8_t* group, int64_t lane) {
    constexpr uint32_t mask = in_each_byte(15);
    for (int c = 0; c < 4; c++) {
        const int k = 8 * c, byte = k % 16, shift = k < 16 ? 0 : 4;
        const uint32_t low = load_u32(from + byte) >> shift & mask, high = load_u32(from + byte + 4) >> shift & mask;
        store_u32(group + c * 64 + lane * 4, low | high << 4);
    }
}

}  // namespace

void pack_bf16(const ConstRows& weight, int64_t outputs, int64_t inputs, uint8_t* to, Pool& pool) {
    fill_panels(Kind::bf16, outputs, inputs, to, pool, [&](int64_t panel, uint8_t* start) {
        for (int64_t lane = 0; lane < lanes_of(panel, outputs); lane++) {
            for (int64_t k = 0; k < inputs; k++) {
                store_u16(start + k / 2 * 64 + lane * 4 + k % 2 * 2, bf16_at(weight, panel * kPanel + lane, k));
            }
        }
    });
}

void pack_f32(const ConstRows& weight, int64_t outputs, int64_t inputs, uint8_t* to, Pool& pool) {
    fill_panels(Kind::f32, outputs, inputs, to, pool, [&](int64_t panel, uint8_t* start) {
        for (int64_t lane = 0; lane < lanes_of(panel, outputs); lane++) {
            for (int64_t k = 0; k < inputs; k++) {
                const float number = f32_at(weight, panel * kPanel + lane, k);
                std::memcpy(start + k * 64 + lane * 4, &number, sizeof number);
            }
        }
    });
}

void pack_q4_0(const uint8_t* blocks, int64_t outputs, int64_t inputs, uint8_t* to, Pool& pool) {
    fill_groups(Kind::q4, blocks, kQ40Block, outputs, inputs, to, pool,
                [](const uint8_t* block, uint8_t* group, int64_t lane) {
                    uint16_t minimum = 0;
                    minus_eight_times(load_u16(block), minimum);
                    store_u16(group + lane * 2, load_u16(block));
                    store_u16(group + 32 + lane * 2, minimum);
                    repack_nibbles(block + 2, group + 64, lane);
                });
}

void pack_q4_1(const uint8_t* blocks, int64_t outputs, int64_t inputs, uint8_t* to, Pool& pool) {
    fill_groups(Kind::q4, blocks, kQ41Block, outputs, inputs, to, pool,
                [](const uint8_t* block, uint8_t* group, int64_t lane) {
                    store_u16(group + lane * 2, load_u16(block));
                    store_u16(group + 32 + lane * 2, load_u16(block + 2));
                    repack_nibbles(block + 4, group + 64, lane);
                });
}

void pack_q8_0(const uint8_t* blocks, int64_t outputs, int64_t inputs, uint8_t* to, Pool& pool) {
    fill_groups(Kind::q8, blocks, kQ80Block, outputs, inputs, to, pool,
                [](const uint8_t* block, uint8_t* group, int64_t lane) {
                    store_u16(group + lane * 2, load_u16(block));
                    for (int64_t k = 0; k < kGroup; k += 4) {
                        store_u32(group + 32 + k * 16 + lane * 4, load_u32(block + 2 + k) ^ in_each_byte(0x80));
                    }
                });
}

void pack_f8(const uint8_t* rows, int64_t outputs, int64_t inputs, uint8_t* to, Pool& pool) {
    fill_panels(Kind::f8, outputs, inputs, to, pool, [&](int64_t panel, uint8_t* start) {
        for (int64_t lane = 0; lane < lanes_of(panel, outputs); lane++) {
            const uint8_t* scales = rows + (panel * kPanel + lane) * f8_row_bytes(inputs);
            const uint8_t* codes = scales + divide_up(inputs, kF8Unit) * 4;
            for (int64_t k = 0; k < inputs; k++) {
                uint8_t* unit = start + k / kF8Unit * kPanel * (4 + kF8Unit);
                if (k % kF8Unit == 0) std::memcpy(unit + lane * 4, scales + k / kF8Unit * 4, 4);
                unit[kPanel * 4 + k % kF8Unit / 4 * 64 + f8_place(lane, k % 4)] = codes[k];
            }
        }
    });
}

namespace {

// Stores `bits` bits of the codes of one group of one output, from a given bit on, as a plane.
template <int bits>
void pack_plane(const uint8_t* codes, int from, uint8_t* lines, int64_t lane) {
    constexpr int quads = 8 / bits;
    constexpr uint32_t mask = in_each_byte((1 << bits) - 1);
    for (int line = 0; line < bits; line++) {
        uint32_t word = 0;
        for (int quad = 0; quad < quads; quad++) {
            word |= (load_u32(codes + (line * quads + quad) * 4) >> from & mask) << quad * bits;
        }
        store_u32(lines + line * 64 + lane * 4, word);
    }
}

void pack_plane(int64_t bits, const uint8_t* codes, int from, uint8_t* lines, int64_t lane) {
    if (bits == 8) return pack_plane<8>(codes, from, lines, lane);
    if (bits == 4) return pack_plane<4>(codes, from, lines, lane);
    if (bits == 2) return pack_plane<2>(codes, from, lines, lane);
    if (bits == 1) pack_plane<1>(codes, from, lines, lane);
}

}  // namespace

void pack_codes(Kind kind, int64_t outputs, int64_t inputs, const CodesCall& from, uint8_t* to, Pool& pool) {
    const BlockForm form = block_form(kind);
    const int64_t units = inputs / form.inputs, record = form.record_bytes();
    fill_panels(kind, outputs, inputs, to, pool, [&](int64_t panel, uint8_t* start) {
        if (form.table) std::memcpy(start, from.table, 64);
        for (int64_t lane = 0; lane < lanes_of(panel, outputs); lane++) {
            const int64_t output = panel * kPanel + lane;
            const uint8_t* codes = from.codes + output * inputs;
            for (int64_t u = 0; u < units; u++) {
                const uint8_t* fields = from.records + (output * units + u) * record;
                uint8_t* unit = start + form.panel_header() + u * form.unit_bytes();
                for (int64_t i = 0; i < form.halves; i++) store_u16(unit + i * 32 + lane * 2, load_u16(fields + i * 2));
                for (int64_t i = 0; i < form.bytes; i++) {
                    unit[form.halves * 32 + i * 16 + lane] = fields[form.halves * 2 + i];
                }
                uint8_t* group = unit + form.unit_header();
                for (int64_t k = 0; k < form.inputs; k += kGroup, codes += kGroup, group += form.group_bytes()) {
                    pack_plane(form.low_bits, codes, 0, group, lane);
                    pack_plane(form.high_bits, codes, int(form.low_bits), group + 64 * form.low_bits, lane);
                }
            }
        }
    });
}

bool q4_0_minima_exist(const uint8_t* blocks, int64_t count) {
    uint16_t minimum;
    for (int64_t i = 0; i < count; i++) {
        if (!minus_eight_times(load_u16(blocks + i * kQ40Block), minimum)) return false;
    }
    return true;
}

}  // namespace penstock
