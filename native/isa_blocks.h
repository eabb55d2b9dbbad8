// The kernels of the block forms; each blocks_*.cpp includes this under its own macro and flags.
//
//     form      codes             scales                                      of GGUF's                   bits a weight
//     q4        4 bits            fp16 and minimum for 32                     Q4_0, Q4_1                          5
//     q8        8 bits, about 128 fp16 for 32                                 Q8_0                              8.5
//     q5        5 bits            fp16 and minimum for 32                     Q5_0, Q5_1                          6
//     q2k       2 bits            u8 and minimum for 16, fp16 for 256         Q2_K                            3.125
//     q3k       3 bits, about 4   i8 for 16, fp16 for 256                     Q3_K                            3.625
//     q4k       4 bits            u8 and minimum for 32, fp16 for 256         Q4_K                            4.625
//     q5k       5 bits            as q4k                                      Q5_K                            5.625
//     q6k       6 bits, about 32  as q3k                                      Q6_K                            6.625
//     nl4       4 bits, a table   fp16 for 32                                 IQ4_NL                            4.5
//     mx4       4 bits, a table   E8M0 for 32                                 MXFP4                            4.25
//     nl4k      4 bits, a table   i8 for 32, fp16 for 256                     IQ4_XS, IQ3_*, IQ2_XXS,         4.375
//                                                                             IQ1_S, TQ1_0, TQ2_0
//     nl4k16    4 bits, a table   i8 for 16, fp16 for 256                     IQ2_XS, IQ2_S, IQ1_M            4.625
//
// and of GPTQ's, AWQ's and compressed-tensors' integers, in groups of 32 or 64 inputs, or of any multiple of 128:
//
//     z4        4 bits            fp16 and u8 zero point for 32                                                4.75
//     z4w       4 bits            fp16 and u8 zero point for 128                                               4.25
#pragma once

#include "block_kernels.h"
#include "linear_blocks.h"

namespace penstock {
inline namespace PENSTOCK_ISA_NAMESPACE {

template <Kind kind>
struct FormOf;
template <>
struct FormOf<Kind::q4> : LinearBlocks<Kind::q4, NibbleCodes, HalfScalesAndMinima> {};
template <>
struct FormOf<Kind::q8> : LinearBlocks<Kind::q8, ByteCodes, HalfScales> {};
template <>
struct FormOf<Kind::q5> : LinearBlocks<Kind::q5, PlaneCodes<4, 1, 0, 8>, HalfScalesAndMinima> {};
template <>
struct FormOf<Kind::q2k> : LinearBlocks<Kind::q2k, PlaneCodes<2, 0, 0, 4>, SuperScales<2>> {};
template <>
struct FormOf<Kind::q3k> : LinearBlocks<Kind::q3k, PlaneCodes<2, 1, 4, 4>, SignedSuperScales<2, false>> {};
template <>
struct FormOf<Kind::q4k> : LinearBlocks<Kind::q4k, NibbleCodes, SuperScales<1>> {};
template <>
struct FormOf<Kind::q5k> : LinearBlocks<Kind::q5k, PlaneCodes<4, 1, 0, 8>, SuperScales<1>> {};
template <>
struct FormOf<Kind::q6k> : LinearBlocks<Kind::q6k, PlaneCodes<4, 2, 32, 4>, SignedSuperScales<2, false>> {};
template <>
struct FormOf<Kind::nl4> : LinearBlocks<Kind::nl4, TableCodes, TableHalfScales> {};
template <>
struct FormOf<Kind::mx4> : LinearBlocks<Kind::mx4, TableCodes, TableE8m0Scales> {};
template <>
struct FormOf<Kind::nl4k> : LinearBlocks<Kind::nl4k, TableCodes, SignedSuperScales<1, true>> {};
template <>
struct FormOf<Kind::nl4k16> : LinearBlocks<Kind::nl4k16, TableCodes, SignedSuperScales<2, true>> {};
template <>
struct FormOf<Kind::z4> : LinearBlocks<Kind::z4, NibbleCodes, ZeroPointScales> {};
template <>
struct FormOf<Kind::z4w> : LinearBlocks<Kind::z4w, NibbleCodes, ZeroPointScales> {};

template <Kind kind>
void BlockKernels<kind>::linear(const LinearCall& call, Pool& pool) {
    FormOf<kind>::multiply(call, pool);
}
template <Kind kind>
void BlockKernels<kind>::prepare(const LinearCall& call, Pool& pool) {
    FormOf<kind>::quantize_rows(call, pool);
}
template <Kind kind>
void BlockKernels<kind>::lookup(const LookupCall& call, Pool& pool) {
    FormOf<kind>::look_up_rows(call, pool);
}

template struct BlockKernels<Kind::q4>;
template struct BlockKernels<Kind::q8>;
template struct BlockKernels<Kind::q5>;
template struct BlockKernels<Kind::q2k>;
template struct BlockKernels<Kind::q3k>;
template struct BlockKernels<Kind::q4k>;
template struct BlockKernels<Kind::q5k>;
template struct BlockKernels<Kind::q6k>;
template struct BlockKernels<Kind::nl4>;
template struct BlockKernels<Kind::mx4>;
template struct BlockKernels<Kind::nl4k>;
template struct BlockKernels<Kind::nl4k16>;
template struct BlockKernels<Kind::z4>;
template struct BlockKernels<Kind::z4w>;

}  // namespace PENSTOCK_ISA_NAMESPACE
}  // namespace penstock
