// Test module: the index math of csrc/templates/layout.cuh, for tests/test_layout.py.
#include "templates/layout.cuh"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>

namespace py = pybind11;
using lowbit::Layout;
namespace layout = lowbit::layout;

PYBIND11_MODULE(layout_math, m) {
  m.def("padded", [](int which, int64_t n, int64_t k, int bits) {
    const layout::Packed packed(static_cast<Layout>(which), n, k, bits);
    return py::make_tuple(packed.rows, packed.cols, packed.nbytes());
  });
  m.def("plane_low", &layout::plane_low);
  m.attr("step_k") = layout::kStepK;
  m.def("step_bit", &layout::step_bit);
  m.def("lane_bytes", &layout::lane_bytes);
  m.def("tile_k", [](int which, int width) { return layout::tile_k(static_cast<Layout>(which), width); });
  m.def("group_place", [](int which, int row) { return layout::group_place(static_cast<Layout>(which), row); });
  m.def("stored_k", &layout::stored_k);
  m.def("byte_mask", &layout::byte_mask);
  m.def("half_mask", &layout::half_mask);
  // Bit positions (8 * byte + bit) [rows, cols] of every field of a plane, padding included.
  m.def("positions", [](int which, int64_t n, int64_t k, int bits, int width) {
    const layout::Packed packed(static_cast<Layout>(which), n, k, bits);
    py::array_t<int64_t> out({packed.rows, packed.cols});
    auto at = out.mutable_unchecked<2>();
    for (int64_t row = 0; row < packed.rows; ++row)
      for (int64_t col = 0; col < packed.cols; ++col) {
        const layout::Spot spot = packed.spot(row, col, width);
        at(row, col) = 8 * spot.byte + spot.bit;
      }
    return out;
  });
}
