// Which instruction set's kernels the process uses.
#pragma once

#include <string>
#include <vector>

#include "kernel_table.h"

namespace penstock {

// The table in use: the best that this machine can run, unless use_isa() chose another.
const KernelTable& kernels();

// Names of the tables that this build has and this machine can run, best first.
std::vector<std::string> isas();

// Choose a table by name; false if isas() does not have it. Not while kernels run.
bool use_isa(const std::string& name);

}  // namespace penstock
