"""Every format, version and width that lowbit reads, each as one weight out of the writers beside this file: what
examples/importer_matrix.py makes its table of.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch

from lowbit import QuantTensor
from lowbit.checkpoint.formats import find, gguf

from . import (
    test_awq,
    test_bitsandbytes,
    test_compressed_tensors,
    test_fp8,
    test_gptq,
    test_hqq,
    test_small_formats,
    test_torchao,
)
from .gguf_values import TYPES
from .test_gguf import data_of, values_of
from .words import only, padded, stream


@dataclass
class Case:
    """A weight written in a format; read() makes the QuantTensor, expected [N, K] float64 is what it means; library()
    is what another library makes of it, float32, or None where none is asked."""

    format: str
    layout: str
    bits: int
    read: Callable[[], QuantTensor]
    expected: torch.Tensor
    library: Callable[[], torch.Tensor] | None = None


def _only(config: dict, tensors: dict):
    return lambda: only(find(config), tensors)


def cases() -> Iterator[Case]:
    """Every format, version and width, in the order of the page."""
    for part in (_gptq, _awq, _auto_round, _compressed_tensors, _bitsandbytes, _fp8, _hqq, _torchao, _others, _gguf):
        yield from part()


def _gptq():
    for release, short in (("gptq", "v1"), ("gptq_v2", "v2"), ("gptq_p", "planes")):
        kinds = {"sym": (True, None), "zeros": (False, None), "zeros, act-order": (False, test_gptq.shuffled(96))}
        for what, (sym, order) in kinds.items():
            for bits in test_gptq.WIDTHS[release]:
                config, tensors, weight = test_gptq.checkpoint(bits, version=release, sym=sym, order=order)
                library = None if release == "gptq" else _gptqmodel(config, tensors)
                yield Case("GPTQ", f"{short}, {what}", bits, _only(config, tensors), weight, library)
    config, tensors, weight = test_gptq.checkpoint(4, size=8)
    yield Case("GPTQ", "v1, groups of 8", 4, _only(config, tensors), weight)


def _gptqmodel(config: dict, tensors: dict):
    try:
        from gptqmodel.nn_modules.qlinear.torch import TorchLinear
        from gptqmodel.quantization.config import FORMAT
    except ImportError:
        return None
    k, (_, n) = len(tensors["g_idx"]), tensors["scales"].shape
    options = {key: config[key] for key in ("bits", "group_size", "sym", "desc_act")}
    made = TorchLinear(in_features=k, out_features=n, format=FORMAT(config["checkpoint_format"]), **options).eval()
    for role, tensor in tensors.items():
        setattr(made, role, tensor.float() if role == "scales" else tensor)  # it computes in the type of the scales
    return lambda: made.dequantize_weight().t()


def _awq():
    config, tensors, weight = test_awq.checkpoint()
    yield Case("AWQ", "gemm", 4, _only(config, tensors), weight)


def _auto_round():
    config = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": False}
    for packing, release in (("auto_gptq", "gptq"), ("gptqmodel", "gptq_v2")):
        _, tensors, weight = test_gptq.checkpoint(4, version=release)
        read = _only({**config, "packing_format": f"auto_round:{packing}"}, tensors)
        yield Case("AutoRound", packing, 4, read, weight)
    _, tensors, weight = test_awq.checkpoint()
    yield Case("AutoRound", "auto_awq", 4, _only({**config, "packing_format": "auto_round:auto_awq"}, tensors), weight)


def _compressed_tensors():
    name = "compressed-tensors"
    for symmetric, what in ((True, "symmetric"), (False, "zeros")):
        for pack, release in ((stream, "from 0.18"), (padded, "to 0.17")):
            for bits in range(2, 9):
                config, tensors, weight = test_compressed_tensors.packed(
                    bits, symmetric=symmetric, pack=pack, dtype=torch.float32
                )
                read = _only(test_compressed_tensors.config("pack-quantized", **config), tensors)
                library = _unpacked(config, tensors) if pack is stream else None
                yield Case(name, f"pack-quantized {release}, {what}", bits, read, weight, library)
    for strategy in ("tensor", "channel", "group", "block"):
        config, tensors, weight = test_compressed_tensors.in_bytes(strategy, 8, True)
        read = _only(test_compressed_tensors.config("int-quantized", **config), tensors)
        yield Case(name, f"int-quantized, {strategy}", 8, read, weight)
    for strategy in test_compressed_tensors.FLOAT8:
        config, tensors, weight = test_compressed_tensors.float8(strategy)
        read = _only(test_compressed_tensors.config("float-quantized", **config), tensors)
        yield Case(name, f"float-quantized, {strategy}", 8, read, weight)
    config, tensors, weight = test_compressed_tensors.nvfp4()
    yield Case(
        name, "nvfp4", 4, _only(test_compressed_tensors.config("nvfp4-pack-quantized", **config), tensors), weight
    )
    for bits, layout in test_compressed_tensors.MX.items():
        config, tensors, weight = test_compressed_tensors.mx(bits)
        yield Case(
            name,
            layout.partition("-")[0],
            bits,
            _only(test_compressed_tensors.config(layout, **config), tensors),
            weight,
        )


def _unpacked(settings: dict, tensors: dict):
    def decode():
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

        weights = QuantizationArgs(type="int", **{"strategy": "group", **settings})
        scheme = QuantizationScheme(targets=["Linear"], weights=weights, format="pack-quantized")
        return BaseCompressor.get_value_from_registry("pack-quantized").decompress(dict(tensors), scheme)["weight"]

    # Why not before 0.18: that packed other words.
    release = tuple(map(int, (installed("compressed-tensors") or "0.0").split(".")[:2]))
    return decode if release >= (0, 18) else None


def _bitsandbytes():
    for kind in ("nf4", "fp4"):
        for nested in (None, 4):
            tensors, weight = test_bitsandbytes.four_bits(8, 128, 64, nested, kind)
            what = f"{kind}, nested scales" if nested else kind
            yield Case("bitsandbytes", what, 4, _only(test_bitsandbytes.CONFIG, tensors), weight)
    tensors, weight = test_bitsandbytes.eight_bits()
    yield Case("bitsandbytes", "int8", 8, _only({"load_in_8bit": True}, tensors), weight)
    tensors, weight = test_bitsandbytes.four_bits(16, 72, 64)
    yield Case("bitsandbytes", "nf4, blocks across rows", 4, _only(test_bitsandbytes.CONFIG, tensors), weight)


def _fp8():
    config, tensors, weight = test_fp8.in_blocks(129, 384, 128, 128)
    yield Case("FP8", "e4m3, blocks of 128 x 128", 8, _only(config, tensors), weight)
    for kind in ("e4m3", "e5m2"):
        for shape, what in (((20, 1), "rows"), ((1,), "tensor")):
            tensors, weight = test_fp8.in_rows(shape, kind)
            yield Case("FP8", f"{kind}, {what}", 8, _only(test_fp8.CONFIG, tensors), weight)
    config, tensors, weight = test_fp8.in_powers(129, 384, 128, 128)
    yield Case("FP8", "e4m3, blocks of 128 x 128, powers of two", 8, _only(config, tensors), weight)


def _hqq():
    for axis in (1, 0):
        for bits in sorted(test_hqq.PACKING) if axis else (4,):
            tensors, weight = test_hqq.checkpoint(bits, axis=axis)
            config = {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": bits, "axis": axis}}}
            yield Case("HQQ", f"axis {axis}", bits, _only(config, tensors), weight)


def _torchao():
    tensors, weight = test_torchao.int4()
    yield Case("torchao", "Int4Tensor", 4, lambda: test_torchao.decoded("Int4Tensor", tensors, [1, 32]), weight)
    kind = "IntxUnpackedToInt8Tensor"
    for bits in (2, 3, 4, 8):
        numbers, expected = test_torchao.in_bytes(bits, [1, 32], False)
        data = {"target_dtype": {"_type": "torch.dtype", "_data": f"int{bits}"}}
        yield Case(
            "torchao", kind, bits, lambda t=numbers, d=data: test_torchao.decoded(kind, t, [1, 32], **d), expected
        )
    for kind, (held, expected) in {
        "Int8Tensor": test_torchao.in_bytes(8, [1, 96], True),
        "Float8Tensor": test_torchao.float8([1, 96]),
    }.items():
        yield Case("torchao", kind, 8, lambda k=kind, t=held: test_torchao.decoded(k, t, [1, 96]), expected)


def _others():
    for algorithm, bits in (("NVFP4", 4), ("FP8", 8)):
        tensors, weight = test_small_formats.modelopt(algorithm)
        config = {"quant_method": "modelopt", "quant_algo": algorithm}
        yield Case("ModelOpt", algorithm, bits, _only(config, tensors), weight)
    config, keys, weights = test_small_formats.mxfp4()
    fmt = find(config)
    layer = fmt.layers(keys)[1]
    tensors = {role: keys[key] for role, key in layer.tensors.items()}
    yield Case("GPT-OSS", "mxfp4", 4, lambda: fmt.decode(layer, tensors), weights[1])
    packed, values = test_small_formats.bitnet()
    config = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "offline"}
    held = {"weight": packed, "weight_scale": torch.tensor([3.0]).bfloat16()}
    yield Case("BitNet", "autobitlinear", 2, _only(config, held), 3 * values)


def _gguf():
    for kind, (number, per, _, _, _) in TYPES.items():
        data, k = data_of(kind, 12), 2 * per
        held = torch.frombuffer(bytearray(data), dtype=torch.uint8)

        def library(held=held, number=number):
            from gguf import quants

            return torch.from_numpy(quants.dequantize(held.view(6, -1).numpy(), number))

        read = lambda held=held, kind=kind, k=k: gguf.decode(held, kind, 6, k)  # noqa: E731
        bits = gguf.decode(held, kind, 6, k).dtype.bits
        asked = library if installed("gguf") else None
        yield Case("GGUF", kind, bits, read, values_of(kind, data, 6, k), asked)


def installed(package: str) -> str | None:
    """The version of a package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
