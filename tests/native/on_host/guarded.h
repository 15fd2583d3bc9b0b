// Memory whose neighbours may not be touched: a read or write beyond it ends the program with a line that says so.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <new>

namespace on_host {

// `count` zeros that end where a page does, to within 16 bytes; the pages before and behind can't be touched.
template <class T>
struct Guarded {
  size_t count;
  T* data;

  explicit Guarded(size_t items) : count(items) {
    const size_t page = sysconf(_SC_PAGESIZE), bytes = (items * sizeof(T) + 15) / 16 * 16;
    const size_t inside = (bytes + page - 1) / page * page;
    mapped = inside + 2 * page;
    pages = mmap(nullptr, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED || mprotect(static_cast<uint8_t*>(pages) + page, inside, PROT_READ | PROT_WRITE))
      throw std::bad_alloc();
    data = reinterpret_cast<T*>(static_cast<uint8_t*>(pages) + page + inside - bytes);
    std::signal(SIGSEGV, [](int) {
      std::puts("WRONG: memory beyond a tensor was touched");
      std::fflush(stdout);
      _exit(1);
    });
  }
  Guarded(const Guarded&) = delete;
  ~Guarded() { munmap(pages, mapped); }

  size_t bytes() const { return count * sizeof(T); }

 private:
  void* pages;
  size_t mapped;
};

}  // namespace on_host
