// The argument types of bindings, which give every argument a name and keep argument lists short.
//
// Each is checked when it is constructed, and owns nothing. An address of 0 means no tensor where that is allowed;
// strides count elements from one row to the next; an element is 0 (float32) or 1 (bfloat16).
#pragma once

#include <cstdint>

#include "attention_call.h"
#include "checks.h"
#include "linear_call.h"

namespace penstock {

// A weight or bias of one row; without an address, none.
struct Vector {
    uintptr_t address = 0;
    int element = 0;

    ConstRows rows() const { return {pointer<void>(address), 0, element_of(element)}; }
};

inline ConstRows one_row(const Vector* vector) { return vector ? vector->rows() : ConstRows{}; }

inline ConstRows reading(const Rows* rows) {
    return rows ? ConstRows{rows->data, rows->stride, rows->element} : ConstRows{};
}

inline void check_rows(const ConstRows& given, int64_t rows, int64_t width, const char* otherwise) {
    require(given.data != nullptr && (rows <= 1 || given.stride >= width), otherwise);
}

inline void check_rows(const Rows& given, int64_t rows, int64_t width, const char* otherwise) {
    check_rows(reading(&given), rows, width, otherwise);
}

inline void check_optional_rows(const ConstRows& given, int64_t rows, int64_t width, const char* otherwise) {
    if (given.data != nullptr) check_rows(given, rows, width, otherwise);
}

// A piece of memory: scratch, or memory to be read from front to back.
struct Memory {
    uintptr_t address;
    int64_t bytes;

    uint8_t* data() const { return pointer<uint8_t>(address); }
    bool holds(int64_t wanted) const { return address != 0 && address % 64 == 0 && bytes >= wanted; }
};

// A packed weight [outputs, inputs].
struct Weight {
    Kind kind;
    int64_t outputs, inputs;
    const uint8_t* data;
};

// Keys and values of one layer in blocks.
struct Cache {
    KvCache cache;
    int64_t num_blocks;
};

// The rows of a step; tensors are on the host.
struct RaggedRows {
    int64_t tokens;
    int32_t rows;
    const int32_t* q_start;
    const int32_t* kv_len;
    const int32_t* block_table;
    int64_t table_width;
};

// The number of query heads and of key (and value) heads, and the width of each; `value_dim` is the width of values in
// a latent cache, else 0.
struct Heads {
    int32_t queries, keys, dim, value_dim = 0;
};

// How attention treats scores.
struct ScoreRule {
    float scale;
    float softcap;       // 0: none
    int32_t window;      // 0: all positions
    const float* sinks;  // [q_heads], or null
    int32_t ahead;       // positions after its own that a token sees
};

// Tables of angles, [num_positions][rotary_dim / 2] each.
struct Rotation {
    const float* cos = nullptr;
    const float* sin = nullptr;
    int64_t num_positions = 0;
    int32_t rotary_dim = 0;
};

// RMS norms of each head before rotation; each may be absent.
struct HeadNorms {
    Vector q, k;
    float eps = 0.0f;
};

}  // namespace penstock
