// Test module: the steps of the CUDA kernels that pack, unpack and expand weights, lane by lane on the host, for
// tests/test_pack_cuda.py. What only a GPU has, exchanges between lanes and shared memory, is plain arrays here.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "templates/code_value.cuh"
#include "templates/stream_pairs.cuh"

namespace py = pybind11;
using namespace lowbit;
using Bytes = py::array_t<uint8_t>;

namespace {

constexpr int kK = 256;  // what a warp takes

// 16 rows x kK of the stream, as pack_rows lays them in shared memory.
template <int Bits>
struct Rows {
  static constexpr int kWords = kK * Bits / 32;
  uint32_t word[16][kWords + 1] = {};
};

template <int Bits>
Bytes pack(const Bytes& stream, int64_t n, int64_t k) {
  const layout::Packed form(Layout::kNvidia, n, k, Bits);
  Bytes out(form.nbytes());
  std::fill_n(out.mutable_data(), form.nbytes(), 0xA5);
  for (int64_t block = 0; block < form.rows / 16; ++block)
    for (int64_t at = 0; at < form.cols; at += kK) {
      Rows<Bits> rows;
      for (int r = 0; r < 16; ++r)
        for (int64_t bit = 0; bit < std::min<int64_t>(kK, k - at) * Bits && block * 16 + r < n; ++bit) {
          const int64_t from = at * Bits + bit;
          rows.word[r][bit / 32] |= (stream.at(block * 16 + r, from / 8) >> (from % 8) & 1u) << (bit % 32);
        }
      for (int lane = 0; lane < 32; ++lane) {
        layout::LaneWords<Bits, kK> words = {};
        for (int u = 0; u < words.kUnits; ++u) {
          const uint32_t* row = rows.word[lane / 4 + u % 2 * 8];
          words.put_four(u, stream::to_four<Bits>(stream::load_pair<Bits>(row, u / 2 * 2, lane % 4),
                                                  stream::load_pair<Bits>(row, u / 2 * 2 + 1, lane % 4)));
        }
        words.for_tiles(form, block, at, lane, [&](int64_t byte, int first, auto count, int64_t tile_k) {
          if (tile_k < form.cols) std::memcpy(out.mutable_data() + byte, words.word + first, 4 * count);
        });
      }
    }
  return out;
}

// The dense octet of every (row, 8 k), padding included, put together from what four lanes hold.
template <int Bits>
py::array_t<uint64_t> unpack(const Bytes& packed, int64_t n, int64_t k) {
  const layout::Packed form(Layout::kNvidia, n, k, Bits);
  py::array_t<uint64_t> out({form.rows, form.cols / 8});
  for (int64_t block = 0; block < form.rows / 16; ++block)
    for (int64_t at = 0; at < form.cols; at += kK) {
      layout::LaneWords<Bits, kK> words[32] = {};
      for (int lane = 0; lane < 32; ++lane)
        words[lane].for_tiles(form, block, at, lane, [&](int64_t byte, int first, auto count, int64_t tile_k) {
          if (tile_k < form.cols) std::memcpy(words[lane].word + first, packed.data() + byte, 4 * count);
        });
      for (int row = 0; row < 16; ++row)
        for (int octet = 0; octet < kK / 8 && at / 8 + octet < form.cols / 8; ++octet) {
          uint32_t pairs[4];
          for (int t = 0; t < 4; ++t)
            pairs[t] = stream::pair_of<Bits>(words[row % 8 * 4 + t].four(octet / 2 * 2 + row / 8), octet % 2);
          out.mutable_at(block * 16 + row, at / 8 + octet) = stream::join_pairs<Bits>(pairs);
        }
    }
  return out;
}

// The value of every code at every place of a word, [2^bits, 4].
template <class Weight>
py::array_t<float> values(const CodeValue<Weight>& value) {
  py::array_t<float> out({1 << Weight::kBits, 4});
  for (int code = 0; code < 1 << Weight::kBits; ++code)
    for (int place = 0; place < 4; ++place) {
      // Neighbours hold other codes, which must not matter.
      const uint32_t others = 0x01010101u * (~code & ((1 << Weight::kBits) - 1)) & ~(0xFFu << (8 * place));
      out.mutable_at(code, place) = value(others | static_cast<uint32_t>(code) << (8 * place), place);
    }
  return out;
}

template <class Weight>
void add_values(py::module_& m, const char* name) {
  m.def(name, [](float step, float offset) { return values(CodeValue<Weight>(Affine{step, offset})); });
}

template <int Bits>
void add(py::module_& m) {
  const std::string bits = std::to_string(Bits);
  m.def(("pack" + bits).c_str(), &pack<Bits>);
  m.def(("unpack" + bits).c_str(), &unpack<Bits>);
  add_values<Int<Bits>>(m, ("int" + bits).c_str());
  m.def(("codebook" + bits).c_str(),
        [](const py::array_t<float>& table) { return values(CodeValue<Codebook<Bits>>(table.data())); });
  if constexpr (Bits > 1) add<Bits - 1>(m);
}

}  // namespace

PYBIND11_MODULE(cuda_steps, m) {
  add<8>(m);
  add_values<Float<1, 1>>(m, "float3_e1m1");
  add_values<Float<2, 1>>(m, "float4_e2m1");
  add_values<Float<2, 2>>(m, "float5_e2m2");
  add_values<Float<3, 1>>(m, "float5_e3m1");
  add_values<Float<2, 3>>(m, "float6_e2m3");
  add_values<Float<3, 2>>(m, "float6_e3m2");
  add_values<Float<3, 3>>(m, "float7_e3m3");
  add_values<Float<4, 2>>(m, "float7_e4m2");
  add_values<Float<4, 3>>(m, "float8_e4m3");
  add_values<Float<5, 2>>(m, "float8_e5m2");
}
