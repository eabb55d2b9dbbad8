// Choosing a token from each row of logits: the likeliest, or one drawn at random from a filtered distribution.
//
// What is kept and in which order the filters run is that of `penstock.sampling`: temperature, top_k, top_p, min_p;
// then the first token in the order of the vocabulary at which the summed weight exceeds `uniform` times the sum of
// all. Nothing is sorted. Weights exp((logit - top) / temperature) are computed once; a filter is a threshold, and a
// threshold is found by a histogram of leading bits, refined twice:
//
//     bits of a weight   [ 12 bits | 10 bits | 10 bits ]     (positive floats are ordered as their bits are)
//
// from the top down until the count reaches k, or the mass reaches p. Mostly the few likeliest tokens decide, and only
// those are looked at one by one.
#pragma once

#include <cmath>

#include "pool.h"
#include "rows_call.h"
#include "simd.h"

namespace penstock {
inline namespace PENSTOCK_ISA_NAMESPACE {

constexpr int kRun = 1024;  // weights that are summed in fp32, 16 lanes; runs are summed in fp64

struct Likeliest {
    int64_t token;  // of equal logits the lowest
    float logit;
    bool failed;  // NaN or +inf among the logits, or nothing but -inf
};

// The most of logits[0, count), and whether one of them is NaN, which no maximum shows.
struct Most {
    float logit;
    bool nan;
};

PENSTOCK_INLINE Most find_most(const float* logits, int64_t count) {
    constexpr int kChains = 4;  // a maximum waits for the one before it
    f32x16 most[kChains];
    Mask ordered[kChains];
    PENSTOCK_UNROLL for (int c = 0; c < kChains; c++) most[c] = broadcast(-__builtin_inff()), ordered[c] = 0xffffu;
    int64_t i = 0;
    for (; i + kChains * kLanes <= count; i += kChains * kLanes) {
        PENSTOCK_UNROLL for (int c = 0; c < kChains; c++) {
            const f32x16 x = load(logits + i + c * kLanes);
            ordered[c] &= equal(x, x);
            most[c] = max(x, most[c]);
        }
    }
    for (; i < count; i += kLanes) {
        const int left = int(count - i < kLanes ? count - i : kLanes);
        const f32x16 x = select(first_lanes(left), load(logits + i, left), broadcast(-__builtin_inff()));
        ordered[0] &= equal(x, x);
        most[0] = max(x, most[0]);
    }
    const Mask all = ordered[0] & ordered[1] & ordered[2] & ordered[3];
    return {reduce_max(max(max(most[0], most[1]), max(most[2], most[3]))), all != 0xffffu};
}

// Of the first run of logits with the most, that which has it first: the rest is looked at once only.
inline Likeliest find_likeliest(const float* logits, int64_t count) {
    Likeliest found{0, -__builtin_inff(), false};
    int64_t from = 0;
    for (int64_t run = 0; run < count; run += kRun) {
        const Most most = find_most(logits + run, count - run < kRun ? count - run : kRun);
        found.failed |= most.nan;
        if (most.logit > found.logit) found.logit = most.logit, from = run;
    }
    found.failed |= !(found.logit < __builtin_inff()) || !(found.logit > -__builtin_inff());
    if (found.failed) return found;
    while (logits[from] != found.logit) from++;
    found.token = from;
    return found;
}

// exp((logits[i] - top) * scale) for [i, i + 16), zero beyond `count`.
PENSTOCK_INLINE f32x16 weights_at(const float* logits, int64_t i, int64_t count, f32x16 top, f32x16 divisor) {
    if (count - i >= kLanes) return exp(div(sub(load(logits + i), top), divisor));
    const int left = int(count - i);
    return select(first_lanes(left), exp(div(sub(load(logits + i, left), top), divisor)), zero());
}

// The sum of 16 lanes at a time over runs: `at(i)` gives elements [i, i + 16).
template <typename At>
PENSTOCK_INLINE double sum_in_runs(int64_t count, const At& at) {
    double total = 0;
    for (int64_t run = 0; run < count; run += kRun) {
        const int64_t end = count - run < kRun ? count : run + kRun;
        f32x16 sum = zero();
        for (int64_t i = run; i < end; i += kLanes) sum = add(sum, at(i));
        total += double(reduce_add(sum));
    }
    return total;
}

inline float log_probability(const float* logits, int64_t count, float top, float logit) {
    const double sum = sum_in_runs(
        count, [&](int64_t i) { return weights_at(logits, i, count, broadcast(top), broadcast(1.0f)); });
    return float(double(logit) - double(top) - std::log(sum));
}

PENSTOCK_INLINE f32x16 weight_at(const float* weights, int64_t i, int64_t count) {
    return count - i >= kLanes ? load(weights + i) : load(weights + i, int(count - i));
}

// How far from the top a filter reaches: this many tokens, or this much mass, whichever is asked for.
struct Reach {
    double tokens;
    double mass;
};

constexpr int kMostLikely = 4096;
constexpr float kFloors[] = {0x1p-5f, 0x1p-10f, 0x1p-14f};

// The weights that are at least `floor`, in their order; kMostLikely + 1 if there are more than fit.
inline int gather_likely(const float* weights, int64_t count, float floor, float* likely) {
    int found = 0;
    for (int64_t i = 0; i < count; i += kLanes) {
        Mask mask = greater_equal(weight_at(weights, i, count), broadcast(floor));
        for (; mask; mask &= mask - 1) {
            if (found == kMostLikely) return kMostLikely + 1;
            likely[found++] = weights[i + lowest_lane(mask)];
        }
    }
    return found;
}

// The largest threshold t at which the weights >= t number at least reach.tokens and hold at least reach.mass; 0 if
// all together do not. All weights are in [0, 1].
inline float find_in_histogram(const float* weights, int64_t count, Reach reach) {
    constexpr int kBits[] = {12, 10, 10};
    uint32_t prefix = 0;  // leading bits of the threshold, as far as they are known
    int known = 0;
    double before_tokens = 0, before_mass = 0;  // of all weights above the ones with this prefix
    for (int bits : kBits) {
        double bin_tokens[1 << 12] = {}, bin_mass[1 << 12] = {};
        const int shift = 32 - known - bits;
        // weights with the known prefix are those in [low, high); zeros are never looked at
        const float low = known && prefix ? float_of(prefix << (32 - known)) : 0x1p-149f;
        const float high = known ? float_of((prefix + 1) << (32 - known)) : __builtin_inff();
        for (int64_t i = 0; i < count; i += kLanes) {
            const f32x16 w = weight_at(weights, i, count);
            Mask mask = greater_equal(w, broadcast(low)) & greater(broadcast(high), w);
            for (; mask; mask &= mask - 1) {
                const float weight = weights[i + lowest_lane(mask)];
                const uint32_t bin = (bits_of(weight) >> shift) & ((1u << bits) - 1u);
                bin_tokens[bin] += 1;
                bin_mass[bin] += double(weight);
            }
        }
        int bin = (1 << bits) - 1;
        for (; bin >= 0; bin--) {
            if (before_tokens + bin_tokens[bin] >= reach.tokens && before_mass + bin_mass[bin] >= reach.mass) break;
            before_tokens += bin_tokens[bin];
            before_mass += bin_mass[bin];
        }
        if (bin < 0) return 0;
        prefix = prefix << bits | uint32_t(bin);
        known += bits;
    }
    return float_of(prefix);
}

// The same, of the few likeliest alone where they reach far enough.
inline float find_threshold(const float* weights, int64_t count, Reach reach) {
    float likely[kMostLikely];
    for (float floor : kFloors) {
        const int found = gather_likely(weights, count, floor, likely);
        if (found > kMostLikely) break;
        double mass = 0;
        for (int i = 0; i < found; i++) mass += double(likely[i]);
        // a little further than needed: the bins add up in another order
        if (found >= reach.tokens && mass >= reach.mass * (1 + 1e-9)) return find_in_histogram(likely, found, reach);
    }
    return find_in_histogram(weights, count, reach);
}

inline void drop_below(float* weights, int64_t count, float threshold) {
    for (int64_t i = 0; i < count; i += kLanes) {
        const f32x16 w = weight_at(weights, i, count);
        const f32x16 kept = select(greater_equal(w, broadcast(threshold)), w, zero());
        if (count - i >= kLanes) {
            store(weights + i, kept);
        } else {
            store(weights + i, kept, int(count - i));
        }
    }
}

// The first token at which the summed weight exceeds uniform * (the sum of all).
inline int64_t draw(const float* weights, int64_t count, double uniform) {
    const auto at = [&](int64_t i) { return weight_at(weights, i, count); };
    const double target = uniform * sum_in_runs(count, at);
    double sum = 0;
    int64_t last = 0;  // a token that is kept: the run's sum by lanes may exceed its sum one by one
    for (int64_t run = 0; run < count; run += kRun) {
        const int64_t length = count - run < kRun ? count - run : kRun;
        const double after = sum + sum_in_runs(length, [&](int64_t i) { return weight_at(weights + run, i, length); });
        if (after > target) {
            for (int64_t i = run; i < run + length; i++) {
                sum += double(weights[i]);
                if (weights[i] > 0) last = i;
                if (sum > target && weights[i] > 0) return i;
            }
            return last;
        }
        sum = after;
    }
    return last;
}

inline int64_t draw_filtered(const SampleCall& call, int64_t row, const float* logits, float top) {
    const int64_t count = call.vocabulary;
    float* weights = call.scratch + row * count;
    const float smallest = 0x1p-126f;  // the smallest normal: a division below it could be by zero
    const float temperature = call.temperature[row] > smallest ? call.temperature[row] : smallest;
    for (int64_t i = 0; i < count; i += kLanes) {
        const f32x16 w = weights_at(logits, i, count, broadcast(top), broadcast(temperature));
        if (count - i >= kLanes) {
            store(weights + i, w);
        } else {
            store(weights + i, w, int(count - i));
        }
    }
    if (call.top_k[row] > 0 && call.top_k[row] < count) {
        drop_below(weights, count, find_threshold(weights, count, Reach{double(call.top_k[row]), 0}));
    }
    if (call.top_p[row] < 1) {
        const double all = sum_in_runs(count, [&](int64_t i) { return weight_at(weights, i, count); });
        drop_below(weights, count, find_threshold(weights, count, Reach{1, call.top_p[row] * all}));
    }
    if (call.min_p[row] > 0) drop_below(weights, count, call.min_p[row]);  // the likeliest weighs 1
    return draw(weights, count, call.uniform[row]);
}

inline void sample(const SampleCall& call, Pool& pool) {
    pool.run(int(call.rows), [&](int task) {
        const int64_t row = task;
        const float* logits = call.logits + row * call.stride;
        const Likeliest likeliest = find_likeliest(logits, call.vocabulary);
        call.failed[row] = likeliest.failed;
        call.tokens[row] = likeliest.token;
        call.logprobs[row] = 0;
        if (likeliest.failed) return;
        if (call.temperature[row] != 0) call.tokens[row] = draw_filtered(call, row, logits, likeliest.logit);
        if (call.wants_logprob[row]) {
            const float logit = logits[call.tokens[row]];
            call.logprobs[row] = log_probability(logits, call.vocabulary, likeliest.logit, logit);
        }
    });
}

}  // namespace PENSTOCK_ISA_NAMESPACE
}  // namespace penstock
