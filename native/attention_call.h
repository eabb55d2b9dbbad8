// The arguments of the attention kernels: plain pointers and sizes, not owned, and checked by the caller.
//
// The cache of a layer is an array of blocks, found through block tables. Keys and values have one of two layouts:
//
//     natural  both    [num_blocks][block_size][kv_heads][head_dim]
//     packed   keys    [num_blocks][kv_heads][words][block_size]  words of 32 bits, words = divide_up(head_dim, w)
//              values  [num_blocks][kv_heads][groups][head_dim]   words of 32 bits, groups = divide_up(block_size, w)
//
// A word holds w numbers, 2 of bf16 or 1 of fp32: of keys, neighbours of one key (an odd head_dim is padded with 0);
// of values, the same element of neighbouring positions.
//
//     keys    word 0   k0[0] k0[1] | k1[0] k1[1] | k2[0] k2[1] | ...     positions 0, 1, 2, ... of the block
//             word 1   k0[2] k0[3] | k1[2] k1[3] | ...
//     values  group 0  v0[0] v1[0] | v0[1] v1[1] | v0[2] v1[2] | ...     elements 0, 1, 2, ... of positions 0 and 1
//             group 1  v2[0] v3[0] | v2[1] v3[1] | ...
//
// A score is a sum over head_dim: with packed keys a vector holds the same word of 16 positions, so 16 lanes sum 16
// scores. A mix of values is a sum over positions: 16 lanes sum 16 elements. And the part of a block that one head
// needs is contiguous, so it is read faster. Attention is fastest with a packed cache and blocks of a multiple of 16
// positions; the results are the same bits for both layouts and all block sizes.
//
// A latent cache is natural, and has one head and only keys: a position's value is the last `value_dim` elements of its
// key (latent_attention.h). In int8 a position has a row of bytes, with one scale for the rotated part, which comes
// before the value, and one for each kLatentGroup elements of the value:
//
//     | int8 codes of the rotated part, padded to 16 | int8 codes of the value, padded to 16 | fp32 scales |
//
// Int8 keys and values have an fp32 scale for each position and head, in the block beside the codes:
//
//     keys    packed with w = 4, and one more word, the scale: words = divide_up(head_dim, 4) + 1
//     values  [num_blocks][kv_heads] of { int8 [groups][head_dim][4], fp32 [groups][4] },
//             groups = divide_up(block_size, 4): a word holds the same element of 4 neighbouring positions, so that 16
//             lanes sum 16 elements of a mix of values. A word has its positions in the order 0, 2, 1, 3: after a shift
//             has separated even and odd bytes, neighbouring positions are pairs.
#pragma once

#include <cstddef>
#include <cstdint>

#include "linear_call.h"

namespace penstock {

enum class KvElement : int32_t { f32 = 0, bf16 = 1, int8 = 2 };

struct KvCache {
    void* keys;
    void* values;
    KvElement element;  // of both
    bool packed;        // always true with int8, unless the cache is latent
    int32_t block_size;
    int32_t kv_heads;
    int32_t head_dim;
    int32_t value_dim = 0;  // of a latent cache, whose `values` are not read; 0 for others

    constexpr bool latent() const { return value_dim > 0; }

    // Whether the words of 16 neighbouring positions are contiguous.
    constexpr bool runs_of_keys() const { return packed && block_size % 16 == 0; }
};

// Row r holds the last q_start[r + 1] - q_start[r] of the kv_len[r] positions of one sequence. A token sees the
// positions up to its own, or with a window the last `window` of them, its own included; and up to `ahead` later
// positions of the sequence. Query head h reads key-value head h / (q_heads / kv_heads).
struct AttentionCall {
    ConstRows q;  // [T][q_heads][head_dim]; the stride is that between tokens
    Rows out;     // shaped like q; [T][q_heads][value_dim] for a latent cache
    KvCache cache;
    int32_t q_heads;  // a multiple of kv_heads
    int32_t rows;
    const int32_t* q_start;      // [rows + 1], ascending from 0
    const int32_t* kv_len;       // [rows]
    const int32_t* block_table;  // [rows][table_width]; blocks before the windows of a row's tokens are not read
    int64_t table_width;
    float scale;
    // At least attention_scratch(rows) bytes, 64-byte aligned; with attention_scratch_to_split(...) bytes threads may
    // share a long context. Results do not depend on it.
    uint8_t* scratch;
    size_t scratch_bytes;
    float softcap = 0.0f;          // scaled scores become softcap * tanh(score / softcap); 0: unchanged
    int32_t window = 0;            // 0: all positions
    const float* sinks = nullptr;  // [q_heads] scores added to the sum of a head's weights, without a value; or null
    int32_t ahead = 0;             // positions after its own that a token sees; 0 for a latent cache
};

// The first position that a token sees if its own is position seen - 1.
constexpr int32_t window_start(int32_t window, int32_t seen) { return window > 0 && seen > window ? seen - window : 0; }

// The most positions that a token sees, its own included; 0: all.
constexpr int32_t reach_of(int32_t window, int32_t ahead) {
    return window == 0 || ahead > INT32_MAX - window ? 0 : window + ahead;
}

constexpr int64_t element_bytes(KvElement element) {
    return element == KvElement::f32 ? 4 : element == KvElement::bf16 ? 2 : 1;
}
constexpr int64_t per_word(KvElement element) { return int64_t(sizeof(uint32_t)) / element_bytes(element); }

// Words of a packed key, including the scale of an int8 key.
constexpr int64_t key_words(const KvCache& cache) {
    const int64_t w = per_word(cache.element);
    return (cache.head_dim + w - 1) / w + (cache.element == KvElement::int8 ? 1 : 0);
}

// Groups of packed values in a block.
constexpr int64_t value_groups(const KvCache& cache) {
    const int64_t w = per_word(cache.element);
    return (cache.block_size + w - 1) / w;
}

// For int8 values: positions of a group; bytes of one head's codes in a block, without and with their scales.
constexpr int32_t kGroupPositions = 4;
constexpr int64_t value_codes(const KvCache& cache) { return value_groups(cache) * kGroupPositions * cache.head_dim; }
constexpr int64_t value_bytes(const KvCache& cache) {
    return value_codes(cache) + value_groups(cache) * kGroupPositions * int64_t(sizeof(float));
}

// A key of a latent cache: where its value begins and where it ends, in elements; its bytes with scales.
constexpr int32_t kLatentGroup = 128;
constexpr int32_t latent_first(const KvCache& cache) {
    const int32_t rotated = cache.head_dim - cache.value_dim;
    return cache.element == KvElement::int8 ? int32_t(round_up(rotated, 16)) : rotated;
}
constexpr int32_t latent_width(const KvCache& cache) {
    return latent_first(cache) + (cache.element == KvElement::int8 ? int32_t(round_up(cache.value_dim, 16)) : cache.value_dim);
}
constexpr int64_t latent_key_bytes(const KvCache& cache) {
    const int64_t scales = cache.element == KvElement::int8 ? 1 + divide_up(cache.value_dim, kLatentGroup) : 0;
    return latent_width(cache) * element_bytes(cache.element) + scales * int64_t(sizeof(float));
}

// Bytes of a block's keys, and of its values, for all heads.
constexpr int64_t key_block_bytes(const KvCache& cache) {
    if (cache.latent()) return cache.block_size * latent_key_bytes(cache);
    if (cache.packed) return cache.kv_heads * key_words(cache) * cache.block_size * int64_t(sizeof(uint32_t));
    return int64_t(cache.block_size) * cache.kv_heads * cache.head_dim * element_bytes(cache.element);
}
constexpr int64_t value_block_bytes(const KvCache& cache) {
    if (cache.latent()) return 0;
    if (cache.element == KvElement::int8) return cache.kv_heads * value_bytes(cache);
    if (cache.packed) return cache.kv_heads * value_groups(cache) * cache.head_dim * int64_t(sizeof(uint32_t));
    return key_block_bytes(cache);
}

constexpr int32_t kMostHeadDim = 512;
constexpr int32_t kMostLatentDim = 1024;  // of a latent cache's keys
constexpr int32_t kMostLatentWidth = kMostLatentDim + 32;  // including the padding of int8
constexpr int32_t kChunk = 256;  // positions; chunks begin at absolute positions 0, kChunk, 2 * kChunk, ...
constexpr int32_t kTileRows = 24;  // (query, head) pairs of a tile, which share their keys and values

constexpr size_t attention_scratch(int32_t rows) { return (size_t(rows) + 1 + 15) / 16 * 64; }

// The most chunks that a tile reads in contexts of at most `longest` positions, if each of its tokens sees `reach`
// positions; reach 0: all.
constexpr int64_t chunks_of_a_tile(int32_t longest, int32_t reach) {
    const int64_t all = (int64_t(longest) + kChunk - 1) / kChunk;
    const int64_t touched = (int64_t(reach) + kTileRows - 2) / kChunk + 2;
    return reach > 0 && touched < all ? touched : all;
}

// For `tiles` tiles (times key-value heads) of at most `longest` positions; only useful below a few tiles per thread.
constexpr size_t attention_scratch_to_split(int32_t rows, int64_t tiles, int32_t head_dim, int32_t longest,
                                            int32_t reach = 0) {
    const size_t chunks = size_t(chunks_of_a_tile(longest, reach));
    return attention_scratch(rows) + size_t(tiles) * chunks * kTileRows * (size_t(head_dim) + 2) * sizeof(float);
}

// Whether threads should share contexts: if contexts are long and there are few tiles per thread. With a reach of a
// chunk or less there is nothing to share.
constexpr bool worth_splitting(int64_t tiles, int32_t longest, int32_t reach, int threads) {
    return threads > 1 && longest > kChunk && (reach == 0 || reach > kChunk) && tiles < 4 * int64_t(threads);
}

// The useful amount of scratch; also enough for shorter reaches.
constexpr size_t attention_scratch_wanted(int32_t rows, int64_t tokens, int32_t q_heads, int32_t kv_heads,
                                          int32_t head_dim, int32_t longest, int threads, int32_t reach = 0) {
    const int64_t tiles = (tokens * (q_heads / kv_heads) / kTileRows + rows) * kv_heads;
    if (!worth_splitting(tiles, longest, reach, threads)) return attention_scratch(rows);
    return attention_scratch_to_split(rows, tiles, head_dim, longest, reach);
}

}  // namespace penstock
