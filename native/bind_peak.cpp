// The machine's limits as Python functions: each runs on every thread of the pool and says how much was done.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>

#include "checks.h"
#include "dispatch.h"
#include "peak.h"
#include "pool.h"

namespace nb = nanobind;

namespace penstock {
namespace {

const Peak& peak() {
    const char* isa = kernels().isa;
#if defined(PENSTOCK_HAVE_AVX512_BF16)
    if (!strcmp(isa, avx512_bf16_peak.isa)) return avx512_bf16_peak;
#endif
#if defined(PENSTOCK_HAVE_AVX512)
    if (!strcmp(isa, avx512_peak.isa)) return avx512_peak;
#endif
#if defined(PENSTOCK_HAVE_AVX2)
    if (!strcmp(isa, avx2_peak.isa)) return avx2_peak;
#endif
    return portable_peak;
}

// The same rounds on each thread; multiplications and additions in all.
template <int64_t (*Peak::*products)(int64_t)>
int64_t arithmetic(int64_t rounds) {
    require(rounds >= 1, "rounds must be at least 1");
    nb::gil_scoped_release released;
    std::atomic<int64_t> done{0};
    const auto task = [&](int) { done += (peak().*products)(rounds); };
    pool().run(pool().threads(), task);
    return done;
}

// Every thread reads its part, in pieces that are handed out in turn as rows of weights are.
void read_memory(uintptr_t address, int64_t bytes) {
    constexpr int64_t kLine = 64, kMostPieces = 4096;
    require(address != 0 && address % kLine == 0 && bytes >= kLine, "memory must be given, on a line of 64 bytes");
    nb::gil_scoped_release released;
    const int64_t lines = bytes / kLine, each = std::max<int64_t>(1024, (lines + kMostPieces - 1) / kMostPieces);
    const float* numbers = pointer<float>(address);
    const auto task = [&](int piece) {
        const int64_t first = piece * each;
        volatile float sum = peak().read(numbers + first * (kLine / 4), std::min(each, lines - first));
        (void)sum;
    };
    pool().run(int((lines + each - 1) / each), task);
}

}  // namespace
}  // namespace penstock

void bind_peak(nb::module_& module) {
    using namespace penstock;
    module.def("peak_fp32", &arithmetic<&Peak::fp32>, "Rounds of products on every thread; operations done.");
    module.def("peak_bf16", &arithmetic<&Peak::bf16>, "The same of bfloat16 pairs.");
    module.def("peak_int8", &arithmetic<&Peak::int8>, "The same of bytes by fours.");
    module.def("read_memory", &read_memory, "Read memory on every thread.");
}
