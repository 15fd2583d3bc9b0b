"""torch's own: dense linear, int4 and int8 weights with bf16 activations, dynamically quantized linear."""

from __future__ import annotations

import warnings

import torch

from .side import Side, Unavailable, group_codes


class _TorchSide(Side):
    """Keeps the copies in ``self.weights`` and what they mean in ``self.values`` (``[N, K]``)."""

    family = "torch"
    weights: list = []
    values: torch.Tensor

    def open(self, problem, copies, threads):
        torch.set_num_threads(threads)
        if self.weights:
            return
        try:
            self.weights = self._prepare(problem.weight, copies)
        except (RuntimeError, AttributeError, NotImplementedError) as why:
            raise Unavailable(str(why).splitlines()[0]) from why

    def dequantized(self, rows):
        return self.values[rows].double()

    def close(self):
        self.weights, self.values = [], None


class Dense(_TorchSide):
    def __init__(self, act: torch.dtype):
        super().__init__(str(act).removeprefix("torch."), act.itemsize * 8, act)

    def _prepare(self, weight, copies):
        self.values = weight.to(self.act)
        return [self.values.clone() for _ in range(copies)]

    def bind(self, x):
        linear, weights = torch.nn.functional.linear, self.weights
        return lambda i: linear(x, weights[i])


class Int4Pack(_TorchSide):
    """``_weight_int4pack_mm_for_cpu``: bf16 in and out, scale and zero of each group in bf16."""

    def __init__(self, group: int):
        super().__init__(f"int4pack_{group}", 4 + 32 / group, torch.bfloat16)
        self.group = group

    def _prepare(self, weight, copies):
        codes, scales = group_codes(weight, 4, self.group)
        scales = scales.bfloat16()
        self.values = (codes.unflatten(1, (-1, self.group)) * scales[..., None].double()).flatten(1)
        pairs = torch.stack([scales.T, torch.zeros_like(scales.T)], -1).contiguous()
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes + 8, 2)
        return [(packed.clone(), pairs.clone()) for _ in range(copies)]

    def bind(self, x):
        product, weights, group = torch.ops.aten._weight_int4pack_mm_for_cpu, self.weights, self.group
        return lambda i: product(x, weights[i][0], group, weights[i][1])


class Int8Pack(_TorchSide):
    """``_weight_int8pack_mm``: bf16 in and out, one scale for each row."""

    def __init__(self):
        super().__init__("int8pack", 8, torch.bfloat16)

    def _prepare(self, weight, copies):
        codes, scales = group_codes(weight, 8, weight.shape[1])
        scales = scales.bfloat16()
        self.values = codes * scales.double()
        return [(codes.to(torch.int8), scales.flatten().clone()) for _ in range(copies)]

    def bind(self, x):
        product, weights = torch.ops.aten._weight_int8pack_mm, self.weights
        return lambda i: product(x, *weights[i])


class Dynamic(_TorchSide):
    """Dynamically quantized linear: fp32 in and out, int8 weights by row, activations uint8 by tensor."""

    def __init__(self, engine: str):
        super().__init__(f"dynamic_{engine}", 8)
        self.engine = engine

    def _prepare(self, weight, copies):
        if self.engine not in torch.backends.quantized.supported_engines:
            raise Unavailable(f"this torch has no quantized engine {self.engine}")
        codes, scales = group_codes(weight, 8, weight.shape[1])
        self.values = codes * scales.double()
        torch.backends.quantized.engine = self.engine
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            stored = torch.quantize_per_channel(
                weight, scales.flatten().double(), torch.zeros(len(weight), dtype=torch.long), 0, torch.qint8
            )
        return [torch.ops.quantized.linear_prepack(stored, None) for _ in range(copies)]

    def bind(self, x):
        torch.backends.quantized.engine = self.engine
        # Why reduce_range: torch's own default for this operator; with it the activations have 7 bits.
        product, weights = torch.ops.quantized.linear_dynamic, self.weights
        return lambda i: product(x, weights[i], True)


def sides() -> list[Side]:
    return [
        Dense(torch.float32),
        Dense(torch.bfloat16),
        Int4Pack(32),
        Int4Pack(128),
        Int8Pack(),
        Dynamic("fbgemm"),
        Dynamic("onednn"),
    ]
