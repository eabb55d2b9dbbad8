// Compiled with the flags of isa_portable.cpp (CMakeLists.txt).
#include "isa_blocks.h"
