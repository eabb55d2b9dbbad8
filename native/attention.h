// Attention over keys and values in blocks, for ragged rows of prefill and decode alike. One file, because the order
// of arithmetic below covers all of it.
//
// Work is divided into tiles. Query i of a row and head g of a group make the pair i * G + g, and a tile is up to
// kTileRows neighbouring pairs of one row and one key-value head: in decode the heads of a group, in prefill several
// queries. All pairs of a tile share each load of a key or value.
//
// Order of the arithmetic, the same for every pair whatever its tile, its batch and the threads:
//
//     for each chunk of kChunk absolute positions of which the pair sees any, with the positions that it sees:
//         score[p]  = sum over d ascending of q[d] * scale * k[p][d]             one accumulator for each score
//         score[p]  = softcap * tanh(score[p] / softcap)                         if there is a softcap
//         top       = max score,  weight[p] = exp(score[p] - top)
//         sum       = weights added up in 16 lanes (p mod 16, ascending), then across lanes
//         mixed[d]  = sum over p ascending of weight[p] * v[p][d]                one accumulator for each element
//
// With AVX512-BF16 and a bfloat16 cache, d and p advance by two, and one instruction adds both products. The scaled
// query is then rounded to bfloat16, and so is each weight, before it is added to `sum`. Where the pair sees only one
// of two neighbouring positions, the other has weight 0.
//
//     chunks are folded into the result in ascending order (online softmax: Milakov and Gimelshein 2018)
//     sum       = sum + exp(sink - top)                                      if there are sinks, after the last chunk
//
// Int8 keys and values (attention_call.h) change only the products. The query is rounded to int16 with a scale of its
// own, so the sum over d is an exact sum of integers, which is then multiplied by both scales. After the weights are
// added up, each is multiplied by the scale of its value. These products are rounded to int16, with one scale for each
// pair and chunk, so the sum over p is an exact sum of integers too.
//
// If there are fewer tiles than threads can share, chunks are computed separately and folded afterwards, by the same
// fold. Positions that a pair does not see, after its own or before its window, are never multiplied: their scores are
// replaced and their values not read. (Blocks are reused without being cleared, and 0 * NaN is NaN.) A tile starts to
// read at the first position that any of its pairs sees; no earlier block is looked up.
#pragma once

#include "attention_call.h"
#include "int8_lanes.h"
#include "layout.h"
#include "pool.h"
#include "simd.h"

namespace penstock {
inline namespace PENSTOCK_ISA_NAMESPACE {

constexpr int kPiece = 64;  // positions whose scores are computed together: the keys of a piece stay in the L1 cache
constexpr int kPieceGroups = kPiece / kLanes;
constexpr int kCacheLine = 64;  // bytes
constexpr int kHeadStride = kMostHeadDim + kLanes;  // an odd number of lines: rows of a tile use different sets of L1
constexpr float kMinusInfinity = -__builtin_inff();

// Register tiles: pairs x vectors. Results do not depend on their sizes.
#if defined(PENSTOCK_AVX512)
constexpr int kScoreRows = 4, kScoreGroups = 4, kMixRows = 6, kMixVectors = 4;
#elif defined(PENSTOCK_ISA_AVX2)
// 8 sums, 4 registers for 16 widened pairs of bfloat16, 1 for the operand: widened once for four rows.
constexpr int kScoreRows = 4, kScoreGroups = 1, kMixRows = 4, kMixVectors = 1;
#else
constexpr int kScoreRows = 1, kScoreGroups = 2, kMixRows = 1, kMixVectors = 2;
#endif

// AVX512-BF16 multiplies pairs of bfloat16 and adds both products: it takes packed keys and values as they are stored.
#if defined(PENSTOCK_ISA_AVX512_BF16)
constexpr bool kHasPairProduct = true;
#else
constexpr bool kHasPairProduct = false;
#endif

template <typename T>
constexpr int kPerWord = int(sizeof(uint32_t) / sizeof(T));

template <typename T>
constexpr bool kIsInt8 = sizeof(T) == 1;

// The memory that one thread needs for one tile, on its stack.
struct TileMemory {
    // Scaled queries: fp32, pairs of bf16 for the pair product, or pairs of int16 for int8 keys.
    alignas(64) uint32_t query[kTileRows * kHeadStride];
    float query_scale[kTileRows];                          // of int16 queries
    alignas(64) float scores[kTileRows * kChunk];          // replaced by weights
    alignas(64) float mixed[kTileRows * kHeadStride];      // of the chunk
    alignas(64) float result[kTileRows * kHeadStride];     // of all chunks so far
    float top[kTileRows], sum[kTileRows];
    alignas(64) bf16 rounded[kTileRows * kChunk];          // weights for the pair product
    // A piece of keys that are not packed in runs of 16, or of values that are not packed in words of positions.
    alignas(64) uint32_t gathered[kMostHeadDim * kPiece];
    const void* value[kChunk];  // the address of each group's words; a group is the positions that share a word
    // For int8: scales; the place of each position in the groups of `value`; weights in that order, and their scales.
    alignas(64) float value_scale[kChunk];
    int16_t place[kChunk];
    alignas(64) int16_t codes[kTileRows][kChunk * kGroupPositions];
    float code_scale[kTileRows];
};

// Up to kTileRows pairs of row `row`, starting with pair `first`, for one key-value head.
struct TileSpan {
    int row, first, count, kv_head;
};

PENSTOCK_INLINE int64_t slot_of(const AttentionCall& call, int row, int position) {
    const int block = call.block_table[row * call.table_width + position / call.cache.block_size];
    return int64_t(block) * call.cache.block_size + position % call.cache.block_size;
}

// The number of positions up to that of pair `index` of the row, its own included.
PENSTOCK_INLINE int up_to(const AttentionCall& call, int row, int index) {
    const int group = call.q_heads / call.cache.kv_heads;
    const int count = call.q_start[row + 1] - call.q_start[row];
    return call.kv_len[row] - count + index / group + 1;
}

// One past the last position that the pair sees.
PENSTOCK_INLINE int seen_by(const AttentionCall& call, int row, int index) {
    const int own = up_to(call, row, index), left = call.kv_len[row] - own;
    return own + (call.ahead < left ? call.ahead : left);
}

// The first position that the pair sees.
PENSTOCK_INLINE int hidden_from(const AttentionCall& call, int row, int index) {
    return window_start(call.window, up_to(call, row, index));
}

// The part of a chunk that each pair of a tile sees, in positions of the chunk.
struct Sight {
    int from, until;        // the pairs that see any of it
    int begin[kTileRows];   // of each of them, ascending
    int end[kTileRows];     // of each of them, ascending
    int first, most;        // the lowest begin and the highest end
    int base;               // `first` rounded down to a vector: where scores begin
};

PENSTOCK_INLINE Sight sight_of(const AttentionCall& call, const TileSpan& span, int start) {
    Sight sight;
    sight.from = 0;
    sight.until = span.count;
    for (int m = 0; m < span.count; m++) {
        const int end = seen_by(call, span.row, span.first + m) - start;
        const int begin = hidden_from(call, span.row, span.first + m) - start;
        sight.begin[m] = begin > 0 ? begin : 0;
        sight.end[m] = end > kChunk ? kChunk : end;
        if (end <= 0) sight.from = m + 1;
        if (begin >= kChunk && m < sight.until) sight.until = m;
    }
    sight.first = sight.begin[sight.from];
    sight.most = sight.end[sight.until - 1];
    sight.base = sight.first / kLanes * kLanes;
    return sight;
}

// ---- memory ahead --------------------------------------------------------------------------------------------------

// Addresses of the words of up to kPieceGroups groups of 16 positions: word w of group g is at group[g] + w * stride.
struct KeyPiece {
    const uint32_t* group[kPieceGroups];
    int64_t stride;
};

// Prefetches memory that is needed next, line by line, between arithmetic: blocks lie anywhere, so the processor's
// prefetcher cannot guess what follows a block. Rows of values first, then keys: lines at `group[g] + word * stride`.
// They go into the L2 cache, since only it allows enough requests at once.
struct Ahead {
    const uint32_t* group[kPieceGroups];
    int groups = 0, words = 0;
    int64_t stride = 0;
    const void* const* value = nullptr;
    int values = 0, row_bytes = 0;
    int g = 0, w = 0, v = 0, at = 0;

    PENSTOCK_INLINE void aim(const KeyPiece& piece, int its_groups, int its_words) {
        for (int i = 0; i < its_groups; i++) group[i] = piece.group[i];
        stride = piece.stride;
        groups = its_groups;
        words = its_words;
        g = w = 0;
    }

    PENSTOCK_INLINE void fetch() {
        if (v < values) {
            PENSTOCK_PREFETCH_FAR(static_cast<const char*>(value[v]) + at);
            at += kCacheLine;
            if (at >= row_bytes) at = 0, v++;
        } else if (g < groups) {
            PENSTOCK_PREFETCH_FAR(group[g] + w * stride);
            if (++w == words) w = 0, g++;
        }
    }
};

// ---- queries ------------------------------------------------------------------------------------------------------

// Scales the tile's queries and stores them as the words by which `score_tile` multiplies keys.
template <typename Q, typename T, bool kPairs>
PENSTOCK_INLINE void load_queries(const AttentionCall& call, const TileSpan& span, TileMemory& memory) {
    const int group = call.q_heads / call.cache.kv_heads, dim = call.cache.head_dim;
    for (int i = 0; i < span.count; i++) {
        const int index = span.first + i;
        const int64_t token = call.q_start[span.row] + index / group;
        const int64_t head = span.kv_head * group + index % group;
        const Q* from = static_cast<const Q*>(call.q.data) + token * call.q.stride + head * dim;
        uint32_t* to = memory.query + i * kHeadStride;
        if constexpr (kIsInt8<T>) {
            alignas(64) float scaled[kMostHeadDim];
            for (int d = 0; d < dim; d += kLanes) {
                store(scaled + d, mul(load_at(from, d, dim), broadcast(call.scale)));
            }
            memory.query_scale[i] = encode_query(scaled, dim, to);
            continue;
        }
        to[kPairs ? dim / 2 : dim - 1 + dim % 2] = 0;  // pads an odd head_dim
        for (int d = 0; d < dim; d += kLanes) {
            const f32x16 scaled = mul(load_at(from, d, dim), broadcast(call.scale));
            if (kPairs) {
                store_at(reinterpret_cast<bf16*>(to), d, dim, scaled);
            } else {
                store_at(reinterpret_cast<float*>(to), d, dim, scaled);
            }
        }
    }
}

// ---- keys ---------------------------------------------------------------------------------------------------------

// The number of groups of 16 in the next piece of a chunk that has `left` positions left.
PENSTOCK_INLINE int groups_in(int left) {
    if (left <= 0) return 0;
    return left < kPiece ? (left + kLanes - 1) / kLanes : kPieceGroups;
}

// The number of words of a key, including the scale of an int8 key.
template <typename T>
constexpr int words_of(int head_dim) {
    return (head_dim + kPerWord<T> - 1) / kPerWord<T> + (kIsInt8<T> ? 1 : 0);
}

// Transposes sixteen natural keys: word w of key i goes to `to[w * 16 + i]`.
template <typename T>
PENSTOCK_INLINE void gather_natural(const T* const* key, int dim, uint32_t* to) {
    const int whole = dim / kPerWord<T>;
    for (int w = 0; w < whole; w += kLanes) {
        f32x16 rows[kLanes];
        PENSTOCK_UNROLL
        for (int i = 0; i < kLanes; i++) rows[i] = load_at(reinterpret_cast<const float*>(key[i]), w, whole);
        transpose(rows);
        const int words = whole - w < kLanes ? whole - w : kLanes;
        for (int i = 0; i < words; i++) store(reinterpret_cast<float*>(to + (w + i) * kLanes), rows[i]);
    }
    if (whole * kPerWord<T> < dim) {  // the last element of an odd number of bfloat16
        for (int i = 0; i < kLanes; i++) {
            to[whole * kLanes + i] = 0;
            memcpy(to + whole * kLanes + i, key[i] + dim - 1, sizeof(T));
        }
    }
}

// Finds or gathers the keys of positions [start, start + 16 * groups), `start` a multiple of 16. Only positions of
// [begin, end) may be read; each group has at least one.
template <typename T>
PENSTOCK_INLINE KeyPiece find_keys(const AttentionCall& call, const TileSpan& span, int start, int groups, int begin,
                                   int end, uint32_t* memory) {
    const KvCache& cache = call.cache;
    const int words = words_of<T>(cache.head_dim), size = cache.block_size;
    [[maybe_unused]] const T* natural = static_cast<const T*>(cache.keys);
    const uint32_t* packed = static_cast<const uint32_t*>(cache.keys);
    const bool runs = cache.runs_of_keys();
    const auto readable = [&](int position) {
        return position < begin ? begin : position < end ? position : end - 1;
    };
    KeyPiece piece;
    piece.stride = runs ? size : kLanes;
    for (int g = 0; g < groups; g++) {
        const int first = start + g * kLanes;
        uint32_t* to = memory + g * words * kLanes;
        piece.group[g] = to;
        if (runs) {
            const int64_t block = call.block_table[span.row * call.table_width + first / size];
            piece.group[g] = packed + (block * cache.kv_heads + span.kv_head) * words * size + first % size;
        } else if (cache.packed) {
            for (int i = 0; i < kLanes; i++) {
                const int64_t slot = slot_of(call, span.row, readable(first + i));
                const int64_t block = slot / size * cache.kv_heads + span.kv_head;
                const uint32_t* key = packed + block * words * size + slot % size;
                for (int w = 0; w < words; w++) to[w * kLanes + i] = key[int64_t(w) * size];
            }
        } else if constexpr (!kIsInt8<T>) {
            const T* key[kLanes];
            for (int i = 0; i < kLanes; i++) {
                const int64_t slot = slot_of(call, span.row, readable(first + i));
                key[i] = natural + (slot * cache.kv_heads + span.kv_head) * cache.head_dim;
            }
            gather_natural(key, cache.head_dim, to);
        }
    }
    return piece;
}

// ---- scores -------------------------------------------------------------------------------------------------------

template <int kRows, int kGroups>
PENSTOCK_INLINE void score_int8_tile(const uint32_t* query, const float* query_scale, const uint32_t* const* group,
                                     int64_t stride, int words, float* scores, Ahead& ahead) {
    Sums sum[kRows][kGroups];
    PENSTOCK_UNROLL
    for (int m = 0; m < kRows; m++) {
        PENSTOCK_UNROLL
        for (int g = 0; g < kGroups; g++) sum[m][g] = no_sum();
    }
    for (int w = 0; w < words - 1; w++) {
        for (int g = 0; g < kGroups; g++) ahead.fetch();
        PENSTOCK_UNROLL
        for (int g = 0; g < kGroups; g++) {
            const Bytes key = load_bytes(group[g] + w * stride);
            PENSTOCK_UNROLL
            for (int m = 0; m < kRows; m++) {
                const uint32_t* q = query + m * kHeadStride + 2 * w;
                sum[m][g] = add_products(sum[m][g], q[0], q[1], key);
            }
        }
    }
    PENSTOCK_UNROLL
    for (int g = 0; g < kGroups; g++) {
        ahead.fetch();
        const f32x16 key_scale = load(reinterpret_cast<const float*>(group[g] + (words - 1) * stride));
        PENSTOCK_UNROLL
        for (int m = 0; m < kRows; m++) {
            const f32x16 scaled = mul(to_floats(sum[m][g]), broadcast(query_scale[m]));
            store(scores + m * kChunk + g * kLanes, mul(scaled, key_scale));
        }
    }
}

template <typename T, bool kPairs, int kRows, int kGroups>
PENSTOCK_INLINE void score_tile(const uint32_t* query, const float* query_scale, const uint32_t* const* group,
                                int64_t stride, int words, float* scores, Ahead& ahead) {
    if constexpr (kIsInt8<T>) {
        score_int8_tile<kRows, kGroups>(query, query_scale, group, stride, words, scores, ahead);
        return;
    }
    f32x16 sum[kRows][kGroups];
    PENSTOCK_UNROLL
    for (int m = 0; m < kRows; m++) {
        PENSTOCK_UNROLL
        for (int g = 0; g < kGroups; g++) sum[m][g] = zero();
    }
    const float* q = reinterpret_cast<const float*>(query);
    for (int w = 0; w < words; w++) {
        for (int g = 0; g < kGroups; g++) ahead.fetch();
#if defined(PENSTOCK_ISA_AVX512_BF16)
        if (kPairs) {
            PENSTOCK_UNROLL
            for (int g = 0; g < kGroups; g++) {
                const __m512bh key = __m512bh(_mm512_loadu_si512(group[g] + w * stride));
                PENSTOCK_UNROLL
                for (int m = 0; m < kRows; m++) {
                    const __m512bh pair = __m512bh(_mm512_set1_epi32(int(query[m * kHeadStride + w])));
                    sum[m][g].v = _mm512_dpbf16_ps(sum[m][g].v, pair, key);
                }
            }
            continue;
        }
#endif
        PENSTOCK_UNROLL
        for (int g = 0; g < kGroups; g++) {
            if (kPerWord<T> == 2) {
                f32x16 even, odd;
                load_pairs(reinterpret_cast<const bf16*>(group[g] + w * stride), even, odd);
                PENSTOCK_UNROLL
                for (int m = 0; m < kRows; m++) {
                    sum[m][g] = fma(broadcast(q[m * kHeadStride + 2 * w]), even, sum[m][g]);
                    sum[m][g] = fma(broadcast(q[m * kHeadStride + 2 * w + 1]), odd, sum[m][g]);
                }
            } else {
                const f32x16 key = load(reinterpret_cast<const float*>(group[g] + w * stride));
                PENSTOCK_UNROLL
                for (int m = 0; m < kRows; m++) {
                    sum[m][g] = fma(broadcast(q[m * kHeadStride + w]), key, sum[m][g]);
                }
            }
        }
    }
    PENSTOCK_UNROLL
    for (int m = 0; m < kRows; m++) {
        PENSTOCK_UNROLL
        for (int g = 0; g < kGroups; g++) store(scores + m * kChunk + g * kLanes, sum[m][g]);
    }
}

template <typename T, bool kPairs, int kRows>
PENSTOCK_INLINE void score_rows(const uint32_t* query, const float* query_scale, const KeyPiece& piece, int groups,
                                int words, float* scores, Ahead& ahead) {
    int g = 0;
    for (; g + kScoreGroups <= groups; g += kScoreGroups) {
        score_tile<T, kPairs, kRows, kScoreGroups>(query, query_scale, piece.group + g, piece.stride, words,
                                                   scores + g * kLanes, ahead);
    }
    for (; g < groups; g++) {
        score_tile<T, kPairs, kRows, 1>(query, query_scale, piece.group + g, piece.stride, words, scores + g * kLanes,
                                        ahead);
    }
}

// Pairs [0, rest), rest < kBound.
template <typename T, bool kPairs, int kBound>
PENSTOCK_INLINE void score_rest(const uint32_t* query, const float* query_scale, const KeyPiece& piece, int groups,
                                int words, int rest, float* scores, Ahead& ahead) {
    if constexpr (kBound > 1) {
        if (rest == kBound - 1) {
            score_rows<T, kPairs, kBound - 1>(query, query_scale, piece, groups, words, scores, ahead);
        } else {
            score_rest<T, kPairs, kBound - 1>(query, query_scale, piece, groups, words, rest, scores, ahead);
        }
    }
}

// Computes the scores of pairs [from, count) with the keys of one piece.
template <typename T, bool kPairs>
PENSTOCK_INLINE void score_piece(const TileMemory& memory, const KeyPiece& piece, int groups, int words, int from,
                                 int count, float* scores, Ahead& ahead) {
    int m = from;
    for (; m + kScoreRows <= count; m += kScoreRows) {
        score_rows<T, kPairs, kScoreRows>(memory.query + m * kHeadStride, memory.query_scale + m, piece, groups,
                                          words, scores + m * kChunk, ahead);
    }
    score_rest<T, kPairs, kScoreRows>(memory.query + m * kHeadStride, memory.query_scale + m, piece, groups, words,
                                      count - m, scores + m * kChunk, ahead);
}

// ---- weights ------------------------------------------------------------------------------------------------------

// Stores the weights as bfloat16 at `p`; returns the rounded values.
PENSTOCK_INLINE f32x16 round_to(bf16* p, f32x16 weight) {
#if defined(PENSTOCK_ISA_AVX512_BF16)
    const __m256i half = narrow(weight);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), half);
    return widen(half);
#else
    store(p, weight);
    return load(p);
#endif
}

// Scores [begin, end) become softcap * tanh(score / softcap) (Gemma 2: Riviere et al. 2024, section 2).
inline void cap_scores(float* scores, int begin, int end, float softcap) {
    const f32x16 cap = broadcast(softcap), inverse = broadcast(1.0f / softcap);
    for (int p = begin; p < end; p += kLanes) store(scores + p, mul(cap, tanh(mul(load(scores + p), inverse))));
}

// Scores [hidden, seen) become weights; lanes before and beyond become 0, which is exp(-inf). With kPairs they go to
// `rounded`.
template <bool kPairs>
PENSTOCK_INLINE void weigh(float* scores, bf16* rounded, int hidden, int seen, float& top, float& sum, Ahead& ahead) {
    const int base = hidden / kLanes * kLanes;
    for (int p = base; p < hidden; p++) scores[p] = kMinusInfinity;
    f32x16 most = broadcast(kMinusInfinity);
    for (int p = base; p < seen; p += kLanes) {
        f32x16 score = load(scores + p);
        if (seen - p < kLanes) {
            score = select(first_lanes(seen - p), score, broadcast(kMinusInfinity));
            store(scores + p, score);
        }
        most = max(score, most);
    }
    top = reduce_max(most);
    f32x16 total = zero();
    for (int p = base; p < seen; p += kLanes) {
        for (int line = 0; line < 4; line++) ahead.fetch();  // there is room for it beside the exponentials
        f32x16 weight = exp(sub(load(scores + p), broadcast(top)));
        if (kPairs) {
            weight = round_to(rounded + p, weight);
        } else {
            store(scores + p, weight);
        }
        total = add(total, weight);
    }
    sum = reduce_add(total);
}

// ---- values -------------------------------------------------------------------------------------------------------

// Whether the cache stores values in the words that are multiplied: the same element of neighbouring positions.
template <typename T>
PENSTOCK_INLINE bool lie_in_words(const KvCache& cache) {
    return kPerWord<T> == 1 || (cache.packed && cache.block_size % kPerWord<T> == 0);
}

// The values of one position: element d is at `of[d * apart]`.
template <typename T>
struct Values {
    const T* of;
    int64_t apart;
};

template <typename T>
PENSTOCK_INLINE Values<T> values_of(const AttentionCall& call, const TileSpan& span, int64_t block, int offset) {
    const KvCache& cache = call.cache;
    const T* values = static_cast<const T*>(cache.values);
    if (!cache.packed) {
        const int64_t slot = block * cache.block_size + offset;
        return {values + (slot * cache.kv_heads + span.kv_head) * cache.head_dim, 1};
    }
    constexpr int w = kPerWord<T>;
    const int64_t group = (block * cache.kv_heads + span.kv_head) * value_groups(cache) + offset / w;
    return {values + group * cache.head_dim * w + offset % w, w};
}

// Finds the words of positions [start, start + count) in the cache, block by block. Returns the number of groups.
template <typename T>
PENSTOCK_INLINE int find_values(const AttentionCall& call, const TileSpan& span, int start, int count,
                                const void** value) {
    constexpr int w = kPerWord<T>;
    const KvCache& cache = call.cache;
    const int size = cache.block_size;
    const int64_t row = int64_t(cache.head_dim) * (cache.packed ? w : cache.kv_heads);
    const int32_t* block = call.block_table + span.row * call.table_width + start / size;
    int offset = start % size, groups = 0;
    for (int p = 0; p < count; block++, offset = 0) {
        const T* at = values_of<T>(call, span, *block, offset).of;
        for (; offset < size && p < count; offset += w, p += w, at += row) value[groups++] = at;
    }
    return groups;
}

// Gathers the words of positions [begin, end) of a chunk; `begin` is the first position of a word. Positions from `end`
// on and before `first` become 0.
template <typename T>
PENSTOCK_INLINE void gather_values(const AttentionCall& call, const TileSpan& span, int start, int first, int begin,
                                   int end, TileMemory& memory) {
    constexpr int w = kPerWord<T>;
    const int dim = call.cache.head_dim, size = call.cache.block_size;
    T* to = reinterpret_cast<T*>(memory.gathered);
    for (int p = begin; p < end; p += w, to += dim * w) {
        memory.value[p / w] = to;
        for (int i = 0; i < w; i++) {
            if (p + i < first || p + i >= end) {
                for (int d = 0; d < dim; d++) to[d * w + i] = T{};
                continue;
            }
            const int at = start + p + i;
            const int32_t block = call.block_table[span.row * call.table_width + at / size];
            const Values<T> values = values_of<T>(call, span, block, at % size);
            for (int d = 0; d < dim; d++) to[d * w + i] = values.of[d * values.apart];
        }
    }
}

PENSTOCK_INLINE const int8_t* int8_values(const AttentionCall& call, const TileSpan& span, int32_t block) {
    const int64_t head = int64_t(block) * call.cache.kv_heads + span.kv_head;
    return static_cast<const int8_t*>(call.cache.values) + head * value_bytes(call.cache);
}

// The same for groups of int8 values, whose first and last may include other positions. Returns the number of groups.
PENSTOCK_INLINE int find_value_groups(const AttentionCall& call, const TileSpan& span, int start, int count,
                                      TileMemory& memory) {
    const int size = call.cache.block_size, dim = call.cache.head_dim;
    const int32_t* block = call.block_table + span.row * call.table_width + start / size;
    int offset = start % size, groups = 0;
    for (int p = 0; p < count; block++, offset = 0) {
        const int8_t* values = int8_values(call, span, *block);
        PENSTOCK_PREFETCH(values + value_codes(call.cache) + offset * int(sizeof(float)));  // needed after the scores
        const int last = size - offset < count - p ? size : offset + count - p;
        for (int group = offset / kGroupPositions; group * kGroupPositions < last; group++, groups++) {
            memory.value[groups] = values + int64_t(group) * kGroupPositions * dim;
            if (size % kGroupPositions == 0) continue;  // then positions are in order
            for (; offset < last && offset < (group + 1) * kGroupPositions; offset++, p++) {
                memory.place[p] = int16_t(groups * kGroupPositions + offset % kGroupPositions);
            }
        }
        if (size % kGroupPositions == 0) p += last - offset;
    }
    return groups;
}

// Loads the scales of the int8 values of positions [begin, end) of a chunk, padded with zeros to whole vectors.
PENSTOCK_INLINE void load_value_scales(const AttentionCall& call, const TileSpan& span, int start, int begin, int end,
                                       float* scale) {
    const int size = call.cache.block_size;
    const int32_t* block = call.block_table + span.row * call.table_width + (start + begin) / size;
    int offset = (start + begin) % size;
    for (int p = begin; p % kLanes != 0; p--) scale[p - 1] = 0.0f;
    for (int p = begin; p < end; block++, offset = 0) {
        const int here = size - offset < end - p ? size - offset : end - p;
        const int8_t* scales = int8_values(call, span, *block) + value_codes(call.cache);
        memcpy(scale + p, scales + offset * int(sizeof(float)), size_t(here) * sizeof(float));
        p += here;
    }
    for (int p = end; p % kLanes != 0; p++) scale[p] = 0.0f;
}

// Stores the weights of pair m times the scales of their values as int16, in the order of `groups` groups, the first of
// which contains position `begin`; all others are 0.
PENSTOCK_INLINE void encode_weights(const AttentionCall& call, const Sight& sight, int m, int begin, int groups,
                                    TileMemory& memory) {
    float* weights = memory.scores + m * kChunk;
    const int seen = sight.end[m], count = seen - begin;
    for (int p = begin / kLanes * kLanes; p < seen; p += kLanes) {
        store(weights + p, mul(load(weights + p), load(memory.value_scale + p)));
    }
    for (int p = begin; p < sight.begin[m]; p++) weights[p] = 0.0f;  // the pair does not see these
    int16_t* to = memory.codes[m];
    if (call.cache.block_size % kGroupPositions == 0) {  // so chunks begin with a group, and positions are in order
        memory.code_scale[m] = encode_head(weights + begin, count, 32767.0f, to);
        memset(to + count, 0, size_t(groups * kGroupPositions - count) * sizeof(int16_t));
        return;
    }
    int16_t codes[kChunk];
    memory.code_scale[m] = encode_head(weights + begin, count, 32767.0f, codes);
    memset(to, 0, size_t(groups) * kGroupPositions * sizeof(int16_t));
    for (int p = 0; p < count; p++) to[memory.place[p]] = codes[p];
}

// mixed[m][column .. column + 16 * kVectors) = the sum over positions of int16 weights times int8 values.
template <int kRows, int kVectors, bool kTail>
PENSTOCK_INLINE void mix_int8_tile(TileMemory& memory, int m, int groups, int column, int tail, Ahead& ahead) {
    Sums sum[kRows][kVectors];
    PENSTOCK_UNROLL
    for (int i = 0; i < kRows; i++) {
        PENSTOCK_UNROLL
        for (int v = 0; v < kVectors; v++) sum[i][v] = no_sum();
    }
    for (int g = 0; g < groups; g++) {
        if (g % kLanes == 0) ahead.fetch();  // keys have one word more than values
        const uint32_t* words = static_cast<const uint32_t*>(memory.value[g]) + column;
        uint32_t weights[kRows][2];
        PENSTOCK_UNROLL
        for (int i = 0; i < kRows; i++) memcpy(weights[i], memory.codes[m + i] + g * kGroupPositions, 8);
        PENSTOCK_UNROLL
        for (int v = 0; v < kVectors; v++) {
            ahead.fetch();
            const Bytes bytes = kTail ? load_bytes(words + v * kLanes, tail) : load_bytes(words + v * kLanes);
            PENSTOCK_UNROLL
            for (int i = 0; i < kRows; i++) sum[i][v] = add_products(sum[i][v], weights[i][0], weights[i][1], bytes);
        }
    }
    PENSTOCK_UNROLL
    for (int i = 0; i < kRows; i++) {
        float* mixed = memory.mixed + (m + i) * kHeadStride + column;
        PENSTOCK_UNROLL
        for (int v = 0; v < kVectors; v++) {
            store(mixed + v * kLanes, mul(to_floats(sum[i][v]), broadcast(memory.code_scale[m + i])));
        }
    }
}

template <int kRows>
PENSTOCK_INLINE void mix_int8_rows(TileMemory& memory, int m, int groups, int dim, Ahead& ahead) {
    int column = 0;
    for (; column + kMixVectors * kLanes <= dim; column += kMixVectors * kLanes) {
        mix_int8_tile<kRows, kMixVectors, false>(memory, m, groups, column, 0, ahead);
    }
    for (; column + kLanes <= dim; column += kLanes) {
        mix_int8_tile<kRows, 1, false>(memory, m, groups, column, 0, ahead);
    }
    if (column < dim) mix_int8_tile<kRows, 1, true>(memory, m, groups, column, dim - column, ahead);
}

// Pairs [m, m + rest), rest < kBound.
template <int kBound>
PENSTOCK_INLINE void mix_int8_rest(TileMemory& memory, int m, int rest, int groups, int dim, Ahead& ahead) {
    if constexpr (kBound > 1) {
        if (rest == kBound - 1) {
            mix_int8_rows<kBound - 1>(memory, m, groups, dim, ahead);
        } else {
            mix_int8_rest<kBound - 1>(memory, m, rest, groups, dim, ahead);
        }
    }
}

PENSTOCK_INLINE void mix_int8(TileMemory& memory, int dim, int from, int count, int groups, Ahead& ahead) {
    int m = from;
    for (; m + kMixRows <= count; m += kMixRows) mix_int8_rows<kMixRows>(memory, m, groups, dim, ahead);
    mix_int8_rest<kMixRows>(memory, m, count - m, groups, dim, ahead);
}

// Which positions of a group of two count. The other one, which is not written yet or hidden from this pair, is not
// multiplied.
enum class Half { both, first, second };

// mixed[m][column .. column + 16 * kVectors) += the sum over groups [begin, end) of weights times values.
template <typename T, int kRows, int kVectors, bool kTail, Half kHalf>
PENSTOCK_INLINE void mix_tile(const void* const* value, int column, int tail, const float* weights,
                              [[maybe_unused]] const bf16* rounded, int begin, int end, float* mixed, Ahead& ahead) {
    f32x16 sum[kRows][kVectors];
    PENSTOCK_UNROLL
    for (int m = 0; m < kRows; m++) {
        PENSTOCK_UNROLL
        for (int v = 0; v < kVectors; v++) sum[m][v] = load(mixed + m * kHeadStride + column + v * kLanes);
    }
    for (int g = begin; g < end; g++) {
        const uint32_t* row = static_cast<const uint32_t*>(value[g]) + column;
        for (int v = 0; v < kVectors; v++) ahead.fetch();
#if defined(PENSTOCK_ISA_AVX512_BF16)
        if constexpr (kPerWord<T> == 2) {
            __m512i words[kVectors];
            PENSTOCK_UNROLL
            for (int v = 0; v < kVectors; v++) {
                words[v] = kTail ? _mm512_maskz_loadu_epi32(__mmask16(first_lanes(tail)), row) :
                                   _mm512_loadu_si512(row + v * kLanes);
                if (kHalf == Half::first) words[v] = _mm512_and_si512(words[v], _mm512_set1_epi32(0xffff));
                if (kHalf == Half::second) words[v] = _mm512_andnot_si512(_mm512_set1_epi32(0xffff), words[v]);
            }
            PENSTOCK_UNROLL
            for (int m = 0; m < kRows; m++) {
                uint32_t both;
                memcpy(&both, rounded + m * kChunk + 2 * g, sizeof both);
                const __m512bh pair = __m512bh(_mm512_set1_epi32(int(both)));
                PENSTOCK_UNROLL
                for (int v = 0; v < kVectors; v++) {
                    sum[m][v].v = _mm512_dpbf16_ps(sum[m][v].v, pair, __m512bh(words[v]));
                }
            }
            continue;
        }
#endif
        PENSTOCK_UNROLL
        for (int v = 0; v < kVectors; v++) {
            alignas(64) uint32_t words[kLanes] = {};
            const uint32_t* from = row + v * kLanes;
            if (kTail) from = static_cast<const uint32_t*>(memcpy(words, from, size_t(tail) * sizeof(uint32_t)));
            if constexpr (kPerWord<T> == 1) {
                const f32x16 x = load(reinterpret_cast<const float*>(from));
                PENSTOCK_UNROLL
                for (int m = 0; m < kRows; m++) sum[m][v] = fma(broadcast(weights[m * kChunk + g]), x, sum[m][v]);
            } else {
                f32x16 first, second;
                load_pairs(reinterpret_cast<const bf16*>(from), first, second);
                PENSTOCK_UNROLL
                for (int m = 0; m < kRows; m++) {
                    const float* of = weights + m * kChunk + 2 * g;
                    if (kHalf != Half::second) sum[m][v] = fma(broadcast(of[0]), first, sum[m][v]);
                    if (kHalf != Half::first) sum[m][v] = fma(broadcast(of[1]), second, sum[m][v]);
                }
            }
        }
    }
    PENSTOCK_UNROLL
    for (int m = 0; m < kRows; m++) {
        PENSTOCK_UNROLL
        for (int v = 0; v < kVectors; v++) store(mixed + m * kHeadStride + column + v * kLanes, sum[m][v]);
    }
}

// All columns, for kRows pairs from m on.
template <typename T, int kRows, Half kHalf>
PENSTOCK_INLINE void mix_rows(TileMemory& memory, int dim, int m, int begin, int end, Ahead& ahead) {
    const void* const* value = memory.value;
    const float* weights = memory.scores + m * kChunk;
    const bf16* rounded = memory.rounded + m * kChunk;
    float* mixed = memory.mixed + m * kHeadStride;
    int column = 0;
    for (; column + kMixVectors * kLanes <= dim; column += kMixVectors * kLanes) {
        mix_tile<T, kRows, kMixVectors, false, kHalf>(value, column, 0, weights, rounded, begin, end, mixed, ahead);
    }
    for (; column + kLanes <= dim; column += kLanes) {
        mix_tile<T, kRows, 1, false, kHalf>(value, column, 0, weights, rounded, begin, end, mixed, ahead);
    }
    if (column < dim) {
        mix_tile<T, kRows, 1, true, kHalf>(value, column, dim - column, weights, rounded, begin, end, mixed, ahead);
    }
}

// Mixes the positions of [begin, end) that pairs [m, m + kRows) see, for each pair in ascending order. Groups that all
// of them see whole are mixed together; what a pair sees before and after those groups is mixed for it alone.
template <typename T, int kRows>
PENSTOCK_INLINE void mix_together(TileMemory& memory, int dim, int m, const Sight& sight, int begin, int end,
                                  Ahead& ahead) {
    constexpr int w = kPerWord<T>;
    const auto low = [&](int i) { return sight.begin[m + i] > begin ? sight.begin[m + i] : begin; };  // ascending
    const auto high = [&](int i) { return sight.end[m + i] < end ? sight.end[m + i] : end; };         // ascending
    const int last = high(0) / w, first = (low(kRows - 1) + w - 1) / w < last ? (low(kRows - 1) + w - 1) / w : last;
    for (int i = 0; i < kRows; i++) {
        const int whole = (low(i) + w - 1) / w;
        if (w == 2 && low(i) % 2 && low(i) < high(i)) {
            mix_rows<T, 1, Half::second>(memory, dim, m + i, whole - 1, whole, ahead);
        }
        if (whole < first) mix_rows<T, 1, Half::both>(memory, dim, m + i, whole, first, ahead);
    }
    mix_rows<T, kRows, Half::both>(memory, dim, m, first, last, ahead);
    for (int i = 0; i < kRows; i++) {
        const int whole = high(i) / w, before = (low(i) + w - 1) / w;
        const int from = before > last ? before : last;
        if (whole > from) mix_rows<T, 1, Half::both>(memory, dim, m + i, from, whole, ahead);
        if (w == 2 && high(i) % 2 && low(i) < high(i)) {
            mix_rows<T, 1, Half::first>(memory, dim, m + i, whole, whole + 1, ahead);
        }
    }
}

// Pairs [m, m + rest), rest < kBound.
template <typename T, int kBound>
PENSTOCK_INLINE void mix_rest(TileMemory& memory, int dim, int m, int rest, const Sight& sight, int begin, int end,
                              Ahead& ahead) {
    if constexpr (kBound > 1) {
        if (rest == kBound - 1) {
            mix_together<T, kBound - 1>(memory, dim, m, sight, begin, end, ahead);
        } else {
            mix_rest<T, kBound - 1>(memory, dim, m, rest, sight, begin, end, ahead);
        }
    }
}

// All pairs that see any of the chunk, for the positions of [begin, end) that they see.
template <typename T>
PENSTOCK_INLINE void mix(TileMemory& memory, int dim, const Sight& sight, int begin, int end, Ahead& ahead) {
    int m = sight.from;
    for (; m + kMixRows <= sight.until; m += kMixRows) {
        mix_together<T, kMixRows>(memory, dim, m, sight, begin, end, ahead);
    }
    mix_rest<T, kMixRows>(memory, dim, m, sight.until - m, sight, begin, end, ahead);
}

// ---- chunks -------------------------------------------------------------------------------------------------------

// Folds the (top, sum, mixed) of the next chunk into the (top, sum, result) of the chunks before it.
PENSTOCK_INLINE void fold(float& top, float& sum, float* result, float next_top, float next_sum, const float* mixed,
                          int dim) {
    const float highest = next_top > top ? next_top : top;
    const f32x16 keep = exp(broadcast(top - highest)), take = exp(broadcast(next_top - highest));
    top = highest;
    sum = lane0(fma(broadcast(next_sum), take, mul(broadcast(sum), keep)));
    for (int d = 0; d < dim; d += kLanes) {
        store(result + d, fma(load(mixed + d), take, mul(load(result + d), keep)));
    }
}

// The first position that a tile reads.
PENSTOCK_INLINE int first_of(const AttentionCall& call, const TileSpan& span) {
    return hidden_from(call, span.row, span.first);
}

// The keys to read after the last piece of a chunk: those of the next chunk, or the first of the next tile.
template <typename T>
PENSTOCK_INLINE void aim_beyond(const AttentionCall& call, const TileSpan& span, const TileSpan* next_span, int start,
                                TileMemory& memory, Ahead& ahead) {
    const bool last = start + kChunk >= call.kv_len[span.row];
    const TileSpan& after = last && next_span ? *next_span : span;
    const int first = last && next_span ? first_of(call, after) : start + kChunk;
    const int begin = first / kLanes * kLanes, left = call.kv_len[after.row] - begin;
    ahead.aim(find_keys<T>(call, after, begin, groups_in(left), first, begin + left, memory.gathered), groups_in(left),
              words_of<T>(call.cache.head_dim));
}

// Computes `top`, `sum` and `mixed` of chunk `chunk` for each pair of the tile. Returns the pairs that see any of it.
// `next_span` is the next tile of the same thread, if there is one.
template <typename T, bool kPairs>
Sight attend_chunk(const AttentionCall& call, const TileSpan& span, const TileSpan* next_span, int chunk,
                   TileMemory& memory, float* top, float* sum) {
    const KvCache& cache = call.cache;
    const int start = chunk * kChunk, dim = cache.head_dim, words = words_of<T>(cache.head_dim);
    const Sight sight = sight_of(call, span, start);
    const int most = sight.most;
    // Values begin at the word or group of the first position, if that lies in one block.
    constexpr int w = kPerWord<T>;
    const int skipped = !kIsInt8<T> || cache.block_size % w == 0 ? sight.first / w * w : sight.first;
    int groups_of_values = 0;  // 0: they are gathered
    if constexpr (kIsInt8<T>) {
        groups_of_values = find_value_groups(call, span, start + skipped, most - skipped, memory);
    } else if (lie_in_words<T>(cache)) {
        groups_of_values = skipped / w;
        groups_of_values += find_values<T>(call, span, start + skipped, most - skipped, memory.value + skipped / w);
    }
    Ahead ahead;
    ahead.value = memory.value;
    ahead.row_bytes = dim * int(sizeof(uint32_t));
    ahead.v = kIsInt8<T> ? 0 : skipped / w;
    const auto keys_from = [&](int begin) {
        return find_keys<T>(call, span, start + begin, groups_in(most - begin), start + sight.first, start + most,
                            memory.gathered);
    };
    KeyPiece piece = keys_from(sight.base);
    for (int begin = sight.base; begin < most; begin += kPiece) {
        const int groups = groups_in(most - begin), groups_after = groups_in(most - begin - kPiece);
        KeyPiece next{};
        if (cache.runs_of_keys()) {
            next = keys_from(begin + kPiece);
            ahead.aim(next, groups_after, words);
        }
        const int soon = ahead.v + kPiece / w;
        ahead.values = groups_after > 0 ? 0 : soon < groups_of_values ? soon : groups_of_values;
        int first = sight.from, until = sight.until;  // other pairs see nothing of this piece
        while (sight.end[first] <= begin) first++;
        while (sight.begin[until - 1] >= begin + kPiece) until--;
        score_piece<T, kPairs>(memory, piece, groups, words, first, until, memory.scores + begin, ahead);
        if (groups_after == 0) break;
        piece = cache.runs_of_keys() ? next : keys_from(begin + kPiece);
    }
    ahead.values = groups_of_values;
    if constexpr (kIsInt8<T>) {
        load_value_scales(call, span, start, skipped, most, memory.value_scale);
    }
    for (int m = sight.from; m < sight.until; m++) {
        float* scores = memory.scores + m * kChunk;
        if (call.softcap > 0.0f) cap_scores(scores, sight.begin[m] / kLanes * kLanes, sight.end[m], call.softcap);
        weigh<kPairs>(scores, memory.rounded + m * kChunk, sight.begin[m], sight.end[m], top[m], sum[m], ahead);
        if constexpr (kIsInt8<T>) {
            encode_weights(call, sight, m, skipped, groups_of_values, memory);
            continue;
        }
        memset(memory.mixed + m * kHeadStride, 0, size_t(dim + kLanes - 1) / kLanes * kLanes * sizeof(float));
    }
    if (cache.runs_of_keys()) aim_beyond<T>(call, span, next_span, start, memory, ahead);
    if constexpr (kIsInt8<T>) {
        mix_int8(memory, dim, sight.from, sight.until, groups_of_values, ahead);
    } else if (groups_of_values > 0) {
        mix<T>(memory, dim, sight, skipped, most, ahead);
    } else {
        constexpr int kAtOnce = kPiece * w;
        for (int begin = skipped; begin < most; begin += kAtOnce) {
            const int end = begin + kAtOnce < most ? begin + kAtOnce : most;
            gather_values<T>(call, span, start, sight.first, begin, end, memory);
            mix<T>(memory, dim, sight, begin, end, ahead);
        }
    }
    return sight;
}

PENSTOCK_INLINE void write_result(const AttentionCall& call, const TileSpan& span, int m, const float* result,
                                  float top, float sum) {
    const int group = call.q_heads / call.cache.kv_heads, dim = call.cache.head_dim, index = span.first + m;
    const int64_t token = call.q_start[span.row] + index / group, head = span.kv_head * group + index % group;
    const int64_t at = token * call.out.stride + head * dim;
    if (call.sinks) sum += lane0(exp(broadcast(call.sinks[head] - top)));  // inf if the sink takes all: the result is 0
    for (int d = 0; d < dim; d += kLanes) {
        const f32x16 out = div(load(result + d), broadcast(sum));
        if (call.out.element == Element::bf16) {
            store_at(static_cast<bf16*>(call.out.data) + at, d, dim, out);
        } else {
            store_at(static_cast<float*>(call.out.data) + at, d, dim, out);
        }
    }
}

// The chunks of a tile: [begin, end).
struct Chunks {
    int begin, end;
};

PENSTOCK_INLINE Chunks chunks_of(const AttentionCall& call, const TileSpan& span) {
    const int seen = seen_by(call, span.row, span.first + span.count - 1);
    return {first_of(call, span) / kChunk, (seen + kChunk - 1) / kChunk};
}

template <typename Q, typename T, bool kPairs>
void attend_tile(const AttentionCall& call, const TileSpan& span, const TileSpan* next_span) {
    TileMemory memory;
    load_queries<Q, T, kPairs>(call, span, memory);
    float top[kTileRows], sum[kTileRows];
    int begun = 0;  // the pairs that have a result already
    const Chunks chunks = chunks_of(call, span);
    for (int chunk = chunks.begin; chunk < chunks.end; chunk++) {
        const Sight sight = attend_chunk<T, kPairs>(call, span, next_span, chunk, memory, top, sum);
        for (int m = sight.from; m < sight.until; m++) {
            float* result = memory.result + m * kHeadStride;
            const float* mixed = memory.mixed + m * kHeadStride;
            if (m >= begun) {
                memory.top[m] = top[m];
                memory.sum[m] = sum[m];
                memcpy(result, mixed, size_t(call.cache.head_dim + kLanes - 1) / kLanes * kLanes * sizeof(float));
            } else {
                fold(memory.top[m], memory.sum[m], result, top[m], sum[m], mixed, call.cache.head_dim);
            }
        }
        begun = sight.until;
    }
    for (int m = 0; m < span.count; m++) {
        write_result(call, span, m, memory.result + m * kHeadStride, memory.top[m], memory.sum[m]);
    }
}

// ---- one chunk per task, for few tiles of long contexts -------------------------------------------------------------

// Where the results of a tile's chunk number `index` wait to be folded: [kTileRows][dim] mixed, then tops, then sums.
// No tile has more than `most` chunks.
PENSTOCK_INLINE float* part_of(const AttentionCall& call, float* parts, int64_t tile, int64_t most, int64_t index) {
    return parts + (tile * most + index) * kTileRows * (call.cache.head_dim + 2);
}

template <typename Q, typename T, bool kPairs>
void attend_part(const AttentionCall& call, const TileSpan& span, int chunk, float* part) {
    TileMemory memory;
    load_queries<Q, T, kPairs>(call, span, memory);
    const int dim = call.cache.head_dim;
    float* tops = part + kTileRows * dim;
    const Sight sight = attend_chunk<T, kPairs>(call, span, nullptr, chunk, memory, tops, tops + kTileRows);
    for (int m = sight.from; m < sight.until; m++) {
        memcpy(part + m * dim, memory.mixed + m * kHeadStride, size_t(dim) * sizeof(float));
    }
}

inline void fold_parts(const AttentionCall& call, const TileSpan& span, float* parts, int64_t tile, int64_t most) {
    const int first = chunks_of(call, span).begin;  // of the tile
    const int dim = call.cache.head_dim;
    alignas(64) float result[kMostHeadDim], mixed[kMostHeadDim];
    for (int m = 0; m < span.count; m++) {
        const int seen = seen_by(call, span.row, span.first + m);
        const int begin = hidden_from(call, span.row, span.first + m) / kChunk;
        float top = 0, sum = 0;
        for (int chunk = begin; chunk * kChunk < seen; chunk++) {
            const float* part = part_of(call, parts, tile, most, chunk - first);
            const float* tops = part + kTileRows * dim;
            memcpy(chunk == begin ? result : mixed, part + m * dim, size_t(dim) * sizeof(float));
            if (chunk == begin) {
                top = tops[m];
                sum = tops[kTileRows + m];
            } else {
                fold(top, sum, result, tops[m], tops[kTileRows + m], mixed, dim);
            }
        }
        write_result(call, span, m, result, top, sum);
    }
}

// ---- tiles --------------------------------------------------------------------------------------------------------

constexpr int kMostTasks = 1 << 15;  // of one Pool::run

template <typename Task>
PENSTOCK_INLINE void run_all(Pool& pool, int64_t tasks, const Task& task) {
    for (int64_t done = 0; done < tasks; done += kMostTasks) {
        const int64_t left = tasks - done;
        pool.run(int(left < kMostTasks ? left : kMostTasks), [&](int i) { task(done + i); });
    }
}

// Tile number `tile` of the call: row r has the tiles [starts[r], starts[r + 1]).
inline TileSpan find_tile(const AttentionCall& call, const int32_t* starts, int64_t tile, int kv_head) {
    int low = 0, high = call.rows;  // starts[low] <= tile < starts[high]
    while (high - low > 1) {
        const int middle = low + (high - low) / 2;
        (starts[middle] <= tile ? low : high) = middle;
    }
    const int pairs = (call.q_start[low + 1] - call.q_start[low]) * (call.q_heads / call.cache.kv_heads);
    const int first = int(tile - starts[low]) * kTileRows;
    return {low, first, pairs - first < kTileRows ? pairs - first : kTileRows, kv_head};
}

template <typename Q, typename T, bool kPairs>
void attend_all(const AttentionCall& call, Pool& pool) {
    const int group = call.q_heads / call.cache.kv_heads, heads = call.cache.kv_heads;
    constexpr int kFewRows = 64;
    int32_t few[kFewRows + 1];  // every member of a team has its own, since they share the scratch
    int32_t* starts = call.rows <= kFewRows ? few : reinterpret_cast<int32_t*>(call.scratch);
    int longest = 0;
    starts[0] = 0;
    for (int r = 0; r < call.rows; r++) {
        const int pairs = (call.q_start[r + 1] - call.q_start[r]) * group;
        starts[r + 1] = starts[r] + (pairs + kTileRows - 1) / kTileRows;
        if (call.kv_len[r] > longest) longest = call.kv_len[r];
    }
    const int64_t tiles = int64_t(starts[call.rows]) * heads;  // neighbouring tiles differ in the head
    const int32_t reach = reach_of(call.window, call.ahead);
    const bool split = worth_splitting(tiles, longest, reach, pool.threads()) &&
                       call.scratch_bytes >=
                           attention_scratch_to_split(call.rows, tiles, call.cache.head_dim, longest, reach);
    const auto span_of = [&](int64_t tile) { return find_tile(call, starts, tile / heads, int(tile % heads)); };
    if (!split) {
        // A task is a run of neighbouring tiles, so that a thread knows what it needs next; the heads of a row are
        // neighbours. The last tiles come first, since those of a prompt see most. One thread alone takes them in
        // ascending order, in which they may have been prefetched (kv_prefetcher.h).
        constexpr int64_t kTasksAThread = 4;
        const int64_t shares = pool.threads() == 1 ? 1 : kTasksAThread * pool.threads();
        const int64_t each = tiles >= shares * heads ? divide_up(tiles / heads, shares) * heads : 1;
        run_all(pool, divide_up(tiles, each), [&](int64_t task) {
            const int64_t first = (divide_up(tiles, each) - 1 - task) * each;
            const int64_t end = first + each < tiles ? first + each : tiles;
            TileSpan span = span_of(first);
            for (int64_t tile = first; tile < end; tile++) {
                const TileSpan next = span_of(tile + 1 < end ? tile + 1 : tile);
                attend_tile<Q, T, kPairs>(call, span, tile + 1 < end ? &next : nullptr);
                span = next;
            }
        });
        return;
    }
    float* parts = reinterpret_cast<float*>(call.scratch + attention_scratch(call.rows));
    const int64_t most = chunks_of_a_tile(longest, reach);
    run_all(pool, tiles * most, [&](int64_t task) {
        const int64_t tile = task % tiles, index = task / tiles;
        const TileSpan span = span_of(tile);
        const Chunks chunks = chunks_of(call, span);
        if (index >= chunks.end - chunks.begin) return;
        attend_part<Q, T, kPairs>(call, span, chunks.begin + int(index), part_of(call, parts, tile, most, index));
    });
    run_all(pool, tiles, [&](int64_t tile) { fold_parts(call, span_of(tile), parts, tile, most); });
}

inline void attention(const AttentionCall& call, Pool& pool) {
    const bool wide_q = call.q.element == Element::f32;
    switch (call.cache.element) {
        case KvElement::f32:
            return wide_q ? attend_all<float, float, false>(call, pool) : attend_all<bf16, float, false>(call, pool);
        case KvElement::bf16:
            return wide_q ? attend_all<float, bf16, kHasPairProduct>(call, pool)
                          : attend_all<bf16, bf16, kHasPairProduct>(call, pool);
        case KvElement::int8:
            return wide_q ? attend_all<float, int8_t, false>(call, pool) : attend_all<bf16, int8_t, false>(call, pool);
    }
}

}  // namespace PENSTOCK_ISA_NAMESPACE
}  // namespace penstock
