// Rows whose element type is known only at run time, and how row-wise work is divided among threads.
#pragma once

#include "linear_call.h"
#include "pool.h"
#include "simd.h"

namespace penstock {
inline namespace PENSTOCK_ISA_NAMESPACE {

// Elements [i, i + 16) of row `row`, which has `count` elements; zero beyond.
PENSTOCK_INLINE f32x16 load_row(const ConstRows& rows, int64_t row, int i, int count) {
    const int64_t at = row * rows.stride;
    return rows.element == Element::f32 ? load_at(static_cast<const float*>(rows.data) + at, i, count)
                                        : load_at(static_cast<const bf16*>(rows.data) + at, i, count);
}
PENSTOCK_INLINE f32x16 load_row(const Rows& rows, int64_t row, int i, int count) {
    return load_row(ConstRows{rows.data, rows.stride, rows.element}, row, i, count);
}
PENSTOCK_INLINE void store_row(const Rows& rows, int64_t row, int i, int count, f32x16 a) {
    const int64_t at = row * rows.stride;
    if (rows.element == Element::f32) {
        store_at(static_cast<float*>(rows.data) + at, i, count, a);
    } else {
        store_at(static_cast<bf16*>(rows.data) + at, i, count, a);
    }
}

// The same rows from column `first` on.
PENSTOCK_INLINE int64_t column_bytes(Element element, int64_t columns) {
    return columns * int64_t(element == Element::f32 ? sizeof(float) : sizeof(bf16));
}
PENSTOCK_INLINE ConstRows columns_from(const ConstRows& rows, int64_t first) {
    return {static_cast<const uint8_t*>(rows.data) + column_bytes(rows.element, first), rows.stride, rows.element};
}
PENSTOCK_INLINE Rows columns_from(const Rows& rows, int64_t first) {
    return {static_cast<uint8_t*>(rows.data) + column_bytes(rows.element, first), rows.stride, rows.element};
}

// Calls row(0) .. row(rows - 1) on the pool, several per task: waking a thread costs about as much as kTaskElements.
template <typename Row>
PENSTOCK_INLINE void run_rows(Pool& pool, int64_t rows, int64_t width, const Row& row) {
    constexpr int64_t kTaskElements = 8192, kMostTasks = 4096;
    int64_t each = (kTaskElements + width - 1) / width;
    if (each * kMostTasks < rows) each = (rows + kMostTasks - 1) / kMostTasks;
    pool.run(int((rows + each - 1) / each), [&](int task) {
        const int64_t last = (task + 1) * each < rows ? (task + 1) * each : rows;
        for (int64_t r = task * each; r < last; r++) row(r);
    });
}

}  // namespace PENSTOCK_ISA_NAMESPACE
}  // namespace penstock
