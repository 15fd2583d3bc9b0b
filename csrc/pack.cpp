// The ops pack_codes and unpack_codes: the bit stream of the canonical form to and from a packed layout, on the host.
//
// Eight codes travel as the bytes of one 64-bit word: a stream of b-bit codes gives eight of them every b bytes, and
// every layout takes its fields from such words by shifts and masks. The layouts are those of templates/layout.cuh;
// the tests hold this file against the formula there and against lowbit/pack/layout.py, bit for bit.
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "check_packing.h"
#include "templates/layout.cuh"
#include "threads.h"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "words are read and written as little-endian bytes");

namespace lowbit {
namespace {

using layout::Packed;

constexpr uint64_t low_bits(int count) { return count >= 64 ? ~uint64_t{0} : (uint64_t{1} << count) - 1; }

// Splits every 2*part-bit number (one in each 2*lane bits) into two of `part` bits, one in each `lane` bits.
template <int part, int lane>
constexpr uint64_t kKeep = low_bits(part) * (lane == 32   ? 1
                                             : lane == 16 ? 0x100000001u
                                                          : 0x1000100010001u);

template <int part, int lane>
inline uint64_t split(uint64_t word) {
  return (word & kKeep<part, lane>) | ((word & (kKeep<part, lane> << part)) << (lane - part));
}

template <int part, int lane>
inline uint64_t join(uint64_t word) {
  return (word & kKeep<part, lane>) | ((word >> (lane - part)) & (kKeep<part, lane> << part));
}

// Eight codes of `Bits` bits, dense, to the eight bytes of a word, and back.
template <int Bits>
inline uint64_t to_bytes(uint64_t dense) {
  return split<Bits, 8>(split<2 * Bits, 16>(split<4 * Bits, 32>(dense)));
}

template <int Bits>
inline uint64_t to_dense(uint64_t bytes) {
  return join<4 * Bits, 32>(join<2 * Bits, 16>(join<Bits, 8>(bytes)));
}

// One row of the bit stream, read and written eight codes at a time; octet i is codes 8i .. 8i+7.
template <int Bits, class Byte>
struct Row {
  Byte* data;  // null for a pad row
  int64_t size, k;

  Row(Byte* stream, int64_t row, int64_t n, int64_t codes_in_row)
      : data(nullptr), size((codes_in_row * Bits + 7) / 8), k(codes_in_row) {
    if (row < n) data = stream + row * size;
  }

  // Codes from k on and codes of a pad row are 0.
  uint64_t load(int64_t octet) const {
    const int64_t at = octet * Bits;
    uint64_t dense = 0;
    if (!data || at >= size) return 0;
    // Why two branches: a copy of constant size is one instruction, another is a call.
    if (size - at >= 8)
      std::memcpy(&dense, data + at, 8);
    else
      std::memcpy(&dense, data + at, size - at);
    const uint64_t bytes = to_bytes<Bits>(dense & low_bits(8 * Bits));
    return k - 8 * octet >= 8 ? bytes : bytes & low_bits(static_cast<int>(8 * (k - 8 * octet)));
  }

  void store(int64_t octet, uint64_t bytes) const {
    const int64_t at = octet * Bits;
    if (!data || at >= size) return;
    if (k - 8 * octet < 8) bytes &= low_bits(static_cast<int>(8 * (k - 8 * octet)));
    const uint64_t dense = to_dense<Bits>(bytes);
    if (size - at >= Bits)
      std::memcpy(data + at, &dense, Bits);
    else
      std::memcpy(data + at, &dense, size - at);
  }
};

template <int value>
using Constant = std::integral_constant<int, value>;

// Calls body(width, lowest bit of the code) for each plane of a code, both as compile-time constants.
template <int Bits, int Width = 8, class Body>
inline void for_planes(const Body& body) {
  if constexpr (Bits & Width) body(Constant<Width>{}, Constant<layout::plane_low(Bits, Width)>{});
  if constexpr (Width > 1) for_planes<Bits, Width / 2>(body);
}

// The `width` bits from `low` up of each of the eight codes.
template <int width>
constexpr uint64_t kFields = low_bits(width) * 0x0101010101010101u;

// ---- cpu: four codes of one row are a 32-bit lane of a vector -------------------------------------------------------

template <int Bits>
void pack_cpu(const uint8_t* stream, int64_t n, int64_t k, const Packed& to, int64_t block, uint8_t* out) {
  for (int r = 0; r < layout::kTileRows; ++r) {
    const Row<Bits, const uint8_t> row(stream, block * layout::kTileRows + r, n, k);
    for (int64_t chunk = 0; chunk < to.cols / 32; ++chunk) {
      uint64_t octets[4];  // 32 k
      for (int i = 0; i < 4; ++i) octets[i] = row.load(chunk * 4 + i);
      for_planes<Bits>([&](auto width, auto low) {
        constexpr int kPerByte = 8 / width;
        uint8_t* tile = out + to.tile_start(block, chunk, width);
        for (int vector = 0; vector < width; ++vector) {
          uint32_t lane = 0;
          for (int i = 0; i < kPerByte; ++i) {
            const int quad = vector * kPerByte + i;
            const uint64_t fields = (octets[quad / 2] >> low) & kFields<width>;
            lane |= static_cast<uint32_t>(fields >> (quad % 2 * 32)) << (width * i);
          }
          std::memcpy(tile + vector * 64 + r * 4, &lane, 4);
        }
      });
    }
  }
}

template <int Bits>
void unpack_cpu(const uint8_t* packed, int64_t n, int64_t k, const Packed& from, int64_t block, uint8_t* stream) {
  for (int r = 0; r < layout::kTileRows; ++r) {
    const Row<Bits, uint8_t> row(stream, block * layout::kTileRows + r, n, k);
    for (int64_t chunk = 0; chunk < from.cols / 32; ++chunk) {
      uint64_t octets[4] = {};
      for_planes<Bits>([&](auto width, auto low) {
        constexpr int kPerByte = 8 / width;
        const uint8_t* tile = packed + from.tile_start(block, chunk, width);
        for (int vector = 0; vector < width; ++vector) {
          uint32_t lane;
          std::memcpy(&lane, tile + vector * 64 + r * 4, 4);
          for (int i = 0; i < kPerByte; ++i) {
            const int quad = vector * kPerByte + i;
            const uint64_t fields = (lane >> (width * i)) & static_cast<uint32_t>(kFields<width>);
            octets[quad / 2] |= fields << (quad % 2 * 32 + low);
          }
        }
      });
      for (int i = 0; i < 4; ++i) row.store(chunk * 4 + i, octets[i]);
    }
  }
}

// ---- nvidia: bytes in the order k = 0, 8, 1, 9, ... of a fragment's row are one word for each of four lanes ---------

// Bytes b0 b1 b2 b3 to b0 0 b1 0 b2 0 b3 0, and back.
inline uint64_t spread(uint32_t word) {
  const uint64_t halves = (word | uint64_t{word} << 16) & 0x0000FFFF0000FFFFu;
  return (halves | halves << 8) & 0x00FF00FF00FF00FFu;
}

inline uint32_t gather(uint64_t word) {
  const uint64_t bytes = word & 0x00FF00FF00FF00FFu;
  const uint64_t halves = (bytes | bytes >> 8) & 0x0000FFFF0000FFFFu;
  return static_cast<uint32_t>(halves | halves >> 16);
}

// Rows g and g + 8 of a row block over the k of a step: units u = 2f + h, two words of two lanes each.
struct Span {
  static constexpr int kUnits = layout::kStepK / 8;
  uint64_t pairs[kUnits][2];
};

// Where the word of a plane lies that belongs to lane 4g + 2t, counted from the first of the step's tiles; that of the
// next lane lies lane_bytes after it.
inline int word_start(int width, int word, int g, int t) {
  const int words = layout::lane_bytes(width) / 4;
  return word / words * layout::tile_bytes(width) + (4 * g + 2 * t) * layout::lane_bytes(width) + word % words * 4;
}

template <int Bits>
void pack_nvidia(const uint8_t* stream, int64_t n, int64_t k, const Packed& to, int64_t block, uint8_t* out) {
  Span span;
  for (int64_t at = 0; at < to.cols; at += layout::kStepK) {
    for (int g = 0; g < 8; ++g) {
      for (int h = 0; h < 2; ++h) {
        const Row<Bits, const uint8_t> row(stream, block * layout::kTileRows + 8 * h + g, n, k);
        for (int u = h; u < span.kUnits; u += 2) {
          const uint64_t first = row.load(at / 8 + (u - h)), second = row.load(at / 8 + (u - h) + 1);
          for (int t = 0; t < 2; ++t)
            span.pairs[u][t] = spread(static_cast<uint32_t>(first >> (32 * t))) |
                               spread(static_cast<uint32_t>(second >> (32 * t))) << 8;
        }
      }
      for_planes<Bits>([&](auto width, auto low) {
        constexpr int kPerByte = 8 / width, kWords = Span::kUnits / kPerByte;
        uint8_t* tile = out + to.tile_start(block, at / layout::tile_k(Layout::kNvidia, width), width);
        for (int word = 0; word < kWords; ++word)
          for (int t = 0; t < 2; ++t) {
            uint64_t pair = 0;
            for (int i = 0; i < kPerByte; ++i)
              pair |= ((span.pairs[word * kPerByte + i][t] >> low) & kFields<width>) << layout::step_bit(width, i);
            uint8_t* lane = tile + word_start(width, word, g, t);
            const uint32_t even = static_cast<uint32_t>(pair), odd = static_cast<uint32_t>(pair >> 32);
            std::memcpy(lane, &even, 4);
            std::memcpy(lane + layout::lane_bytes(width), &odd, 4);
          }
      });
    }
  }
}

template <int Bits>
void unpack_nvidia(const uint8_t* packed, int64_t n, int64_t k, const Packed& from, int64_t block, uint8_t* stream) {
  for (int64_t at = 0; at < from.cols; at += layout::kStepK) {
    for (int g = 0; g < 8; ++g) {
      Span span = {};
      for_planes<Bits>([&](auto width, auto low) {
        constexpr int kPerByte = 8 / width, kWords = Span::kUnits / kPerByte;
        const uint8_t* tile = packed + from.tile_start(block, at / layout::tile_k(Layout::kNvidia, width), width);
        for (int word = 0; word < kWords; ++word)
          for (int t = 0; t < 2; ++t) {
            const uint8_t* lane = tile + word_start(width, word, g, t);
            uint32_t even, odd;
            std::memcpy(&even, lane, 4);
            std::memcpy(&odd, lane + layout::lane_bytes(width), 4);
            const uint64_t pair = even | uint64_t{odd} << 32;
            for (int i = 0; i < kPerByte; ++i)
              span.pairs[word * kPerByte + i][t] |= ((pair >> layout::step_bit(width, i)) & kFields<width>) << low;
          }
      });
      for (int h = 0; h < 2; ++h) {
        const Row<Bits, uint8_t> row(stream, block * layout::kTileRows + 8 * h + g, n, k);
        for (int u = h; u < span.kUnits; u += 2) {
          const uint64_t* pair = span.pairs[u];
          row.store(at / 8 + (u - h), gather(pair[0]) | uint64_t{gather(pair[1])} << 32);
          row.store(at / 8 + (u - h) + 1, gather(pair[0] >> 8) | uint64_t{gather(pair[1] >> 8)} << 32);
        }
      }
    }
  }
}

// ---- dispatch -------------------------------------------------------------------------------------------------------

// Handles one block of 16 rows; (source, n, k, packed form, block, destination).
using BlockFn = void (*)(const uint8_t*, int64_t, int64_t, const Packed&, int64_t, uint8_t*);

template <int Bits>
constexpr BlockFn kBlockFns[2][2] = {{pack_cpu<Bits>, pack_nvidia<Bits>}, {unpack_cpu<Bits>, unpack_nvidia<Bits>}};

BlockFn block_fn(bool unpack, Layout which, int bits) {
  const int at = static_cast<int>(which);
  switch (bits) {
    case 1:
      return kBlockFns<1>[unpack][at];
    case 2:
      return kBlockFns<2>[unpack][at];
    case 3:
      return kBlockFns<3>[unpack][at];
    case 4:
      return kBlockFns<4>[unpack][at];
    case 5:
      return kBlockFns<5>[unpack][at];
    case 6:
      return kBlockFns<6>[unpack][at];
    case 7:
      return kBlockFns<7>[unpack][at];
    default:
      return kBlockFns<8>[unpack][at];
  }
}

// Why: weights are streamed once a product, and 4 KiB pages cost a TLB miss each; many systems give 2 MiB pages only
// where a program asks, and only before the first write. Failure costs nothing, so it is not looked at.
void ask_huge_pages(uint8_t* data, int64_t nbytes) {
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t kPage = uintptr_t{2} << 20;
  if (nbytes < static_cast<int64_t>(2 * kPage)) return;
  const uintptr_t start = (reinterpret_cast<uintptr_t>(data) + kPage - 1) / kPage * kPage;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + static_cast<uintptr_t>(nbytes)) / kPage * kPage;
  if (start < end) madvise(reinterpret_cast<void*>(start), end - start, MADV_HUGEPAGE);
#endif
}

void run(const Tensor& stream, const Tensor& packed, int64_t n, int64_t k, int64_t bits, int64_t which, bool unpack) {
  const Packed form = check_packing(kCpu, stream, packed, n, k, bits, which);
  const Tensor& from = unpack ? packed : stream;
  const Tensor& to = unpack ? stream : packed;
  const auto* source = static_cast<const uint8_t*>(from.const_data_ptr());
  auto* destination = static_cast<uint8_t*>(to.mutable_data_ptr());
  if (!unpack) ask_huge_pages(destination, to.numel());
  const BlockFn work = block_fn(unpack, form.layout, static_cast<int>(bits));
  const int64_t grain = std::max<int64_t>(1, 32768 / std::max<int64_t>(1, 16 * form.cols));
  parallel(form.rows / 16, grain, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) work(source, n, k, form, block, destination);
  });
}

}  // namespace

void pack_codes(const Tensor& codes, int64_t n, int64_t k, int64_t bits, int64_t layout, const Tensor& out) {
  run(codes, out, n, k, bits, layout, false);
}

void unpack_codes(const Tensor& packed, int64_t n, int64_t k, int64_t bits, int64_t layout, const Tensor& out) {
  run(out, packed, n, k, bits, layout, true);
}

}  // namespace lowbit
