// Runs a whole program in one call: the same kernels in the same order as from Python, but without returning to Python
// between them, which costs as much as a small kernel. Nothing is allocated, and the caller has checked everything.
#pragma once

#include <cstdint>

#include "kernel_table.h"
#include "program.h"

namespace penstock {

class Pool;

// Bytes of scratch for a step whose longest context has `longest` positions, on `threads` threads.
int64_t program_scratch(const Program& program, int64_t tokens, int32_t rows, int32_t longest, int threads);

void run_program(const Program& program, const Step& step, const KernelTable& kernels, Pool& pool);

}  // namespace penstock
