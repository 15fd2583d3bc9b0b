"""Risk: fused layers on a GPU take a product of another stream or capture, or lose their weight on the way there."""

import copy

import pytest
import torch

import lowbit
from lowbit.fused import FusedLinear

from .kernels import needs_kernels

transformers = pytest.importorskip("transformers", reason="models need the extra hf")

from .line import captured  # noqa: E402
from .models import DEVICE, IDS, LAYOUT, OFF, dequantized, layers_of, logits, off, same_weights, tiny  # noqa: E402

pytestmark = needs_kernels


def pair(kind="llama", weight="int4", dtype=torch.float16, where=DEVICE):
    """A quantized model on the GPU, and a copy that was fused on ``where`` and moved."""
    plain = lowbit.quantize_model(tiny(kind, dtype, layers=2), weight, group_size=64, method="rtn")
    return copy.deepcopy(plain).to(DEVICE), lowbit.fuse(plain.to(where)).to(DEVICE)


@pytest.mark.parametrize("where", ["cpu", DEVICE])
@pytest.mark.parametrize(("kind", "weight"), [("llama", "int4"), ("qwen2", "uint3"), ("llama", "float6_e3m2")])
def test_a_fused_model_computes_what_its_weights_say(kind, weight, where):
    plain, fused = pair(kind, weight, where=where)
    shared = [m for m in fused.modules() if isinstance(m, FusedLinear)]
    assert len(shared) == 10 and all(m.layout == LAYOUT for m in layers_of(fused).values())
    assert same_weights(plain, fused) and off(fused, dequantized(plain)) <= OFF[torch.float16]
    assert same_weights(plain, lowbit.unfuse(fused)) and torch.equal(logits(fused), logits(plain))


def test_a_captured_step_of_fused_layers_is_replayed_on_other_tokens():
    """Bit for bit beside the graph of the layers that are not fused: attention may take another kernel in a graph."""
    models, ids = pair(), IDS[:1, :9].to(DEVICE)
    outs = torch.empty(2, 1, 9, 320, dtype=torch.float16, device=DEVICE)

    @torch.no_grad()
    def step(model, out):
        out.copy_(model(ids, use_cache=False).logits)

    graphs = [captured(lambda model=model, out=out: step(model, out)) for model, out in zip(models, outs, strict=True)]
    for row in (3, 5):
        ids.copy_(IDS[row : row + 1, :9])
        for graph in graphs:
            graph.replay()
        assert torch.equal(outs[0], outs[1])
        torch.testing.assert_close(outs[1].cpu().double(), logits(models[1], ids).detach(), rtol=0, atol=0.02)


def test_a_layer_on_another_stream_makes_its_own_product():
    plain, fused = pair()
    x = torch.randn(4, 256, dtype=torch.float16, device=DEVICE)
    a, b = plain.model.layers[0].mlp, fused.model.layers[0].mlp
    with torch.no_grad():
        b.fused.scope.held = ()
        b.gate_proj(x)
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            found = b.up_proj(x)
        stream.synchronize()
        held = b.fused.scope.held
        assert len(held[2]) == 1 and 0 in held[2]  # gate's, of the product on the new stream
        torch.testing.assert_close(found, a.up_proj(x), rtol=5e-3, atol=5e-3)
