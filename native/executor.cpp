// Who computes a step: the threads together, kernel by kernel; each of them a shard (shards.h); or a team (team.h).
#include "executor.h"

#include <algorithm>
#include <atomic>

#include "run.h"

namespace penstock {
namespace {

// The progress of a step's shards, for shards that wait for others.
class Progress {
public:
    explicit Progress(int shards) : shards_(shards) {
        for (int i = 0; i < shards; i++) {
            written_[i].store(0, std::memory_order_relaxed);
            layer_[i].store(INT64_MAX, std::memory_order_relaxed);  // no shard waits for one that has not begun
        }
    }

    // No shard may be more layers ahead of another than fit into the shared cache.
    void begin_layer(int mine, int64_t layer, int64_t apart) {
        layer_[mine].store(layer, std::memory_order_relaxed);
        for (int other = 0; other < shards_; other++) {
            wait_until([&] { return layer_[other].load(std::memory_order_relaxed) >= layer - apart; });
        }
    }

    // Says that shard `mine` has written what later tokens read of `operation`: keys and values, or a state.
    void publish(int mine, int64_t operation) { written_[mine].store(operation + 1, std::memory_order_release); }

    // Returns when all shards from `first` up to `mine` have done so.
    void await(int mine, int first, int64_t operation) {
        for (int earlier = first; earlier < mine; earlier++) {
            wait_until([&] { return written_[earlier].load(std::memory_order_acquire) > operation; });
        }
    }

    void end(int mine) { layer_[mine].store(INT64_MAX, std::memory_order_relaxed); }

private:
    int shards_;
    std::atomic<int64_t> written_[kMostShards], layer_[kMostShards];  // written_: a number of operations
};

// How one shard reports its progress to others, and waits for them.
struct Neighbours {
    Progress& progress;
    KvPrefetcher& prefetcher;
    int mine, first;
    int64_t operation;

    void publish() const { progress.publish(mine, operation); }
    void await() const { progress.await(mine, first, operation); }
    void stored() const {
        publish();
        await();
        prefetcher.aim_at_next();
    }
};

struct Nobody {
    void publish() const {}
    void await() const {}
    void stored() const {}
};

// Runs each shard on a thread of its own, with a pool of one.
void run_shards(const Program& program, const Step& step, const KernelTable& kernels, Pool& pool, const Shard* shards) {
    const int count = pool.threads();
    const int64_t apart = layers_apart(program);
    uint8_t* scratch[kMostShards];
    for (int i = 0; i < count; i++) {
        scratch[i] = i == 0 ? step.scratch : scratch[i - 1] + shard_scratch(program, shards[i - 1].tokens);
    }
    Progress progress(count);
    pool.run(count, [&](int mine) {
        Pool alone(1);
        const Shard& shard = shards[mine];
        KvPrefetcher prefetcher(program, step, shard);
        const Run run(program, step, kernels, alone, shard, scratch[mine], &prefetcher);
        prefetcher.aim_at_next();
        int64_t layer = 0;
        for (size_t i = 0; i < program.operations.size(); i++) {
            if (layer < int64_t(program.layer_starts.size()) && program.layer_starts[size_t(layer)] == int64_t(i)) {
                progress.begin_layer(mine, layer++, apart);
            }
            run.operate(program.operations[i], Neighbours{progress, prefetcher, mine, shard.waits_for, int64_t(i)});
        }
        progress.end(mine);
    });
}

// Whether a team should compute the step.
bool suits_team(const Program& program, const Step& step, int threads) {
    return program.sharing && step.adapted_count == 0 && worth_a_team(step.tokens, threads) &&
           step.scratch_bytes >= team_scratch(program, step.tokens, threads) + int64_t(attention_scratch(step.rows));
}

// Runs a program from `operation` on with a team: every thread walks all of it. Computes nothing and returns false if
// another call has the threads.
bool run_team(const Program& program, const Step& step, const KernelTable& kernels, Pool& pool, size_t operation) {
    const int members = pool.threads();
    const int64_t used = team_scratch(program, step.tokens, members);
    const Shard whole{0, step.tokens, 0, step.rows, step.q_start, step.kv_len, 0, step.scratch + used,
                      step.scratch_bytes - used};
    Team team(members);
    return pool.run_together([&](int mine) {
        Pool together(team, mine), alone(1);
        const Membership member{*program.sharing, step.scratch, alone};
        uint8_t* own = step.scratch + areas_size(program, step.tokens) + mine * shard_scratch(program, step.tokens);
        const Run run(program, step, kernels, together, whole, own, nullptr, &member);
        for (size_t i = operation; i < program.operations.size(); i++) run.operate(program.operations[i], Nobody{});
    });
}

}  // namespace

int64_t program_scratch(const Program& program, int64_t tokens, int32_t rows, int32_t longest, int threads) {
    const int64_t attention = attention_scratch_of(program, tokens, rows, longest, threads);
    const int64_t apart = threads == 1 ? 0 : threads * lost_by_sharing(program) + shards_scratch(rows, threads);
    const int64_t together = shard_scratch(program, tokens, threads) + std::max(attention, apart);
    if (!worth_a_team(tokens, threads)) return together;
    return std::max(together, team_scratch(program, tokens, threads) + attention);
}

void run_program(const Program& program, const Step& step, const KernelTable& kernels, Pool& pool) {
    const int64_t used = shard_scratch(program, step.tokens, pool.threads()), left = step.scratch_bytes - used;
    const int64_t lost = pool.threads() * lost_by_sharing(program);
    Shard shards[kMostShards];
    // Shards wait only for earlier ones, so steps whose tokens look ahead cannot be divided.
    const bool may_share = !program.looks_ahead;
    uint8_t* const rest = step.scratch + used + lost;
    if (may_share && share_out(program, step, kernels, pool.threads(), rest, left - lost, shards)) {
        return run_shards(program, step, kernels, pool, shards);
    }
    const Shard whole{0, step.tokens, 0, step.rows, step.q_start, step.kv_len, 0, step.scratch + used, left};
    const Run run(program, step, kernels, pool, whole, step.scratch, nullptr);
    const bool by_team = suits_team(program, step, pool.threads());
    size_t layer = 0;
    for (size_t i = 0; i < program.operations.size(); i++) {
        if (layer < program.layer_starts.size() && program.layer_starts[layer] == int64_t(i)) {
            // The first layer wakes the threads; until they are awake, the others compute.
            if (layer++ > 0 && by_team && pool.awake() && run_team(program, step, kernels, pool, i)) return;
        }
        run.operate(program.operations[i], Nobody{});
    }
}

}  // namespace penstock
