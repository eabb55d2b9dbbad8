// How threads share the panels of a product: each starts with a run of neighbouring panels, and a thread that finishes
// takes half of what the slowest has left.
//
// Memory delivers weights fastest in long runs. But runs take different times: another process takes a processor, a
// core gets less memory bandwidth, some cores are slower than others. When runs were fixed in advance, all threads
// waited for the slowest (ADR 23).
#pragma once

#include <atomic>
#include <cstdint>

#include "layout.h"
#include "pool.h"
#include "simd.h"

namespace penstock {
inline namespace PENSTOCK_ISA_NAMESPACE {

class PanelRuns {
public:
    static constexpr int64_t kMost = 256;  // runs

    // `left` has a word for each run, which is 0 or as `take` left it when all panels were taken.
    PanelRuns(SharedWord* left, int64_t panels, int64_t runs) : left_(left), panels_(panels), runs_(runs) {}

    // Opens run `mine`: its owner may take panels from its beginning, and others from its end.
    void begin(int64_t mine) { left_[mine].value.store(packed({start(mine), start(mine + 1)}), std::memory_order_relaxed); }

    // Gets the next panels [first, last) for the owner of run `mine`; returns false when none are left. Every panel is
    // handed out once.
    bool take(int mine, int64_t& first, int64_t& last) {
        while (true) {
            uint64_t seen = left_[mine].value.load(std::memory_order_relaxed);
            const Run run = unpacked(seen);
            if (run.first < run.last) {
                first = run.first;
                last = run.last - run.first > kTogether ? run.first + kTogether : run.last;
                if (replace(mine, seen, {last, run.last})) return true;
            } else if (!take_half_of_longest(mine)) {
                return false;
            }
        }
    }

private:
    static constexpr int64_t kTogether = 8;  // panels: 150 KiB of 4-bit weights with 2048 inputs
    static constexpr int64_t kTile = 2;      // the most panels of a tile: runs begin at tiles

    struct Run {
        int64_t first, last;
    };
    static uint64_t packed(Run run) { return uint64_t(run.last) << 32 | uint64_t(run.first); }
    static Run unpacked(uint64_t run) { return {int64_t(run & 0xffffffffu), int64_t(run >> 32)}; }

    // Only the owner advances a run's first panel, and no panel is returned: so a run whose word is unchanged is
    // unchanged.
    bool replace(int64_t of, uint64_t seen, Run run) {
        return left_[of].value.compare_exchange_strong(seen, packed(run), std::memory_order_relaxed);
    }

    // Returns false if no run has more than its owner is about to take.
    bool take_half_of_longest(int mine) {
        int64_t longest = -1, most = kTogether;
        uint64_t seen = 0;
        for (int64_t i = 0; i < runs_; i++) {
            const uint64_t theirs = left_[i].value.load(std::memory_order_relaxed);
            const Run run = unpacked(theirs);
            if (run.last - run.first <= most) continue;
            most = run.last - run.first;
            longest = i;
            seen = theirs;
        }
        if (longest < 0) return false;
        const Run run = unpacked(seen);
        const int64_t middle = run.first + round_up(most / 2, kTile);
        // If another thread was faster, there may be another run to halve.
        if (replace(longest, seen, {run.first, middle})) {
            left_[mine].value.store(packed({middle, run.last}), std::memory_order_relaxed);
        }
        return true;
    }

    int64_t start(int64_t i) const { return i == runs_ ? panels_ : panels_ * i / runs_ / kTile * kTile; }

    SharedWord* left_;  // of each run, its first panel in the low half of the word, its end in the high half
    int64_t panels_, runs_;
};

}  // namespace PENSTOCK_ISA_NAMESPACE
}  // namespace penstock
