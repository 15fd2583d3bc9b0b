// Run-time detection of the instruction sets of cpu_isa.inc. Feature bits: Intel SDM volume 2, CPUID; AMX permission:
// Linux Documentation/arch/x86/xstate.rst.
#include "cpu_isa.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>

namespace lowbit {
namespace {

enum Register { kEax, kEbx, kEcx, kEdx };

// Register state that the operating system must save and restore (bits of XCR0).
constexpr uint64_t kYmm = 0x6, kZmm = 0xe6, kTiles = 0x60000 | kZmm;

struct Feature {
  std::string_view name;
  uint32_t leaf, subleaf;
  Register reg;
  int bit;
  uint64_t state;
};

constexpr Feature kFeatures[] = {
    {"fma", 1, 0, kEcx, 12, kYmm},        {"f16c", 1, 0, kEcx, 29, kYmm},       {"avx2", 7, 0, kEbx, 5, kYmm},
    {"avx512f", 7, 0, kEbx, 16, kZmm},    {"avx512dq", 7, 0, kEbx, 17, kZmm},   {"avx512bw", 7, 0, kEbx, 30, kZmm},
    {"avx512vl", 7, 0, kEbx, 31, kZmm},   {"avx512vbmi", 7, 0, kEcx, 1, kZmm},  {"avx512vnni", 7, 0, kEcx, 11, kZmm},
    {"avx512bf16", 7, 1, kEax, 5, kZmm},  {"avx512fp16", 7, 0, kEdx, 23, kZmm}, {"avxvnni", 7, 1, kEax, 4, kYmm},
    {"gfni", 7, 0, kEcx, 8, kZmm},        {"amx-bf16", 7, 0, kEdx, 22, kTiles}, {"amx-tile", 7, 0, kEdx, 24, kTiles},
    {"amx-int8", 7, 0, kEdx, 25, kTiles},
};

constexpr const Feature* lookup(std::string_view name) {
  for (const Feature& feature : kFeatures)
    if (feature.name == name) return &feature;
  return nullptr;
}

// Calls check(feature or null) for each name of a comma-separated list; true when all are.
template <class Check>
constexpr bool all_of(std::string_view names, Check check) {
  while (!names.empty()) {
    const size_t comma = names.find(',');
    if (!check(lookup(names.substr(0, comma)))) return false;
    names = comma == std::string_view::npos ? std::string_view() : names.substr(comma + 1);
  }
  return true;
}

constexpr bool known(const Feature* feature) { return feature != nullptr; }
#define LOWBIT_ISA(name, features, rows, condition) \
  static_assert(all_of(features, known), "cpu_isa.inc: " #name " has a feature that the table above lacks");
#include "cpu_isa.inc"
#undef LOWBIT_ISA

bool cpuid(uint32_t leaf, uint32_t subleaf, std::array<uint32_t, 4>& regs) {
  return __get_cpuid_count(leaf, subleaf, &regs[kEax], &regs[kEbx], &regs[kEcx], &regs[kEdx]) != 0;
}

uint64_t saved_state() {
  std::array<uint32_t, 4> regs{};
  const bool osxsave = cpuid(1, 0, regs) && (regs[kEcx] >> 27 & 1);
  if (!osxsave) return 0;
  uint32_t low, high;
  // Why: the intrinsic _xgetbv needs -mxsave, and this file must run on every CPU.
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return static_cast<uint64_t>(high) << 32 | low;
}

bool has(const Feature* feature) {
  std::array<uint32_t, 4> regs{};
  return (saved_state() & feature->state) == feature->state && cpuid(feature->leaf, feature->subleaf, regs) &&
         (regs[feature->reg] >> feature->bit & 1);
}

// Linux gives a process the tile registers only on request; granted once, it holds for all threads.
bool tile_permission() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

constexpr int kCount = 0
#define LOWBIT_ISA(name, features, rows, condition) +1
#include "cpu_isa.inc"
#undef LOWBIT_ISA
    ;

std::array<Isa, kCount> detect() {
  return {{
#define LOWBIT_ISA(name, features, rows, condition) {#name, features, rows, all_of(features, has) && (condition)},
#include "cpu_isa.inc"
#undef LOWBIT_ISA
  }};
}

const std::array<Isa, kCount>& isas() {
  static const std::array<Isa, kCount> list = detect();
  return list;
}

std::atomic<int>& chosen() {
  static std::atomic<int> index = [] {
    int best = 0;
    while (!isas()[best].usable) ++best;  // the last row needs nothing, so the loop ends
    return best;
  }();
  return index;
}

}  // namespace

int isa_count() { return kCount; }
const Isa& isa(int index) { return isas()[index]; }
int current_isa() { return chosen().load(std::memory_order_relaxed); }

}  // namespace lowbit

extern "C" {

const char* lowbit_isas() {
  static const std::string names = [] {
    std::string text;
    for (const lowbit::Isa& isa : lowbit::isas())
      if (isa.usable) text += (text.empty() ? "" : " ") + std::string(isa.name);
    return text;
  }();
  return names.c_str();
}

const char* lowbit_isa() { return lowbit::isa(lowbit::current_isa()).name; }

int lowbit_set_isa(const char* name) {
  if (name == nullptr) return 1;
  for (int i = 0; i < lowbit::kCount; ++i) {
    if (std::string_view(lowbit::isa(i).name) != name) continue;
    if (!lowbit::isa(i).usable) return 2;
    lowbit::chosen() = i;
    return 0;
  }
  return 1;
}

}  // extern "C"
