// Sixteen float lanes, the one vector type of all kernels. The file is long because it has every operation once for
// each instruction set.
//
// A kernel header is compiled once per instruction set: its translation unit defines one of
//
//     PENSTOCK_ISA_AVX512_AMX   PENSTOCK_ISA_AVX512_BF16   PENSTOCK_ISA_AVX512   PENSTOCK_ISA_AVX2   PENSTOCK_ISA_PORTABLE
//
// (the first stands for the second too) and everything below then lives in an inline namespace of that name. Without it
// two translation units would define the same inline function twice, the linker would keep either one, and a machine
// without AVX-512 could run into it.
// For the same reason kernel headers use no templates of the standard library.
//
// Exactness: lanes are independent, reductions add in one fixed order, and `fma` rounds once wherever the machine has
// it. So the bits of a result depend on its inputs and on the instruction set, not on the tile that computed it. The
// build must preserve this: `-ffp-contract=off` (otherwise compilers fuse a `mul` and an `add` in one tile and not in
// another) and never `-ffast-math`.
//
// Tails: `load(p, n)` reads n < 16 elements and zeroes the other lanes, `store(p, v, n)` writes n; neither touches
// memory beyond. AVX512-BF16 rounds to bfloat16 in hardware, which treats subnormals as 0; the others keep them.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(PENSTOCK_ISA_AVX512_AMX)
#define PENSTOCK_ISA_NAMESPACE avx512_amx
#define PENSTOCK_ISA_AVX512_BF16 1
#define PENSTOCK_AVX512 1
#elif defined(PENSTOCK_ISA_AVX512_BF16)
#define PENSTOCK_ISA_NAMESPACE avx512_bf16
#define PENSTOCK_AVX512 1
#elif defined(PENSTOCK_ISA_AVX512)
#define PENSTOCK_ISA_NAMESPACE avx512
#define PENSTOCK_AVX512 1
#elif defined(PENSTOCK_ISA_AVX2)
#define PENSTOCK_ISA_NAMESPACE avx2
#elif defined(PENSTOCK_ISA_PORTABLE)
#define PENSTOCK_ISA_NAMESPACE portable
#else
#error "define one of PENSTOCK_ISA_AVX512_AMX, _AVX512_BF16, _AVX512, _AVX2 and _PORTABLE"
#endif

#if defined(PENSTOCK_AVX512) || defined(PENSTOCK_ISA_AVX2)
#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 13
#pragma GCC diagnostic ignored "-Wuninitialized"  // this compiler sees a fault in its own header
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#endif

#if defined(__FAST_MATH__)
#error "-ffast-math would let the compiler reorder sums; kernels promise one order"
#endif

#if defined(__GNUC__) || defined(__clang__)
#define PENSTOCK_INLINE inline __attribute__((always_inline))
#define PENSTOCK_UNROLL _Pragma("GCC unroll 16")
#define PENSTOCK_NOINLINE __attribute__((noinline))
#define PENSTOCK_PREFETCH(p) __builtin_prefetch(p)
#define PENSTOCK_PREFETCH_FAR(p) __builtin_prefetch(p, 0, 2)  // into L2: many more may be outstanding
#define PENSTOCK_PREFETCH_WRITE(p) __builtin_prefetch(p, 1, 3)
#else
#define PENSTOCK_INLINE inline
#define PENSTOCK_UNROLL
#define PENSTOCK_NOINLINE
#define PENSTOCK_PREFETCH_WRITE(p) ((void)(p))
#define PENSTOCK_PREFETCH(p) ((void)(p))
#define PENSTOCK_PREFETCH_FAR(p) ((void)(p))
#endif

namespace penstock {

// bfloat16: the upper half of a float.
struct bf16 {
    uint16_t bits;
};

inline namespace PENSTOCK_ISA_NAMESPACE {

constexpr int kLanes = 16;

// One bit for each lane, lane 0 lowest; the bits above lane 15 are 0.
using Mask = uint32_t;

// ---- scalars ------------------------------------------------------------------------------------------------------

PENSTOCK_INLINE uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

PENSTOCK_INLINE float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

PENSTOCK_INLINE float to_float(float x) { return x; }
PENSTOCK_INLINE float to_float(bf16 x) { return float_of(uint32_t(x.bits) << 16); }

// Rounds to nearest, ties to even; a NaN stays a NaN (its payload may be only in the bits that are cut off).
PENSTOCK_INLINE bf16 to_bf16(float x) {
    const uint32_t bits = bits_of(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return bf16{uint16_t((bits >> 16) | 0x40u)};
    return bf16{uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

PENSTOCK_INLINE void put(float* p, float x) { *p = x; }
PENSTOCK_INLINE void put(bf16* p, float x) { *p = to_bf16(x); }

PENSTOCK_INLINE Mask first_lanes(int n) { return (1u << n) - 1u; }  // n in [0, 16]

PENSTOCK_INLINE int lowest_lane(Mask mask) {  // mask is not 0
#if defined(__GNUC__) || defined(__clang__)
    return __builtin_ctz(mask);
#else
    int lane = 0;
    while (!(mask >> lane & 1u)) lane++;
    return lane;
#endif
}

PENSTOCK_INLINE int lanes_in(Mask mask) {
#if defined(__GNUC__) || defined(__clang__)
    return __builtin_popcount(mask);
#else
    int lanes = 0;
    for (; mask; mask &= mask - 1) lanes++;
    return lanes;
#endif
}

#if defined(PENSTOCK_AVX512)
// ---- AVX-512: one register ----------------------------------------------------------------------------------------

struct f32x16 {
    __m512 v;
};

PENSTOCK_INLINE f32x16 broadcast(float x) { return {_mm512_set1_ps(x)}; }
PENSTOCK_INLINE f32x16 zero() { return {_mm512_setzero_ps()}; }

PENSTOCK_INLINE f32x16 widen(__m256i half) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
}
PENSTOCK_INLINE __m256i narrow(f32x16 a) {
#if defined(PENSTOCK_ISA_AVX512_BF16)
    const __m256bh rounded = _mm512_cvtneps_pbh(a.v);
    __m256i bits;
    memcpy(&bits, &rounded, sizeof bits);
    return bits;
#else
    const __m512i bits = _mm512_castps_si512(a.v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
    rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
#endif
}

PENSTOCK_INLINE f32x16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
PENSTOCK_INLINE f32x16 load(const float* p, int n) { return {_mm512_maskz_loadu_ps(__mmask16(first_lanes(n)), p)}; }
PENSTOCK_INLINE f32x16 load(const bf16* p) {
    return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
PENSTOCK_INLINE f32x16 load(const bf16* p, int n) {
    return widen(_mm256_maskz_loadu_epi16(__mmask16(first_lanes(n)), p));
}
PENSTOCK_INLINE void store(float* p, f32x16 a) { _mm512_storeu_ps(p, a.v); }
PENSTOCK_INLINE void store(float* p, f32x16 a, int n) { _mm512_mask_storeu_ps(p, __mmask16(first_lanes(n)), a.v); }
PENSTOCK_INLINE void store(bf16* p, f32x16 a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(a)); }
PENSTOCK_INLINE void store(bf16* p, f32x16 a, int n) {
    _mm256_mask_storeu_epi16(p, __mmask16(first_lanes(n)), narrow(a));
}

PENSTOCK_INLINE f32x16 add(f32x16 a, f32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
PENSTOCK_INLINE f32x16 sub(f32x16 a, f32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
PENSTOCK_INLINE f32x16 mul(f32x16 a, f32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
PENSTOCK_INLINE f32x16 div(f32x16 a, f32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
PENSTOCK_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// If either is NaN: b. (`max(x, broadcast(low))` drops a NaN in x, `max(broadcast(low), x)` keeps it.)
PENSTOCK_INLINE f32x16 max(f32x16 a, f32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
PENSTOCK_INLINE f32x16 min(f32x16 a, f32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
PENSTOCK_INLINE f32x16 abs(f32x16 a) { return {_mm512_abs_ps(a.v)}; }
PENSTOCK_INLINE f32x16 sqrt(f32x16 a) { return {_mm512_sqrt_ps(a.v)}; }

// Ordered comparisons: false if either is NaN.
PENSTOCK_INLINE Mask greater(f32x16 a, f32x16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ); }
PENSTOCK_INLINE Mask greater_equal(f32x16 a, f32x16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ); }
PENSTOCK_INLINE Mask equal(f32x16 a, f32x16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ); }
PENSTOCK_INLINE f32x16 select(Mask mask, f32x16 yes, f32x16 no) {
    return {_mm512_mask_blend_ps(__mmask16(mask), no.v, yes.v)};
}

PENSTOCK_INLINE float lane0(f32x16 a) { return _mm512_cvtss_f32(a.v); }
// Lanes i + 8, i + 4, i + 2, i + 1 moved to lane i.
PENSTOCK_INLINE f32x16 down8(f32x16 a) { return {_mm512_shuffle_f32x4(a.v, a.v, 0x4e)}; }
PENSTOCK_INLINE f32x16 down4(f32x16 a) { return {_mm512_shuffle_f32x4(a.v, a.v, 0xb1)}; }
PENSTOCK_INLINE f32x16 down2(f32x16 a) { return {_mm512_permute_ps(a.v, 0x4e)}; }
PENSTOCK_INLINE f32x16 down1(f32x16 a) { return {_mm512_permute_ps(a.v, 0xb1)}; }

// The nearest integer to each lane, ties to even.
PENSTOCK_INLINE f32x16 nearest(f32x16 a) {
    return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// a * 2^n for integral n within [-252, 254].
PENSTOCK_INLINE f32x16 scale2(f32x16 a, f32x16 n) { return {_mm512_scalef_ps(a.v, n.v)}; }

// Separates the 32 bfloat16 at p: even = p[0], p[2], ..., odd = p[1], p[3], ...
PENSTOCK_INLINE void load_pairs(const bf16* p, f32x16& even, f32x16& odd) {
    const __m512i both = _mm512_loadu_si512(p);
    even.v = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
    odd.v = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(int(0xffff0000u))));
}

#elif defined(PENSTOCK_ISA_AVX2)
// ---- AVX2 and FMA: two registers, `low` holds lanes 0 to 7 --------------------------------------------------------

struct f32x16 {
    __m256 low, high;
};

PENSTOCK_INLINE f32x16 broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
PENSTOCK_INLINE f32x16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }

PENSTOCK_INLINE __m256 widen(__m128i half) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
PENSTOCK_INLINE __m256i rounded(__m256 a) {  // the bfloat16 in the lower half of each lane
    const __m256i bits = _mm256_castps_si256(a);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    return _mm256_srli_epi32(_mm256_blendv_epi8(up, quiet, nan), 16);
}
PENSTOCK_INLINE __m256i narrow(f32x16 a) {
    // packus interleaves the 128-bit halves of its arguments; the permutation restores their order
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded(a.low), rounded(a.high)), 0xd8);
}

PENSTOCK_INLINE f32x16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
PENSTOCK_INLINE f32x16 load(const float* p, int n) {
    alignas(32) float lanes[kLanes] = {};
    memcpy(lanes, p, size_t(n) * sizeof(float));
    return load(lanes);
}
PENSTOCK_INLINE f32x16 load(const bf16* p) {
    return {widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
            widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
PENSTOCK_INLINE f32x16 load(const bf16* p, int n) {
    alignas(32) bf16 lanes[kLanes] = {};
    memcpy(lanes, p, size_t(n) * sizeof(bf16));
    return load(lanes);
}
PENSTOCK_INLINE void store(float* p, f32x16 a) {
    _mm256_storeu_ps(p, a.low);
    _mm256_storeu_ps(p + 8, a.high);
}
PENSTOCK_INLINE void store(float* p, f32x16 a, int n) {
    alignas(32) float lanes[kLanes];
    store(lanes, a);
    memcpy(p, lanes, size_t(n) * sizeof(float));
}
PENSTOCK_INLINE void store(bf16* p, f32x16 a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(a)); }
PENSTOCK_INLINE void store(bf16* p, f32x16 a, int n) {
    alignas(32) bf16 lanes[kLanes];
    store(lanes, a);
    memcpy(p, lanes, size_t(n) * sizeof(bf16));
}

PENSTOCK_INLINE f32x16 add(f32x16 a, f32x16 b) {
    return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)};
}
PENSTOCK_INLINE f32x16 sub(f32x16 a, f32x16 b) {
    return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)};
}
PENSTOCK_INLINE f32x16 mul(f32x16 a, f32x16 b) {
    return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
}
PENSTOCK_INLINE f32x16 div(f32x16 a, f32x16 b) {
    return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)};
}
PENSTOCK_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
// If either is NaN: b. (`max(x, broadcast(low))` drops a NaN in x, `max(broadcast(low), x)` keeps it.)
PENSTOCK_INLINE f32x16 max(f32x16 a, f32x16 b) {
    return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)};
}
PENSTOCK_INLINE f32x16 min(f32x16 a, f32x16 b) {
    return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)};
}
PENSTOCK_INLINE f32x16 abs(f32x16 a) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, a.low), _mm256_andnot_ps(sign, a.high)};
}
PENSTOCK_INLINE f32x16 sqrt(f32x16 a) { return {_mm256_sqrt_ps(a.low), _mm256_sqrt_ps(a.high)}; }

PENSTOCK_INLINE Mask bits_of(__m256 low, __m256 high) {
    return Mask(_mm256_movemask_ps(low)) | Mask(_mm256_movemask_ps(high)) << 8;
}
// Ordered comparisons: false if either is NaN.
PENSTOCK_INLINE Mask greater(f32x16 a, f32x16 b) {
    return bits_of(_mm256_cmp_ps(a.low, b.low, _CMP_GT_OQ), _mm256_cmp_ps(a.high, b.high, _CMP_GT_OQ));
}
PENSTOCK_INLINE Mask greater_equal(f32x16 a, f32x16 b) {
    return bits_of(_mm256_cmp_ps(a.low, b.low, _CMP_GE_OQ), _mm256_cmp_ps(a.high, b.high, _CMP_GE_OQ));
}
PENSTOCK_INLINE Mask equal(f32x16 a, f32x16 b) {
    return bits_of(_mm256_cmp_ps(a.low, b.low, _CMP_EQ_OQ), _mm256_cmp_ps(a.high, b.high, _CMP_EQ_OQ));
}
PENSTOCK_INLINE __m256 lanes_of(Mask mask) {  // all ones in each of eight lanes whose bit is set
    const __m256i one = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(int(mask)), one), one));
}
PENSTOCK_INLINE f32x16 select(Mask mask, f32x16 yes, f32x16 no) {
    return {_mm256_blendv_ps(no.low, yes.low, lanes_of(mask)),
            _mm256_blendv_ps(no.high, yes.high, lanes_of(mask >> 8))};
}

PENSTOCK_INLINE float lane0(f32x16 a) { return _mm256_cvtss_f32(a.low); }
// Lanes i + 8, i + 4, i + 2, i + 1 moved to lane i.
PENSTOCK_INLINE f32x16 down8(f32x16 a) { return {a.high, a.low}; }
PENSTOCK_INLINE f32x16 down4(f32x16 a) {
    return {_mm256_permute2f128_ps(a.low, a.low, 1), _mm256_permute2f128_ps(a.high, a.high, 1)};
}
PENSTOCK_INLINE f32x16 down2(f32x16 a) { return {_mm256_permute_ps(a.low, 0x4e), _mm256_permute_ps(a.high, 0x4e)}; }
PENSTOCK_INLINE f32x16 down1(f32x16 a) { return {_mm256_permute_ps(a.low, 0xb1), _mm256_permute_ps(a.high, 0xb1)}; }

// The nearest integer to each lane, ties to even.
PENSTOCK_INLINE f32x16 nearest(f32x16 a) {
    constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(a.low, mode), _mm256_round_ps(a.high, mode)};
}
PENSTOCK_INLINE __m256 power2(__m256i n) {  // 2^n for n in [-126, 127]
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}
PENSTOCK_INLINE __m256 scale2(__m256 a, __m256 n) {
    // in two steps, so that subnormal results are rounded once and nothing overflows on the way
    const __m256i whole = _mm256_cvtps_epi32(n);
    const __m256i half = _mm256_srai_epi32(whole, 1);
    return _mm256_mul_ps(_mm256_mul_ps(a, power2(half)), power2(_mm256_sub_epi32(whole, half)));
}
// a * 2^n for integral n within [-252, 254].
PENSTOCK_INLINE f32x16 scale2(f32x16 a, f32x16 n) { return {scale2(a.low, n.low), scale2(a.high, n.high)}; }

// Separates the 32 bfloat16 at p: even = p[0], p[2], ..., odd = p[1], p[3], ...
PENSTOCK_INLINE void load_pairs(const bf16* p, f32x16& even, f32x16& odd) {
    const __m256i first = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    const __m256i second = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 16));
    const __m256i upper = _mm256_set1_epi32(int(0xffff0000u));
    even = {_mm256_castsi256_ps(_mm256_slli_epi32(first, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(second, 16))};
    odd = {_mm256_castsi256_ps(_mm256_and_si256(first, upper)), _mm256_castsi256_ps(_mm256_and_si256(second, upper))};
}

#else
// ---- portable: an array, in loops that any compiler can vectorise --------------------------------------------------

struct f32x16 {
    float lane[kLanes];
};

template <typename Function>
PENSTOCK_INLINE f32x16 each(Function function) {
    f32x16 result;
    for (int i = 0; i < kLanes; i++) result.lane[i] = function(i);
    return result;
}

PENSTOCK_INLINE f32x16 broadcast(float x) {
    return each([=](int) { return x; });
}
PENSTOCK_INLINE f32x16 zero() { return broadcast(0.0f); }

template <typename T>
PENSTOCK_INLINE f32x16 load(const T* p) {
    return each([=](int i) { return to_float(p[i]); });
}
template <typename T>
PENSTOCK_INLINE f32x16 load(const T* p, int n) {
    f32x16 result = zero();
    for (int i = 0; i < n; i++) result.lane[i] = to_float(p[i]);
    return result;
}
template <typename T>
PENSTOCK_INLINE void store(T* p, f32x16 a) {
    for (int i = 0; i < kLanes; i++) put(p + i, a.lane[i]);
}
template <typename T>
PENSTOCK_INLINE void store(T* p, f32x16 a, int n) {
    for (int i = 0; i < n; i++) put(p + i, a.lane[i]);
}

PENSTOCK_INLINE f32x16 add(f32x16 a, f32x16 b) {
    return each([&](int i) { return a.lane[i] + b.lane[i]; });
}
PENSTOCK_INLINE f32x16 sub(f32x16 a, f32x16 b) {
    return each([&](int i) { return a.lane[i] - b.lane[i]; });
}
PENSTOCK_INLINE f32x16 mul(f32x16 a, f32x16 b) {
    return each([&](int i) { return a.lane[i] * b.lane[i]; });
}
PENSTOCK_INLINE f32x16 div(f32x16 a, f32x16 b) {
    return each([&](int i) { return a.lane[i] / b.lane[i]; });
}
PENSTOCK_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__FP_FAST_FMAF) || defined(__ARM_FEATURE_FMA)
    return each([&](int i) { return __builtin_fmaf(a.lane[i], b.lane[i], c.lane[i]); });
#else
    // without the instruction a fused multiply-add is a call of the C library for every lane, fifty times slower
    return each([&](int i) { return a.lane[i] * b.lane[i] + c.lane[i]; });
#endif
}
// If either is NaN: b. (`max(x, broadcast(low))` drops a NaN in x, `max(broadcast(low), x)` keeps it.)
PENSTOCK_INLINE f32x16 max(f32x16 a, f32x16 b) {
    return each([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
}
PENSTOCK_INLINE f32x16 min(f32x16 a, f32x16 b) {
    return each([&](int i) { return a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]; });
}
PENSTOCK_INLINE f32x16 abs(f32x16 a) {
    return each([&](int i) { return float_of(bits_of(a.lane[i]) & 0x7fffffffu); });
}
PENSTOCK_INLINE f32x16 sqrt(f32x16 a) {
    return each([&](int i) { return __builtin_sqrtf(a.lane[i]); });
}

// Ordered comparisons: false if either is NaN.
PENSTOCK_INLINE Mask greater(f32x16 a, f32x16 b) {
    Mask mask = 0;
    for (int i = 0; i < kLanes; i++) mask |= Mask(a.lane[i] > b.lane[i]) << i;
    return mask;
}
PENSTOCK_INLINE Mask greater_equal(f32x16 a, f32x16 b) {
    Mask mask = 0;
    for (int i = 0; i < kLanes; i++) mask |= Mask(a.lane[i] >= b.lane[i]) << i;
    return mask;
}
PENSTOCK_INLINE Mask equal(f32x16 a, f32x16 b) {
    Mask mask = 0;
    for (int i = 0; i < kLanes; i++) mask |= Mask(a.lane[i] == b.lane[i]) << i;
    return mask;
}
PENSTOCK_INLINE f32x16 select(Mask mask, f32x16 yes, f32x16 no) {
    return each([&](int i) { return (mask >> i & 1u) ? yes.lane[i] : no.lane[i]; });
}

PENSTOCK_INLINE float lane0(f32x16 a) { return a.lane[0]; }
// Lanes i + 8, i + 4, i + 2, i + 1 moved to lane i (as exchanges, like the other instruction sets).
PENSTOCK_INLINE f32x16 down8(f32x16 a) {
    return each([&](int i) { return a.lane[i ^ 8]; });
}
PENSTOCK_INLINE f32x16 down4(f32x16 a) {
    return each([&](int i) { return a.lane[i ^ 4]; });
}
PENSTOCK_INLINE f32x16 down2(f32x16 a) {
    return each([&](int i) { return a.lane[i ^ 2]; });
}
PENSTOCK_INLINE f32x16 down1(f32x16 a) {
    return each([&](int i) { return a.lane[i ^ 1]; });
}

// The nearest integer to each lane of magnitude below 2^22, ties to even: adding 1.5 * 2^23 leaves no bits below 1.
PENSTOCK_INLINE f32x16 nearest(f32x16 a) {
    return each([&](int i) { return (a.lane[i] + 12582912.0f) - 12582912.0f; });
}
// a * 2^n for integral n within [-252, 254]; in two steps, so that subnormal results are rounded once and nothing
// overflows on the way. The integer is taken from the bits, because converting a NaN would be undefined.
PENSTOCK_INLINE f32x16 scale2(f32x16 a, f32x16 n) {
    return each([&](int i) {
        const uint32_t whole = bits_of(n.lane[i] + 12582912.0f) - bits_of(12582912.0f) + 512u;  // n + 512, even shift
        const uint32_t half = whole >> 1;
        const float first = float_of((half - 256u + 127u) << 23);
        const float second = float_of((whole - half - 256u + 127u) << 23);
        return a.lane[i] * first * second;
    });
}

// Separates the 32 bfloat16 at p: even = p[0], p[2], ..., odd = p[1], p[3], ...
PENSTOCK_INLINE void load_pairs(const bf16* p, f32x16& even, f32x16& odd) {
    even = each([=](int i) { return to_float(p[2 * i]); });
    odd = each([=](int i) { return to_float(p[2 * i + 1]); });
}
#endif

// ---- for all instruction sets ---------------------------------------------------------------------------------------

// Writes the lanes in `mask`, in order, to `to`, which needs room for all 16. Returns their number.
PENSTOCK_INLINE int pack_lanes(float* to, Mask mask, f32x16 a) {
#if defined(PENSTOCK_AVX512)
    _mm512_storeu_ps(to, _mm512_maskz_compress_ps(__mmask16(mask), a.v));
    return lanes_in(mask);
#else
    float lane[kLanes];
    store(lane, a);
    int count = 0;
    for (; mask; mask &= mask - 1) to[count++] = lane[lowest_lane(mask)];
    return count;
#endif
}

// Sum and maximum of all lanes: i + 8 into i, then 4, 2, 1. The maximum of NaN and a number is undefined: test for NaN
// first.
PENSTOCK_INLINE float reduce_add(f32x16 a) {
    a = add(a, down8(a));
    a = add(a, down4(a));
    a = add(a, down2(a));
    return lane0(add(a, down1(a)));
}
PENSTOCK_INLINE float reduce_max(f32x16 a) {
    a = max(a, down8(a));
    a = max(a, down4(a));
    a = max(a, down2(a));
    return lane0(max(a, down1(a)));
}
PENSTOCK_INLINE float reduce_min(f32x16 a) {
    a = min(a, down8(a));
    a = min(a, down4(a));
    a = min(a, down2(a));
    return lane0(min(a, down1(a)));
}

// e^x within 1 ulp. exp(0) is exactly 1, exp(-inf) is 0, overflow gives inf, and small results are subnormal; NaN
// stays NaN.
//
// x = n ln 2 + r with |r| <= ln 2 / 2, ln 2 in two pieces (Cody and Waite 1980, chapter 6), e^r as
// 1 + r + r^2 q(r) where q of degree 4 is the minimax fit for the relative error (4e-9), and a scaling by 2^n.
PENSTOCK_INLINE f32x16 exp(f32x16 x) {
    x = max(broadcast(-104.0f), min(broadcast(89.0f), x));  // arguments in this order let a NaN pass
    const f32x16 n = nearest(mul(x, broadcast(0x1.715476p+0f)));
    f32x16 r = fma(n, broadcast(-0x1.63p-1f), x);  // exact, fused or not: n has 8 bits, the constant 9
    r = fma(n, broadcast(2.12194440e-4f), r);
    f32x16 p = broadcast(0x1.6a2256p-10f);
    p = fma(p, r, broadcast(0x1.123b04p-7f));
    p = fma(p, r, broadcast(0x1.5558f8p-5f));
    p = fma(p, r, broadcast(0x1.55549p-3f));
    p = fma(p, r, broadcast(0x1.fffffcp-2f));
    p = fma(p, r, broadcast(1.0f));
    p = fma(p, r, broadcast(1.0f));
    return scale2(p, n);
}

// tanh x within 2 ulp, and exactly odd. tanh(inf) is 1; NaN stays NaN.
//
// Below 0.625 as x (1 + x^2 q(x^2)), where q of degree 4 is the minimax fit for the relative error (4e-9); above it as
// 1 - 2 / (exp(2 |x|) + 1), where the difference is at least half of either term.
PENSTOCK_INLINE f32x16 tanh(f32x16 x) {
    const f32x16 a = abs(x), z = mul(x, x);
    f32x16 q = broadcast(-0x1.75e1c0p-8f);
    q = fma(q, z, broadcast(0x1.522698p-6f));
    q = fma(q, z, broadcast(-0x1.b83c5ap-5f));
    q = fma(q, z, broadcast(0x1.110726p-3f));
    q = fma(q, z, broadcast(-0x1.555532p-2f));
    const f32x16 near = mul(x, fma(q, z, broadcast(1.0f)));
    const f32x16 far = sub(broadcast(1.0f), div(broadcast(2.0f), add(exp(add(a, a)), broadcast(1.0f))));
    const f32x16 outer = select(greater(zero(), x), sub(zero(), far), far);
    return select(greater_equal(a, broadcast(0.625f)), outer, near);
}

// Transposes a 16 x 16 matrix of rows in place; lanes are moved, never computed with.
PENSTOCK_INLINE void transpose(f32x16* rows) {
#if defined(PENSTOCK_AVX512)
    __m512 a[kLanes];
    PENSTOCK_UNROLL
    for (int i = 0; i < kLanes; i += 2) {  // pairs of rows: [0 0' 1 1'], [2 2' 3 3'] within each quarter
        a[i] = _mm512_unpacklo_ps(rows[i].v, rows[i + 1].v);
        a[i + 1] = _mm512_unpackhi_ps(rows[i].v, rows[i + 1].v);
    }
    __m512 b[kLanes];
    PENSTOCK_UNROLL
    for (int i = 0; i < kLanes; i += 4) {  // four rows: b[i + c] holds column c of each quarter
        const __m512d first = _mm512_castps_pd(a[i]), second = _mm512_castps_pd(a[i + 1]);
        const __m512d third = _mm512_castps_pd(a[i + 2]), fourth = _mm512_castps_pd(a[i + 3]);
        b[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(first, third));
        b[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(first, third));
        b[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(second, fourth));
        b[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(second, fourth));
    }
    PENSTOCK_UNROLL
    for (int c = 0; c < 4; c++) {  // quarter q of b[4 k + c] is column 4 q + c of rows 4 k to 4 k + 3
        const __m512 even_low = _mm512_shuffle_f32x4(b[c], b[c + 4], 0x88);
        const __m512 odd_low = _mm512_shuffle_f32x4(b[c], b[c + 4], 0xdd);
        const __m512 even_high = _mm512_shuffle_f32x4(b[c + 8], b[c + 12], 0x88);
        const __m512 odd_high = _mm512_shuffle_f32x4(b[c + 8], b[c + 12], 0xdd);
        rows[c].v = _mm512_shuffle_f32x4(even_low, even_high, 0x88);
        rows[c + 4].v = _mm512_shuffle_f32x4(odd_low, odd_high, 0x88);
        rows[c + 8].v = _mm512_shuffle_f32x4(even_low, even_high, 0xdd);
        rows[c + 12].v = _mm512_shuffle_f32x4(odd_low, odd_high, 0xdd);
    }
#else
    alignas(64) float lanes[kLanes][kLanes];
    for (int i = 0; i < kLanes; i++) store(lanes[i], rows[i]);
    alignas(64) float turned[kLanes][kLanes];
    for (int i = 0; i < kLanes; i++) {
        for (int j = 0; j < kLanes; j++) turned[i][j] = lanes[j][i];
    }
    for (int i = 0; i < kLanes; i++) rows[i] = load(turned[i]);
#endif
}

// Loads elements [i, i + 16) of an array of `count` elements, zero beyond it; and the same for stores.
template <typename T>
PENSTOCK_INLINE f32x16 load_at(const T* p, int i, int count) {
    return count - i >= kLanes ? load(p + i) : load(p + i, count - i);
}
template <typename T>
PENSTOCK_INLINE void store_at(T* p, int i, int count, f32x16 a) {
    if (count - i >= kLanes) {
        store(p + i, a);
    } else {
        store(p + i, a, count - i);
    }
}

}  // namespace PENSTOCK_ISA_NAMESPACE
}  // namespace penstock
