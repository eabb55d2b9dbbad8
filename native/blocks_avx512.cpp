// Compiled with the flags of isa_avx512.cpp (CMakeLists.txt).
#include "isa_blocks.h"
