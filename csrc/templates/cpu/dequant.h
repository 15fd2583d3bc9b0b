// From packed planes to codes, bytes or floats: one chunk (kLanes rows x 32 k) at a time.
//
// A decoder names how a code becomes a number; the generator picks one per weight type:
//   Codes<bits, mult>    byte = mult * code                    integers
//   Bytes<bits, Table>   byte = Table::kBytes[code]            floats whose values fit in a byte (ByteForm)
//   Floats<bits, Table>  value = Table::kValues[code]          the other floats
//   Codebook<bits>       value = Weight::codebook[code]        a table that comes with the weight
//
// A chunk has eight quads; lane r, byte j of quad q belongs to row r and k = 4q + j of the chunk:
//
//   plane of p bits, vector v:   byte 4r + j  =  | quad (8/p)v | quad (8/p)v + 1 | ...      (low bits first)
#pragma once

namespace lowbit::cpu::LOWBIT_ISA_NS {
namespace {

template <int Bits, int Mult>
struct Codes {
  static constexpr int kBits = Bits;
};
template <int Bits, class Table>
struct ByteTable;
template <int Bits, class Table>
struct FloatTable;
template <int Bits, class Table>
struct Bytes {
  static constexpr int kBits = Bits;
  using LookUp = ByteTable<Bits, Table>;
};
template <int Bits, class Table>
struct Floats {
  static constexpr int kBits = Bits;
  using LookUp = FloatTable<Bits, Table>;
};
template <int Bits>
struct Codebook {
  static constexpr int kBits = Bits;
  Simd::Entries<Bits> entries;
};

// The decoder of a weight, to be made once a loop. Why an object: a codebook is in registers, where it fits.
template <class D>
LOWBIT_INLINE D decoder_of(const Weight&, D) {
  return {};
}
template <int Bits>
LOWBIT_INLINE Codebook<Bits> decoder_of(const Weight& w, Codebook<Bits>) {
  return {Simd::load_entries<Bits>(w.codebook)};
}

// --- tables, laid out for vector look-ups ------------------------------------------------------------------------
template <int Bits, class Table>
struct ByteTable {
  struct Data {
    alignas(64) uint8_t bytes[64];
    alignas(64) float values[1 << Bits];
  };
  static constexpr Data fill() {
    Data d{};
    for (int c = 0; c < 64; ++c) d.bytes[c] = Table::kBytes[c & ((1 << Bits) - 1)];
    // Without the offset, which is the byte of code 0: the value of every float's code 0 is 0.
    for (int c = 0; c < (1 << Bits); ++c) d.values[c] = static_cast<float>(Table::kBytes[c] - Table::kBytes[0]);
    return d;
  }
  static constexpr Data data = fill();
  static constexpr int bits = Bits;
  static constexpr const uint8_t* bytes = data.bytes;
  static constexpr const float* values = data.values;
};

// bfloat16 holds every value of at most 8 bits exactly; words = the upper halves of the fp32 values, high and low
// their bytes. For 7 and 8 bits high and low hold the magnitudes only.
template <int Bits, class Table>
struct FloatTable {
  static constexpr int kEntries = Bits < 6 ? 64 : 1 << Bits;
  struct Data {
    alignas(64) uint16_t words[kEntries];
    alignas(64) uint8_t high[kEntries];
    alignas(64) uint8_t low[kEntries];
    alignas(64) float values[1 << Bits];
  };
  static constexpr Data fill() {
    Data d{};
    for (int c = 0; c < kEntries; ++c) {
      const float v = Table::kValues[c & ((1 << Bits) - 1)];
      const uint32_t u = __builtin_bit_cast(uint32_t, v);
      d.words[c] = static_cast<uint16_t>(u >> 16);
      d.high[c] = static_cast<uint8_t>(u >> 24);
      d.low[c] = static_cast<uint8_t>(u >> 16);
    }
    for (int c = 0; c < (1 << Bits); ++c) d.values[c] = Table::kValues[c];
    return d;
  }
  static constexpr Data data = fill();
  static constexpr int bits = Bits;
  static constexpr const uint16_t* words = data.words;
  static constexpr const uint8_t* high = data.high;
  static constexpr const uint8_t* low = data.low;
  static constexpr const float* values = data.values;
};

// --- planes to codes ---------------------------------------------------------------------------------------------
// The P-bit field of quad Q, moved to bit To of its byte, all other bits 0. The plane starts at vector First.
template <int P, int First, int Q, int To>
LOWBIT_INLINE Simd::B field(const uint8_t* chunk) {
  return Simd::field<P, P*(Q % (8 / P)), To>(Simd::load_bytes(chunk + kVector * (First + Q * P / 8)));
}

// Mult * code for each row and k of quad Q: the fields of the planes of the code's width, low bits in the widest.
template <int Bits, int Mult, int Q>
LOWBIT_INLINE Simd::B code_quad(const uint8_t* chunk) {
  static_assert(Mult == 1 || (Mult == 2 && Bits < 8), "a byte holds mult * code");
  constexpr int kTo = Mult - 1;  // bit where the code starts
  if constexpr (Bits == 8) return Simd::load_bytes(chunk + kVector * Q);
  if constexpr (Bits == 4 || Bits == 2 || Bits == 1) return field<Bits, 0, Q, kTo>(chunk);
  if constexpr (Bits == 6) return Simd::bit_or(field<4, 0, Q, kTo>(chunk), field<2, 4, Q, kTo + 4>(chunk));
  if constexpr (Bits == 5) return Simd::bit_or(field<4, 0, Q, kTo>(chunk), field<1, 4, Q, kTo + 4>(chunk));
  if constexpr (Bits == 3) return Simd::bit_or(field<2, 0, Q, kTo>(chunk), field<1, 2, Q, kTo + 2>(chunk));
  if constexpr (Bits == 7) {
    const Simd::B low = Simd::bit_or(field<4, 0, Q, kTo>(chunk), field<2, 4, Q, kTo + 4>(chunk));
    return Simd::bit_or(low, field<1, 6, Q, kTo + 6>(chunk));
  }
}

template <int Q, int Bits, int Mult>
LOWBIT_INLINE Simd::B unpack_quad(Codes<Bits, Mult>, const uint8_t* chunk) {
  return code_quad<Bits, Mult, Q>(chunk);
}
template <int Q, int Bits, class Table>
LOWBIT_INLINE Simd::B unpack_quad(Floats<Bits, Table>, const uint8_t* chunk) {
  return code_quad<Bits, 1, Q>(chunk);
}
template <int Q, int Bits>
LOWBIT_INLINE Simd::B unpack_quad(const Codebook<Bits>&, const uint8_t* chunk) {
  return code_quad<Bits, 1, Q>(chunk);
}
template <int Q, int Bits, class Table>
LOWBIT_INLINE Simd::B unpack_quad(Bytes<Bits, Table>, const uint8_t* chunk) {
  const Simd::B codes = code_quad<Bits, 1, Q>(chunk);
#if defined(LOWBIT_ISA_BYTE_DOT)
  return Simd::lookup<ByteTable<Bits, Table>>(codes);
#else
  return codes;
#endif
}

// --- a quad that unpack_quad() returned, as floats ---------------------------------------------------------------
// Codes: the byte. Bytes (ISAs without byte products only): the value times 2^shift. Others: the value.
template <int Bits, int Mult>
LOWBIT_INLINE void to_floats(const Codes<Bits, Mult>&, Simd::B quad, Simd::F out[kQuad]) {
  Simd::widen(quad, out);
}
template <int Bits>
LOWBIT_INLINE void to_floats(const Codebook<Bits>& d, Simd::B quad, Simd::F out[kQuad]) {
  Simd::look_up(d.entries, quad, out);
}
template <class D>
LOWBIT_INLINE void to_floats(const D&, Simd::B quad, Simd::F out[kQuad]) {
  Simd::decode<typename D::LookUp>(quad, out);
}

// What is left to take off a float of to_floats().
template <int Bits, int Mult>
constexpr int float_offset(Codes<Bits, Mult>, ByteForm form) {
  return form.offset;
}
template <class D>
constexpr int float_offset(D, ByteForm) {
  return 0;
}

// How products with this decoder run on this ISA: as integer dot products of bytes; where bfloat16 holds the values and
// the ISA has tiles, of pairs.
template <class D>
struct Uses {
  static constexpr bool kBytes = Simd::kByteDot, kPairs = false;
};
template <int Bits, class Table>
struct Uses<Floats<Bits, Table>> {
  static constexpr bool kBytes = false, kPairs = true;
};
template <int Bits>
struct Uses<Codebook<Bits>> {
  static constexpr bool kBytes = false, kPairs = false;
};

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NS
