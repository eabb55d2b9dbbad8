// Chooses a token from each row of logits: the likeliest, or one drawn at random from a filtered distribution.
//
// The filters, and their order, are those of `penstock.sampling`: temperature, top_k, top_p, min_p. Then it takes the
// first token in the order of the vocabulary at which the summed weight exceeds `uniform` times the sum of all. Nothing
// is sorted. Weights exp((logit - top) / temperature) are computed once. A filter is a threshold, which is found by
// dividing the interval that contains it: how many weights, and how much of the mass, are above each cut? Once few
// weights lie in the interval, only these are examined.
#pragma once

#include <cmath>

#include "pool.h"
#include "rows_call.h"
#include "simd.h"

namespace penstock {
inline namespace PENSTOCK_ISA_NAMESPACE {

constexpr int kRun = 1024;  // weights that are summed in fp32, 16 lanes; runs are summed in fp64

struct Likeliest {
    int64_t token;  // the lowest of equal logits
    float logit;
    bool failed;  // a logit is NaN or +inf, or all are -inf
};

// The maximum of logits[0, count), and whether any of them is NaN, which a maximum does not show.
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

// The first maximum, found in the first run that has it, so that the other runs are read only once.
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

// exp((logits[i] - top) / divisor) for [i, i + 16), zero beyond `count`.
PENSTOCK_INLINE f32x16 weights_at(const float* logits, int64_t i, int64_t count, float top, float divisor) {
    const f32x16 x = sub(load_at(logits, int(i), int(count)), broadcast(top));
    const f32x16 weight = exp(divisor == 1.0f ? x : div(x, broadcast(divisor)));  // a division takes half as long as exp
    return count - i >= kLanes ? weight : select(first_lanes(int(count - i)), weight, zero());
}

// The sum over runs, 16 lanes at a time: `at(i)` returns elements [i, i + 16).
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

// log(sum(exp(logits))): a logit less this is the log probability of its token.
inline double log_normalizer(const float* logits, int64_t count, float top) {
    const double sum = sum_in_runs(count, [&](int64_t i) { return weights_at(logits, i, count, top, 1.0f); });
    return double(top) + std::log(sum);
}

// The number of some weights, and their sum.
struct Held {
    double tokens, mass;
};

// How much a filter keeps: at least this many tokens and this much mass.
struct Reach {
    double tokens, mass;

    bool met_by(Held held) const { return held.tokens >= tokens && held.mass >= mass; }
};

constexpr int kCuts = 4;  // tried together, because additions to one sum wait for each other

// For each cut, all above 0, the weights that are at least the cut. A separate function, to save registers.
PENSTOCK_NOINLINE inline void hold_from(const float* weights, int64_t count, const float (&cuts)[kCuts],
                                        Held (&held)[kCuts]) {
    f32x16 cut[kCuts];
    for (int c = 0; c < kCuts; c++) {
        cut[c] = broadcast(cuts[c]);
        held[c] = {0, 0};
    }
    for (int64_t run = 0; run < count; run += kRun) {
        const int64_t end = count - run < kRun ? count : run + kRun;
        f32x16 mass[kCuts];
        int tokens[kCuts] = {};
        PENSTOCK_UNROLL for (int c = 0; c < kCuts; c++) mass[c] = zero();
        for (int64_t i = run; i < end; i += kLanes) {
            const f32x16 w = load_at(weights, int(i), int(count));
            PENSTOCK_UNROLL for (int c = 0; c < kCuts; c++) {
                const Mask mask = greater_equal(w, cut[c]);
                tokens[c] += lanes_in(mask);
                mass[c] = add(mass[c], select(mask, w, zero()));
            }
        }
        for (int c = 0; c < kCuts; c++) {
            held[c].tokens += tokens[c];
            held[c].mass += double(reduce_add(mass[c]));
        }
    }
}

// Writes the weights in [low, high), in order, to `to`, which needs room for 16 more. Returns their number.
inline int64_t pack_between(const float* weights, int64_t count, float low, float high, float* to) {
    int64_t found = 0;
    for (int64_t i = 0; i < count; i += kLanes) {
        const f32x16 w = load_at(weights, int(i), int(count));
        found += pack_lanes(to + found, greater_equal(w, broadcast(low)) & greater(broadcast(high), w), w);
    }
    return found;
}

constexpr int kFew = 2048;  // weights: 8 KB, which stay in L1

struct Threshold {
    float at;
    double kept;  // the number of weights from there on
};

// The largest threshold t for which at least reach.tokens weights are >= t and sum to at least reach.mass; 0 if all of
// them together do not. All weights are in [0, 1].
inline Threshold find_threshold(const float* weights, int64_t count, Reach reach) {
    // The threshold is in [low, high), as bits, which order positive floats. `kept` are at least low, `above` at least
    // high; once the weights between are few, only they are examined.
    uint32_t low = 0, high = bits_of(1.0f) + 1;
    double kept = double(count);
    Held above{0, 0}, beyond{0, 0};  // beyond: above what is examined
    const float* looked_at = weights;
    int64_t size = count;
    float few[kFew + kLanes], cut[kCuts] = {0x1p-14f, 0x1p-10f, 0x1p-6f, 0x1p-3f};  // first guesses
    while (true) {
        Held held[kCuts];
        hold_from(looked_at, size, cut, held);
        for (int c = kCuts - 1; c >= 0; c--) {
            const Held all{beyond.tokens + held[c].tokens, beyond.mass + held[c].mass};
            if (reach.met_by(all)) {
                low = bits_of(cut[c]);
                kept = all.tokens;
                break;
            }
            high = bits_of(cut[c]);
            above = all;
        }
        const double between = kept - above.tokens;
        if (high - low == 1) return {float_of(low), kept};
        if (looked_at == weights && between <= kFew) {
            size = pack_between(weights, count, float_of(low > 1 ? low : 1), float_of(high), few);
            looked_at = few;
            beyond = above;
        }
        for (uint32_t c = 0; c < kCuts; c++) {  // evenly in the interval, and never at its ends
            const uint32_t at = low + uint32_t(uint64_t(high - low) * (c + 1) / (kCuts + 1));
            cut[c] = float_of(at == low ? low + 1 : at);
        }
    }
}

// The weights to draw from: all of the vocabulary, or, once few are left, only those from `floor` on.
struct Candidates {
    float* weights;
    int64_t count;
    float floor = 0;  // of the packed weights; 0: nothing is packed
    float few[kFew + kLanes];

    Candidates(float* all, int64_t size) : weights(all), count(size) {}

    // Drops all weights below the threshold, of which at most `kept` remain.
    void narrow(Threshold threshold) {
        if (threshold.at == 0) return;
        if (floor > 0 || threshold.kept <= kFew) {
            count = pack_between(weights, count, threshold.at, 2.0f, few);
            weights = few;
            floor = threshold.at > floor ? threshold.at : floor;
            return;
        }
        for (int64_t i = 0; i < count; i += kLanes) {
            const f32x16 w = load_at(weights, int(i), int(count));
            store_at(weights, int(i), int(count), select(greater_equal(w, broadcast(threshold.at)), w, zero()));
        }
    }
};

// The token of weight number `index` among those from `floor` on.
inline int64_t find_packed(const float* weights, int64_t count, float floor, int64_t index) {
    int64_t i = 0;
    Mask mask = 0;
    for (; i < count; i += kLanes) {
        mask = greater_equal(load_at(weights, int(i), int(count)), broadcast(floor));
        if (index < lanes_in(mask)) break;
        index -= lanes_in(mask);
    }
    for (; index > 0; index--) mask &= mask - 1;
    return i + lowest_lane(mask);
}

// The first token at which the summed weight exceeds uniform * (the sum of all).
inline int64_t draw(const float* weights, int64_t count, double uniform) {
    const auto at = [&](int64_t i) { return load_at(weights, int(i), int(count)); };
    const double target = uniform * sum_in_runs(count, at);
    double sum = 0;
    int64_t last = 0;  // a token that is kept: the run's sum by lanes may exceed its sum one by one
    for (int64_t run = 0; run < count; run += kRun) {
        const int64_t length = count - run < kRun ? count - run : kRun;
        const double after = sum + sum_in_runs(length, [&](int64_t i) { return load_at(weights + run, int(i), int(length)); });
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
        store_at(weights, int(i), int(count), weights_at(logits, i, count, top, temperature));
    }
    Candidates of(weights, count);
    if (call.top_k[row] > 0 && call.top_k[row] < count) {
        of.narrow(find_threshold(of.weights, of.count, Reach{double(call.top_k[row]), 0}));
    }
    if (call.top_p[row] < 1) {
        const double all = sum_in_runs(of.count, [&](int64_t i) { return load_at(of.weights, int(i), int(of.count)); });
        of.narrow(find_threshold(of.weights, of.count, Reach{1, call.top_p[row] * all}));
    }
    if (call.min_p[row] > 0) of.narrow({call.min_p[row], double(of.count)});  // the likeliest token has weight 1
    const int64_t drawn = draw(of.weights, of.count, call.uniform[row]);
    return of.floor > 0 ? find_packed(weights, count, of.floor, drawn) : drawn;
}

inline void sample(const SampleCall& call, Pool& pool) {
    pool.run(int(call.rows), [&](int task) {
        const int64_t row = task;
        const float* logits = call.logits + row * call.stride;
        const Likeliest likeliest = find_likeliest(logits, call.vocabulary);
        call.failed[row] = likeliest.failed;
        call.tokens[row] = likeliest.token;
        call.logprobs[row] = 0;
        call.normalizers[row] = 0;
        if (likeliest.failed) return;
        if (call.temperature[row] != 0) call.tokens[row] = draw_filtered(call, row, logits, likeliest.logit);
        if (call.wants_logprob[row]) {
            const double normalizer = log_normalizer(logits, call.vocabulary, likeliest.logit);
            call.normalizers[row] = normalizer;
            call.logprobs[row] = float(double(logits[call.tokens[row]]) - normalizer);
        }
    });
}

// On one thread: that takes less time than waking another.
inline void rule_out(const RuleOutCall& call) {
    for (int64_t i = 0; i < call.width; i += kLanes) {
        const f32x16 x = load_at(call.x, int(i), int(call.width));
        const Mask allowed = call.allowed[i / 8] | (i + 8 < call.width ? Mask(call.allowed[i / 8 + 1]) << 8 : 0);
        const Mask nan = ~equal(x, x) & 0xffffu;
        store_at(call.out, int(i), int(call.width), select(allowed | nan, x, broadcast(-__builtin_inff())));
    }
}

}  // namespace PENSTOCK_ISA_NAMESPACE
}  // namespace penstock
