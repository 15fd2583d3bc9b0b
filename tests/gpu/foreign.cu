// Stand-ins for the kernels of other libraries that run before and after a product (tests/gpu/test_overlap.py).
//
// Each works on 32-bit words and can be made to overlap its neighbours as rudely as the rules of programmatic
// dependent launch allow: it lets its successor start at once and touches memory only after a pause. All blocks wait
// for the predecessor, unless told not to: such a kernel is broken and shows that the tests see a broken one.
//
//   table [turns][words]   what belongs to each turn; the turn of a kernel is (*turn + offset) % turns
#include <cuda_runtime.h>

#include <cstdint>

// The manners of one launch; tests/gpu/foreign.py has the same fields. Why not in the unnamed namespace: functions that
// take it would not be exported.
struct Manner {
  void* stream;
  int blocks;
  int overlap;     // launched so that it may start before its predecessor ends
  int trigger;     // lets its successor start at once
  int waits;       // waits for its predecessor, as every correct kernel does
  int64_t cycles;  // pause before it touches memory
};

namespace {

__device__ void enter(const Manner& manner) {
  if (manner.trigger) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  if (manner.waits) asm volatile("griddepcontrol.wait;" ::: "memory");
  const int64_t begin = clock64();
  while (clock64() - begin < manner.cycles) {
  }
}

__device__ int64_t first() { return blockIdx.x * int64_t{blockDim.x} + threadIdx.x; }
__device__ int64_t step() { return gridDim.x * int64_t{blockDim.x}; }

__global__ void write_kernel(uint32_t* to, const uint32_t* table, int64_t words, const uint32_t* turn, uint32_t offset,
                             uint32_t turns, Manner manner) {
  enter(manner);
  // Why volatile: no load may be moved above the wait or become one of read-only memory.
  const uint32_t now = (*static_cast<const volatile uint32_t*>(turn) + offset) % turns;
  const volatile uint32_t* from = table + now * words;
  for (int64_t i = first(); i < words; i += step()) to[i] = from[i];
}

// verdict[0] counts words that differ, verdict[1] comparisons; behind, of the first kNoted words that differ, how many
// comparisons were done before and which word it is, then what was seen and what was expected, 32 bits each.
constexpr unsigned long long kNoted = 256;
__global__ void compare_kernel(const uint32_t* seen, const uint32_t* table, int64_t words, const uint32_t* turn,
                               uint32_t offset, uint32_t turns, unsigned long long* verdict, Manner manner) {
  enter(manner);
  const uint32_t now = (*static_cast<const volatile uint32_t*>(turn) + offset) % turns;
  const volatile uint32_t* got = seen;
  const volatile uint32_t* expected = table + now * words;
  for (int64_t i = first(); i < words; i += step()) {
    const uint32_t one = got[i], other = expected[i];
    if (one == other) continue;
    const unsigned long long before = atomicAdd(verdict, 1ull);
    if (before >= kNoted) continue;
    verdict[2 + 2 * before] =
        static_cast<const volatile unsigned long long*>(verdict)[1] << 32 | static_cast<uint32_t>(i);
    verdict[3 + 2 * before] = static_cast<unsigned long long>(one) << 32 | other;
  }
  if (first() == 0) atomicAdd(verdict + 1, 1ull);
}

__global__ void copy_kernel(uint32_t* to, const uint32_t* from, int64_t words, Manner manner) {
  enter(manner);
  const volatile uint32_t* source = from;
  for (int64_t i = first(); i < words; i += step()) to[i] = source[i];
}

__global__ void advance_kernel(uint32_t* turn, uint32_t by, Manner manner) {
  enter(manner);
  if (first() == 0) *turn += by;
}

template <typename... Args>
int launch(void (*kernel)(Args...), const Manner& manner, Args... args) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(manner.blocks);
  config.blockDim = dim3(128);
  config.stream = static_cast<cudaStream_t>(manner.stream);
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = manner.overlap ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

}  // namespace

// All return a cudaError_t.
extern "C" {

// to[words] = table[turn]
int foreign_write(uint32_t* to, const uint32_t* table, int64_t words, const uint32_t* turn, uint32_t offset,
                  uint32_t turns, const Manner* manner) {
  return launch(write_kernel, *manner, to, table, words, turn, offset, turns, *manner);
}

int foreign_compare(const uint32_t* seen, const uint32_t* table, int64_t words, const uint32_t* turn, uint32_t offset,
                    uint32_t turns, unsigned long long* verdict, const Manner* manner) {
  return launch(compare_kernel, *manner, seen, table, words, turn, offset, turns, verdict, *manner);
}

int foreign_copy(uint32_t* to, const uint32_t* from, int64_t words, const Manner* manner) {
  return launch(copy_kernel, *manner, to, from, words, *manner);
}

// *turn += by
int foreign_advance(uint32_t* turn, uint32_t by, const Manner* manner) {
  return launch(advance_kernel, *manner, turn, by, *manner);
}
}
