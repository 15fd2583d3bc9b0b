"""Names: of kernels, units, tables and C++ enumerators, and the way back from tags such as ``w3a8``."""

from __future__ import annotations

from lowbit.dtypes import ACT_TYPES, KERNEL_TYPES, ActType, WeightType
from lowbit.errors import SchemeError, nearest

from .families import Family, Variant

_KIND_TAGS = {"int": "w", "uint": "wu", "float": "wf", "codebook": "wc"}
#: The CUDA types of activations.
CUDA_ACTS = {"float32": "float", "float16": "__half", "bfloat16": "__nv_bfloat16"}


def weight_tag(weight: WeightType) -> str:
    """int4 -> w4, uint4 -> wu4, float4_e2m1 -> wf4e2m1, codebook4 -> wc4."""
    return _KIND_TAGS[weight.kind] + weight.name.removeprefix(weight.kind).replace("_", "")


def row_name(weight: WeightType, act: ActType, family: str, variant: str) -> str:
    """The name of a kernel: ``w4a32_cpu_avx512``."""
    return f"{weight_tag(weight)}{act.tag}_{family}_{variant}"


def unit_tag(weight: WeightType) -> str:
    """Tells C++ types apart: int4 and uint4 -> 4, float4_e2m1 -> 4e2m1."""
    return weight_tag(weight).lstrip("wuf")


def unit_name(family: Family, variant: Variant, part: int | str, act: ActType | None = None) -> str:
    """The file of a unit; ``part`` is its width in bits, a unit_tag, ``all``, or ``shared``: what all weights need.

    On a CPU one file per variant, because each has its own compiler target; on CUDA one per activation type.
    """
    if family.device == "cpu":
        return f"{family.name}_{variant.name}_{part}.cpp"
    return f"{family.name}_{part}_{act.tag}.cu"


def cpp_weight(weight: WeightType) -> str:
    """The type that names a weight type in CUDA templates; int b and uint b share one."""
    if weight.kind == "float":
        return f"lowbit::Float<{weight.exponent}, {weight.mantissa}>"
    return f"lowbit::{'Codebook' if weight.kind == 'codebook' else 'Int'}<{weight.bits}>"


def table_name(weight: WeightType) -> str:
    """The C++ struct that holds the values of a weight type."""
    return f"Table_{weight.name}"


def enumerator(name: str) -> str:
    """The C++ enumerator of a Python name: bfloat16 -> kBFloat16, float8_e4m3fn -> kFloat8E4m3fn."""
    return "kBF" + name[2:] if name.startswith("bf") else "k" + "".join(map(str.capitalize, name.split("_")))


def parse_tags(tags: str) -> tuple[WeightType, tuple[ActType, ...]]:
    """``w3a8`` -> (int3, (int8,)); ``w3`` -> (int3, every activation type). Raises SchemeError with near names."""
    for weight in KERNEL_TYPES:
        if tags == weight_tag(weight):
            return weight, ACT_TYPES
        for act in ACT_TYPES:
            if tags == weight_tag(weight) + act.tag:
                return weight, (act,)
    weights = nearest(tags, [weight_tag(w) for w in KERNEL_TYPES])
    acts = ", ".join(a.tag for a in ACT_TYPES)
    raise SchemeError(f"expected a weight tag ({weights}) with an activation tag ({acts}) such as w3a8, got {tags!r}")
