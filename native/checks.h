// Checks that every binding makes before it calls a kernel. A failed check is a ValueError in Python, before any write.
#pragma once

#include <cstdint>
#include <stdexcept>

#include "attention_call.h"
#include "layout.h"
#include "linear_call.h"

namespace penstock {

constexpr int64_t kMostRows = int64_t{1} << 31;

inline void require(bool good, const char* otherwise) {
    if (!good) throw std::invalid_argument(otherwise);
}

template <class T>
T* pointer(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

inline Element element_of(int element) {
    require(element == 0 || element == 1, "element must be 0 (float32) or 1 (bfloat16)");
    return static_cast<Element>(element);
}

inline KvElement kv_element_of(int element) {
    require(element >= 0 && element <= static_cast<int>(KvElement::int8),
            "element of a cache must be 0 (float32), 1 (bfloat16) or 2 (int8)");
    return static_cast<KvElement>(element);
}

inline Kind kind_of(int kind) {
    require(kind >= 0 && kind < kKinds, "kind must be one of Kind's numbers, 0 to 16");
    return static_cast<Kind>(kind);
}

inline Activation activation_of(int kind) {
    require(kind >= 0 && kind <= static_cast<int>(Activation::gelu_and_mul),
            "activation must be 0 (silu_and_mul), 1 (gelu_new), 2 (gelu), 3 (relu), 4 (gelu_new_and_mul), "
            "5 (clamped_swiglu_and_mul) or 6 (gelu_and_mul)");
    return static_cast<Activation>(kind);
}

// The activation of a gated product; none for other products.
inline std::optional<Activation> gate_of(std::optional<int> kind) {
    if (!kind) return std::nullopt;
    require(gates(activation_of(*kind)), "a gate must be 0 (silu_and_mul), 4 (gelu_new_and_mul), "
                                         "5 (clamped_swiglu_and_mul) or 6 (gelu_and_mul)");
    return activation_of(*kind);
}

inline void check_sizes(int64_t outputs, int64_t inputs) {
    require(outputs >= 1 && outputs < int64_t{1} << 31, "outputs must be between 1 and 2^31 - 1");
    require(inputs >= 1 && inputs <= kMostInputs, "inputs must be between 1 and 65536");
}

inline void check_weight(Kind kind, int64_t outputs, int64_t inputs) {
    check_sizes(outputs, inputs);
    const int64_t unit = block_form(kind).inputs;
    // In q4 and q8 the last group may be partial too, if Penstock rounded the weights to them.
    const bool filled_up = unit == 0 || kind == Kind::q4 || kind == Kind::q8;
    require(filled_up || inputs % unit == 0, "inputs must be whole units of the block form");
}

inline void check_cache(const KvCache& cache, int64_t num_blocks) {
    require(cache.keys != nullptr && (cache.latent() || cache.values != nullptr), "keys and values must be given");
    require(!cache.latent() || (cache.kv_heads == 1 && !cache.packed && cache.value_dim <= cache.head_dim),
            "a latent cache has one head, keys as they are, and values that are a part of them");
    require(num_blocks >= 1 && num_blocks < kMostRows, "num_blocks must be between 1 and 2^31 - 1");
    require(cache.block_size >= 1, "block_size must be at least 1");
    require(cache.element != KvElement::int8 || cache.packed || cache.latent(), "an int8 cache must be packed");
}

inline void check_latent_heads(int kv_heads, int head_dim, int value_dim) {
    require(kv_heads == 1, "a latent cache has one head");
    require(head_dim >= 1 && head_dim <= kMostLatentDim, "head_dim of a latent cache must be between 1 and 1024");
    require(value_dim >= 1 && value_dim <= head_dim, "value_dim must be between 1 and head_dim");
}

inline void check_heads(int kv_heads, int head_dim) {
    require(kv_heads >= 1, "kv_heads must be at least 1");
    require(head_dim >= 1 && head_dim <= kMostHeadDim, "head_dim must be between 1 and 512");
}

inline void check_ragged_rows(const AttentionCall& call, int64_t tokens, int64_t num_blocks) {
    require(call.q_start[0] == 0 && call.q_start[call.rows] == tokens,
            "q_start must go from 0 to the number of tokens");
    for (int32_t row = 0; row < call.rows; row++) {
        const int64_t count = int64_t(call.q_start[row + 1]) - call.q_start[row];
        require(count >= 1, "q_start must ascend");
        require(call.kv_len[row] >= count, "kv_len must count a row's own tokens too");
        const int64_t blocks = (int64_t(call.kv_len[row]) + call.cache.block_size - 1) / call.cache.block_size;
        require(blocks <= call.table_width, "block_table is too narrow for kv_len");
        const int32_t* table = call.block_table + row * call.table_width;
        const int64_t first = window_start(call.window, int32_t(call.kv_len[row] - count + 1)) / call.cache.block_size;
        for (int64_t i = first; i < blocks; i++) {
            require(table[i] >= 0 && table[i] < num_blocks, "block_table names a block that does not exist");
        }
    }
}

inline void check_slots(const int64_t* write_slots, int64_t tokens, int64_t slots) {
    for (int64_t t = 0; t < tokens; t++) {
        require(write_slots[t] >= 0 && write_slots[t] < slots, "write_slots names a slot that does not exist");
    }
}

inline void check_positions(const int64_t* positions, int64_t tokens, int64_t num_positions) {
    for (int64_t t = 0; t < tokens; t++) {
        require(positions[t] >= 0 && positions[t] < num_positions, "a position lies outside cos and sin");
    }
}

}  // namespace penstock
