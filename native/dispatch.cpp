// Which sets this processor runs, best first; the table in use changes only when it is told to.
#include "dispatch.h"

namespace penstock {
namespace {

struct Candidate {
    const KernelTable* table;
    bool (*runs_here)();
};

// Best first. The compiler's own CPUID reading also asks whether the system saves the wide registers.
const Candidate candidates[] = {
#if defined(PENSTOCK_HAVE_AVX512_BF16)
    {&avx512_bf16_kernels,
     [] {
         return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni") &&
                __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
     }},
#endif
#if defined(PENSTOCK_HAVE_AVX512)
    {&avx512_kernels,
     [] {
         return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
     }},
#endif
#if defined(PENSTOCK_HAVE_AVX2)
    {&avx2_kernels,
     [] {
         return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
     }},
#endif
    {&portable_kernels, [] { return true; }},
};

const KernelTable* best() {
    for (const Candidate& candidate : candidates)
        if (candidate.runs_here()) return candidate.table;
    return &portable_kernels;
}

const KernelTable*& in_use() {
    static const KernelTable* table = best();
    return table;
}

}  // namespace

const KernelTable& kernels() { return *in_use(); }

std::vector<std::string> isas() {
    std::vector<std::string> names;
    for (const Candidate& candidate : candidates)
        if (candidate.runs_here()) names.emplace_back(candidate.table->isa);
    return names;
}

bool use_isa(const std::string& name) {
    for (const Candidate& candidate : candidates) {
        if (candidate.runs_here() && name == candidate.table->isa) {
            in_use() = candidate.table;
            return true;
        }
    }
    return false;
}

}  // namespace penstock
