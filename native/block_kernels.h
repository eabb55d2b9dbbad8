// The kernels of the block forms of one instruction set; blocks_*.cpp are compiled apart from the others, since there
// are so many of them.
#pragma once

#include "linear_call.h"
#include "simd.h"

namespace penstock {

class Pool;

inline namespace PENSTOCK_ISA_NAMESPACE {

void linear_q5(const LinearCall& call, Pool& pool);
void linear_q2k(const LinearCall& call, Pool& pool);
void linear_q3k(const LinearCall& call, Pool& pool);
void linear_q4k(const LinearCall& call, Pool& pool);
void linear_q5k(const LinearCall& call, Pool& pool);
void linear_q6k(const LinearCall& call, Pool& pool);
void linear_nl4(const LinearCall& call, Pool& pool);
void linear_mx4(const LinearCall& call, Pool& pool);
void linear_nl4k(const LinearCall& call, Pool& pool);
void linear_nl4k16(const LinearCall& call, Pool& pool);

void prepare_q5(const LinearCall& call, Pool& pool);
void prepare_q2k(const LinearCall& call, Pool& pool);
void prepare_q3k(const LinearCall& call, Pool& pool);
void prepare_q4k(const LinearCall& call, Pool& pool);
void prepare_q5k(const LinearCall& call, Pool& pool);
void prepare_q6k(const LinearCall& call, Pool& pool);
void prepare_nl4(const LinearCall& call, Pool& pool);
void prepare_mx4(const LinearCall& call, Pool& pool);
void prepare_nl4k(const LinearCall& call, Pool& pool);
void prepare_nl4k16(const LinearCall& call, Pool& pool);

void lookup_q5(const LookupCall& call, Pool& pool);
void lookup_q2k(const LookupCall& call, Pool& pool);
void lookup_q3k(const LookupCall& call, Pool& pool);
void lookup_q4k(const LookupCall& call, Pool& pool);
void lookup_q5k(const LookupCall& call, Pool& pool);
void lookup_q6k(const LookupCall& call, Pool& pool);
void lookup_nl4(const LookupCall& call, Pool& pool);
void lookup_mx4(const LookupCall& call, Pool& pool);
void lookup_nl4k(const LookupCall& call, Pool& pool);
void lookup_nl4k16(const LookupCall& call, Pool& pool);

}  // namespace PENSTOCK_ISA_NAMESPACE
}  // namespace penstock
