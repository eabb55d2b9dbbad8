// Compiled with the flags of isa_avx2.cpp (CMakeLists.txt).
#include "isa_blocks.h"
