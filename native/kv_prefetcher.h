// Prefetches the keys and values that attention will read next, line by line, while products are computed.
//
// With many streams, products are bound by arithmetic and leave memory idle; attention is bound by memory. So a shard
// of a step (shards.h) prefetches its next keys and values in the loops of its products, and attention finds them in
// the shared cache. The requests are spread evenly, because a processor drops prefetches when too many are outstanding.
//
// Results do not change: memory is prefetched, not read.
#pragma once

#include <cstddef>
#include <cstdint>

namespace penstock {

struct KvCache;
struct Program;
struct Shard;
struct Step;

// Used by one thread.
class KvPrefetcher {
public:
    KvPrefetcher(const Program& program, const Step& step, const Shard& shard)
        : program_(program), step_(step), shard_(shard) {}

    // Goes on to the cache that attention reads next, in its order: row by row, block by block.
    void aim_at_next();

    // The next `lines` lines of 64 bytes; repeats the last ones when there are no more.
    const uint8_t* take(int lines) {
        if (left_ < lines) next_run();
        const uint8_t* at = at_;
        at_ += lines * line_;
        left_ -= lines;
        return at;
    }

private:
    void next_run();
    int32_t first_block() const;

    const Program& program_;
    const Step& step_;
    const Shard& shard_;
    size_t operation_ = 0;  // where the search for the next attention begins
    const KvCache* cache_ = nullptr;
    int32_t window_ = 0;  // of that attention
    int32_t row_ = 0;    // of the shard
    int32_t block_ = 0;  // of the row: the one whose keys or values come next
    bool values_next_ = false;
    const uint8_t* at_ = nullptr;  // in a block's keys or values, which are contiguous lines
    int64_t left_ = 0;             // lines
    int64_t line_ = 0;             // bytes to the next line; 0 at the end
};

}  // namespace penstock
