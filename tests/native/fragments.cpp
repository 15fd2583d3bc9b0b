// Test module: what the decoders of csrc/templates/dequant make of a packed weight for the tensor cores, lane by lane
// on the host, for tests/test_fragments.py.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <cstring>

#include "on_host/byte_perm.h"
#define __byte_perm emulated::byte_perm

#include "templates/dequant/bytes.cuh"
#include "templates/dequant/float.cuh"
#include "templates/dequant/int.cuh"
#include "templates/lane_words.cuh"

namespace py = pybind11;
using namespace lowbit;
using Bytes = py::array_t<uint8_t>;
using Registers = py::array_t<uint32_t>;

namespace {

// [row tile][lane][unit][4]: the registers that make(words, unit, a) gives, of a weight [n, 128] in layout nvidia.
template <int Bits, int Units, class Make>
Registers registers(const Bytes& packed, int64_t n, const Make& make) {
  const layout::Packed form(Layout::kNvidia, n, layout::kStepK, Bits);
  Registers out({form.rows / 16, int64_t{32}, int64_t{Units}, int64_t{4}});
  for (int64_t tile = 0; tile < form.rows / 16; ++tile)
    for (int lane = 0; lane < 32; ++lane) {
      planes::Words<Bits> words = {};
      layout::LaneWords<Bits, layout::kStepK>::for_tiles(
          form, tile, 0, lane, [&](int64_t byte, int first, auto count, int64_t) {
            std::memcpy(words.word + first, packed.data() + byte, 4 * count);
          });
      for (int unit = 0; unit < Units; ++unit) {
        uint32_t a[4];
        make(words, unit, a);
        std::memcpy(out.mutable_data(tile, lane, unit, 0), a, sizeof(a));
      }
    }
  return out;
}

template <int Bits>
void define_int(py::module_& m) {
  using Codes = planes::Codes<Bits>;
  m.def(("int" + std::to_string(Bits)).c_str(), [](const Bytes& packed, int64_t n) {
    return registers<Bits, 8>(packed, n, [](const auto& words, int f, auto& a) { Codes::fragment(words, f, a); });
  });
  m.def(("code_bits" + std::to_string(Bits)).c_str(),
        [] { return py::make_tuple(Codes::code_bit(0), Codes::code_bit(1)); });
}

template <int Exponent, int Mantissa, int ExponentBit>
Registers floats(const Bytes& packed, int64_t n, bool keep_first, bool keep_second) {
  const uint32_t kept[2] = {keep_first ? ~0u : 0, keep_second ? ~0u : 0};
  return registers<1 + Exponent + Mantissa, 8>(packed, n, [&](const auto& words, int f, auto& a) {
    planes::float_fragment<Exponent, Mantissa, ExponentBit>(words, f, kept, a);
  });
}

// The operands of bytes of a plane, or of codes of 3 bits; where digits of fragments go, and the bit that fields of
// rows g and g + 8 begin at.
template <int Width, int Apart>
void define_bytes(py::module_& m) {
  const std::string name = "bytes" + std::to_string(Width) + "_" + std::to_string(Apart);
  m.def(name.c_str(), [](const Bytes& packed, int64_t n) {
    return registers<Width, 4>(packed, n, [](const auto& words, int i, auto& a) {
      if constexpr (Width == 3) {
        bytes::fragments(words, i, a);
      } else {
        bytes::fragments<Width, Apart>(words.word, i, a);
      }
    });
  });
  m.def((name + "_form").c_str(), [] {
    using Parts = bytes::Parts<Width, Apart>;
    py::list places, low;
    for (int f = 0; f < 8; ++f) places.append(bytes::Order<Apart>::place(f));
    for (int i = 0; i < 4; ++i) {
      const int width = Parts::kWidest, sum = Parts::sum(width, i);
      low.append(py::make_tuple(Parts::bit(width, sum, 0), Parts::bit(width, sum, 1)));
    }
    return py::make_tuple(places, low);
  });
}

template <int Exponent, int Mantissa>
void define_float(py::module_& m) {
  const std::string name = "e" + std::to_string(Exponent) + "m" + std::to_string(Mantissa);
  m.def((name + "_fp16").c_str(), &floats<Exponent, Mantissa, 10>);
  m.def((name + "_bf16").c_str(), &floats<Exponent, Mantissa, 7>);
}

}  // namespace

PYBIND11_MODULE(fragments, m) {
  define_int<1>(m), define_int<2>(m), define_int<3>(m), define_int<4>(m);
  define_int<5>(m), define_int<6>(m), define_int<7>(m), define_int<8>(m);
  define_float<1, 1>(m), define_float<2, 1>(m), define_float<2, 2>(m), define_float<3, 1>(m);
  define_float<2, 3>(m), define_float<3, 2>(m), define_float<3, 3>(m), define_float<4, 2>(m);
  define_float<4, 3>(m), define_float<5, 2>(m);
  define_bytes<1, 1>(m), define_bytes<1, 4>(m), define_bytes<2, 1>(m), define_bytes<2, 2>(m), define_bytes<2, 4>(m);
  define_bytes<3, 2>(m), define_bytes<4, 1>(m), define_bytes<4, 2>(m), define_bytes<4, 4>(m), define_bytes<8, 1>(m);
}
