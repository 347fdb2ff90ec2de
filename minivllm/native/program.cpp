// The C ABI of the native part.  Compiled for any x86-64: nothing here may need more than that, since it says what the
// CPU has.

#include <cpuid.h>

#include <cstdint>

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace {

// __builtin_cpu_supports also asks whether the operating system saves the registers; not all compilers know f16c there.
bool has_f16c() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & (1u << 29)) != 0;
}

}  // namespace

// The number of this ABI: library.py has the same one, and takes no library of another.
EXPORTED int32_t minivllm_abi(void) { return 1; }

// The best instruction set of this CPU that kernels.cpp is compiled for: 0 none, 1 avx2, 2 avx512.
EXPORTED int32_t minivllm_isa(void) {
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                      __builtin_cpu_supports("bmi2") && has_f16c();
    if (!avx2) return 0;
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    return avx512 ? 2 : 1;
}
