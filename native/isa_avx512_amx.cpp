// The kernels of avx512_bf16, except for products of bfloat16.
#include "kernel_table.h"
#include "linear_bf16.h"

namespace penstock {
namespace {

KernelTable with_tiles(KernelTable table) {
    table.isa = "avx512_amx";
    LinearKernels& kernels = table.linears[int(Kind::bf16)];
    kernels.linear = linear_bf16;
    kernels.rows_of_a_tile = LinearBf16::kTileRows;
    return table;
}

}  // namespace

const KernelTable avx512_amx_kernels = with_tiles(avx512_bf16_kernels);

}  // namespace penstock
