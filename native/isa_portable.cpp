#include "isa_table.h"

namespace penstock {
const KernelTable portable_kernels = table_named("portable");
}
