// Programs that reach the machine's limits: arithmetic that never waits, and reading memory without using it.
//
// For each instruction set: the products of the linear kernels, with enough independent sums to hide an instruction's
// latency; and a sum over memory with the widest loads and the prefetches of these kernels. Their rates are upper
// bounds for every kernel on this machine. Like the kernels, peak.cpp is compiled once for each instruction set.
#pragma once

#include <cstdint>

namespace penstock {

struct Peak {
    const char* isa;

    // Runs `rounds` rounds of independent products on one thread; returns the number of multiplications and additions.
    int64_t (*fp32)(int64_t rounds);
    int64_t (*bf16)(int64_t rounds);
    int64_t (*int8)(int64_t rounds);

    // Reads whole lines of 64 bytes; returns their sum so that the compiler cannot omit the reads.
    float (*read)(const float* numbers, int64_t lines);
};

extern const Peak portable_peak;
extern const Peak avx2_peak;
extern const Peak avx512_peak;
extern const Peak avx512_bf16_peak;
extern const Peak avx512_amx_peak;

}  // namespace penstock
