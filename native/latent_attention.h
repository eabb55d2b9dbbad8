// Attention over a latent cache: one head of keys for all heads of queries, where a position's value is the end of its key
// (multi-head latent attention, absorbed: DeepSeek-AI 2024, "DeepSeek-V2", section 2.1).
//
// A task is one token and up to kLatentHeads neighbouring heads, which share each load of a key. Order of the arithmetic,
// the same for every token and head whatever the batch, the chunks of a prompt and the threads:
//
//     for each chunk of kChunk absolute positions of which the token sees any, with the positions that it sees:
//         score[p]  = sum over d ascending of q[d] * scale * k[p][d], in 16 lanes (d mod 16), then across lanes
//         top, weight[p] and sum as in attention.h
//         mixed[d]  = sum over p ascending of weight[p] * k[p][head_dim - value_dim + d]  one accumulator per element
//
// Chunks are folded, and sinks added, as in attention.h. All arithmetic is fp32. Keys are read as they are stored, bf16
// or fp32, or as int8 codes times their scales; then d counts the elements of a row with its padding
// (attention_call.h).
#pragma once

#include <type_traits>

#include "attention.h"
#include "attention_call.h"
#include "elements.h"
#include "pool.h"
#include "simd.h"

namespace penstock {
inline namespace PENSTOCK_ISA_NAMESPACE {

constexpr int kLatentHeads = 8;

// Register tiles: heads x positions of scores, heads x vectors of mixes. Results do not depend on their sizes.
#if defined(PENSTOCK_AVX512)
constexpr int kTiledHeads = 4, kTiledPositions = 4, kTiledVectors = 4;
#else
constexpr int kTiledHeads = 2, kTiledPositions = 2, kTiledVectors = 2;
#endif

// The memory that one thread needs for one task, on its stack.
struct LatentMemory {
    alignas(64) float query[kLatentHeads * kMostLatentWidth];  // scaled; in the order of keys, padded to whole vectors
    alignas(64) float mixed[kLatentHeads * kMostLatentDim];
    alignas(64) float result[kLatentHeads * kMostLatentDim];
    alignas(64) float scores[kLatentHeads * kChunk];  // replaced by weights
    const void* key[kChunk];                          // of the positions that the token sees
};

// 16 codes as floats.
PENSTOCK_INLINE f32x16 load_codes(const int8_t* p) {
#if defined(PENSTOCK_AVX512)
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
#elif defined(PENSTOCK_ISA_AVX2)
    const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes)),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(codes, 8)))};
#else
    return each([&](int i) { return float(p[i]); });
#endif
}

// How the keys of a call are stored.
struct LatentKeys {
    int first, width;  // where a value begins and a key ends, in elements

    template <typename T>
    PENSTOCK_INLINE f32x16 load(const void* key, int d) const {
        if constexpr (std::is_same_v<T, int8_t>) {
            const int8_t* codes = static_cast<const int8_t*>(key);
            const float* scales = reinterpret_cast<const float*>(codes + width);
            return mul(load_codes(codes + d), broadcast(scales[d < first ? 0 : 1 + (d - first) / kLatentGroup]));
        } else {
            return load_at(static_cast<const T*>(key), d, width);
        }
    }
};

// The part of a chunk that a token sees: its positions [from, until).
struct Glimpse {
    int from, until;
};

template <typename T, int kHeads, int kPositions>
PENSTOCK_INLINE void score_latent_tile(LatentMemory& memory, int head, int position, const LatentKeys& keys) {
    f32x16 sum[kHeads][kPositions];
    PENSTOCK_UNROLL
    for (int h = 0; h < kHeads; h++) {
        PENSTOCK_UNROLL
        for (int p = 0; p < kPositions; p++) sum[h][p] = zero();
    }
    for (int d = 0; d < keys.width; d += kLanes) {
        f32x16 key[kPositions];
        PENSTOCK_UNROLL
        for (int p = 0; p < kPositions; p++) key[p] = keys.load<T>(memory.key[position + p], d);
        PENSTOCK_UNROLL
        for (int h = 0; h < kHeads; h++) {
            const f32x16 query = load(memory.query + (head + h) * kMostLatentWidth + d);
            PENSTOCK_UNROLL
            for (int p = 0; p < kPositions; p++) sum[h][p] = fma(query, key[p], sum[h][p]);
        }
    }
    PENSTOCK_UNROLL
    for (int h = 0; h < kHeads; h++) {
        PENSTOCK_UNROLL
        for (int p = 0; p < kPositions; p++) memory.scores[(head + h) * kChunk + position + p] = reduce_add(sum[h][p]);
    }
}

template <typename T, int kHeads>
PENSTOCK_INLINE void score_latent_rows(LatentMemory& memory, int head, const Glimpse& seen, const LatentKeys& keys) {
    int p = seen.from;
    for (; p + kTiledPositions <= seen.until; p += kTiledPositions) {
        score_latent_tile<T, kHeads, kTiledPositions>(memory, head, p, keys);
    }
    for (; p < seen.until; p++) score_latent_tile<T, kHeads, 1>(memory, head, p, keys);
}

template <typename T, int kHeads, int kVectors>
PENSTOCK_INLINE void mix_latent_tile(LatentMemory& memory, int head, const Glimpse& seen, const LatentKeys& keys,
                                     int column) {
    f32x16 sum[kHeads][kVectors];
    PENSTOCK_UNROLL
    for (int h = 0; h < kHeads; h++) {
        PENSTOCK_UNROLL
        for (int v = 0; v < kVectors; v++) sum[h][v] = zero();
    }
    for (int p = seen.from; p < seen.until; p++) {
        f32x16 part[kVectors];
        PENSTOCK_UNROLL
        for (int v = 0; v < kVectors; v++) part[v] = keys.load<T>(memory.key[p], keys.first + column + v * kLanes);
        PENSTOCK_UNROLL
        for (int h = 0; h < kHeads; h++) {
            const f32x16 weight = broadcast(memory.scores[(head + h) * kChunk + p]);
            PENSTOCK_UNROLL
            for (int v = 0; v < kVectors; v++) sum[h][v] = fma(weight, part[v], sum[h][v]);
        }
    }
    PENSTOCK_UNROLL
    for (int h = 0; h < kHeads; h++) {
        PENSTOCK_UNROLL
        for (int v = 0; v < kVectors; v++) {
            store(memory.mixed + (head + h) * kMostLatentDim + column + v * kLanes, sum[h][v]);
        }
    }
}

template <typename T, int kHeads>
PENSTOCK_INLINE void mix_latent_rows(LatentMemory& memory, int head, const Glimpse& seen, const LatentKeys& keys) {
    const int width = keys.width - keys.first;
    int column = 0;
    for (; column + kTiledVectors * kLanes <= width; column += kTiledVectors * kLanes) {
        mix_latent_tile<T, kHeads, kTiledVectors>(memory, head, seen, keys, column);
    }
    for (; column < width; column += kLanes) mix_latent_tile<T, kHeads, 1>(memory, head, seen, keys, column);
}

template <typename Q>
PENSTOCK_INLINE void load_latent_queries(const AttentionCall& call, int64_t token, int head, int count,
                                         LatentMemory& memory) {
    const int dim = call.cache.head_dim, value = call.cache.value_dim, rotated = dim - value;
    const int first = latent_first(call.cache);
    for (int h = 0; h < count; h++) {
        const Q* from = static_cast<const Q*>(call.q.data) + token * call.q.stride + int64_t(head + h) * dim;
        float* to = memory.query + h * kMostLatentWidth;
        const auto copy = [&](const Q* part, int width, float* place) {
            for (int d = 0; d < width; d += kLanes) {
                store(place + d, mul(load_at(part, d, width), broadcast(call.scale)));
            }
        };
        if (first == rotated) {
            copy(from, dim, to);
        } else {
            copy(from, rotated, to);
            copy(from + rotated, value, to + first);
        }
    }
}

PENSTOCK_INLINE void write_latent_result(const AttentionCall& call, int64_t token, int head, const float* result,
                                         float top, float sum) {
    const int width = call.cache.value_dim;
    if (call.sinks) sum += lane0(exp(broadcast(call.sinks[head] - top)));
    for (int d = 0; d < width; d += kLanes) {
        Rows out = columns_from(call.out, int64_t(head) * width);
        store_row(out, token, d, width, div(load(result + d), broadcast(sum)));
    }
}

// Computes tops, sums and mixes of `count` heads for the chunk of positions [start, start + kChunk).
template <typename T>
PENSTOCK_INLINE void attend_latent_chunk(const AttentionCall& call, int row, int start, const Glimpse& seen, int count,
                                         LatentMemory& memory, float* top, float* sum) {
    const KvCache& cache = call.cache;
    const LatentKeys keys{latent_first(cache), latent_width(cache)};
    const int64_t bytes = latent_key_bytes(cache);
    for (int p = seen.from; p < seen.until; p++) {
        memory.key[p] = static_cast<const uint8_t*>(cache.keys) + slot_of(call, row, start + p) * bytes;
    }
    int h = 0;
    for (; h + kTiledHeads <= count; h += kTiledHeads) score_latent_rows<T, kTiledHeads>(memory, h, seen, keys);
    for (; h < count; h++) score_latent_rows<T, 1>(memory, h, seen, keys);
    Ahead nothing;
    for (h = 0; h < count; h++) {
        float* scores = memory.scores + h * kChunk;
        if (call.softcap > 0.0f) cap_scores(scores, seen.from / kLanes * kLanes, seen.until, call.softcap);
        weigh<false>(scores, nullptr, seen.from, seen.until, top[h], sum[h], nothing);
    }
    for (h = 0; h + kTiledHeads <= count; h += kTiledHeads) {
        mix_latent_rows<T, kTiledHeads>(memory, h, seen, keys);
    }
    for (; h < count; h++) mix_latent_rows<T, 1>(memory, h, seen, keys);
}

template <typename Q, typename T>
void attend_latent_heads(const AttentionCall& call, int row, int64_t token, int head, int count) {
    LatentMemory memory;
    load_latent_queries<Q>(call, token, head, count, memory);
    const int seen = int(call.kv_len[row] - (call.q_start[row + 1] - token) + 1);
    const int hidden = window_start(call.window, seen), width = call.cache.value_dim;
    float top[kLatentHeads], sum[kLatentHeads];
    for (int start = hidden / kChunk * kChunk; start < seen; start += kChunk) {
        const Glimpse glimpse{hidden > start ? hidden - start : 0, seen - start < kChunk ? seen - start : kChunk};
        float next_top[kLatentHeads], next_sum[kLatentHeads];
        attend_latent_chunk<T>(call, row, start, glimpse, count, memory, next_top, next_sum);
        for (int h = 0; h < count; h++) {
            float* result = memory.result + h * kMostLatentDim;
            const float* mixed = memory.mixed + h * kMostLatentDim;
            if (start <= hidden) {
                top[h] = next_top[h];
                sum[h] = next_sum[h];
                memcpy(result, mixed, size_t(width + kLanes - 1) / kLanes * kLanes * sizeof(float));
            } else {
                fold(top[h], sum[h], result, next_top[h], next_sum[h], mixed, width);
            }
        }
    }
    for (int h = 0; h < count; h++) {
        write_latent_result(call, token, head + h, memory.result + h * kMostLatentDim, top[h], sum[h]);
    }
}

template <typename Q, typename T>
void attend_latent_all(const AttentionCall& call, Pool& pool) {
    const int64_t first = call.q_start[0], tokens = call.q_start[call.rows] - first;
    const int64_t shares = (call.q_heads + kLatentHeads - 1) / kLatentHeads;
    run_all(pool, tokens * shares, [&](int64_t task) {
        const int64_t token = first + task / shares;
        int low = 0, high = call.rows;  // q_start[low] <= token < q_start[high]
        while (high - low > 1) {
            const int middle = low + (high - low) / 2;
            (call.q_start[middle] <= token ? low : high) = middle;
        }
        const int head = int(task % shares) * kLatentHeads, left = call.q_heads - head;
        attend_latent_heads<Q, T>(call, low, token, head, left < kLatentHeads ? left : kLatentHeads);
    });
}

inline void attend_latent(const AttentionCall& call, Pool& pool) {
    const bool wide_q = call.q.element == Element::f32;
    switch (call.cache.element) {
        case KvElement::f32:
            return wide_q ? attend_latent_all<float, float>(call, pool) : attend_latent_all<bf16, float>(call, pool);
        case KvElement::bf16:
            return wide_q ? attend_latent_all<float, bf16>(call, pool) : attend_latent_all<bf16, bf16>(call, pool);
        case KvElement::int8:
            return wide_q ? attend_latent_all<float, int8_t>(call, pool) : attend_latent_all<bf16, int8_t>(call, pool);
    }
}

// Attention over a cache of either kind.
inline void attention_of_any(const AttentionCall& call, Pool& pool) {
    call.cache.latent() ? attend_latent(call, pool) : attention(call, pool);
}

}  // namespace PENSTOCK_ISA_NAMESPACE
}  // namespace penstock
