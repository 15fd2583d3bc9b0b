// Test module: csrc/templates/cut.cuh and csrc/cuda/plan.h, for tests/test_cut.py and tests/test_cuda_plan.py.
#include "templates/cut.cuh"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <vector>

#include "cuda/plan.h"

namespace py = pybind11;
using lowbit::Cut;

PYBIND11_MODULE(cut_math, m) {
  // [block, task, begin, end] of every part, for `tasks` of `stages` each over `blocks`.
  m.def("parts", [](int tasks, int stages, int blocks) {
    const int all = tasks * stages;
    const Cut cut{all / blocks, all % blocks};
    std::vector<std::array<int, 4>> found;
    for (int block = 0; block < blocks; ++block)
      lowbit::Share(cut, stages, block).for_parts(stages, [&](const lowbit::Part& part) {
        found.push_back({block, part.task, part.begin, part.end});
      });
    return found;
  });
  m.def("workers_for", &lowbit::workers_for);
  m.def("first_tile", [](int64_t rows, int64_t n, int64_t k, int bits, int capability, std::array<int, 2> clusters) {
    return lowbit::cuda::first_tile(rows, n, k, bits, capability, clusters.data());
  });
  // family: decode, gemm_sm80, gemm_sm90.
  m.def("is_for", [](int family, int tokens, int capability) {
    return lowbit::cuda::is_for(static_cast<lowbit::cuda::Family>(family), tokens, capability);
  });
  m.def("part_of", [](int each, int more, int at) { return Cut{each, more}.part_of(at); });
  m.def("start", [](int each, int more, int part) { return Cut{each, more}(part); });
}
