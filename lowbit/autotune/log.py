"""``LOWBIT_LOG=plan``: for each new product on CUDA one line that says which kernel ran it, and why no other one.

The compiled op tells :func:`watch`'s function after each launch (csrc/cuda/matmul.h), so that products of compiled and
captured graphs are seen too; no Python of theirs changes. Nothing here asks CUDA for anything: a capture goes on, and
no product waits.
"""

from __future__ import annotations

import ctypes
import logging

from ..dtypes import ACT_TYPES, KERNEL_TYPES, WEIGHT_TYPES, weight_type
from ..scheme import EVEN_SCALES, OP_ZERO_KINDS, SCALE_TYPES, WHOLE_ZEROS, Scheme
from .plan import BUCKETS, Candidate, Device
from .tuned import candidates

_logger = logging.getLogger("lowbit")
_NUMBERS = "weight act m n k group_size zero_kind scale_type capability blocks pairs follows"
#: Why a kernel was chosen: by struct WatchedProduct, and by the place of a candidate of the plan.
_REASONS = {
    "tuned": "the fastest as measured",
    "parts": "some rows at a time",
    "expanded": "which expands the weight for torch's product",
}
_PLACES = {"timed": "", "untimed": "by a rule, no time is known", "later": "no other one holds it"}
_kept = []  # Why: the library calls what ctypes would free


class Product(ctypes.Structure):
    """struct WatchedProduct of csrc/cuda/matmul.h."""

    _fields_ = [("kernel", ctypes.c_char_p), ("why", ctypes.c_char_p)]
    _fields_ += [(name, ctypes.c_int64) for name in _NUMBERS.split()]


_WATCHER = ctypes.CFUNCTYPE(None, ctypes.POINTER(Product))


def watch(library: ctypes.CDLL) -> None:
    """Log every new product of the CUDA library from now on, by the logger "lowbit", at level INFO: to stderr, unless
    the program gives loggers another place.
    """
    seen: dict[tuple, object] = {}

    def tell(pointer) -> None:
        product = pointer.contents
        if product.why == b"tried":  # lowbit.tune times kernels, the product itself is still to come
            return
        m = product.m
        numbers = [getattr(product, name) for name in _NUMBERS.split() if name not in ("m", "follows", "zero_kind")]
        key = (bucket(m), min(product.zero_kind, EVEN_SCALES), *numbers)  # of even scales whatever their unit
        mine = object()
        # Why setdefault: of two threads with the same new product one is first.
        if seen.setdefault(key, mine) is mine:
            _say(sentence(product))

    _logger.setLevel(logging.INFO)
    _kept.append(_WATCHER(tell))
    library.lowbit_cuda_watch(_kept[-1])


def bucket(m: int) -> tuple[int, int | None]:
    """The least and the most rows of x of M's bucket; no most above the last."""
    below = [0, *(b for b in BUCKETS if b < m)][-1]
    return below + 1, next((b for b in BUCKETS if b >= m), None)


def sentence(product: Product) -> str:
    """What is logged: the product, its kernel, and the other candidates by why they lost."""
    kind = KERNEL_TYPES[product.weight]
    codebook = kind not in WEIGHT_TYPES
    scheme = Scheme(
        weight_type(f"uint{kind.bits}") if codebook else kind,
        product.group_size,
        OP_ZERO_KINDS[product.zero_kind],
        SCALE_TYPES[product.scale_type],
    )
    act = ACT_TYPES[product.act].name
    device = Device(product.capability, product.blocks, product.pairs)
    whole = product.zero_kind == WHOLE_ZEROS
    options = {"whole_zeros": whole, "uneven_scales": product.zero_kind == 0, "codebook": codebook}
    found = candidates(scheme, act, product.m, product.n, product.k, device, **options)
    least, most = bucket(product.m)
    rows = "" if most == least else f" (of {least} and more)" if most is None else f" (of {least} to {most})"
    zeros = "" if scheme.zero_kind == "none" else f", zeros {scheme.zero_kind!r}"
    zeros += ", a codebook" * codebook
    group = "a row" if scheme.group_size < 0 else scheme.group_size
    what = f"{scheme.weight} x {act}, M {product.m}{rows}, N {product.n}, K {product.k}, group {group}{zeros}"
    return f"plan: {what}: {outcome(product.kernel.decode(), product.why.decode(), found)}"


def outcome(kernel: str, why: str, found: list[Candidate]) -> str:
    """``w4a16_gemm_sm90_n32 14.4 us; slower: ...``: what ran a product for a reason of struct WatchedProduct, then the
    other candidates, the one that is tried first first.
    """
    chosen = next((c for c in found if c.name == kernel), Candidate(kernel))  # a dequant kernel is no candidate
    asked = {"plan": found.index(chosen) if chosen in found else 0, "parts": len(found), "expanded": len(found)}
    refused = [c for c in found[: asked.get(why, 0)] if c.place != "never" and c is not chosen]
    rest = [c for c in found if c is not chosen and c not in refused]
    reason = _REASONS.get(why, why) if why != "plan" else _PLACES[chosen.place]
    timed = "slower" if why == "plan" and chosen.us is not None else "with times"
    measured = [c for c in rest if c.measured is not None] if why == "tuned" else []
    rest = [c for c in rest if c not in measured]
    others = {
        "can't hold it here": refused,
        "measured to be slower": measured,
        timed: [c for c in rest if c.place == "timed"],
        "tried after it": [c for c in rest if c.place == "untimed"],
        "tried only after all others": [c for c in rest if c.place == "later"],
        "not for it": [c for c in rest if c.place == "never"],
    }
    lost = (f"; {label}: " + ", ".join(_against(c, chosen) for c in named) for label, named in others.items() if named)
    return f"{chosen}{reason and f', {reason}'}{''.join(lost)}"


def _against(other: Candidate, chosen: Candidate) -> str:
    if other.measured is not None and chosen.measured is not None:
        return f"{other} ({other.measured - chosen.measured:+.1f})"
    if other.us is None or chosen.us is None:
        return str(other)
    return f"{other} ({other.us - chosen.us:+.1f})"


def _say(text: str) -> None:
    if not _logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        _logger.addHandler(handler)
    _logger.info(text)
