// In place of csrc/templates/ptx/tma.cuh: what the copy engine does.
#pragma once
#include <cuda.h>

#include <cstring>

#include "on_host/warp.h"

namespace emulated {

// What encode() leaves in a CUtensorMap.
struct Described {
  const uint8_t* data;
  uint64_t size[3], pitch[2];
  uint32_t box[3];
  int width;  // bytes of an item
  bool swizzled;
};
static_assert(sizeof(Described) <= sizeof(CUtensorMap));

// cuTensorMapEncodeTiled, with the limits that the driver's documentation names.
inline CUresult encode(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t dimensions, void* data,
                       const cuuint64_t* sizes, const cuuint64_t* pitches, const cuuint32_t* box, const cuuint32_t*,
                       CUtensorMapInterleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                       CUtensorMapFloatOOBfill) {
  Described made{static_cast<const uint8_t*>(data), {1, 1, 1}, {0, 0}, {1, 1, 1}, 0, false};
  made.width = type == CU_TENSOR_MAP_DATA_TYPE_UINT64 ? 8 : 2;
  made.swizzled = swizzle == CU_TENSOR_MAP_SWIZZLE_128B;
  bool good = reinterpret_cast<uintptr_t>(data) % 16 == 0 && box[0] * made.width % 16 == 0;
  good &= !made.swizzled || box[0] * made.width <= 128;
  for (uint32_t i = 0; i < dimensions; ++i) {
    made.size[i] = sizes[i], made.box[i] = box[i];
    good &= sizes[i] > 0 && box[i] > 0 && box[i] <= 256;
    if (i == 0) continue;
    made.pitch[i - 1] = pitches[i - 1];
    good &= pitches[i - 1] % 16 == 0;
  }
  std::memcpy(map, &made, sizeof(made));
  return good ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

// A box to a block, 16 bytes at a time; what lies outside of the tensor becomes 0.
inline void copy_box(uint32_t to, const CUtensorMap& map, const int (&at)[3], uint32_t at_barrier, int block = rank()) {
  Described d;
  std::memcpy(&d, &map, sizeof(d));
  if (to % (d.swizzled ? 1024 : 128)) fail("a bad place for a box", to);
  const int row = d.box[0] * d.width;
  Barrier& counts = barrier(at_barrier, block);
  for (uint32_t outer = 0; outer < d.box[2]; ++outer)
    for (uint32_t middle = 0; middle < d.box[1]; ++middle)
      for (int piece = 0; piece < row; piece += 16, to += 16) {
        const uint64_t z = at[2] + outer, y = at[1] + middle;
        const int64_t begin = int64_t{at[0]} * d.width + piece, end = static_cast<int64_t>(d.size[0]) * d.width;
        const bool there = z < d.size[2] && y < d.size[1];
        const int bytes = there ? static_cast<int>(std::min<int64_t>(std::max<int64_t>(end - begin, 0), 16)) : 0;
        const uint8_t* from = bytes ? d.data + z * d.pitch[1] + y * d.pitch[0] + begin : d.data;
        const Copy one{d.swizzled ? to ^ (to / 128 % 8 * 16) : to, from, bytes};
        place(one.to, 16, 16);
        if (races.covers(current, block, one.to, 16)) fail("a box over what may still be read", one.to);
        written_by(counts.engine, one.to, 16, block);
        late ? counts.copies.push_back(one) : apply(one, block);
      }
  const int bytes = row * d.box[1] * d.box[2];
  late ? under_way.push_back({at_barrier, bytes, block}) : count_bytes(at_barrier, bytes, block);
}

}  // namespace emulated

namespace lowbit::ptx {

inline bool elect_one() { return emulated::current % 32 == 0; }
inline void publish_barriers() {}
constexpr uint64_t kFirstOut = 0, kLastOut = 0;
inline void copy_box(uint32_t to, const CUtensorMap& map, int inner, int outer, uint32_t barrier, uint64_t) {
  emulated::copy_box(to, map, {inner, outer, 0}, barrier);
}
inline void copy_box(uint32_t to, const CUtensorMap& map, int inner, int middle, int outer, uint32_t barrier,
                     uint64_t) {
  emulated::copy_box(to, map, {inner, middle, outer}, barrier);
}
inline void copy_box_to_all(uint32_t to, const CUtensorMap& map, int inner, int outer, uint32_t barrier,
                            uint16_t blocks, uint64_t) {
  for (int block = 0; block < emulated::cluster_blocks; ++block)
    if (blocks >> block & 1) emulated::copy_box(to, map, {inner, outer, 0}, barrier, block);
}
inline void arrive_in_cluster(uint32_t barrier, uint32_t block) { emulated::arrive(barrier, block); }
inline void prefetch_map(const CUtensorMap&) {}

}  // namespace lowbit::ptx
