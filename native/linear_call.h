// The arguments of a linear kernel: plain pointers and sizes, not owned, and checked by the caller.
#pragma once

#include <cstdint>
#include <optional>

#include "layout.h"

namespace penstock {

class KvPrefetcher;

enum class Element : int32_t { f32 = 0, bf16 = 1 };
enum class Activation : int32_t {
    silu_and_mul = 0,
    gelu_new = 1,
    gelu = 2,
    relu = 3,
    gelu_new_and_mul = 4,
    clamped_swiglu_and_mul = 5,
    gelu_and_mul = 6
};

// Whether the activation multiplies one half of its input by a function of the other half.
constexpr bool gates(Activation kind) {
    return kind == Activation::silu_and_mul || kind == Activation::gelu_new_and_mul ||
           kind == Activation::clamped_swiglu_and_mul || kind == Activation::gelu_and_mul;
}

// Rows of floats; `stride` counts elements from one row to the next. `data` is null if there are none (no bias, ...).
struct ConstRows {
    const void* data;
    int64_t stride;
    Element element;
};

struct Rows {
    void* data;
    int64_t stride;
    Element element;
};

// out[rows, outputs] = x[rows, inputs] * weight[outputs, inputs]^T + bias[outputs] + residual[rows, outputs]
//
// Sums are in fp32; bias, then residual, are added to the finished sum; then it is rounded to the element of `out`.
// `residual` and `out` may be the same memory.
//
// In a gated call the first half of the outputs are gates and the second half are multiplied by them (SwiGLU, GeGLU):
//
//     out[rows, outputs / 2] = activation(first half) * second half
//
// with finished sums, bias included. Then outputs is a multiple of 32, and there is no residual.
struct LinearCall {
    int64_t rows;
    int64_t outputs;
    int64_t inputs;
    ConstRows x;
    const uint8_t* weight;  // packed; each kernel's file begins with a drawing of the layout
    ConstRows bias;         // one row
    ConstRows residual;
    Rows out;
    uint8_t* scratch;  // rows * scratch_stride() bytes on a cache line; undefined before and after
    std::optional<Activation> gate;  // of a gated call
    KvPrefetcher* prefetcher = nullptr;  // what to prefetch meanwhile, in a call by one thread; or none
    bool prepared = false;  // whether `scratch` already holds the result of the form's `prepare`; then x is not read

    bool gated() const { return gate.has_value(); }
    int64_t columns() const { return gated() ? outputs / 2 : outputs; }  // of out
};

// Whether rows are multiplied where they are; if not, they are first converted into scratch.
constexpr bool multiplied_as_it_lies(Kind kind, int64_t inputs, Element element) {
    if (kind == Kind::bf16) return element == Element::bf16 && inputs % 2 == 0;
    if (kind == Kind::f8) return element == Element::bf16 && inputs % 4 == 0;
    return kind == Kind::f32 && element == Element::f32;
}

// out[i, :] = row ids[i] of a packed weight [outputs, inputs]
struct LookupCall {
    int64_t count;
    int64_t inputs;
    int64_t outputs;
    const int64_t* ids;  // each in [0, outputs)
    const uint8_t* weight;
    Rows out;
};

}  // namespace penstock
