// In place of csrc/templates/ptx/wgmma.cuh. Products are made at once, or (emulated::late) when they are waited for:
// operands that are written too early are wrong in one of the two, and so are sums that are read too early.
#pragma once
#include "on_host/warp.h"

namespace emulated {

constexpr int kMostTokens = 256;

// What a thread asked for and has not waited for. The last group has not ended yet.
struct Asked {
  std::deque<std::vector<std::function<void(bool)>>> groups{1};
  int waited = 0;  // groups
};
inline std::vector<Asked> asked;
inline Asked& own_products() {
  if (asked.size() < fibers.size()) asked.resize(fibers.size());
  return asked[current];
}

// What the lanes of a warp did before they ended a group of products: loads of its operands.
struct Loaded {
  int group = -1;
  Clock told;
};
constexpr int kMostGroups = 4;  // at once
inline Loaded loaded[kMostWarps][kMostGroups];
inline void end_group() {
  Asked& own = own_products();
  const int group = own.waited + static_cast<int>(own.groups.size());
  Loaded& found = loaded[current / 32][group % kMostGroups];
  if (found.group != group) found = {group, {}};
  races.tell(current, found.told);
  own.groups.emplace_back();
}
inline uint32_t warp_engine() { return static_cast<uint32_t>(fibers.size()) + kFirstOfWarps + current / 32; }

// What lanes loaded for products that are done has come, and x was read.
inline void wait_groups_of_products(int pending) {
  Asked& own = own_products();
  wait_for_lanes();
  for (; static_cast<int>(own.groups.size()) > pending + 1; own.groups.pop_front()) {
    for (const auto& product : own.groups.front()) product(late);
    learn(races.known[current], loaded[current / 32][++own.waited % kMostGroups].told);
  }
  wait_for_lanes();
  races.known[current][warp_engine()] = races.engine[warp_engine()];
}

// Where the 16 k from `address` on of a token lie, as the copy engine left them.
inline uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

// This lane's share of a warp's reads of x.
inline void read_tokens(uint32_t address, int tokens) {
  for (int token = current % 32; token < tokens; token += 32)
    for (int half = 0; half < 32; half += 16) {
      const uint32_t at = swizzled(address + token * 128 + half);
      place(at, 16, 16);
      if (races.reads(current, rank(), at, 16, warp_engine())) fail("a product that may be too early", at);
    }
}

template <class Act>
void add_product(float* sum, const uint32_t* a, uint32_t address, int tokens, bool add) {
  static float x[kMostWarps][kMostTokens][16];
  const int warp = current / 32, lane = current % 32;
  std::copy(a, a + 4, exchange[warp][lane]);
  for (int token = lane; token < tokens; token += 32)
    for (int k = 0; k < 16; ++k) {
      uint32_t pair;
      std::memcpy(&pair, place(swizzled(address + token * 128 + k / 2 * 4), 4, 4), 4);
      x[warp][token][k] = half_of<Act>(pair, k % 2);
    }
  wait_for_lanes();
  for (int h = 0; h < 2; ++h) {
    float row[16];
    for (int k = 0; k < 16; ++k) row[k] = half_of<Act>(exchange[warp][lane / 4 * 4 + k % 8 / 2][h + k / 8 * 2], k % 2);
    for (int i = 0; i < tokens / 4; ++i) {
      const int token = i / 2 * 8 + lane % 4 * 2 + i % 2;
      float& to = sum[4 * (i / 2) + 2 * h + i % 2];
      if (!add) to = 0;
      for (int k = 0; k < 16; ++k) to += row[k] * x[warp][token][k];
    }
  }
  wait_for_lanes();
}

}  // namespace emulated

namespace lowbit::ptx {

template <int Count>
void give_registers() {}
template <int Count>
void take_registers() {}
template <int Count>
void settle(float (&)[Count]) {}

inline uint64_t describe_tokens(uint32_t address) { return address >> 4; }

// Operands are in registers: what they are made of has been read.
inline void begin_products() { emulated::races.end_reads(emulated::current); }
inline void commit_products() { emulated::end_group(); }

template <class Act, int Tokens, int Count>
void wgmma(float (&sum)[Count], const uint32_t (&a)[4][4], uint64_t tokens, int add = 1) {
  for (int f = 0; f < 4; ++f) {
    const uint32_t address = (static_cast<uint32_t>(tokens) << 4) + f * 32;
    const auto multiply = [to = &sum[0], from = &a[f][0], address, add = add || f > 0] {
      emulated::add_product<Act>(to, from, address, Tokens, add);
    };
    emulated::read_tokens(address, Tokens);
    if (!emulated::late) multiply();
    emulated::own_products().groups.back().push_back([=](bool late) {
      if (late) multiply();
      emulated::read_tokens(address, Tokens);  // x is read until now
    });
  }
}

template <int Pending>
void wait_products() {
  emulated::wait_groups_of_products(Pending);
}

}  // namespace lowbit::ptx
