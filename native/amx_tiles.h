// The tiles of AMX: eight registers of up to sixteen rows of 64 bytes, which a thread configures and releases.
#pragma once

#include "simd.h"

namespace penstock {
inline namespace PENSTOCK_ISA_NAMESPACE {

struct TileShape {
    int rows, bytes;  // of a row
};

// The calling thread's tiles, released by the destructor: while they are in use the system saves 8 KiB more at each
// switch of threads.
class AmxTiles {
public:
    static constexpr int kTiles = 8;

    // Configures tiles from 0 on; the others cannot be used.
    template <int kShapes>
    explicit AmxTiles(const TileShape (&shapes)[kShapes]) {
        static_assert(kShapes <= kTiles, "");
        Config config{};
        config.palette = 1;
        for (int tile = 0; tile < kShapes; tile++) {
            config.rows[tile] = uint8_t(shapes[tile].rows);
            config.bytes[tile] = uint16_t(shapes[tile].bytes);
        }
        // GCC's tile intrinsics do not declare which memory they read, so all earlier writes must be complete.
        asm volatile("" : : "r"(&config) : "memory");
        _tile_loadconfig(&config);
    }
    ~AmxTiles() { _tile_release(); }
    AmxTiles(const AmxTiles&) = delete;
    AmxTiles& operator=(const AmxTiles&) = delete;

private:
    // The layout that LDTILECFG reads (Intel's manual, volume 1, section 18.2).
    struct Config {
        uint8_t palette, start_row, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    };
    static_assert(sizeof(Config) == 64, "");
};

}  // namespace PENSTOCK_ISA_NAMESPACE
}  // namespace penstock
