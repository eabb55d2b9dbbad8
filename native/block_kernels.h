// The kernels of the block forms of one instruction set; blocks_*.cpp are compiled apart from the others, because
// they are many.
#pragma once

#include "linear_call.h"
#include "simd.h"

namespace penstock {

class Pool;

inline namespace PENSTOCK_ISA_NAMESPACE {

// Defined in isa_blocks.h for each kind that is a block form.
template <Kind kind>
struct BlockKernels {
    static void linear(const LinearCall& call, Pool& pool);
    static void prepare(const LinearCall& call, Pool& pool);
    static void lookup(const LookupCall& call, Pool& pool);
};

}  // namespace PENSTOCK_ISA_NAMESPACE
}  // namespace penstock
