"""Risk: a language model on a GPU holds other weights than on the host, or makes other tokens.

The models have random weights; what one should compute is its dequantized weights in float64, on the host.
"""

import copy

import pytest
import torch

import lowbit

from .kernels import needs_kernels

transformers = pytest.importorskip("transformers", reason="models need the extra hf")

from .line import captured  # noqa: E402
from .models import DEVICE, IDS, LAYOUT, OFF, assert_greedy, dequantized, layers_of, logits, off, tiny  # noqa: E402

pytestmark = [needs_kernels, pytest.mark.usefixtures("quiet_and_fresh")]
HALVES = [torch.float16, torch.bfloat16]
#: Of the codes a method finds on both devices, the share that is equal at least. Sums are taken in another order, so
#: scales that are equally good change places; with gptq a changed code changes the rest of its row. With the last bit
#: of every sum made noise on a CPU, it is all, all, 99.9999%, 99.9% and 85%.
EQUAL = {"rtn": 1, "mse": 0.999, "hqq": 0.998, "awq": 0.95, "gptq": 0.7}
#: How much more or less of the float model's logits a model may lose for it; by noise alone 0.1% with gptq.
LOSS = {"rtn": 1e-6, "mse": 2e-3, "hqq": 5e-3, "awq": 0.02, "gptq": 0.03}


def quantized(model, method="rtn", dtype="uint4", device=DEVICE, **options):
    data = {"calibration": IDS} if method in ("gptq", "awq") else {}
    model = copy.deepcopy(model).to(device)
    return lowbit.quantize_model(model, dtype, group_size=64, method=method, **data, **options)


@pytest.mark.parametrize("method", list(EQUAL))
@pytest.mark.parametrize(("kind", "weight"), [("llama", "int4"), ("qwen2", "uint3")])
def test_every_method_finds_what_it_finds_on_the_host(method, kind, weight):
    source = tiny(kind, layers=2)
    here, there = (quantized(source, method, weight, device) for device in ("cpu", DEVICE))
    layers = layers_of(there)
    assert len(layers) == 14 and all(m.layout == LAYOUT for m in layers.values())
    codes = [
        torch.cat([m.quant_tensor().cpu().unpack().flatten() for m in layers_of(q).values()]) for q in (here, there)
    ]
    share = (codes[0] == codes[1]).double().mean()
    assert share >= EQUAL[method], f"{share:.2%} of the codes are equal"
    float_ = source.double()
    lost = [float((logits(dequantized(q)) - logits(float_)).norm()) for q in (here, there)]
    assert abs(lost[1] - lost[0]) <= LOSS[method] * lost[0], f"expected a loss of {lost[0]:.4g}, got {lost[1]:.4g}"
    assert off(there) <= OFF[torch.float32]


@pytest.mark.parametrize(("method", "dtype"), [("gptq", torch.float16), ("awq", torch.bfloat16)], ids=str)
def test_calibration_in_sixteen_bits_gains_as_on_the_host(method, dtype):
    source = tiny(dtype=dtype, layers=2)
    float_ = copy.deepcopy(source).double()
    plain, here, there = (
        float((logits(dequantized(quantized(source, *how))) - logits(float_)).norm())
        for how in (("rtn", "int3", "cpu"), (method, "int3", "cpu"), (method, "int3", DEVICE))
    )
    assert abs(there - here) <= 0.05 * here and there < plain, f"rtn {plain:.4g}, {here:.4g} on the CPU, {there:.4g}"


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(("kind", "weight"), [("llama", "uint4"), ("qwen2", "int3"), ("llama", "float4_e2m1")])
def test_generate_makes_the_tokens_of_the_float64_model(kind, weight, dtype):
    model = quantized(tiny(kind, dtype), dtype=weight)
    exact = dequantized(model)
    assert off(model, exact) <= OFF[dtype]
    for rows in (1, 3):
        ids = model.generate(IDS[:rows, :9].to(DEVICE), max_new_tokens=32, do_sample=False, pad_token_id=0)
        assert ids.shape == (rows, 41)
        for row in ids:
            assert_greedy(row[None], 9, exact, dtype)


def test_captured_decode_step_makes_the_tokens_of_the_float64_model():
    model = quantized(tiny(dtype=torch.float16))
    cache = transformers.StaticCache(config=model.config, max_cache_len=64)
    prompt, token = IDS[:1, :9].to(DEVICE), torch.zeros(1, 1, dtype=torch.long, device=DEVICE)

    @torch.no_grad()
    def step(ids=token):
        token.copy_(model(ids, past_key_values=cache).logits[:, -1:].argmax(-1))

    step(prompt)
    graph = captured(step)
    for first in (0, 5):  # the same graph for another text
        prompt.copy_(IDS[first : first + 1, :9])
        cache.reset()
        step(prompt)
        ids = [prompt, token.clone()]
        for _ in range(31):
            graph.replay()
            ids.append(token.clone())
        assert_greedy(torch.cat(ids, 1), 9, dequantized(model), torch.float16)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_model_compiles_into_one_graph_that_computes_the_same(backend):
    model = quantized(tiny(dtype=torch.float16, layers=1)).requires_grad_(False)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    exact = dequantized(model)
    with torch.no_grad():
        found = compiled(IDS.to(DEVICE), use_cache=False).logits.cpu().double()
    expected = logits(exact)
    assert (found - expected).norm() <= OFF[torch.float16] * expected.norm()
