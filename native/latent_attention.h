// Attention over a latent cache: one head of keys for all heads of queries, where a position's value is the end of its key
// (multi-head latent attention, absorbed: DeepSeek-AI 2024, "DeepSeek-V2", section 2.1).
//
// A task is one token and up to kLatentHeads neighbouring heads, which share each load of a key. Order of the arithmetic,
// the same for every token and head whatever the batch, the chunks of a prompt and the threads:
//
//     for each chunk of kChunk absolute positions of which the token sees any, with the positions that it sees:
//         score[p]  = sum over d ascending of q[d] * scale * k[p][d], in 16 lanes (d mod 16), then across lanes
//         top, weight[p] and sum as in attention.h
//         mixed[d]  = sum over p ascending of weight[p] * k[p][head_dim - value_dim + d]     one accumulator an element
//
// and chunks are folded, and sinks added, as there. All of it is fp32; keys are read as they lie, bf16 or fp32.
#pragma once

#include "attention.h"
#include "attention_call.h"
#include "elements.h"
#include "pool.h"
#include "simd.h"

namespace penstock {
inline namespace PENSTOCK_ISA_NAMESPACE {

constexpr int kLatentHeads = 8;

// Register tiles: heads x positions of scores, heads x vectors of mixes. Bits do not depend on them.
#if defined(PENSTOCK_AVX512)
constexpr int kTiledHeads = 4, kTiledPositions = 4, kTiledVectors = 4;
#else
constexpr int kTiledHeads = 2, kTiledPositions = 2, kTiledVectors = 2;
#endif

// What one thread needs for one task; on its stack.
struct LatentMemory {
    alignas(64) float query[kLatentHeads * kMostLatentDim];  // scaled; rows are filled up with 0 to whole vectors
    alignas(64) float mixed[kLatentHeads * kMostLatentDim];
    alignas(64) float result[kLatentHeads * kMostLatentDim];
    alignas(64) float scores[kLatentHeads * kChunk];  // then weights
    const void* key[kChunk];                          // of the positions that the token sees
};

// What a token sees of a chunk: positions [from, until) of it.
struct Glimpse {
    int from, until;
};

template <typename T, int kHeads, int kPositions>
PENSTOCK_INLINE void score_latent_tile(LatentMemory& memory, int head, int position, int dim) {
    f32x16 sum[kHeads][kPositions];
    PENSTOCK_UNROLL
    for (int h = 0; h < kHeads; h++) {
        PENSTOCK_UNROLL
        for (int p = 0; p < kPositions; p++) sum[h][p] = zero();
    }
    for (int d = 0; d < dim; d += kLanes) {
        f32x16 key[kPositions];
        PENSTOCK_UNROLL
        for (int p = 0; p < kPositions; p++) {
            key[p] = load_at(static_cast<const T*>(memory.key[position + p]), d, dim);
        }
        PENSTOCK_UNROLL
        for (int h = 0; h < kHeads; h++) {
            const f32x16 query = load(memory.query + (head + h) * kMostLatentDim + d);
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
PENSTOCK_INLINE void score_latent_rows(LatentMemory& memory, int head, const Glimpse& seen, int dim) {
    int p = seen.from;
    for (; p + kTiledPositions <= seen.until; p += kTiledPositions) {
        score_latent_tile<T, kHeads, kTiledPositions>(memory, head, p, dim);
    }
    for (; p < seen.until; p++) score_latent_tile<T, kHeads, 1>(memory, head, p, dim);
}

template <typename T, int kHeads, int kVectors>
PENSTOCK_INLINE void mix_latent_tile(LatentMemory& memory, int head, const Glimpse& seen, int first, int column,
                                     int width) {
    f32x16 sum[kHeads][kVectors];
    PENSTOCK_UNROLL
    for (int h = 0; h < kHeads; h++) {
        PENSTOCK_UNROLL
        for (int v = 0; v < kVectors; v++) sum[h][v] = zero();
    }
    for (int p = seen.from; p < seen.until; p++) {
        const T* value = static_cast<const T*>(memory.key[p]) + first;
        f32x16 part[kVectors];
        PENSTOCK_UNROLL
        for (int v = 0; v < kVectors; v++) part[v] = load_at(value, column + v * kLanes, width);
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
PENSTOCK_INLINE void mix_latent_rows(LatentMemory& memory, int head, const Glimpse& seen, int first, int width) {
    int column = 0;
    for (; column + kTiledVectors * kLanes <= width; column += kTiledVectors * kLanes) {
        mix_latent_tile<T, kHeads, kTiledVectors>(memory, head, seen, first, column, width);
    }
    for (; column < width; column += kLanes) {
        mix_latent_tile<T, kHeads, 1>(memory, head, seen, first, column, width);
    }
}

template <typename Q>
PENSTOCK_INLINE void load_latent_queries(const AttentionCall& call, int64_t token, int head, int count,
                                         LatentMemory& memory) {
    const int dim = call.cache.head_dim;
    for (int h = 0; h < count; h++) {
        const Q* from = static_cast<const Q*>(call.q.data) + token * call.q.stride + int64_t(head + h) * dim;
        for (int d = 0; d < dim; d += kLanes) {
            store(memory.query + h * kMostLatentDim + d, mul(load_at(from, d, dim), broadcast(call.scale)));
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

// The chunk of positions [start, start + kChunk): tops, sums and mixes of the heads, of which there are `count`.
template <typename T>
PENSTOCK_INLINE void attend_latent_chunk(const AttentionCall& call, int row, int start, const Glimpse& seen, int count,
                                         LatentMemory& memory, float* top, float* sum) {
    const KvCache& cache = call.cache;
    const int dim = cache.head_dim, width = cache.value_dim;
    for (int p = seen.from; p < seen.until; p++) {
        memory.key[p] = static_cast<const T*>(cache.keys) + slot_of(call, row, start + p) * dim;
    }
    int h = 0;
    for (; h + kTiledHeads <= count; h += kTiledHeads) score_latent_rows<T, kTiledHeads>(memory, h, seen, dim);
    for (; h < count; h++) score_latent_rows<T, 1>(memory, h, seen, dim);
    Ahead nothing;
    for (h = 0; h < count; h++) {
        float* scores = memory.scores + h * kChunk;
        if (call.softcap > 0.0f) cap_scores(scores, seen.from / kLanes * kLanes, seen.until, call.softcap);
        weigh<false>(scores, nullptr, seen.from, seen.until, top[h], sum[h], nothing);
    }
    for (h = 0; h + kTiledHeads <= count; h += kTiledHeads) {
        mix_latent_rows<T, kTiledHeads>(memory, h, seen, dim - width, width);
    }
    for (; h < count; h++) mix_latent_rows<T, 1>(memory, h, seen, dim - width, width);
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
    if (call.cache.element == KvElement::f32) {
        return wide_q ? attend_latent_all<float, float>(call, pool) : attend_latent_all<bf16, float>(call, pool);
    }
    return wide_q ? attend_latent_all<float, bf16>(call, pool) : attend_latent_all<bf16, bf16>(call, pool);
}

// Attention over a cache of either sort.
inline void attention_of_any(const AttentionCall& call, Pool& pool) {
    call.cache.latent() ? attend_latent(call, pool) : attention(call, pool);
}

}  // namespace PENSTOCK_ISA_NAMESPACE
}  // namespace penstock
