// The kernels of the block forms; each blocks_*.cpp includes this under its own macro and flags.
//
//     form      codes             scales                                      of GGUF's                   bits a weight
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
#pragma once

#include "block_kernels.h"
#include "linear_blocks.h"

namespace penstock {
inline namespace PENSTOCK_ISA_NAMESPACE {

using LinearQ5 = LinearBlocks<Kind::q5, PlaneCodes<4, 1, 0>, HalfScales>;
using LinearQ2k = LinearBlocks<Kind::q2k, PlaneCodes<2, 0, 0>, SuperScales<2>>;
using LinearQ3k = LinearBlocks<Kind::q3k, PlaneCodes<2, 1, 4>, SignedSuperScales<2, false>>;
using LinearQ4k = LinearBlocks<Kind::q4k, NibbleCodes, SuperScales<1>>;
using LinearQ5k = LinearBlocks<Kind::q5k, PlaneCodes<4, 1, 0>, SuperScales<1>>;
using LinearQ6k = LinearBlocks<Kind::q6k, PlaneCodes<4, 2, 32>, SignedSuperScales<2, false>>;
using LinearNl4 = LinearBlocks<Kind::nl4, TableCodes, TableHalfScales>;
using LinearMx4 = LinearBlocks<Kind::mx4, TableCodes, TableE8m0Scales>;
using LinearNl4k = LinearBlocks<Kind::nl4k, TableCodes, SignedSuperScales<1, true>>;
using LinearNl4k16 = LinearBlocks<Kind::nl4k16, TableCodes, SignedSuperScales<2, true>>;

void linear_q5(const LinearCall& call, Pool& pool) { LinearQ5::run(call, pool); }
void linear_q2k(const LinearCall& call, Pool& pool) { LinearQ2k::run(call, pool); }
void linear_q3k(const LinearCall& call, Pool& pool) { LinearQ3k::run(call, pool); }
void linear_q4k(const LinearCall& call, Pool& pool) { LinearQ4k::run(call, pool); }
void linear_q5k(const LinearCall& call, Pool& pool) { LinearQ5k::run(call, pool); }
void linear_q6k(const LinearCall& call, Pool& pool) { LinearQ6k::run(call, pool); }
void linear_nl4(const LinearCall& call, Pool& pool) { LinearNl4::run(call, pool); }
void linear_mx4(const LinearCall& call, Pool& pool) { LinearMx4::run(call, pool); }
void linear_nl4k(const LinearCall& call, Pool& pool) { LinearNl4k::run(call, pool); }
void linear_nl4k16(const LinearCall& call, Pool& pool) { LinearNl4k16::run(call, pool); }

void prepare_q5(const LinearCall& call, Pool& pool) { LinearQ5::prepare(call, pool); }
void prepare_q2k(const LinearCall& call, Pool& pool) { LinearQ2k::prepare(call, pool); }
void prepare_q3k(const LinearCall& call, Pool& pool) { LinearQ3k::prepare(call, pool); }
void prepare_q4k(const LinearCall& call, Pool& pool) { LinearQ4k::prepare(call, pool); }
void prepare_q5k(const LinearCall& call, Pool& pool) { LinearQ5k::prepare(call, pool); }
void prepare_q6k(const LinearCall& call, Pool& pool) { LinearQ6k::prepare(call, pool); }
void prepare_nl4(const LinearCall& call, Pool& pool) { LinearNl4::prepare(call, pool); }
void prepare_mx4(const LinearCall& call, Pool& pool) { LinearMx4::prepare(call, pool); }
void prepare_nl4k(const LinearCall& call, Pool& pool) { LinearNl4k::prepare(call, pool); }
void prepare_nl4k16(const LinearCall& call, Pool& pool) { LinearNl4k16::prepare(call, pool); }

void lookup_q5(const LookupCall& call, Pool& pool) { LinearQ5::look_up_rows(call, pool); }
void lookup_q2k(const LookupCall& call, Pool& pool) { LinearQ2k::look_up_rows(call, pool); }
void lookup_q3k(const LookupCall& call, Pool& pool) { LinearQ3k::look_up_rows(call, pool); }
void lookup_q4k(const LookupCall& call, Pool& pool) { LinearQ4k::look_up_rows(call, pool); }
void lookup_q5k(const LookupCall& call, Pool& pool) { LinearQ5k::look_up_rows(call, pool); }
void lookup_q6k(const LookupCall& call, Pool& pool) { LinearQ6k::look_up_rows(call, pool); }
void lookup_nl4(const LookupCall& call, Pool& pool) { LinearNl4::look_up_rows(call, pool); }
void lookup_mx4(const LookupCall& call, Pool& pool) { LinearMx4::look_up_rows(call, pool); }
void lookup_nl4k(const LookupCall& call, Pool& pool) { LinearNl4k::look_up_rows(call, pool); }
void lookup_nl4k16(const LookupCall& call, Pool& pool) { LinearNl4k16::look_up_rows(call, pool); }

}  // namespace PENSTOCK_ISA_NAMESPACE
}  // namespace penstock
