// Which of our instruction sets this x86-64 processor has and the operating system enables.
//
// Read from the processor itself: the compiler's __builtin_cpu_supports reads a table that its runtime library fills
// in, and the library that zig links into release wheels leaves it empty. For the bits see Intel's manual, volume 2,
// CPUID; by volume 1, sections 14.3 and 15.2, one must also ask whether the system saves the registers.
#pragma once

#if defined(__x86_64__)

#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <cstdint>

namespace penstock {

struct X86Features {
    bool avx2 = false;         // and FMA, F16C
    bool avx512 = false;       // F, BW, DQ and VL; and FMA, F16C
    bool avx512_bf16 = false;  // and VNNI
    bool avx512_amx = false;   // and tiles of bfloat16
};

// The registers that the system saves when it switches threads (XCR0). Requires OSXSAVE.
inline std::uint64_t saved_registers() {
    std::uint32_t low, high;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (std::uint64_t{high} << 32) | low;
}

// Asks Linux to let this process use tiles (Documentation/arch/x86/xstate.rst): a thread that uses them has 8 KiB more
// state to save. Linux refuses if a thread's signal stack is too small for that.
inline bool may_use_tiles() {
#if defined(__linux__)
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return false;
#endif
}

inline X86Features read_x86_features() {
    struct Leaf {
        std::uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
        Leaf(std::uint32_t leaf, std::uint32_t subleaf) { __get_cpuid_count(leaf, subleaf, &eax, &ebx, &ecx, &edx); }
    };
    const auto has = [](std::uint64_t word, std::uint64_t bits) { return (word & bits) == bits; };
    constexpr std::uint32_t kFma = 1u << 12, kOsxsave = 1u << 27, kF16c = 1u << 29;                     // leaf 1, ECX
    constexpr std::uint32_t kAvx2 = 1u << 5;                                                            // leaf 7, EBX
    constexpr std::uint32_t kAvx512F = 1u << 16, kAvx512Dq = 1u << 17, kAvx512Bw = 1u << 30, kAvx512Vl = 1u << 31;
    constexpr std::uint32_t kAvx512Vnni = 1u << 11;                                                     // leaf 7, ECX
    constexpr std::uint32_t kAvx512Bf16 = 1u << 5;                                                      // leaf 7.1, EAX
    constexpr std::uint32_t kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;                                   // leaf 7, EDX
    constexpr std::uint64_t kYmm = 0x06, kZmm = 0xe6;  // XCR0: XMM, YMM; then also masks, upper halves, upper registers
    constexpr std::uint64_t kTiles = 0x60000;          // tile configuration, tile data

    X86Features features;
    if (!has(Leaf(1, 0).ecx, kOsxsave | kFma | kF16c)) return features;
    const std::uint64_t saved = saved_registers();
    const Leaf extended(7, 0);
#if defined(__APPLE__)
    const bool wide = true;  // Darwin saves them from their first use on, and XCR0 does not show them until then
#else
    const bool wide = has(saved, kZmm);
#endif
    features.avx2 = has(saved, kYmm) && has(extended.ebx, kAvx2);
    features.avx512 = wide && has(extended.ebx, kAvx512F | kAvx512Dq | kAvx512Bw | kAvx512Vl);
    // Leaf 7's EAX is its highest subleaf; beyond it, a processor returns the data of another leaf.
    features.avx512_bf16 = features.avx512 && has(extended.ecx, kAvx512Vnni) && extended.eax >= 1 &&
                           has(Leaf(7, 1).eax, kAvx512Bf16);
    features.avx512_amx = features.avx512_bf16 && has(saved, kTiles) && has(extended.edx, kAmxTile | kAmxBf16) && may_use_tiles();
    return features;
}

inline const X86Features& x86_features() {
    static const X86Features features = read_x86_features();
    return features;
}

}  // namespace penstock

#endif
