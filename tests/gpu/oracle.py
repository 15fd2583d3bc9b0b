"""Weights and their exact products on the GPU, in float64 and from the definition of the types alone.

lowbit.reference says what numbers should be, on the host and slowly; this is the same rule fast enough for hundreds of
kernels. test_products.py holds the two against each other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

import lowbit
from lowbit import reference
from lowbit.commands.selftest import TOLERANCE
from lowbit.dtypes import weight_type

#: Share of |x| @ |W|.T that sums in fp32 may be off: some 1800 additions of a warp, each cut off at 2^-23.
SHARE = 1e-4
#: Fewer values than this are judged one by one only: their roundings don't average out.
ENOUGH = 64


@dataclass
class Weight:
    """A packed weight on the GPU with what it means: ``exact`` float64 [N, K], and ``size``, what a value is the
    difference or sum of: scale * (|value| + offset of the codes + |zero|)."""

    qt: lowbit.QuantTensor
    pw: lowbit.PackedWeight
    exact: torch.Tensor
    size: torch.Tensor


def generator(seed: int) -> torch.Generator:
    return torch.Generator(device="cuda").manual_seed(seed)


def legal_codes(dtype: str) -> torch.Tensor:
    """The codes of a type that are numbers, uint8, on the GPU."""
    wtype = weight_type(dtype)
    return torch.tensor([c for c in range(2**wtype.bits) if c not in wtype.invalid_codes], dtype=torch.uint8).cuda()


def make(dtype: str, shape, group_size=128, zero_kind="none", scale_type="float16", seed=0, plain=False) -> Weight:
    """Random legal codes, scales and zeros; x of size 1 gives a product of size 1 or so, so that fp16 holds it.

    zero_kind: "whole" for "zero" with whole numbers. plain: scales are powers of two and zeros whole numbers, so that
    fp16 and bf16 hold every value of the weight.
    """
    wtype, (n, k), chance = weight_type(dtype), shape, generator(seed)
    legal = legal_codes(dtype)
    codes = legal[torch.randint(len(legal), shape, generator=chance, device="cuda")]
    groups = 1 if group_size == -1 else -(-k // group_size)
    largest = max(abs(v) for c, v in enumerate(wtype.values) if c not in wtype.invalid_codes)
    whole, zero_kind = zero_kind == "whole" or plain, "zero" if zero_kind == "whole" else zero_kind
    top = largest + (2**wtype.bits if zero_kind == "zero" else 0)
    uniform = torch.rand(2, n, groups, generator=chance, device="cuda")
    scales = (uniform[0] + 0.5) * 4 / (top * k**0.5)
    zero = (uniform[1] * 2**wtype.bits).floor() if whole else uniform[1] * 2**wtype.bits
    zeros = {"none": None, "zero": zero, "min": (uniform[1] - 0.5) / k**0.5}[zero_kind]
    if plain:
        scales = scales.log2().floor().exp2()
        # Why not "min" of other types: a whole number of scales below a value may need more digits than bf16 has.
        assert zero_kind == "none" or wtype.kind == "uint", "no zeros of which bf16 holds every difference"
        zeros = -scales * zero if zero_kind == "min" else zeros
    return weight_of(dtype, codes, scales, zeros, group_size, zero_kind, scale_type)


def weight_of(dtype, codes, scales, zeros=None, group_size=128, zero_kind="none", scale_type="float16") -> Weight:
    """The weight of given codes uint8 [N, K], scales and zeros [N, G], which are rounded to scale_type."""
    wtype, stored = weight_type(dtype), getattr(torch, scale_type)
    scales, zeros = scales.to(stored), None if zeros is None else zeros.to(stored)
    qt = lowbit.QuantTensor.from_codes(codes, scales, zeros, dtype=wtype, group_size=group_size, zero_kind=zero_kind)
    table = reference.decode(torch.arange(2**wtype.bits, dtype=torch.uint8), wtype).cuda()
    value, s = table[codes.int()], _spread(scales, codes.shape[1], group_size)
    offset = {"int": 1 if wtype.bits == 1 else 2 ** (wtype.bits - 1)}.get(wtype.kind, 0)
    if zero_kind == "none":
        exact, size = s * value, s.abs() * (value.abs() + offset)
    else:
        z = _spread(zeros, codes.shape[1], group_size)
        if zero_kind == "zero":
            exact, size = s * (value - z), s.abs() * (value.abs() + offset + z.abs())
        else:
            exact, size = s * value + z, s.abs() * (value.abs() + offset) + z.abs()
    return Weight(qt, lowbit.pack_weight(qt, "cuda"), exact, size)


def _spread(groups: torch.Tensor, k: int, group_size: int) -> torch.Tensor:
    """float64 [N, K], or [N, 1] where one group is the whole row."""
    wide = groups.double()
    return wide if group_size == -1 else wide.repeat_interleave(group_size, 1)[:, :k]


def normal(*shape: int, dtype=torch.float32, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=generator(seed), device="cuda").to(dtype)


#: Inputs that different mistakes cannot all survive: a large offset left in the sums passes zero_mean alone.
INPUTS = {
    "zero_mean": lambda x: x,
    "positive": lambda x: x.abs() + 1,
    "silu": lambda x: torch.nn.functional.silu(2 * x),
}


def product(x: torch.Tensor, weight: Weight, bias=None) -> tuple[torch.Tensor, torch.Tensor]:
    """``(exact, size)`` float64 [..., N]: the product and |x| @ size.T (with |bias|), which errors are a share of."""
    wide = x.double()
    exact, size = wide @ weight.exact.T, wide.abs() @ weight.size.T
    return (exact, size) if bias is None else (exact + bias.double(), size + bias.double().abs())


def wrong(y: torch.Tensor, exact: torch.Tensor, size: torch.Tensor, share=SHARE, together=True, more=0.0) -> str | None:
    """What is wrong with a product y, or None.

    Each value is rounded once from a sum that is exact but for a share of size; all together are off by no more than
    the bound of y's type allows, and ``more``, unless together is False.
    """
    form = torch.finfo(y.dtype)
    # Subnormals lie as far apart as the smallest normal numbers.
    bound = form.eps / 2 * exact.abs().clamp_min(form.smallest_normal) + share * size
    off = (y.double() - exact).abs()
    beyond = ~(off <= bound)  # NaN is beyond too
    if beyond.any():
        worst = (off / bound).nan_to_num(torch.inf).argmax()
        index = tuple(int(i) for i in torch.unravel_index(worst, y.shape))
        got, expected = y.flatten()[worst].item(), exact.flatten()[worst].item()
        return f"{int(beyond.sum())} of {y.numel()} values, the worst at {index}: {got:.6g}, expected {expected:.6g}"
    length = exact.norm().clamp_min(1e-30)
    error, allowed = off.norm() / length, TOLERANCE[str(y.dtype).removeprefix("torch.")] + more / length
    if together and y.numel() >= ENOUGH and not error <= allowed:
        return f"||y - exact|| / ||exact|| is {error:.2e}, expected at most {allowed:.1e}"
    return None


def wrong_rounded(y: torch.Tensor, x: torch.Tensor, weight: Weight, bias=None, together=True) -> str | None:
    """The same for a product of values of the weight that were rounded to x's type: each value, before that the
    difference of value and zero, and scales and zeros of which x's type does not hold all digits.

    together: goes with x of no sign alone. Else roundings do not average out: few different values repeat the same.
    """
    half, stored = torch.finfo(x.dtype).eps / 2, weight.qt.scales.double()
    lost = ((stored.to(x.dtype).double() - stored).abs() / stored.abs().clamp_min(1e-300)).max().item()
    steps = {"none": 1, "zero": 2, "min": 1}[weight.qt.scheme.zero_kind]
    if weight.qt.zeros is not None and torch.finfo(weight.qt.zeros.dtype).eps < 2 * half:
        steps += 1
    exact, size = product(x, weight, bias)
    # Errors that are independent of each other; those of scales are the same for a group.
    apart = (x.double().square() @ weight.size.square().T).sum().sqrt().item()
    more = half * apart + lost * (exact.norm().item() + apart)
    return wrong(y, exact, size, half * steps + lost + SHARE, together, more)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two fp16 or bf16 tensors are equal to the bit, NaN and -0 included."""
    return torch.equal(a.view(torch.int16), b.view(torch.int16))
