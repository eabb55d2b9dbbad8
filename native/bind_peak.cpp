// Measuring the machine's limits, as methods of a Cpu: each runs on all of its threads and returns how much was done.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>

#include "bind_values.h"
#include "checks.h"
#include "cpu.h"
#include "peak.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace penstock {
namespace {

const Peak& peak_of(const Cpu& cpu) {
    const char* isa = cpu.kernels().isa;
#if defined(PENSTOCK_HAVE_AVX512_AMX)
    if (!strcmp(isa, avx512_amx_peak.isa)) return avx512_amx_peak;
#endif
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

// Runs the same rounds on each thread; returns all multiplications and additions.
template <int64_t (*Peak::*products)(int64_t)>
int64_t arithmetic(const Cpu& cpu, int64_t rounds) {
    require(rounds >= 1, "rounds must be at least 1");
    nb::gil_scoped_release released;
    const Peak& peak = peak_of(cpu);
    std::atomic<int64_t> done{0};
    const auto task = [&](int) { done += (peak.*products)(rounds); };
    cpu.pool().run(cpu.threads(), task);
    return done;
}

// Every thread reads its part, in pieces that are handed out in turn, like rows of weights.
void read_memory(const Cpu& cpu, const Memory& memory) {
    constexpr int64_t kLine = 64, kMostPieces = 4096;
    require(memory.address != 0 && memory.address % kLine == 0 && memory.bytes >= kLine,
            "memory must be given, on a line of 64 bytes");
    nb::gil_scoped_release released;
    const int64_t lines = memory.bytes / kLine, each = std::max<int64_t>(1024, (lines + kMostPieces - 1) / kMostPieces);
    const Peak& peak = peak_of(cpu);
    const float* numbers = pointer<float>(memory.address);
    const auto task = [&](int piece) {
        const int64_t first = piece * each;
        volatile float sum = peak.read(numbers + first * (kLine / 4), std::min(each, lines - first));
        (void)sum;
    };
    cpu.pool().run(int((lines + each - 1) / each), task);
}

}  // namespace
}  // namespace penstock

void bind_peak(nb::class_<penstock::Cpu>& cpu) {
    using namespace penstock;
    cpu.def("peak_fp32", &arithmetic<&Peak::fp32>, "rounds"_a, "Rounds of products on every thread; operations done.");
    cpu.def("peak_bf16", &arithmetic<&Peak::bf16>, "rounds"_a, "The same of bfloat16 pairs.");
    cpu.def("peak_int8", &arithmetic<&Peak::int8>, "rounds"_a, "The same of bytes by fours.");
    cpu.def("read_memory", &read_memory, "memory"_a, "Read memory on every thread.");
}
