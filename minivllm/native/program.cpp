// The C ABI of the native part.  Compiled for any x86-64: nothing here may need more than that, since it says what the
// CPU has.

#include <cpuid.h>

#include <cstdint>

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace {

bool has(uint32_t flags, uint32_t wanted) { return (flags & wanted) == wanted; }

// The registers that the operating system saves when it switches threads: an instruction of others must not run.
uint32_t saved_registers() {
    uint32_t low = 0, high = 0;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

// By CPUID and not __builtin_cpu_supports: of that not all compilers know f16c, and some answer no to everything.
int32_t best_isa() {
    uint32_t a = 0, b = 0, basic = 0, d = 0, more = 0, c = 0;
    if (!__get_cpuid(1, &a, &b, &basic, &d) || !__get_cpuid_count(7, 0, &a, &more, &c, &d)) return 0;
    const uint32_t fma = 1u << 12, osxsave = 1u << 27, f16c = 1u << 29;  // leaf 1, ECX
    const uint32_t avx2 = 1u << 5, bmi2 = 1u << 8;  // leaf 7, EBX
    const uint32_t f = 1u << 16, dq = 1u << 17, bw = 1u << 30, vl = 1u << 31;
    const uint32_t ymm = 0x06, zmm = 0xe6;  // bits of XCR0
    if (!has(basic, fma | osxsave | f16c) || !has(more, avx2 | bmi2) || !has(saved_registers(), ymm)) return 0;
    return has(more, f | dq | bw | vl) && has(saved_registers(), zmm) ? 2 : 1;
}

}  // namespace

// The number of this ABI: library.py has the same one, and takes no library of another.
EXPORTED int32_t minivllm_abi(void) { return 1; }

// The best instruction set of this CPU that kernels.cpp is compiled for: 0 none, 1 avx2, 2 avx512.
EXPORTED int32_t minivllm_isa(void) { return best_isa(); }
