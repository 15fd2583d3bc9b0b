"""lowbit.tune: measure on this GPU which kernels are the fastest for a weight, and keep it for other processes too."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import torch
from torch import nn

from . import cuda_devices
from .autotune import cache, tuned
from .autotune.plan import candidates, device_of
from .autotune.problem import Problem, Span, spans_of
from .autotune.tuner import Times, tune_spans
from .errors import DeviceError, DtypeError, SchemeError
from .fused import Fused, FusedLinear
from .graph_timer import GraphTimer
from .nn import Linear
from .ops.schema import type_name
from .pack import PackedWeight
from .pack.packed import finish
from .scheme import FAMILY_ACTS, WHOLE_ZEROS

_ACTS = FAMILY_ACTS["decode"]
_lock = threading.Lock()


class Tuned(dict):
    """Problem -> range of rows of x -> kernel -> microseconds; prints the winners. file: where it is kept, or None."""

    file = None

    def __str__(self) -> str:
        lines = []
        for problem, spans in self.items():
            lines.append(f"{problem}: {len(spans)} ranges of rows of x timed")
            for (least, most), times in sorted(spans.items()):
                first, *rest = sorted(times, key=times.__getitem__)
                others = ", ".join(f"{name.partition('_')[2]} {times[name]:.1f}" for name in rest)
                rows = str(most) if least == most else f"{least} to {most}"
                lines.append(f"  {rows:>12}  {first} {times[first]:.1f} us" + (f"; {others}" if others else ""))
        return "\n".join(lines)


def tune(
    weight,
    ms: Iterable[int] | int | None = None,
    *,
    act: str | None = None,
    seconds: float = 1.0,
    again: bool = False,
    save: bool = True,
    progress: Callable[[int, int, str], None] | None = None,
) -> Tuned:
    """Measure which kernels multiply fastest by a weight on its GPU; products of this process use them from now on, and
    later processes on such a GPU, with the same driver and build of lowbit, from their first product on.

    weight: a PackedWeight, a lowbit.Linear, or any module: of its layers each pair of shape and type is tuned once. ms:
    rows of x; each stands for a range of them (by default all up to 1024, and around 2048 and 4096). act: type of x,
    "float16" or "bfloat16" (by default that of the layer, or of the scales). seconds: most time for each shape and
    type, packing and copies apart. again: also measure what this machine has measured before. save: keep it in a file
    (``LOWBIT_CACHE``). progress: called with (done, total, what) after each. Weights with a codebook or with scales of
    float32 are left out: they go by the plan.

    Needs free memory of three times the GPU's last cache. Results of products stay right whatever runs meanwhile; work
    on the GPU meanwhile makes times wrong. Returns what was measured: :class:`Tuned`, empty where nothing was left.
    Raises DtypeError for another type of weight, DeviceError for one that no kernels of this GPU multiply, or while a
    CUDA graph is captured, ShapeError for ms, SchemeError for act or while a kernel is forced.
    """
    spans = spans_of(ms)
    if act is not None and act not in _ACTS:
        raise SchemeError(f"act must be None or {' or '.join(map(repr, _ACTS))}, got {act!r}")
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise SchemeError(f"expected seconds to be a number above 0, got {seconds!r}")
    weights = distinct(weight, act)
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise DeviceError("cannot time kernels while a CUDA graph is captured; tune before the capture")
    found = Tuned()
    with _lock:
        for done, (problem, index, make) in enumerate(weights, 1):
            new = _tune_one(problem, index, make, spans, seconds, again)
            if new:
                found[problem] = new
                tuned.use(device_of(index), {problem: new})
                if save:
                    found.file = cache.add(tuned.machine_of(index), {problem: new})
            if progress is not None:
                progress(done, len(weights), str(problem))
    return found


def _tune_one(problem: Problem, index: int, make, spans: list[Span], seconds: float, again: bool) -> dict[Span, Times]:
    device = device_of(index)
    before = {} if again else tuned.known(device).get(problem, {})
    left = [span for span in spans if span not in before]
    if not left:
        return {}
    shape, whole = (problem.n, problem.k), problem.zeros == "whole"

    def plan(m: int):
        return candidates(problem.scheme, problem.act, m, *shape, device, whole_zeros=whole)

    return tune_spans(left, plan, GraphTimer(make(), problem.act), seconds=seconds)


def distinct(weight, act: str | None = None) -> list[tuple[Problem, int, Callable[[], PackedWeight]]]:
    """What is to be tuned of a weight or a module: each problem of each kind of GPU once, the index of its device, and
    a function that gives such a weight. Raises DtypeError or DeviceError like :func:`tune`.
    """
    if isinstance(weight, PackedWeight):
        places = [(weight.scheme, weight.shape, weight.numbers, weight.codebook, weight.scales, None, lambda: weight)]
        reason = None if weight.native and weight.layout == "nvidia" else f"got {weight!r}"
    elif isinstance(weight, nn.Module):
        layers = _layers(weight)
        places = [
            (x.scheme, (x.out_features, x.in_features), x._numbers, x.codebook, x.scales, x.float_dtype, _packed(x))
            for x in layers
            if x.layout == "nvidia" and cuda_devices.cuda_kernels(x.qweight.device.index or 0)
        ]
        reason = (
            None if places else f"got a {type(weight).__name__} with {len(layers)} layers of lowbit, none of them so"
        )
    else:
        raise DtypeError(f"expected a PackedWeight, a lowbit.Linear or a module, got {type(weight).__name__}")
    if reason:
        raise DeviceError(f"expected weights packed for a CUDA device that lowbit's kernels run on, {reason}")
    found: dict[tuple, tuple] = {}
    for scheme, (n, k), numbers, codebook, scales, float_dtype, make in places:
        if codebook is not None or scheme.scale_type == "float32":
            continue  # no line of a table is for them, so the plan always chooses
        own = type_name(float_dtype) if float_dtype is not None else scheme.scale_type
        wanted = act or (own if own in _ACTS else scheme.held_scales("nvidia"))
        index = scales.device.index or 0
        problem = Problem.of(scheme, wanted, n, k, numbers[-1] == WHOLE_ZEROS)
        found.setdefault((problem, torch.cuda.get_device_name(index)), (problem, index, make))
    return list(found.values())


def _layers(module: nn.Module) -> list[Linear]:
    """The layers of a module that multiply, of fused ones the one that does it for all of them."""
    found = []
    for part in module.modules():
        if isinstance(part, Fused):
            found.append(part.whole)
        elif isinstance(part, FusedLinear):
            found.append(part.fusion[0].whole)
        elif isinstance(part, Linear):
            found.append(part)
    return list(dict.fromkeys(found))


def _packed(layer: Linear) -> Callable[[], PackedWeight]:
    def make() -> PackedWeight:
        shape = (layer.out_features, layer.in_features)
        if layer.scales.dtype is not layer._stored:
            layer._restore_type()
        held = (layer.qweight, layer.scales, layer.zeros, None)
        finish(layer.qweight.device)
        return PackedWeight(*held, scheme=layer.scheme, shape=shape, layout=layer.layout)

    return make
