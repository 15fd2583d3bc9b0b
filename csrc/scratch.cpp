#include "scratch.h"

#include <cstdlib>
#include <new>

namespace lowbit {
namespace {

struct Buffer {
  void* data = nullptr;
  size_t bytes = 0;
  ~Buffer() { std::free(data); }
};

thread_local Buffer buffers[static_cast<int>(Scratch::kSlots)];

}  // namespace

void* scratch(Scratch slot, size_t bytes) {
  Buffer& b = buffers[static_cast<int>(slot)];
  const bool oversized = b.bytes > kKeepBytes && bytes <= kKeepBytes;
  if (bytes > b.bytes || oversized) {
    std::free(b.data);
    b.data = nullptr;
    b.bytes = 0;
    const size_t rounded = (bytes + 4095) / 4096 * 4096;
    void* p = nullptr;
    if (posix_memalign(&p, 64, rounded) != 0) throw std::bad_alloc();
    b.data = p;
    b.bytes = rounded;
  }
  return b.data;
}

}  // namespace lowbit
