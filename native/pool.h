// A pool of threads for tasks of a few microseconds; the threads live as long as the pool.
//
// The pool decides which thread runs a task and when; results must not depend on either. The caller is one of the
// threads, so a pool of one has no workers. Workers spin for a moment after their last task (the next kernel usually
// follows within microseconds), then sleep, so that an idle engine costs nothing.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace penstock {

// What a thread does while it spins.
inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Returns when done() is true: spins for a moment, which is nearly always enough, then yields the processor.
template <class Done>
void wait_until(const Done& done) {
    constexpr int kSpins = 4096;
    for (int i = 0; !done(); i++) {
        if (i < kSpins) {
            relax();
        } else {
            std::this_thread::yield();
        }
    }
}

// A word that threads share, on a cache line of its own.
struct alignas(64) SharedWord {
    std::atomic<std::uint64_t> value;
};

// Threads that run the same code at the same time, each with a number of its own, and wait for each other at meetings
// (a barrier). At a meeting each writes to a cache line of its own and reads those of the others; handing out tasks and
// waiting for their end would write several times to the same lines.
class Team {
public:
    static constexpr int kMost = 64;

    explicit Team(int members);

    int members() const { return members_; }

    // Returns when all members have met as often as `mine`: now all may read what each wrote before.
    void meet(int mine);

    // A word for each member, for whatever they share between two meetings.
    SharedWord* words() { return words_; }

private:
    int members_;
    SharedWord met_[kMost], words_[kMost];
};

class Pool {
public:
    using Call = void (*)(const void* context, int task);

    explicit Pool(int threads);
    // A team's pool for member `mine`: every member calls run() for the same tasks; each does its share and returns
    // when all are done.
    Pool(Team& team, int mine);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int threads() const;
    Team* team() const { return team_; }  // null for any other pool

    // Whether all threads are spinning: none sleeps, and none stayed in the process from which this one was forked.
    bool awake() const;

    // Calls task(0) .. task(tasks - 1), each once, in any order and on any of the threads; returns when all are done.
    // Two threads may call at once; then one of them does all of its tasks itself. Tasks must not throw.
    template <class Task>
    void run(int tasks, const Task& task) {
        run(tasks, [](const void* context, int index) { (*static_cast<const Task*>(context))(index); }, &task);
    }
    void run(int tasks, Call call, const void* context);

    // Calls task(0) .. task(threads() - 1) at the same time, each on a thread of its own, so that they may wait for each
    // other. Calls none and returns false if another call has the threads. Requires more than one thread.
    template <class Task>
    bool run_together(const Task& task) {
        return run_together([](const void* context, int index) { (*static_cast<const Task*>(context))(index); }, &task);
    }
    bool run_together(Call call, const void* context);

private:
    void work();
    void take_tasks();
    void hand_out(int tasks, Call call, const void* context);

    Team* team_ = nullptr;
    int mine_ = 0;

    // The current run: generation (32 bits), number of tasks (16), next task (16), in one word, so that a worker that
    // wakes late cannot claim a task of one run with the numbers of another.
    std::atomic<std::uint64_t> ticket_{0};
    std::atomic<int> unfinished_{0};
    Call call_ = nullptr;
    const void* context_ = nullptr;
    std::mutex running_;

    std::mutex sleep_;
    std::condition_variable wake_;
    std::atomic<int> sleepers_{0};
    bool stop_ = false;
    std::vector<std::thread> workers_;
    std::int64_t process_ = 0;
};

}  // namespace penstock
