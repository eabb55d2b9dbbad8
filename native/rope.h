// Norms per head, rotary positions, and storing new keys and values in the cache, in one pass.
//
// A token's query, key and value are read once; each head is computed in fp32 and rounded once, when it is stored.
#pragma once

#include <type_traits>

#include "elements.h"
#include "int8_lanes.h"
#include "rows_call.h"

namespace penstock {
inline namespace PENSTOCK_ISA_NAMESPACE {

// Reads one head as fp32, normalises it if `weight` is given, and rotates it if the call has angles.
PENSTOCK_INLINE void turn_head(const RotaryCall& call, const ConstRows& from, const ConstRows& weight, int64_t token,
                               int head, float* x) {
    const int dim = call.cache.head_dim, half = (call.rotary_dim > 0 ? call.rotary_dim : dim) / 2;
    ConstRows view = from;
    view.data = static_cast<const uint8_t*>(from.data) +
                int64_t(head) * dim * (from.element == Element::f32 ? sizeof(float) : sizeof(bf16));
    f32x16 squares = zero();
    for (int d = 0; d < dim; d += kLanes) {
        const f32x16 part = load_row(view, token, d, dim);
        store(x + d, part);
        squares = fma(part, part, squares);
    }
    if (weight.data) {
        const f32x16 mean = broadcast(reduce_add(squares) / float(dim) + call.eps);
        const f32x16 inverse = div(broadcast(1.0f), sqrt(mean));
        for (int d = 0; d < dim; d += kLanes) {
            store(x + d, mul(mul(load(x + d), inverse), load_row(weight, 0, d, dim)));
        }
    }
    if (!call.cos) return;
    const int64_t angles = (call.positions ? call.positions[token] : token) * half;
    for (int d = 0; d < half; d += kLanes) {  // the pairs (x[d], x[d + half]): Su et al. 2021, section 3.4.2
        const f32x16 cos = load_at(call.cos + angles, d, half), sin = load_at(call.sin + angles, d, half);
        const f32x16 first = load_at(x, d, half), second = load_at(x + half, d, half);
        store_at(x, d, half, sub(mul(first, cos), mul(second, sin)));
        store_at(x + half, d, half, add(mul(second, cos), mul(first, sin)));
    }
}

// Stores a key as packed words, word w at to[w * block_size].
PENSTOCK_INLINE void scatter_key(const KvCache& cache, int64_t slot, int head, const uint32_t* key, int words) {
    const int size = cache.block_size;
    uint32_t* to = static_cast<uint32_t*>(cache.keys);
    to += (slot / size * cache.kv_heads + head) * words * size + slot % size;
    for (int w = 0; w < words; w++) to[int64_t(w) * size] = key[w];
}

template <typename T>
PENSTOCK_INLINE void store_key(const KvCache& cache, int64_t slot, int head, const float* x) {
    const int dim = cache.head_dim;
    if (!cache.packed) {
        T* key = static_cast<T*>(cache.keys) + (slot * cache.kv_heads + head) * dim;
        for (int d = 0; d < dim; d += kLanes) store_at(key, d, dim, load(x + d));
        return;
    }
    constexpr int each = int(sizeof(uint32_t) / sizeof(T));
    const int words = (dim + each - 1) / each;
    alignas(64) uint32_t key[kMostHeadDim];
    key[words - 1] = 0;  // pads an odd head_dim
    for (int d = 0; d < dim; d += kLanes) store_at(reinterpret_cast<T*>(key), d, dim, load(x + d));
    scatter_key(cache, slot, head, key, words);
}

template <>
PENSTOCK_INLINE void store_key<int8_t>(const KvCache& cache, int64_t slot, int head, const float* x) {
    const int words = (cache.head_dim + 3) / 4;
    alignas(64) uint32_t key[kMostHeadDim / 4 + 1];
    key[words - 1] = 0;  // pads a head_dim that is no multiple of 4
    const float scale = encode_head(x, cache.head_dim, 127.0f, reinterpret_cast<int8_t*>(key));
    memcpy(key + words, &scale, sizeof scale);
    scatter_key(cache, slot, head, key, words + 1);
}

// Stores a key in an int8 latent cache.
PENSTOCK_INLINE void store_latent_codes(const KvCache& cache, int64_t slot, const float* x) {
    const int rotated = cache.head_dim - cache.value_dim, width = latent_width(cache);
    int8_t* codes = static_cast<int8_t*>(cache.keys) + slot * latent_key_bytes(cache);
    float* scales = reinterpret_cast<float*>(codes + width);
    memset(codes, 0, size_t(width));
    *scales++ = encode_head(x, rotated, 127.0f, codes);
    for (int d = 0; d < cache.value_dim; d += kLatentGroup) {
        const int left = cache.value_dim - d;
        *scales++ = encode_head(x + rotated + d, left < kLatentGroup ? left : kLatentGroup, 127.0f,
                                codes + latent_first(cache) + d);
    }
}

template <typename T>
PENSTOCK_INLINE void store_value(const KvCache& cache, int64_t slot, int head, const ConstRows& from, int64_t token) {
    const int dim = cache.head_dim;
    ConstRows view = from;
    view.data = static_cast<const uint8_t*>(from.data) +
                int64_t(head) * dim * (from.element == Element::f32 ? sizeof(float) : sizeof(bf16));
    if (!cache.packed) {
        T* value = static_cast<T*>(cache.values) + (slot * cache.kv_heads + head) * dim;
        for (int d = 0; d < dim; d += kLanes) store_at(value, d, dim, load_row(view, token, d, dim));
        return;
    }
    constexpr int each = int(sizeof(uint32_t) / sizeof(T));
    const int64_t block = slot / cache.block_size, offset = slot % cache.block_size;
    alignas(64) T value[kMostHeadDim];
    for (int d = 0; d < dim; d += kLanes) store_at(value, d, dim, load_row(view, token, d, dim));
    const int64_t group = (block * cache.kv_heads + head) * value_groups(cache) + offset / each;
    T* to = static_cast<T*>(cache.values) + group * dim * each + offset % each;  // a thread may write its neighbour
    for (int d = 0; d < dim; d++) to[d * each] = value[d];
}

template <>
PENSTOCK_INLINE void store_value<int8_t>(const KvCache& cache, int64_t slot, int head, const ConstRows& from,
                                         int64_t token) {
    const int dim = cache.head_dim;
    const int64_t block = slot / cache.block_size, offset = slot % cache.block_size;
    ConstRows view = from;
    view.data = static_cast<const uint8_t*>(from.data) +
                int64_t(head) * dim * (from.element == Element::f32 ? sizeof(float) : sizeof(bf16));
    alignas(64) float x[kMostHeadDim];
    for (int d = 0; d < dim; d += kLanes) store(x + d, load_row(view, token, d, dim));
    int8_t codes[kMostHeadDim];
    const float scale = encode_head(x, dim, 127.0f, codes);
    int8_t* values = static_cast<int8_t*>(cache.values) + (block * cache.kv_heads + head) * value_bytes(cache);
    memcpy(values + value_codes(cache) + offset * int64_t(sizeof scale), &scale, sizeof scale);
    constexpr int kPlace[kGroupPositions] = {0, 2, 1, 3};
    int8_t* to = values + offset / kGroupPositions * kGroupPositions * dim + kPlace[offset % kGroupPositions];
    for (int d = 0; d < dim; d++) to[d * kGroupPositions] = codes[d];
}

template <typename T>
PENSTOCK_INLINE void store_token(const RotaryCall& call, int64_t token) {
    alignas(64) float x[kMostLatentDim];
    for (int head = 0; head < call.cache.kv_heads; head++) {
        turn_head(call, call.k, call.k_norm, token, head, x);
        if (std::is_same_v<T, int8_t> && call.cache.latent()) {
            store_latent_codes(call.cache, call.write_slots[token], x);
            continue;
        }
        store_key<T>(call.cache, call.write_slots[token], head, x);
        if (!call.cache.latent()) store_value<T>(call.cache, call.write_slots[token], head, call.v, token);
    }
}

// Prefetches the memory of a token's key and value. Each word of a packed key is on a different line, and stores that
// miss would complete one after the other.
PENSTOCK_INLINE void fetch_places(const KvCache& cache, int64_t slot) {
    const int64_t block = slot / cache.block_size, offset = slot % cache.block_size;
    const uint8_t* keys = static_cast<const uint8_t*>(cache.keys);
    const uint8_t* values = static_cast<const uint8_t*>(cache.values);
    if (cache.packed) {
        const int64_t words = cache.kv_heads * key_words(cache), apart = cache.block_size * int64_t(sizeof(uint32_t));
        const uint8_t* at = keys + block * words * apart + offset * int64_t(sizeof(uint32_t));
        for (int64_t w = 0; w < words; w++) PENSTOCK_PREFETCH_WRITE(at + w * apart);
    }
    if (cache.packed) {
        const bool scaled = cache.element == KvElement::int8;
        const int64_t a_group = cache.head_dim * int64_t(sizeof(uint32_t)), at = offset / per_word(cache.element) * a_group;
        const int64_t a_head = scaled ? value_bytes(cache) : value_groups(cache) * a_group;
        for (int head = 0; head < cache.kv_heads; head++) {
            const uint8_t* of = values + (block * cache.kv_heads + head) * a_head;
            for (int64_t i = 0; i < a_group; i += 64) PENSTOCK_PREFETCH_WRITE(of + at + i);
            if (scaled) PENSTOCK_PREFETCH_WRITE(of + value_codes(cache) + offset * int64_t(sizeof(float)));
        }
        return;
    }
    const int64_t natural = cache.kv_heads * cache.head_dim * element_bytes(cache.element);
    const int64_t bytes = cache.latent() ? latent_key_bytes(cache) : natural;
    for (int64_t i = 0; i < bytes; i += 64) PENSTOCK_PREFETCH_WRITE((cache.latent() ? keys : values) + slot * bytes + i);
}

inline void rotate_and_store(const RotaryCall& call, Pool& pool) {
    const int dim = call.cache.head_dim;
    run_rows(pool, call.tokens, int64_t(dim) * (call.q_heads + 2 * call.cache.kv_heads), [&](int64_t token) {
        alignas(64) float x[kMostLatentDim];
        if (call.k.data) fetch_places(call.cache, call.write_slots[token]);  // they arrive while queries are rotated
        for (int head = 0; call.q.data && head < call.q_heads; head++) {
            turn_head(call, call.q, call.q_norm, token, head, x);
            Rows out = call.q_out;
            out.data = static_cast<uint8_t*>(out.data) +
                       int64_t(head) * dim * (out.element == Element::f32 ? sizeof(float) : sizeof(bf16));
            for (int d = 0; d < dim; d += kLanes) store_row(out, token, d, dim, load(x + d));
        }
        if (!call.k.data) return;
        switch (call.cache.element) {
            case KvElement::f32: return store_token<float>(call, token);
            case KvElement::bf16: return store_token<bf16>(call, token);
            case KvElement::int8: return store_token<int8_t>(call, token);
        }
    });
}

}  // namespace PENSTOCK_ISA_NAMESPACE
}  // namespace penstock
