#include "isa_table.h"

namespace penstock {
const KernelTable avx512_bf16_kernels = table_named("avx512_bf16");
}
