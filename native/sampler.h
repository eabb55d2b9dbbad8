// Choosing a token from each row of logits: the likeliest, or one drawn at random from a filtered distribution.
//
// What is kept and in which order the filters run is that of `penstock.sampling`: temperature, top_k, top_p, min_p;
// then the first token in the order of the vocabulary at which the summed weight exceeds `uniform` times the sum of
// all. Nothing is sorted. Weights exp((logit - top) / temperature) are computed once; a filter is a threshold, and a
// threshold is found by cutting the interval in which it must lie: how many weights, and how much of the mass, are above
// each cut? Once few weights lie in the interval, only those are looked at.
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

// exp((logits[i] - top) / divisor) for [i, i + 16), zero beyond `count`.
PENSTOCK_INLINE f32x16 weights_at(const float* logits, int64_t i, int64_t count, float top, float divisor) {
    const auto weigh = [&](f32x16 logit) {
        const f32x16 x = sub(logit, broadcast(top));
        return exp(divisor == 1.0f ? x : div(x, broadcast(divisor)));  // a division takes as long as half of exp
    };
    if (count - i >= kLanes) return weigh(load(logits + i));
    const int left = int(count - i);
    return select(first_lanes(left), weigh(load(logits + i, left)), zero());
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
    const double sum = sum_in_runs(count, [&](int64_t i) { return weights_at(logits, i, count, top, 1.0f); });
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

// What the weights from a floor on are, all together.
struct Held {
    double tokens, mass;
};

constexpr int kLooks = 4;  // floors that are tried at a time: a sum waits for the one before it

// For each floor, all above 0, the weights that are at least that.
PENSTOCK_NOINLINE inline void look(const float* weights, int64_t count, const float (&floors)[kLooks],
                                   Held (&held)[kLooks]) {
    f32x16 floor[kLooks];
    for (int l = 0; l < kLooks; l++) {
        floor[l] = broadcast(floors[l]);
        held[l] = {0, 0};
    }
    for (int64_t run = 0; run < count; run += kRun) {
        const int64_t end = count - run < kRun ? count : run + kRun;
        f32x16 mass[kLooks];
        int tokens[kLooks] = {};
        PENSTOCK_UNROLL for (int l = 0; l < kLooks; l++) mass[l] = zero();
        for (int64_t i = run; i < end; i += kLanes) {
            const f32x16 w = weight_at(weights, i, count);
            PENSTOCK_UNROLL for (int l = 0; l < kLooks; l++) {
                const Mask mask = greater_equal(w, floor[l]);
                tokens[l] += lanes_in(mask);
                mass[l] = add(mass[l], select(mask, w, zero()));
            }
        }
        for (int l = 0; l < kLooks; l++) {
            held[l].tokens += tokens[l];
            held[l].mass += double(reduce_add(mass[l]));
        }
    }
}

// The weights in [low, high), in their order, to `to`, where there is room for 16 more. Returns how many.
inline int64_t pack_between(const float* weights, int64_t count, float low, float high, float* to) {
    int64_t found = 0;
    for (int64_t i = 0; i < count; i += kLanes) {
        const f32x16 w = weight_at(weights, i, count);
        found += pack_lanes(to + found, greater_equal(w, broadcast(low)) & greater(broadcast(high), w), w);
    }
    return found;
}

constexpr int kFew = 2048;

struct Threshold {
    float at;
    double kept;  // tokens with weights from there on
};

// The largest threshold t at which the weights >= t number at least reach.tokens and hold at least reach.mass; 0 if
// all together do not. All weights are in [0, 1].
inline Threshold find_threshold(const float* weights, int64_t count, Reach reach) {
    // t is in [low, high), as bits, which order positive floats. Of the weights from high on `above` tells; in [low,
    // high) there are `between`, of which the first `looked_at` numbers at `from` are all, once they are few.
    uint32_t low = 0, high = bits_of(1.0f) + 1;
    Held above{0, 0}, before{0, 0};
    double between = double(count), kept = between;
    float few[kFew + kLanes], floor[kLooks] = {0x1p-14f, 0x1p-10f, 0x1p-6f, 0x1p-3f};  // first guesses
    const float* from = weights;
    int64_t looked_at = count;
    while (true) {
        Held held[kLooks];
        look(from, looked_at, floor, held);
        for (int l = kLooks - 1; l >= 0; l--) {
            const Held all{before.tokens + held[l].tokens, before.mass + held[l].mass};
            if (all.tokens >= reach.tokens && all.mass >= reach.mass) {
                low = bits_of(floor[l]);
                kept = all.tokens;
                between = kept - above.tokens;
                break;
            }
            high = bits_of(floor[l]);
            between -= all.tokens - above.tokens;
            above = all;
        }
        if (high - low == 1) return {float_of(low), kept};
        if (from == weights && between <= kFew) {
            looked_at = pack_between(weights, count, float_of(low > 1 ? low : 1), float_of(high), few);
            from = few;
            before = above;
        }
        for (uint32_t l = 0; l < kLooks; l++) {  // parts of the interval, none of them at its ends
            const uint32_t at = low + uint32_t(uint64_t(high - low) * (l + 1) / (kLooks + 1));
            floor[l] = float_of(at == low ? low + 1 : at);
        }
    }
}

// What is drawn from: all weights of the vocabulary, or only those from a floor on, once these are few.
struct Candidates {
    float* weights;
    int64_t count;
    float floor = 0;  // of what is packed; 0: nothing is
    float few[kFew + kLanes];

    Candidates(float* all, int64_t size) : weights(all), count(size) {}

    // Drops all below the threshold. `kept` is how many are left, or more.
    void narrow(Threshold threshold) {
        if (threshold.at == 0) return;
        if (floor > 0 || threshold.kept <= kFew) {
            count = pack_between(weights, count, threshold.at, 2.0f, few);
            weights = few;
            floor = threshold.at > floor ? threshold.at : floor;
            return;
        }
        for (int64_t i = 0; i < count; i += kLanes) {
            const f32x16 w = weight_at(weights, i, count);
            const f32x16 kept = select(greater_equal(w, broadcast(threshold.at)), w, zero());
            if (count - i >= kLanes) {
                store(weights + i, kept);
            } else {
                store(weights + i, kept, int(count - i));
            }
        }
    }
};

// Where the weight number `index` of those from `floor` on is.
inline int64_t find_packed(const float* weights, int64_t count, float floor, int64_t index) {
    int64_t i = 0;
    Mask mask = 0;
    for (; i < count; i += kLanes) {
        mask = greater_equal(weight_at(weights, i, count), broadcast(floor));
        if (index < lanes_in(mask)) break;
        index -= lanes_in(mask);
    }
    for (; index > 0; index--) mask &= mask - 1;
    return i + lowest_lane(mask);
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
        const f32x16 w = weights_at(logits, i, count, top, temperature);
        if (count - i >= kLanes) {
            store(weights + i, w);
        } else {
            store(weights + i, w, int(count - i));
        }
    }
    Candidates of(weights, count);
    if (call.top_k[row] > 0 && call.top_k[row] < count) {
        of.narrow(find_threshold(of.weights, of.count, Reach{double(call.top_k[row]), 0}));
    }
    if (call.top_p[row] < 1) {
        const double all = sum_in_runs(of.count, [&](int64_t i) { return weight_at(of.weights, i, of.count); });
        of.narrow(find_threshold(of.weights, of.count, Reach{1, call.top_p[row] * all}));
    }
    if (call.min_p[row] > 0) of.narrow({call.min_p[row], double(of.count)});  // the likeliest weighs 1
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
