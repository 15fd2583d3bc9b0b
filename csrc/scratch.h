// Working memory of the CPU kernels: one buffer a thread and slot, aligned to 64 bytes, contents undefined.
//
// A buffer is valid until the same thread asks for the same slot again. Small buffers are kept for the next call,
// large ones (over kKeepBytes) are returned when the slot is asked for again with less, or when the thread ends.
#pragma once
#include <cstddef>

namespace lowbit {

enum class Scratch : int { kActivations, kPanel, kSlots };
constexpr size_t kKeepBytes = size_t{4} << 20;

// Throws std::bad_alloc when memory is short.
void* scratch(Scratch slot, size_t bytes);

}  // namespace lowbit
