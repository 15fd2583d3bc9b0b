"""Which families of kernels exist: one entry each. Everything else follows from this list and lowbit/dtypes.py.

To add a family: write its template, add an entry to :func:`families`, and let ``lowbit.scheme.FAMILY_ACTS`` say which
activations it takes. A family for a new device class also needs a frame in render.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_ISA_ROW = re.compile(r'^LOWBIT_ISA\((\w+), "([^"]*)", .+\)$', re.MULTILINE)


@dataclass(frozen=True)
class Variant:
    """One way that a family is compiled: for an instruction set of a CPU, or with a tile on a GPU."""

    name: str
    target: str = ""  # the compiler's name for it: a target of g++, or a type in the template
    sizes: tuple[tuple[str, int], ...] = ()  # numbers that the choice of a kernel needs, by name
    archs: str = r".*"  # on CUDA, what it is worth compiling for: a pattern of names such as 80 and 90a
    weights: str = r".*"  # the weight types that it is worth compiling for: a pattern of their names
    least_group: int = 16  # on CUDA, the shortest groups that it takes


@dataclass(frozen=True)
class Family:
    """One kind of kernel. In ``template`` and ``shared``, {variant} stands for the variant's name."""

    name: str
    device: str  # what --arch picks; also the frame of render.py and the library
    variants: tuple[Variant, ...]
    template: tuple[str, ...]  # headers of a unit of kernels, in order; the last one has the algorithm
    args: str = "MatmulArgs"  # the struct of args.h that its kernels take
    shared: tuple[str, ...] = ()  # headers of the units that hold what kernels of all weights call; CUDA: Shared<>
    unit_of: str = "width"  # one "width", one C++ "type" where kernels are slow to compile, or "all" where they are not

    @property
    def library(self) -> str:
        return f"liblowbit_{self.device}.so"


def cpu_variants(path: Path = ROOT / "csrc/cpu_isa.inc") -> tuple[Variant, ...]:
    """The instruction sets of cpu_isa.inc, best first."""
    return tuple(Variant(name, target) for name, target in _ISA_ROW.findall(path.read_text()))


def token_tiles(*sizes: int, **worth: str | int) -> tuple[Variant, ...]:
    """Tiles of a family for CUDA, by the most tokens (rows of x) of each; ``worth``: more of Variant."""
    return tuple(Variant(f"n{tokens}", f"Tile<{tokens}>", (("tokens", tokens),), **worth) for tokens in sizes)


def families() -> tuple[Family, ...]:
    """Every family, in the order of the manifest."""
    simd = "templates/cpu/simd_{variant}.h"
    return (
        Family(
            name="cpu",
            device="cpu",
            variants=cpu_variants(),
            template=(simd, "templates/cpu/dequant.h", "templates/cpu/gemm.h"),
            shared=(simd, "templates/cpu/product.h"),
        ),
        Family(
            name="decode",
            device="cuda",
            # Other floats, and finer groups, are no slower by the smallest tile of gemm_sm90.
            variants=token_tiles(1, weights=r"u?int\d", least_group=32)
            + token_tiles(1, weights=r"float4.*")
            + token_tiles(1, weights=r"float[38].*", least_group=128)
            + token_tiles(2, 4, weights=r"u?int\d|float[348].*", least_group=128),
            template=("templates/decode.cuh",),
            unit_of="type",
        ),
        Family(
            name="gemm_sm80",
            device="cuda",
            variants=token_tiles(8, 16, 32, 64, 128, archs=r"(?!90a).*")  # gemm_sm90 is faster there
            + token_tiles(48, 96, archs=r"(?!90a).*", weights=r"u?int\d"),  # why not for all: a wheel's size
            template=("templates/gemm_sm80.cuh",),
            shared=("templates/gemm_sm80/add_parts.cuh",),
            unit_of="type",
        ),
        Family(
            name="gemm_sm90",
            device="cuda",
            variants=token_tiles(8, 16, archs=r"(9|10|11)\d[af]?")  # the copy engine is there
            + token_tiles(32, 64, 128, 256, archs="90a")  # and wgmma
            # Why not for all: they gain a tenth, and all of a build is to take less than ten minutes.
            + token_tiles(48, 96, 144, 160, 192, 208, archs="90a", weights=r"u?int\d", least_group=128),
            template=("templates/gemm_sm90.cuh",),
            shared=("templates/gemm_sm90/add_parts.cuh",),
            unit_of="type",
        ),
        Family("dequant", "cuda", (Variant("rows"),), ("templates/dequant_weight.cuh",), "DequantArgs", unit_of="all"),
    )
