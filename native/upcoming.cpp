// Where the keys and values of a part lie: see upcoming.h.
#include "upcoming.h"

#include "decoder.h"
#include "parts.h"

namespace penstock {

void Upcoming::aim(int64_t layer) {
    keys_ = at_ = reinterpret_cast<const uint8_t*>(step_.keys[layer]);
    values_ = reinterpret_cast<const uint8_t*>(step_.values[layer]);
    row_ = block_ = 0;
    values_next_ = false;
    left_ = 0;
    line_ = 64;
}

void Upcoming::next_run() {
    const KvCache& cache = step_.cache;
    while (row_ < part_.rows && int64_t(block_) * cache.block_size >= part_.kv_len[row_]) row_++, block_ = 0;
    if (row_ == part_.rows) {
        left_ = INT64_MAX;
        line_ = 0;
        return;
    }
    const int64_t block = step_.block_table[(part_.row + row_) * step_.table_width + block_];
    const int64_t bytes = values_next_ ? value_block_bytes(cache) : key_block_bytes(cache);
    at_ = (values_next_ ? values_ : keys_) + block * bytes;
    left_ = bytes / 64;
    if (values_next_) block_++;
    values_next_ = !values_next_;
}

}  // namespace penstock
