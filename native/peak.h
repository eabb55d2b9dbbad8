// The machine's limits as programs: arithmetic that waits for nothing, and memory that is read and not used.
//
// For each instruction set the products that the linear kernels are made of, with as many independent sums as hide an
// instruction's latency; and a sum over memory with the widest loads and the prefetches of those kernels. What they
// reach is what a kernel can reach at best on this machine. Compiled like the kernels: peak.cpp, once for each set.
#pragma once

#include <cstdint>

namespace penstock {

struct Peak {
    const char* isa;

    // So many rounds of independent products on one thread; returns the multiplications and additions done.
    int64_t (*fp32)(int64_t rounds);
    int64_t (*bf16)(int64_t rounds);
    int64_t (*int8)(int64_t rounds);

    // Reads whole lines of 64 bytes; the sum keeps the compiler from leaving it out.
    float (*read)(const float* numbers, int64_t lines);
};

extern const Peak portable_peak;
extern const Peak avx2_peak;
extern const Peak avx512_peak;
extern const Peak avx512_bf16_peak;
extern const Peak avx512_amx_peak;

}  // namespace penstock
