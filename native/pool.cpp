#include "pool.h"

#include <cassert>
#include <chrono>

namespace penstock {
namespace {

[[maybe_unused]] constexpr int kMostTasks = 0xffff;
constexpr auto kSpin = std::chrono::microseconds(60);  // longer than the Python between two kernels of a layer
constexpr int kPausesBetweenLooksAtTheClock = 64;

std::uint64_t ticket(std::uint64_t generation, int tasks) {
    return (generation << 32) | (static_cast<std::uint64_t>(tasks) << 16);
}
int next_task(std::uint64_t ticket) { return static_cast<int>(ticket & 0xffff); }
bool has_task(std::uint64_t ticket) { return (ticket & 0xffff) < ((ticket >> 16) & 0xffff); }

// Spins until `done()` or until the time is up; says which.
template <class Done>
bool spin(const Done& done) {
    const auto until = std::chrono::steady_clock::now() + kSpin;
    do {
        for (int i = 0; i < kPausesBetweenLooksAtTheClock; i++) {
            if (done()) return true;
            relax();
        }
    } while (std::chrono::steady_clock::now() < until);
    return done();
}

}  // namespace

Pool::Pool(int threads) {
    for (int i = 1; i < threads; i++) workers_.emplace_back([this] { work(); });
}

Pool::~Pool() {
    {
        std::lock_guard<std::mutex> lock(sleep_);
        stop_ = true;
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
}

int Pool::threads() const { return static_cast<int>(workers_.size()) + 1; }

void Pool::run(int tasks, Call call, const void* context) {
    assert(tasks <= kMostTasks);
    std::unique_lock<std::mutex> ours(running_, std::try_to_lock);
    if (tasks <= 1 || workers_.empty() || !ours.owns_lock()) {
        for (int i = 0; i < tasks; i++) call(context, i);
        return;
    }
    call_ = call;
    context_ = context;
    unfinished_.store(tasks, std::memory_order_relaxed);
    const std::uint64_t generation = (ticket_.load(std::memory_order_relaxed) >> 32) + 1;
    ticket_.store(ticket(generation, tasks));  // in one order with sleepers_: we see the sleeper, or it sees the ticket
    if (sleepers_.load() > 0) {
        std::lock_guard<std::mutex> lock(sleep_);
        wake_.notify_all();
    }
    take_tasks();
    const auto finished = [this] { return unfinished_.load(std::memory_order_acquire) == 0; };
    while (!spin(finished)) std::this_thread::yield();  // a worker lost its processor in the middle of a task
}

void Pool::take_tasks() {
    std::uint64_t seen = ticket_.load(std::memory_order_acquire);
    while (has_task(seen)) {
        if (!ticket_.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel, std::memory_order_acquire)) {
            continue;
        }
        // The claimed task keeps its run unfinished, hence call_ and context_ as they are.
        call_(context_, next_task(seen));
        unfinished_.fetch_sub(1, std::memory_order_release);
        seen = ticket_.load(std::memory_order_acquire);
    }
}

void Pool::work() {
    const auto called = [this] { return has_task(ticket_.load(std::memory_order_acquire)); };
    while (true) {
        while (spin(called)) take_tasks();
        std::unique_lock<std::mutex> lock(sleep_);
        sleepers_.fetch_add(1);
        wake_.wait(lock, [this] { return stop_ || has_task(ticket_.load()); });
        sleepers_.fetch_sub(1);
        if (stop_) return;
    }
}

}  // namespace penstock
