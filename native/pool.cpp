#include "pool.h"

#include <cassert>
#include <chrono>
#if defined(__unix__) || defined(__APPLE__)
#include <unistd.h>
#endif

namespace penstock {
namespace {

[[maybe_unused]] constexpr int kMostTasks = 0xffff;
constexpr auto kSpin = std::chrono::microseconds(60);  // longer than Python needs between two kernels of a layer
constexpr int kPausesBetweenLooksAtTheClock = 64;

std::uint64_t ticket(std::uint64_t generation, int tasks) {
    return (generation << 32) | (static_cast<std::uint64_t>(tasks) << 16);
}
int next_task(std::uint64_t ticket) { return static_cast<int>(ticket & 0xffff); }
bool has_task(std::uint64_t ticket) { return (ticket & 0xffff) < ((ticket >> 16) & 0xffff); }

std::int64_t this_process() {
#if defined(__unix__) || defined(__APPLE__)
    return getpid();
#else
    return 0;  // this system has no fork
#endif
}

// Spins until `done()` or until the time is up; returns whether it was done.
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

Team::Team(int members) : members_(members) {
    assert(members <= kMost);
    for (int i = 0; i < members; i++) {
        met_[i].value.store(0, std::memory_order_relaxed);
        words_[i].value.store(0, std::memory_order_relaxed);
    }
}

void Team::meet(int mine) {
    const std::uint64_t times = met_[mine].value.load(std::memory_order_relaxed) + 1;
    met_[mine].value.store(times, std::memory_order_release);
    for (int other = 0; other < members_; other++) {
        wait_until([&] { return met_[other].value.load(std::memory_order_acquire) >= times; });
    }
}

Pool::Pool(Team& team, int mine) : team_(&team), mine_(mine) {}

Pool::Pool(int threads) : process_(this_process()) {
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

bool Pool::awake() const { return sleepers_.load(std::memory_order_relaxed) == 0 && process_ == this_process(); }

int Pool::threads() const { return team_ ? team_->members() : static_cast<int>(workers_.size()) + 1; }

void Pool::run(int tasks, Call call, const void* context) {
    assert(tasks <= kMostTasks);
    if (team_) {
        for (int i = mine_; i < tasks; i += team_->members()) call(context, i);
        return team_->meet(mine_);
    }
    std::unique_lock<std::mutex> ours(running_, std::try_to_lock);
    if (tasks <= 1 || workers_.empty() || !ours.owns_lock()) {
        for (int i = 0; i < tasks; i++) call(context, i);
        return;
    }
    hand_out(tasks, call, context);
}

bool Pool::run_together(Call call, const void* context) {
    assert(!workers_.empty());
    std::unique_lock<std::mutex> ours(running_, std::try_to_lock);
    if (!ours.owns_lock()) return false;
    hand_out(threads(), call, context);  // a thread that waits for others within its task cannot take a second one
    return true;
}

void Pool::hand_out(int tasks, Call call, const void* context) {
    call_ = call;
    context_ = context;
    unfinished_.store(tasks, std::memory_order_relaxed);
    const std::uint64_t generation = (ticket_.load(std::memory_order_relaxed) >> 32) + 1;
    ticket_.store(ticket(generation, tasks));  // ordered with sleepers_: we see the sleeper, or it sees the ticket
    if (sleepers_.load() > 0) {
        std::lock_guard<std::mutex> lock(sleep_);
        wake_.notify_all();
    }
    take_tasks();
    const auto finished = [this] { return unfinished_.load(std::memory_order_acquire) == 0; };
    while (!spin(finished)) std::this_thread::yield();  // a worker lost its processor during a task
}

void Pool::take_tasks() {
    std::uint64_t seen = ticket_.load(std::memory_order_acquire);
    while (has_task(seen)) {
        if (!ticket_.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel, std::memory_order_acquire)) {
            continue;
        }
        // The run is not finished before the claimed task, so call_ and context_ do not change.
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
