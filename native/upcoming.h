// The keys and values that attention will read in the next layer, asked for line by line while products are computed.
//
// With many streams, products keep the registers busy and leave the memory idle; attention does the opposite. So a part
// of a step (parts.h) asks for its next keys and values in the loops of its products: by the time attention wants them
// they lie in the shared cache. Evenly, because a processor drops what is asked for while too much is on its way.
//
// Changes no result: memory is asked for, and not read.
#pragma once

#include <cstdint>

namespace penstock {

struct DecoderStep;
struct Part;

// Of one thread.
class Upcoming {
public:
    Upcoming(const DecoderStep& step, const Part& part) : step_(step), part_(part) {}

    // Goes on to the cache of a layer, in the order in which attention reads it: row after row, block after block.
    void aim(int64_t layer);

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

    const DecoderStep& step_;
    const Part& part_;
    const uint8_t* keys_ = nullptr;  // of the layer
    const uint8_t* values_ = nullptr;
    int32_t row_ = 0;    // of the part
    int32_t block_ = 0;  // of the row: whose keys come next, or whose values
    bool values_next_ = false;
    const uint8_t* at_ = nullptr;  // in a run of neighbouring lines: a block's keys, or its values
    int64_t left_ = 0;             // lines
    int64_t line_ = 0;             // bytes to the next line; 0 at the end
};

}  // namespace penstock
