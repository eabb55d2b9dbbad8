// Reorders weights from the order of files to the order in which kernels read them, once, when a model is loaded.
//
// `to` has room for packed_bytes(kind, outputs, inputs); the linear kernels' files draw the layouts.
#pragma once

#include "layout.h"
#include "linear_call.h"

namespace penstock {

class Pool;

// GGUF's blocks of 32 numbers: their sizes in bytes, and contents.
constexpr int64_t kQ40Block = 18;  // fp16 scale, 16 bytes of codes: low halves are numbers 0 to 15, high ones 16 to 31
constexpr int64_t kQ41Block = 20;  // fp16 scale, fp16 minimum, codes as above
constexpr int64_t kQ80Block = 34;  // fp16 scale, 32 signed bytes

void pack_bf16(const ConstRows& weight, int64_t outputs, int64_t inputs, uint8_t* to, Pool& pool);
void pack_f32(const ConstRows& weight, int64_t outputs, int64_t inputs, uint8_t* to, Pool& pool);
void pack_q4_0(const uint8_t* blocks, int64_t outputs, int64_t inputs, uint8_t* to, Pool& pool);
void pack_q4_1(const uint8_t* blocks, int64_t outputs, int64_t inputs, uint8_t* to, Pool& pool);
void pack_q8_0(const uint8_t* blocks, int64_t outputs, int64_t inputs, uint8_t* to, Pool& pool);

// FP8: each row has fp32 scales, one for each 128 inputs, followed by its codes.
constexpr int64_t f8_row_bytes(int64_t inputs) { return divide_up(inputs, kF8Unit) * 4 + inputs; }
void pack_f8(const uint8_t* rows, int64_t outputs, int64_t inputs, uint8_t* to, Pool& pool);

// The parts of a block form (layout.h): codes [outputs][inputs]; records [outputs][units][record_bytes()], the fields
// of each output in a unit; and the first line of panels, 64 bytes, if the form has a table.
struct CodesCall {
    const uint8_t* codes;
    const uint8_t* records;
    const uint8_t* table;
};
void pack_codes(Kind kind, int64_t outputs, int64_t inputs, const CodesCall& from, uint8_t* to, Pool& pool);

// Whether -8 times the scale of every Q4_0 block is an fp16 number, so that pack_q4_0 is exact.
bool q4_0_minima_exist(const uint8_t* blocks, int64_t count);

}  // namespace penstock
