// How every linear kernel walks its outputs: which thread computes what, in which register tiles; and how results are
// written.
//
// Exactness: threads divide outputs and rows, never inputs; a tile sums each of its elements over all inputs in the one
// order of its kernel. So neither the division nor a tile's shape can change a bit.
//
// A kernel has `kRows`, `block()` as below and a `walk` of its own (linear_bf16_amx.h), or is a value with
//     kRows, kPanels                                  its register tile for many rows: rows x panels of 16 outputs
//     kFewRows                                        its tile for few rows has one panel and up to this many rows
//     kPanelsInTurn                                   whether a tile of two panels, in a gated call, needs no more
//                                                     registers than a tile of one panel
//     kEvenTiles                                      whether rows are divided evenly among tiles, or the rest goes
//                                                     to a lower tile
//     block()                                         how many rows are walked over how many panels before the next rows are
//     template <int R, int P> tile(row, panel, turn)  computes and writes R rows x P panels from there on; in a gated
//                                                     call P / 2 of gates and as many that gates multiply
#pragma once

#include "activation.h"
#include "kv_prefetcher.h"
#include "layout.h"
#include "linear_call.h"
#include "panel_runs.h"
#include "pool.h"
#include "simd.h"

namespace penstock {
inline namespace PENSTOCK_ISA_NAMESPACE {

PENSTOCK_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
PENSTOCK_INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

PENSTOCK_INLINE f32x16 load_elements(const ConstRows& from, int64_t row, int64_t column, int count) {
    const int64_t at = row * from.stride + column;
    if (from.element == Element::f32) return load_at(static_cast<const float*>(from.data) + at, 0, count);
    return load_at(static_cast<const bf16*>(from.data) + at, 0, count);
}

PENSTOCK_INLINE void store_elements(const Rows& to, int64_t row, int64_t column, int count, f32x16 value) {
    const int64_t at = row * to.stride + column;
    if (to.element == Element::f32) return store_at(static_cast<float*>(to.data) + at, 0, count, value);
    store_at(static_cast<bf16*>(to.data) + at, 0, count, value);
}

// Rows and panels of a product that are walked together.
struct Block {
    int64_t rows, panels;
};

// Where the panels of a tile begin: side by side, or in a gated call the first half at the gates and the second half at
// the outputs that gates multiply.
template <int P>
PENSTOCK_INLINE const uint8_t* panel_at(const LinearCall& call, int64_t panel, int p, int64_t bytes) {
    if (P > 1 && call.gated() && p >= P / 2) panel += call.outputs / 2 / kPanel - P / 2;
    return call.weight + (panel + p) * bytes;
}

// How a tile prefetches weights.
//
// A tile of one panel and up to kQuickRows rows needs little time for a line: out-of-order execution and prefetches
// into L1 keep memory busy. With VNNI the same holds for a tile of one row and the two panels of a gated call. A larger
// tile spends longer on each line, and then prefetches into L1, of which few may be outstanding, are too few: so it
// prefetches early into L2, which allows many, and from there in time into L1 (ADR 15).
//
// If several tiles read the same panels for different rows, each prefetches its share of the panels that follow: if the
// first fetched all of them, it would wait for them, and memory would be idle during the others.
struct Turn {
    int64_t at, of;  // this tile's number, and how many tiles share the panels
};

template <int R, int P, int kQuickRows = 3>
class WeightsAhead {
public:
    PENSTOCK_INLINE WeightsAhead(const LinearCall& call, int64_t panel_bytes, const Turn& turn)
        : distance_(P == 1 && turn.of == 1 ? 8192 : (call.gated() ? P / 2 : P) * panel_bytes), of_(turn.of),
          until_mine_(turn.at) {}

    // Goes on by one or more lines of every panel; returns how far ahead to prefetch. 0, when it is another tile's
    // turn, prefetches what the tile reads anyway: no branch, and no request to memory.
    PENSTOCK_INLINE int64_t next_early() {
        const bool mine = until_mine_ == 0;
        until_mine_ = mine ? of_ - 1 : until_mine_ - 1;
        return mine ? distance_ : 0;
    }

    PENSTOCK_INLINE static void ask(const uint8_t* at, int64_t early) {
        if constexpr (kQuick) {
            PENSTOCK_PREFETCH(at + kQuickAhead);
        } else {
            PENSTOCK_PREFETCH_FAR(at + early);
            PENSTOCK_PREFETCH(at + 2048);
        }
    }

private:
#if defined(PENSTOCK_ISA_AVX512_BF16)
    static constexpr bool kQuick = R <= (P == 1 ? kQuickRows : 1);
#else
    static constexpr bool kQuick = P == 1 && R <= kQuickRows;
#endif
    static constexpr int64_t kQuickAhead = P == 1 ? 4096 : 2048;  // of each panel
    int64_t distance_, of_, until_mine_;
};

// The next `lines` lines that the call's prefetcher wants; lines that are cached anyway, if there is none. The number
// of lines per weight is the same for all forms.
PENSTOCK_INLINE const uint8_t* take_prefetch(const LinearCall& call, int lines, const void* otherwise) {
    return call.prefetcher ? call.prefetcher->take(lines) : static_cast<const uint8_t*>(otherwise);
}

PENSTOCK_INLINE f32x16 add_vector(f32x16 sum, const ConstRows& vector, int64_t row, int64_t column, int count) {
    return vector.data ? add(sum, load_elements(vector, row, column, count)) : sum;
}

// Writes the sums of a tile, [rows][panels * 16]: plus bias, plus residual, rounded once. Not inlined into tiles: it
// runs once for thousands of products, and every shape of tile would have a copy.
PENSTOCK_NOINLINE inline void finish(const LinearCall& call, int64_t row, int rows, int64_t panel, int panels,
                                     const float* sums) {
    for (int r = 0; r < rows; r++) {
        for (int p = 0; p < panels; p++) {
            const int64_t column = (panel + p) * kPanel;
            const int count = int(smaller(kPanel, call.outputs - column));
            const f32x16 sum = add_vector(load(sums + (r * panels + p) * kLanes), call.bias, 0, column, count);
            store_elements(call.out, row + r, column, count, add_vector(sum, call.residual, row + r, column, count));
        }
    }
}

// The same for a gated call: multiplies the second half of the tile's panels by the activated first half.
template <class Activate>
PENSTOCK_INLINE void finish_gates(const LinearCall& call, int64_t row, int rows, int64_t panel, int panels,
                                  const float* sums, const Activate& activate) {
    const int half = panels / 2;
    for (int r = 0; r < rows; r++) {
        for (int p = 0; p < half; p++) {
            const int64_t column = (panel + p) * kPanel;
            const float* gates = sums + (r * panels + p) * kLanes;
            const f32x16 gate = add_vector(load(gates), call.bias, 0, column, kPanel);
            const f32x16 up = add_vector(load(gates + half * kLanes), call.bias, 0, call.columns() + column, kPanel);
            store_elements(call.out, row + r, column, kPanel, activate(gate, up));
        }
    }
}

PENSTOCK_NOINLINE inline void finish_gated(const LinearCall& call, int64_t row, int rows, int64_t panel, int panels,
                                           const float* sums) {
    const auto finish_by = [&](const auto& of) { finish_gates(call, row, rows, panel, panels, sums, of); };
    if (call.gate == Activation::gelu_new_and_mul) {
        return finish_by([](f32x16 gate, f32x16 up) { return mul(gelu_by_tanh(gate), up); });
    }
    if (call.gate == Activation::gelu_and_mul) {
        return finish_by([](f32x16 gate, f32x16 up) { return mul(gelu_by_normal(gate), up); });
    }
    if (call.gate == Activation::clamped_swiglu_and_mul) {
        return finish_by([](f32x16 gate, f32x16 up) { return clamped_swiglu(gate, up); });
    }
    finish_by([](f32x16 gate, f32x16 up) { return mul(silu(gate), up); });
}

// The sums of a tile, stored from registers.
template <int R, int P>
struct alignas(64) TileSums {
    float sums[R * P * kLanes];

    PENSTOCK_INLINE TileSums() {}
    PENSTOCK_INLINE explicit TileSums(const f32x16 (&sum)[R][P]) {
        PENSTOCK_UNROLL for (int r = 0; r < R; r++) {
            PENSTOCK_UNROLL for (int p = 0; p < P; p++) store(at(r, p), sum[r][p]);
        }
    }

    // The sums of one panel.
    PENSTOCK_INLINE void put(int p, const f32x16 (&sum)[R][1]) {
        PENSTOCK_UNROLL for (int r = 0; r < R; r++) store(at(r, p), sum[r][0]);
    }

    PENSTOCK_INLINE float* at(int r, int p) { return sums + (r * P + p) * kLanes; }

    PENSTOCK_INLINE void finish_tile(const LinearCall& call, int64_t row, int64_t panel) const {
        (P > 1 && call.gated() ? finish_gated : finish)(call, row, R, panel, P, sums);
    }
};

// A tile of a kernel that sums panels over all inputs in one call, `add_up(row, weight, ahead, sum)`: all panels
// together, or one after the other if registers do not suffice for two with this many rows. (With few rows memory
// bandwidth is the limit.)
template <int R, int P, class Kernel>
PENSTOCK_INLINE void add_up_tile(const Kernel& kernel, Kind kind, int64_t row, int64_t panel, const Turn& turn) {
    const int64_t bytes = panel_bytes(kind, kernel.call.inputs);
    WeightsAhead<R, P> ahead(kernel.call, bytes, turn);
    const uint8_t* weight[P];
    PENSTOCK_UNROLL for (int p = 0; p < P; p++) weight[p] = panel_at<P>(kernel.call, panel, p, bytes);
    if constexpr (P > 1 && Kernel::kPanelsInTurn && 2 * R > Kernel::kRows) {
        TileSums<R, P> sums;
        for (int p = 0; p < P; p++) {
            f32x16 sum[R][1];
            kernel.add_up(row, {weight[p]}, ahead, sum);
            sums.put(p, sum);
        }
        sums.finish_tile(kernel.call, row, panel);
    } else {
        f32x16 sum[R][P];
        kernel.add_up(row, weight, ahead, sum);
        TileSums<R, P>(sum).finish_tile(kernel.call, row, panel);
    }
}

// One tile of `rows` rows, at most R.
template <int R, int P, class Kernel>
PENSTOCK_INLINE void walk_tile(const Kernel& kernel, int64_t row, int64_t rows, int64_t panel, const Turn& turn) {
    if constexpr (R > 1) {
        if (rows < R) return walk_tile<R - 1, P>(kernel, row, rows, panel, turn);
    }
    kernel.template tile<R, P>(row, panel, turn);
}

// As few tiles as possible.
template <int R, int P, class Kernel>
void walk_rows(const Kernel& kernel, int64_t row, int64_t last, int64_t panel) {
    Turn turn{0, divide_up(last - row, R)};
    for (; turn.at < turn.of; turn.at++) {
        const int64_t rows = Kernel::kEvenTiles ? divide_up(last - row, turn.of - turn.at) : smaller(last - row, R);
        walk_tile<R, P>(kernel, row, rows, panel, turn);
        row += rows;
    }
}

template <class Kernel>
void walk_tiles(const Kernel& kernel, int64_t row, int64_t last_row, int64_t panel, int64_t last_panel) {
    constexpr int R = Kernel::kRows, P = Kernel::kPanels, Few = Kernel::kFewRows;
    if (last_row - row <= Few) {
        for (; panel < last_panel; panel++) walk_rows<Few, 1>(kernel, row, last_row, panel);
    }
    for (; last_panel - panel >= P; panel += P) walk_rows<R, P>(kernel, row, last_row, panel);
    if constexpr (P > 2) {
        for (; last_panel - panel >= 2; panel += 2) walk_rows<R, 2>(kernel, row, last_row, panel);
    }
    for (; panel < last_panel; panel++) walk_rows<Few, 1>(kernel, row, last_row, panel);
}

// Panels of a gated call count its columns: each is a panel of gates and the panel that they multiply.
template <class Kernel>
void walk_gated_tiles(const Kernel& kernel, int64_t row, int64_t last_row, int64_t panel, int64_t last_panel) {
    constexpr int P = Kernel::kPanels < 2 ? 2 : Kernel::kPanels;
    constexpr int R = Kernel::kPanels > 1 || Kernel::kPanelsInTurn ? Kernel::kRows : (Kernel::kRows + 1) / 2;
    constexpr int Few = Kernel::kFewRows < R ? Kernel::kFewRows : R;
    if (last_row - row <= Few) {
        for (; panel < last_panel; panel++) walk_rows<Few, 2>(kernel, row, last_row, panel);
    }
    for (; last_panel - panel >= P / 2; panel += P / 2) walk_rows<R, P>(kernel, row, last_row, panel);
    for (; panel < last_panel; panel++) walk_rows<R, 2>(kernel, row, last_row, panel);
}

// Whether a kernel has a `walk`.
template <class Kernel, class = void>
constexpr bool walks_itself = false;
template <class Kernel>
constexpr bool walks_itself<Kernel, decltype(void(&Kernel::walk))> = true;

// Walks a block's rows over its panels, then the next rows over the same panels.
template <class Kernel>
void walk_blocks(const Kernel& kernel, const LinearCall& call, int64_t row, int64_t last_row, int64_t panel,
                 int64_t last_panel) {
    const auto walk = [&](int64_t row, int64_t last_row, int64_t panel, int64_t last_panel) {
        if constexpr (walks_itself<Kernel>) kernel.walk(row, last_row, panel, last_panel);
        else if (call.gated()) walk_gated_tiles(kernel, row, last_row, panel, last_panel);
        else walk_tiles(kernel, row, last_row, panel, last_panel);
    };
    const Block block = kernel.block();
    if (last_row - row <= block.rows) return walk(row, last_row, panel, last_panel);
    for (; panel < last_panel; panel += block.panels) {
        const int64_t end = smaller(last_panel, panel + block.panels);
        for (int64_t from = row; from < last_row; from += block.rows) {
            walk(from, smaller(last_row, from + block.rows), panel, end);
        }
    }
}

// Divides the outputs among the threads, and the rows too if there are too few panels; uses only as many threads as
// have something to do.
template <class Kernel>
void split_tiles(const Kernel& kernel, const LinearCall& call, Pool& pool) {
    constexpr int64_t kLeastProducts = 1 << 16, kLeastPanels = 2;
    const auto walk = [&](int64_t row, int64_t last_row, int64_t panel, int64_t last_panel) {
        walk_blocks(kernel, call, row, last_row, panel, last_panel);
    };
    const int64_t panels = panels_of(call.columns()), work = call.rows * round_up(call.outputs, kPanel) * call.inputs;
    const int64_t threads = smaller(smaller(pool.threads(), PanelRuns::kMost), larger(1, work / kLeastProducts));
    const int64_t runs = smaller(threads, larger(1, panels / kLeastPanels));
    const int64_t rows_each = round_up(divide_up(call.rows, threads / runs), Kernel::kRows);
    if (threads == 1) return pool.run(1, [&](int) { walk(0, call.rows, 0, panels); });
    if (rows_each < call.rows) {
        return pool.run(int(runs * divide_up(call.rows, rows_each)), [&](int task) {
            const int64_t row = task / runs * rows_each, run = task % runs;
            walk(row, smaller(row + rows_each, call.rows), panels * run / runs, panels * (run + 1) / runs);
        });
    }
    Team* team = pool.team();
    SharedWord words[PanelRuns::kMost];
    PanelRuns left(team ? team->words() : words, panels, runs);
    if (!team) {
        for (int64_t i = 0; i < runs; i++) left.begin(i);
    }
    pool.run(int(runs), [&](int mine) {
        if (team) left.begin(mine);  // members arrive at different times, so each opens only its own run
        for (int64_t panel, last_panel; left.take(mine, panel, last_panel);) walk(0, call.rows, panel, last_panel);
    });
}

// Runs `convert(row)` for each row: on the calling thread alone if there is little to do.
template <class Convert>
void each_row(int64_t rows, int64_t inputs, Pool& pool, const Convert& convert) {
    constexpr int64_t kLeastElements = 1 << 13;
    const int64_t tasks = larger(1, smaller(smaller(rows, pool.threads() * 2), rows * inputs / kLeastElements));
    const int64_t rows_each = divide_up(rows, tasks);
    pool.run(int(divide_up(rows, rows_each)), [&](int task) {
        const int64_t last = smaller(rows, (task + 1) * rows_each);
        for (int64_t row = task * rows_each; row < last; row++) convert(row);
    });
}

}  // namespace PENSTOCK_ISA_NAMESPACE
}  // namespace penstock
