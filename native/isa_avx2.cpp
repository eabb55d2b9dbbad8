#include "isa_table.h"

namespace penstock {
const KernelTable avx2_kernels = table_named("avx2");
}
