// Reads the generated list twice: to declare the kernels, and to make the table of rows.
#include "registry.h"

#include <array>
#include <iterator>
#include <string>
#include <string_view>

#include "cpu_isa.h"
#include "types.inc"

#define LOWBIT_KERNEL(isa, name, weight, act) \
  namespace cpu::isa {                        \
  void name(const MatmulArgs&);               \
  }
namespace lowbit {
#include "registry.inc"
}
#undef LOWBIT_KERNEL

namespace lowbit {
namespace {

const KernelRow kRows[] = {
#define LOWBIT_KERNEL(isa, name, weight, act) {#name, #isa, weight, act, &cpu::isa::name},
#include "registry.inc"
#undef LOWBIT_KERNEL
    {nullptr, nullptr, 0, 0, nullptr},  // an array may not be empty, and a build may have no kernel
};

using Table = std::array<std::array<const KernelRow*, kActTypes>, kKernelTypes>;

// One table per ISA, best first; an ISA without a row of its own takes that of the next usable one below.
const Table* tables() {
  static const auto* all = [] {
    auto* tables = new Table[isa_count()]();
    for (int i = isa_count() - 1; i >= 0; --i) {
      if (i + 1 < isa_count()) tables[i] = tables[i + 1];
      if (!isa(i).usable) continue;
      for (const KernelRow& row : kernel_rows())
        if (std::string_view(row.isa) == isa(i).name) tables[i][row.weight][row.act] = &row;
    }
    return tables;
  }();
  return all;
}

}  // namespace

KernelRows kernel_rows() { return {std::begin(kRows), std::end(kRows) - 1}; }

const KernelRow* find(int isa, int weight, int act, int64_t rows) {
  if (isa < 0 || isa >= isa_count() || weight < 0 || weight >= kKernelTypes || act < 0 || act >= kActTypes)
    return nullptr;
  while (isa + 1 < isa_count() && rows < lowbit::isa(isa).rows) ++isa;
  return tables()[isa][weight][act];
}

}  // namespace lowbit

extern "C" const char* lowbit_kernel_rows() {
  static const std::string names = [] {
    std::string text;
    for (const lowbit::KernelRow& row : lowbit::kernel_rows())
      text += (text.empty() ? "" : "\n") + std::string(row.name);
    return text;
  }();
  return names.c_str();
}
