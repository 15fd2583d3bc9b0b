// Small kernels of one block with something missing, or not: `run CASE`, where CASE is a number, odd where something
// is missing. Ends with 1 and a line that begins with "WRONG" where a race is found. For tests/test_on_host.py.
#include "on_host/language.h"
//
#include <cuda_runtime.h>

#include "on_host/async.cuh"
#include "on_host/tma.cuh"
#include "on_host/wgmma.cuh"

using namespace lowbit;

namespace {

constexpr int kThreads = 64, kBarrier = 4096;

// Threads write; others read.
void block(bool missing) {
  const int own = threadIdx.x;
  ptx::store_shared(4 * own, uint32_t{1});
  if (!missing) __syncthreads();
  ptx::load_shared(4 * (kThreads - 1 - own));
}

// Lanes show each other something, which tells nothing of memory.
void lanes(bool missing) {
  const int own = threadIdx.x;
  ptx::store_shared(4 * own, uint32_t{1});
  if (missing) {
    __shfl_sync(~0u, own, 0);
  } else {
    __syncwarp();
  }
  ptx::load_shared(4 * (own ^ 1));
}

// A warp arrives for what its lanes read, then one lane writes again.
void ring(bool missing) {
  const int own = threadIdx.x, warp = own / 32;
  if (own == 0) ptx::arrivals_init(kBarrier, 1);
  __syncthreads();
  if (warp == 0) {
    ptx::load_shared(4 * own);
    if (!missing) __syncwarp();
    if (own == 0) ptx::arrive(kBarrier);
  } else if (own == 32) {
    ptx::wait_arrivals(kBarrier, 0);
    ptx::store_shared(4 * 7, uint32_t{1});
  }
}

// A barrier that others may use before it is made.
void made(bool missing) {
  if (threadIdx.x == 0) ptx::arrivals_init(kBarrier, kThreads);
  if (!missing) __syncthreads();
  ptx::arrive(kBarrier);
}

// Copies of a thread, for which others wait at a barrier; missing: they arrive before them.
void copies(bool missing) {
  alignas(16) static const uint8_t from[16] = {};
  const int own = threadIdx.x;
  if (own == 0) ptx::arrivals_init(kBarrier, kThreads);
  __syncthreads();
  if (missing) ptx::arrive(kBarrier);
  ptx::copy_async(16 * own, from);
  if (!missing) ptx::arrive_with_copies(kBarrier);
  ptx::wait_arrivals(kBarrier, 0);
  ptx::load_shared(16 * (kThreads - 1 - own));
}

// Two rows of 64 numbers, of which a box has one.
CUtensorMap rows() {
  alignas(128) static const uint8_t from[256] = {};
  const cuuint64_t size[2] = {64, 2}, pitch[1] = {128};
  const cuuint32_t box[2] = {64, 1};
  CUtensorMap map;
  emulated::encode(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2, const_cast<uint8_t*>(from), size, pitch, box, box,
                   CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE,
                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return map;
}

// Two copies that two barriers count; missing: the reader waits for the other one.
void boxes(bool missing) {
  const CUtensorMap map = rows();
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) {
      ptx::arrivals_init(kBarrier + 8 * i, 1);
      emulated::expect(kBarrier + 8 * i, 128);
      ptx::copy_box(128 * i, map, 0, i, kBarrier + 8 * i, 0);
    }
  }
  __syncthreads();
  ptx::wait_arrivals(kBarrier + (missing ? 8 : 0), 0);
  ptx::load_shared(4 * (threadIdx.x % 32));
}

// A box comes where a warp has read, which arrived for that; missing: without ending its reads.
void refilled(bool missing) {
  const CUtensorMap map = rows();
  const int own = threadIdx.x, warp = own / 32;
  if (own == 0)
    for (int i = 0; i < 2; ++i) ptx::arrivals_init(kBarrier + 8 * i, 1);
  __syncthreads();
  if (warp == 0) {
    ptx::load_shared(4 * own);
    if (!missing) ptx::end_reads();
    __syncwarp();
    if (own == 0) ptx::arrive(kBarrier);
  } else if (own == 32) {
    ptx::wait_arrivals(kBarrier, 0);
    emulated::expect(kBarrier + 8, 128);
    ptx::copy_box(0, map, 0, 0, kBarrier + 8, 0);
  }
}

// Two threads read boxes in turns; missing: an even number of places, so that one waits for the second turn of a place
// whose first, which is the other's, may still be under way.
void turns(bool missing) {
  const CUtensorMap map = rows();
  const int own = threadIdx.x, places = missing ? 3 : 2;
  const auto full = [](int place) { return kBarrier + 8 * place; };
  const auto empty = [](int place) { return kBarrier + 64 + 8 * place; };
  emulated::late = true;
  if (own == 0)
    for (int i = 0; i < places; ++i) ptx::arrivals_init(full(i), 1), ptx::arrivals_init(empty(i), 1);
  __syncthreads();
  for (int i = 0; own == 0 && i < 4; ++i) {
    const int place = i % places;
    if (i >= places) ptx::wait_arrivals(empty(place), (i / places - 1) % 2);
    emulated::expect(full(place), 128);
    ptx::copy_box(128 * place, map, 0, i % 2, full(place), 0);
  }
  for (int i = own - 1; (own == 1 || own == 2) && i < 4; i += 2) {
    const int place = i % places;
    ptx::wait_arrivals(full(place), i / places % 2);
    ptx::load_shared(128 * place);
    ptx::end_reads();
    ptx::arrive(empty(place));
  }
}

// A warp multiplies x, which is written anew once a lane has arrived; missing: it arrives while products still read.
void products(bool missing) {
  const int own = threadIdx.x, warp = own / 32;
  if (own == 0) ptx::arrivals_init(kBarrier, 1);
  __syncthreads();
  if (warp == 0) {
    float sum[16] = {};
    const uint32_t a[4][4] = {};
    ptx::wgmma<__half, 32>(sum, a, ptx::describe_tokens(0));
    ptx::commit_products();
    if (missing && own == 0) ptx::arrive(kBarrier);
    ptx::wait_products<0>();
    if (!missing && own == 0) ptx::arrive(kBarrier);
  } else if (own == 32) {
    ptx::wait_arrivals(kBarrier, 0);
    ptx::store_shared(0, uint32_t{1});
  }
}

}  // namespace

int main(int, char** given) {
  alignas(1024) static uint8_t memory[8192];
  emulated::memory = memory;
  constexpr void (*kCases[])(bool) = {block, lanes, ring, made, copies, boxes, refilled, turns, products};
  const int number = std::atoi(given[1]);
  emulated::launch([=] { kCases[number / 2](number % 2); }, 1, kThreads, sizeof(memory));
}
