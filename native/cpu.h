// A processor as one engine sees it: the kernels of one instruction set, and threads of its own to run them on.
//
// Two of them in one process share nothing. Results depend on the instruction set, never on the threads.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include "kernel_table.h"
#include "pool.h"

namespace penstock {

constexpr int kMostThreads = 1024;

class Cpu {
public:
    // `isa` is one of isas(), or "" for the best of them. Throws std::invalid_argument if it is neither, or if threads
    // are not between 1 and kMostThreads.
    Cpu(const std::string& isa, int threads);
    ~Cpu();
    Cpu(const Cpu&) = delete;
    Cpu& operator=(const Cpu&) = delete;

    const KernelTable& kernels() const { return kernels_; }
    Pool& pool() const { return *pool_; }
    int threads() const { return pool_->threads(); }

private:
    const KernelTable& kernels_;
    Pool* pool_;
    pid_t owner_;
};

// Names of the instruction sets that this build has and this machine can run, best first.
std::vector<std::string> isas();

}  // namespace penstock
