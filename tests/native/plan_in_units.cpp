// Compiled in one unit, with TIMES and SPLITS, and in two, with one each: for tests/test_plan_units.py.
#include "cuda/plan.h"

namespace {
constexpr int kH200[] = {132, 66, 30, 15, 39};
}

#ifdef TIMES
extern "C" float tile_us(int tokens, int bits, long long n, long long k) {
  lowbit::cuda::Question q{};
  q.m = tokens, q.n = n, q.k = k, q.bits = bits, q.group_size = 128, q.even_scales = true;
  q.capability = 90, q.clusters = kH200;
  return lowbit::cuda::tile_us(lowbit::cuda::Family::kGemmSm90, tokens, q);
}
#endif

#ifdef SPLITS
// Row tiles, parts and blocks of what the plan has for a tile.
extern "C" int split_of(int tokens, int bits, long long n, long long k) {
  const auto found = lowbit::cuda::plan_split({(n + 15) / 16, (k + 127) / 128, tokens, bits, 8, kH200, ~0u, {}, 1});
  return found.row_tiles * 10000 + found.parts * 100 + found.blocks;
}
#endif
