// Asks for the keys and values that attention will read next, line by line while products are computed.
//
// With many streams, products keep the registers busy and leave the memory idle; attention does the opposite. So a shard
// of a step (shards.h) asks for its next keys and values in the loops of its products: by the time attention wants them
// they lie in the shared cache. Evenly, because a processor drops what is asked for while too much is on its way.
//
// Changes no result: memory is asked for, and not read.
#pragma once

#include <cstddef>
#include <cstdint>

namespace penstock {

struct KvCache;
struct Program;
struct Shard;
struct Step;

// Of one thread.
class KvPrefetcher {
public:
    KvPrefetcher(const Program& program, const Step& step, const Shard& shard)
        : program_(program), step_(step), shard_(shard) {}

    // Goes on to the cache that is read next, in the order in which attention reads it: row after row, block after
    // block.
    void aim_at_next();

    // The next `lines` lines of 64 bytes; the last ones again and again when there are no more.
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
    size_t operation_ = 0;  // from here on we look for the next attention
    const KvCache* cache_ = nullptr;
    int32_t window_ = 0;  // of its attention
    int32_t row_ = 0;    // of the shard
    int32_t block_ = 0;  // of the row: whose keys come next, or whose values
    bool values_next_ = false;
    const uint8_t* at_ = nullptr;  // in a run of neighbouring lines: a block's keys, or its values
    int64_t left_ = 0;             // lines
    int64_t line_ = 0;             // bytes to the next line; 0 at the end
};

}  // namespace penstock
