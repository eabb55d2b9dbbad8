#include "isa_table.h"

namespace penstock {
const KernelTable avx512_kernels = table_named("avx512");
}
