// Which instruction sets exist, which of them this CPU has, and which one the kernels of this process use.
#pragma once

namespace lowbit {

struct Isa {
  const char* name;
  const char* features;  // in the compiler's spelling, comma-separated
  int rows;              // the fewest rows of x that its kernels take
  bool usable;           // CPU, operating system and condition of cpu_isa.inc agree
};

int isa_count();
// Rows of cpu_isa.inc, best first; 0 <= index < isa_count(). Detection runs once, on first use, from any thread.
const Isa& isa(int index);
// Index of the ISA in use: the best usable one unless lowbit_set_isa chose another.
int current_isa();

}  // namespace lowbit

// Called from Python through ctypes. The strings live as long as the library.
#pragma GCC visibility push(default)
extern "C" {
const char* lowbit_isas();             // names usable on this CPU, best first, separated by spaces
const char* lowbit_isa();              // the one in use
int lowbit_set_isa(const char* name);  // 0 done, 1 no such name, 2 this CPU lacks it
}
#pragma GCC visibility pop
