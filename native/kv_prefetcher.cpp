#include "kv_prefetcher.h"

#include "program.h"
#include "shards.h"

namespace penstock {

void KvPrefetcher::aim_at_next() {
    while (operation_ < program_.operations.size() && !program_.attends(operation_)) operation_++;
    if (operation_ == program_.operations.size()) return;  // continue with the last cache: harmless, and it ends soon
    const AttendOperation& attend = *program_.attends(operation_++);
    cache_ = &step_.caches[attend.cache];
    window_ = attend.window;
    at_ = static_cast<const uint8_t*>(cache_->keys);
    row_ = 0;
    block_ = first_block();
    values_next_ = false;
    left_ = 0;
    line_ = 64;
}

// The row's first block: that with the first position that its first token sees.
int32_t KvPrefetcher::first_block() const {
    if (row_ >= shard_.rows) return 0;
    const int32_t count = shard_.q_start[row_ + 1] - shard_.q_start[row_];
    return window_start(window_, shard_.kv_len[row_] - count + 1) / cache_->block_size;
}

void KvPrefetcher::next_run() {
    if (!cache_) return;
    const KvCache& cache = *cache_;
    while (row_ < shard_.rows && int64_t(block_) * cache.block_size >= shard_.kv_len[row_]) {
        row_++;
        block_ = first_block();
    }
    if (row_ == shard_.rows) {
        left_ = INT64_MAX;
        line_ = 0;
        return;
    }
    const int64_t block = step_.block_table[(shard_.row + row_) * step_.table_width + block_];
    const int64_t bytes = values_next_ ? value_block_bytes(cache) : key_block_bytes(cache);
    at_ = static_cast<const uint8_t*>(values_next_ ? cache.values : cache.keys) + block * bytes;
    left_ = bytes / 64;
    if (values_next_ || cache.latent()) block_++;
    values_next_ = !values_next_ && !cache.latent();
}

}  // namespace penstock
