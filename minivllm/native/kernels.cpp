// What is compiled once for each instruction set: ISA is its name, avx2 or avx512, and the namespace of all that is here.

#include <cstdint>

#ifndef ISA
#error "compile with -DISA=avx2 or -DISA=avx512, as hatch_build.py does"
#endif

namespace minivllm {
namespace ISA {

// Float32 values in a vector register.
int32_t lanes() {
#ifdef __AVX512F__
    return 16;
#else
    return 8;
#endif
}

}  // namespace ISA
}  // namespace minivllm
