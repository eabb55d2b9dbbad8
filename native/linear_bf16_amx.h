// Linear with bfloat16 weights and activations by AMX (ADR 55): tiles of 32 rows by two panels of 16 outputs, 32 inputs at a time.
//
// The packed weight of linear_bf16.h already has the layout of a tile: pairs of inputs of 16 outputs, line by line.
//
// Order of a sum: in steps of 32 inputs, ascending. In each step the sum of the even inputs and that of the odd ones,
// both ascending, are added together, and the result to the sum so far. Subnormals count as zero. A row's sums do not
// depend on other rows of its tile, and every call is computed like this, however few rows it has.
#pragma once

#include "linear_tiles.h"
#if defined(PENSTOCK_ISA_AVX512_AMX)
#include "amx_tiles.h"
#endif

namespace penstock {
inline namespace PENSTOCK_ISA_NAMESPACE {

#if defined(PENSTOCK_ISA_AVX512_AMX)

struct LinearBf16 {
    static constexpr int kTileRows = 16, kRows = 2 * kTileRows;
    static constexpr int64_t kInputs = 32, kTileBytes = 1024;  // of a tile
    static constexpr int64_t kAhead = 8192;                    // how many bytes of a panel are prefetched ahead of use
    const LinearCall& call;
    const bf16* x;
    int64_t x_stride;

    // Rows that fit into the L2 cache beside the panels by which they are multiplied.
    Block block() const {
        constexpr int64_t kRowsBytes = 512 << 10, kPanels = 8;
        return {larger(1, kRowsBytes / (call.inputs * 2) / kRows) * kRows, kPanels};
    }

    // Panels of a gated call count its columns, as in walk_gated_tiles. All tiles have the same number of rows, because
    // a thread's tiles have one shape at a time. So the last tiles move up until they end with the last row: they compute
    // some rows a second time, and write only their own.
    void walk(int64_t row, int64_t last_row, int64_t panel, int64_t last_panel) const {
        const int rows = int(smaller(kTileRows, last_row - row));
        const TileShape of_rows{rows, 64}, of_weights{kTileRows, 64};
        const AmxTiles tiles({of_rows, of_rows, of_rows, of_rows, of_rows, of_rows, of_weights, of_weights});
        const int64_t step = call.gated() ? 1 : 2;
        for (; panel < last_panel; panel += step) {
            const bool pair = call.gated() || panel + 1 < last_panel;
            for (int64_t from = row; from < last_row; from += kRows) {
                const RowTiles tiled{rows, from, last_row, from == row};
                if (last_row - from > kTileRows) pair ? tile<2, 2>(tiled, panel) : tile<2, 1>(tiled, panel);
                else pair ? tile<1, 2>(tiled, panel) : tile<1, 1>(tiled, panel);
            }
        }
    }

private:
    // Rows [from, end), of which those beyond kRows are left to others, in tiles of `rows` rows.
    struct RowTiles {
        int rows;
        int64_t from, end;
        bool first;  // whether no other rows were multiplied by these panels before

        int64_t begin_of(int t) const { return smaller(from + t * kTileRows, end); }
        int64_t tile_at(int t) const { return smaller(begin_of(t), end - rows); }
    };

    // `T` tiles of rows and `P` panels. The first tiles of rows that read the panels prefetch their lines.
    template <int T, int P>
    PENSTOCK_NOINLINE void tile(const RowTiles& tiled, int64_t panel) const {
        const int64_t bytes = panel_bytes(Kind::bf16, call.inputs), whole = call.inputs / kInputs;
        const uint8_t* weight[P];
        for (int p = 0; p < P; p++) weight[p] = panel_at<P>(call, panel, p, bytes);
        const bf16* numbers[T];
        for (int t = 0; t < T; t++) numbers[t] = x + tiled.tile_at(t) * x_stride;
        _tile_zero(0);
        if constexpr (P > 1) _tile_zero(1);
        if constexpr (T > 1) _tile_zero(2);
        if constexpr (T > 1 && P > 1) _tile_zero(3);
        const bool first = tiled.first;
        for (int64_t i = 0; i < whole; i++) {
            const uint8_t* next_lines = take_prefetch(call, 8, numbers[0]);
            for (int line = 0; line < 8; line++) PENSTOCK_PREFETCH_FAR(next_lines + line * 64);
            for (int p = 0; first && p < P; p++) {
                for (int64_t line = 0; line < kTileBytes; line += 64) PENSTOCK_PREFETCH_FAR(weight[p] + line + kAhead);
            }
            multiply<T, P>(numbers, x_stride * 2, weight);
            for (int t = 0; t < T; t++) numbers[t] += kInputs;
            for (int p = 0; p < P; p++) weight[p] += kTileBytes;
        }
        if (call.inputs % kInputs) multiply_rest<T, P>(tiled.rows, numbers, weight);
        constexpr int kStride = P * kLanes;
        alignas(64) float sums[T][kTileRows * kStride];
        _tile_stored(0, sums[0], kStride * sizeof(float));
        if constexpr (P > 1) _tile_stored(1, sums[0] + kLanes, kStride * sizeof(float));
        if constexpr (T > 1) _tile_stored(2, sums[1], kStride * sizeof(float));
        if constexpr (T > 1 && P > 1) _tile_stored(3, sums[1] + kLanes, kStride * sizeof(float));
        for (int t = 0; t < T; t++) {
            const int64_t begin = tiled.begin_of(t), count = tiled.begin_of(t + 1) - begin;
            const float* own = sums[t] + (begin - tiled.tile_at(t)) * kStride;
            (P > 1 && call.gated() ? finish_gated : finish)(call, begin, int(count), panel, P, own);
        }
    }

    // Adds the products of 32 inputs to the sums in tiles 0 to 3, which are tiles of rows by panels. (Tiles are named in
    // instructions: no template can choose them.) Weights are loaded as a stream, which leaves L1 to the rows.
    template <int T, int P>
    PENSTOCK_INLINE static void multiply(const bf16* const (&numbers)[T], int64_t stride, const uint8_t* const (&weight)[P]) {
        _tile_stream_loadd(6, weight[0], 64);
        _tile_loadd(4, numbers[0], stride);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (T > 1) {
            _tile_loadd(5, numbers[T - 1], stride);
            _tile_dpbf16ps(2, 5, 6);
        }
        if constexpr (P > 1) {
            _tile_stream_loadd(7, weight[P - 1], 64);
            _tile_dpbf16ps(1, 4, 7);
            if constexpr (T > 1) _tile_dpbf16ps(3, 5, 7);
        }
    }

    // The same for fewer than 32 inputs, padded with zeros.
    template <int T, int P>
    PENSTOCK_NOINLINE void multiply_rest(int rows, const bf16* const (&numbers)[T], const uint8_t* const (&weight)[P]) const {
        alignas(64) uint8_t filled_weights[P][kTileBytes] = {};
        alignas(64) bf16 filled_numbers[T][kTileRows * kInputs] = {};
        const size_t pairs = size_t(divide_up(call.inputs % kInputs, 2));
        const uint8_t* weights_there[P];
        const bf16* numbers_there[T];
        for (int p = 0; p < P; p++) {
            memcpy(filled_weights[p], weight[p], pairs * 64);
            weights_there[p] = filled_weights[p];
        }
        for (int t = 0; t < T; t++) {
            for (int r = 0; r < rows; r++) memcpy(filled_numbers[t] + r * kInputs, numbers[t] + r * x_stride, pairs * 4);
            numbers_there[t] = filled_numbers[t];
        }
        asm volatile("" : : : "memory");  // see AmxTiles
        multiply<T, P>(numbers_there, kInputs * 2, weights_there);
    }
};

#endif

}  // namespace PENSTOCK_ISA_NAMESPACE
}  // namespace penstock
