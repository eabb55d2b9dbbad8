// The instruction sets of this processor, best first; and what a Cpu owns.
#include "cpu.h"

#include <unistd.h>

#include <stdexcept>

#include "x86_features.h"

namespace penstock {
namespace {

struct Candidate {
    const KernelTable* table;
    bool (*runs_here)();
};

// Best first.
const Candidate candidates[] = {
#if defined(PENSTOCK_HAVE_AVX512_AMX)
    {&avx512_amx_kernels, [] { return x86_features().avx512_amx; }},
#endif
#if defined(PENSTOCK_HAVE_AVX512_BF16)
    {&avx512_bf16_kernels, [] { return x86_features().avx512_bf16; }},
#endif
#if defined(PENSTOCK_HAVE_AVX512)
    {&avx512_kernels, [] { return x86_features().avx512; }},
#endif
#if defined(PENSTOCK_HAVE_AVX2)
    {&avx2_kernels, [] { return x86_features().avx2; }},
#endif
    {&portable_kernels, [] { return true; }},
};

const KernelTable& table_of(const std::string& isa) {
    for (const Candidate& candidate : candidates)
        if (candidate.runs_here() && (isa.empty() || isa == candidate.table->isa)) return *candidate.table;
    throw std::invalid_argument("there are no kernels for " + isa + " here");
}

int checked(int threads) {
    if (threads < 1 || threads > kMostThreads) throw std::invalid_argument("threads must be between 1 and 1024");
    return threads;
}

}  // namespace

Cpu::Cpu(const std::string& isa, int threads)
    : kernels_(table_of(isa)), pool_(new Pool(checked(threads))), owner_(getpid()) {}

// A forked child does not have the workers of its parent's pools, so it must not wait for them. It may still use a
// pool: the caller then does every task itself.
Cpu::~Cpu() {
    if (owner_ == getpid()) delete pool_;
}

std::vector<std::string> isas() {
    std::vector<std::string> names;
    for (const Candidate& candidate : candidates)
        if (candidate.runs_here()) names.emplace_back(candidate.table->isa);
    return names;
}

}  // namespace penstock
