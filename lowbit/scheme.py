"""What is legal: how weight type, group size, zero kind, scale type and activation go together.

:func:`why_not` is the only place that knows; the generator, the errors and ``--explain`` print its sentence.
"""

from __future__ import annotations

from dataclasses import dataclass

from .dtypes import ACT_TYPES, ActType, WeightType, act_type, weight_type
from .errors import SchemeError

GROUP_SIZES = (16, 32, 64, 128, 256)
WHOLE_ROW = -1
#: How a zero enters a value, in the order of its id: W = s*v; W = s*(v - zero); W = s*v + zero.
ZERO_KINDS = ("none", "zero", "min")
#: The same by the numbers that ops and kernels get, and more, with which some kernels are faster: zeros of kind "zero"
#: that are all whole numbers, and from EVEN_SCALES on no zeros and scales that are so even that fp16 holds values in
#: units of 2**(number - EVEN_SCALES) (lowbit/pack/known.py).
WHOLE_ZEROS = len(ZERO_KINDS)
EVEN_SCALES = WHOLE_ZEROS + 1
OP_ZERO_KINDS = (*ZERO_KINDS, "zero", *["none"] * 16)
#: Types of scales, in the order of their id; zeros have that of the scales. The names are torch's.
SCALE_TYPES = ("float16", "bfloat16", "float32", "float8_e8m0fnu", "float8_e4m3fn")
#: Those of 8 bits, which go without zeros, and the type as which layout nvidia holds them: each has all their values.
WIDER_SCALES = {"float8_e8m0fnu": "bfloat16", "float8_e4m3fn": "float16"}
#: The type of scales that go with a factor for each row (``row_scales``, float32): by itself it ends at 448.
FACTORED_SCALES = "float8_e4m3fn"
#: Types of x that the kernels of a family multiply with (``dequant``: that it expands weights to).
FAMILY_ACTS = {
    "cpu": tuple(act.name for act in ACT_TYPES),
    "decode": ("float16", "bfloat16"),
    "gemm_sm80": ("float16", "bfloat16"),
    "gemm_sm90": ("float16", "bfloat16"),
    "dequant": ("float32", "float16", "bfloat16"),
}
#: Families whose kernels read codebooks, and of how many bits.
CODEBOOK_BITS = {"cpu": range(1, 9), "gemm_sm90": (4,), "dequant": range(1, 9)}
#: Types of scales and zeros that the kernels of a family read, where they don't read all.
FAMILY_SCALES = dict.fromkeys(("decode", "gemm_sm80"), ("float16", "bfloat16", *WIDER_SCALES))


@dataclass(frozen=True)
class Scheme:
    """How a weight is quantized: everything but its values and its shape."""

    weight: WeightType
    group_size: int = 128
    zero_kind: str = "none"
    scale_type: str = "float16"

    @classmethod
    def make(cls, weight, group_size: int = 128, zero_kind: str | None = None, scale_type: str = "float16") -> Scheme:
        """A checked scheme; the zero kind defaults to what the weight type needs. Raises SchemeError."""
        weight = weight_type(weight)
        if group_size is None:  # why_not takes it for "not judged"
            raise SchemeError("group_size must be a whole number, got None")
        if zero_kind is None:
            zero_kind = "zero" if weight.kind == "uint" else "none"
        reason = why_not(weight, group_size=group_size, zero_kind=zero_kind, scale_type=scale_type)
        if reason:
            raise SchemeError(reason)
        return cls(weight, group_size, zero_kind, scale_type)

    @property
    def has_row_scales(self) -> bool:
        """Whether each row has a factor of its own beside its scales: W = row_scale * scale * value."""
        return self.scale_type == FACTORED_SCALES

    @property
    def float_type(self) -> str:
        """The type of floats that goes with the scales: their own, or one that has their values."""
        return "float32" if self.has_row_scales else WIDER_SCALES.get(self.scale_type, self.scale_type)

    def held_scales(self, layout: str | None) -> str:
        """The type that scales have in a layout of kernels, or in the canonical form (None)."""
        return WIDER_SCALES.get(self.scale_type, self.scale_type) if layout == "nvidia" else self.scale_type

    def groups(self, k: int) -> int:
        """How many groups a row of k weights has (the last one may be short)."""
        return 1 if self.group_size == WHOLE_ROW else -(-k // self.group_size)


class Schemed:
    """What a weight with a ``scheme`` says about it."""

    scheme: Scheme

    @property
    def dtype(self) -> WeightType:
        return self.scheme.weight

    @property
    def group_size(self) -> int:
        return self.scheme.group_size

    @property
    def zero_kind(self) -> str:
        return self.scheme.zero_kind


def why_not(
    weight: WeightType | str,
    act: ActType | str | None = None,
    *,
    group_size: int | None = None,
    zero_kind: str | None = None,
    scale_type: str | None = None,
    family: str | None = None,
) -> str | None:
    """The reason why a combination is not legal, as one sentence, or None when it is. Unset fields are not judged."""
    weight = weight_type(weight)
    if group_size is not None:
        if isinstance(group_size, bool) or not isinstance(group_size, int):
            return f"group_size must be a whole number, got {group_size!r}"
        if group_size != WHOLE_ROW and group_size not in GROUP_SIZES:
            sizes = ", ".join(map(str, GROUP_SIZES))
            return f"group_size must be one of {sizes} or -1 (the whole row), got {group_size}"
    if zero_kind is not None and zero_kind not in ZERO_KINDS:
        return f"zero_kind must be one of {', '.join(ZERO_KINDS)}, got {zero_kind!r}"
    if scale_type is not None and scale_type not in SCALE_TYPES:
        return f"scales must be one of {', '.join(SCALE_TYPES)}, got {scale_type!r}"
    if scale_type in WIDER_SCALES and zero_kind not in (None, "none"):
        return f"scales of {scale_type} go without zeros, got zero_kind {zero_kind!r}"
    if family is not None and family not in FAMILY_ACTS:
        return f"no family of kernels is called {family!r}; expected one of {', '.join(FAMILY_ACTS)}"
    if scale_type is not None and scale_type not in FAMILY_SCALES.get(family, SCALE_TYPES):
        return f"family {family!r} takes scales of {', '.join(FAMILY_SCALES[family])}, got {scale_type}"
    if weight.kind == "codebook" and family is not None:
        if family not in CODEBOOK_BITS:
            return f"family {family!r} reads no codebooks; {', '.join(CODEBOOK_BITS)} do"
        if weight.bits not in CODEBOOK_BITS[family]:
            return f"family {family!r} reads codebooks of 4 bits, got {weight.bits}"
    if act is not None:
        act = act_type(act)
        if weight.kind == "codebook" and act.on_the_fly:
            return f"act must be None for a weight with a codebook, got {act.name!r}: its values have no byte form"
        if family is not None and act.name not in FAMILY_ACTS[family]:
            return f"family {family!r} takes x of {', '.join(FAMILY_ACTS[family])}, got {act.name}"
    return None
