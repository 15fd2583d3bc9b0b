// Reads the generated list three times: to declare the launchers, and for each family's table of rows.
#include "registry.h"

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "types.inc"

// All rows of products are alike.
#define LOWBIT_DECODE(...) LOWBIT_PRODUCT(kDecode, __VA_ARGS__)
#define LOWBIT_GEMM_SM80(...) LOWBIT_PRODUCT(kGemmSm80, __VA_ARGS__)
#define LOWBIT_GEMM_SM90(...) LOWBIT_PRODUCT(kGemmSm90, __VA_ARGS__)

#define LOWBIT_PRODUCT(family, name, weight, act, tokens) \
  extern "C" int name(const lowbit::MatmulArgs&, const lowbit::Launch&);
#define LOWBIT_DEQUANT(name, weight, act) extern "C" int name(const lowbit::DequantArgs&, const lowbit::Launch&);
#include "cuda_registry.inc"
#undef LOWBIT_PRODUCT
#undef LOWBIT_DEQUANT

namespace lowbit::cuda {
namespace {

// Why vectors: a build may have no kernel of a family, and an array may not be empty.
const std::vector<ProductRow>& product_rows() {
  static const std::vector<ProductRow> rows = {
#define LOWBIT_PRODUCT(family, name, weight, act, tokens) {#name, Family::family, weight, act, tokens, &::name},
#define LOWBIT_DEQUANT(name, weight, act)
#include "cuda_registry.inc"
#undef LOWBIT_PRODUCT
#undef LOWBIT_DEQUANT
  };
  return rows;
}

const std::vector<DequantRow>& dequant_rows() {
  static const std::vector<DequantRow> rows = {
#define LOWBIT_PRODUCT(family, name, weight, act, tokens)
#define LOWBIT_DEQUANT(name, weight, act) {#name, weight, act, &::name},
#include "cuda_registry.inc"
#undef LOWBIT_PRODUCT
#undef LOWBIT_DEQUANT
  };
  return rows;
}

// The rows of each pair of types: one for dequant, one a tile for products.
template <class Row>
using Table = std::array<std::array<std::vector<const Row*>, kActTypes>, kKernelTypes>;

template <class Row>
Table<Row>* make_table(const std::vector<Row>& rows) {
  auto* table = new Table<Row>;
  for (const Row& row : rows) (*table)[row.weight][row.act].push_back(&row);
  return table;
}

bool in_range(int weight, int act) { return weight >= 0 && weight < kKernelTypes && act >= 0 && act < kActTypes; }

}  // namespace

const std::vector<const ProductRow*>& product_tiles(int weight, int act) {
  static const std::vector<const ProductRow*> none;
  static const auto* table = [] {
    auto* made = make_table(product_rows());
    for (auto& of_weight : *made)
      for (auto& tiles : of_weight)
        std::sort(tiles.begin(), tiles.end(), [](auto* a, auto* b) {
          return a->tokens != b->tokens ? a->tokens < b->tokens : a->family > b->family;
        });
    return made;
  }();
  return in_range(weight, act) ? (*table)[weight][act] : none;
}

const DequantRow* find_dequant(int weight, int act) {
  static const auto* table = make_table(dequant_rows());
  if (!in_range(weight, act) || (*table)[weight][act].empty()) return nullptr;
  return (*table)[weight][act].front();
}

}  // namespace lowbit::cuda

extern "C" const char* lowbit_cuda_kernel_rows() {
  static const std::string names = [] {
    std::string text;
    for (const auto& row : lowbit::cuda::product_rows()) text += row.name + std::string("\n");
    for (const auto& row : lowbit::cuda::dequant_rows()) text += row.name + std::string("\n");
    return text;
  }();
  return names.c_str();
}
