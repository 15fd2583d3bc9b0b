"""Risk: adapters on a model on a GPU are trained with gradients of another weight, or change the weight."""

import warnings

import pytest
import torch

import lowbit

from .kernels import needs_kernels

pytest.importorskip("transformers", reason="models need the extra hf")
peft = pytest.importorskip("peft", reason="LoRA needs peft, which is no part of any extra")

from .models import DEVICE, IDS, dequantized, layers_of, tiny  # noqa: E402

pytestmark = needs_kernels
#: How far a gradient may be from the float64 one, as a share of its norm: 16-bit hidden states are rounded some thirty
#: times on the way down and up.
OFF = {torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 0.12}


def adapted(model):
    torch.manual_seed(0)
    options = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": False}
    return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **options))


def trained(model) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("dtype", list(OFF), ids=str)
@pytest.mark.parametrize("weight", ["int4", "uint3"])
def test_gradients_and_a_step_are_those_of_the_float64_model(weight, dtype):
    base = tiny("qwen2", dtype, layers=2).to(DEVICE)
    base = lowbit.quantize_model(base, weight, group_size=64, method="rtn")
    before = {name: m.quant_tensor().cpu() for name, m in layers_of(base).items()}
    exact = adapted(dequantized(base)).double().train()
    model = adapted(base).train()  # in place
    mine, theirs = trained(model), trained(exact)
    assert mine.keys() == theirs.keys() and len(mine) == 2 * 14
    with torch.no_grad():
        for name, parameter in theirs.items():
            parameter.mul_(0.3)
            mine[name].copy_(parameter)
    losses = []
    for tuned in (model, exact):
        ids = IDS[:4].to(next(iter(trained(tuned).values())).device)
        optimizer = torch.optim.SGD(trained(tuned).values(), lr=0.05)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="x is float32")
            loss = tuned(ids, labels=ids).loss
            loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert abs(losses[0] - losses[1]) <= OFF[dtype] * losses[1]
    for name, parameter in theirs.items():
        error = (mine[name].grad.cpu().double() - parameter.grad).norm() / parameter.grad.norm()
        assert error <= OFF[dtype], f"{name}: {error:.2e}"
        torch.testing.assert_close(mine[name].detach().cpu().double(), parameter.detach(), rtol=0.05, atol=0.01)
    after = {name.replace(".base_layer", ""): m.quant_tensor().cpu() for name, m in layers_of(base).items()}
    assert after == before
