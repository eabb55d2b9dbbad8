// Compiled with the flags of isa_avx512_bf16.cpp (CMakeLists.txt).
#include "isa_blocks.h"
