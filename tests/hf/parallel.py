"""One process of two, and what starts them. Usage: parallel.py TASK FOLDER BACKEND; prints "same"."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))
import transformers

import lowbit
from lowbit import LowbitConfig

TOKENS = torch.arange(40, 60)[None]
SETTINGS = {"dtype": "uint4", "group_size": 32, "method": "rtn", "dynamic": {"up_proj$": {"dtype": "int3"}}}


def prepare_folder(made: Path, source: Path) -> Path:
    """Write what the processes read: a checkpoint, its quantized form, and what one process on the CPU computes."""
    transformers.AutoModelForCausalLM.from_pretrained(source).save_pretrained(made / "src")
    (made / "settings.json").write_text(json.dumps(SETTINGS))
    lowbit.quantize_checkpoint(made / "src", made / "q", **SETTINGS)
    model = lowbit.from_pretrained(made / "q", dtype=torch.float32)
    found = model(TOKENS).logits
    torch.save(found.detach(), made / "expected.pt")
    found.square().mean().backward()
    torch.save(model.model.norm.weight.grad, made / "gradient.pt")
    return made


def run(task: str, folder: Path, backend: str = "gloo") -> None:
    """Run a function of this file in two processes: "gloo" on the CPU, "nccl" on two GPUs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    common |= {"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "2"}
    if backend == "gloo":
        common["CUDA_VISIBLE_DEVICES"] = ""  # else transformers and FSDP take the GPUs that they see
    started = []
    for rank in "01":
        env = {**common, "RANK": rank, "LOCAL_RANK": rank}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(subprocess.Popen([sys.executable, __file__, task, folder, backend], env=env, **pipes))
    try:
        said = [process.communicate(timeout=240)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    for process, text in zip(started, said, strict=True):
        assert process.returncode == 0 and text.strip().endswith("same"), text[-3000:]


def split(path, parallel=None, **options):
    """Load with tensor parallelism over both processes, as this version of transformers spells it; parallel: settings
    of its own that it may have."""
    try:
        from transformers.distributed import DistributedConfig

        options["distributed_config"] = DistributedConfig(**parallel or {"tp_size": 2})
    except (ImportError, TypeError):
        if parallel is not None:
            return None
        options["tp_plan"] = "auto"
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options)


def logits(model):
    with torch.no_grad():
        made = model(TOKENS.to(model.device)).logits
    return (made.full_tensor() if hasattr(made, "full_tensor") else made).cpu()


def tensor_parallel(folder: Path) -> None:
    expected = torch.load(folder / "expected.pt", weights_only=True)
    settings = json.loads((folder / "settings.json").read_text())
    flying = {"quantization_config": LowbitConfig(**settings)}
    for path, options in ((folder / "q", {}), (folder / "src", flying)):
        model = split(path, **options)
        layer = next(m for m in model.modules() if isinstance(m, lowbit.Linear))
        held = layer.qweight.to_local() if hasattr(layer.qweight, "to_local") else layer.qweight
        assert held.shape[0] * 2 == layer.out_features, held.shape
        torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
        name = "again" if options else "again_q"
        model.save_pretrained(folder / name)
        dist.barrier()
        whole = lowbit.from_pretrained(folder / name, dtype=torch.float32) if dist.get_rank() == 0 else None
        if whole is not None:
            torch.testing.assert_close(logits(whole), expected, rtol=1e-4, atol=1e-4)
        dist.barrier()


def experts(folder: Path) -> None:
    """Attention is cut, experts lie whole in each process, and their sums are not added twice."""
    expected = torch.load(folder / "expected.pt", weights_only=True)
    settings = json.loads((folder / "settings.json").read_text())
    flying = {"quantization_config": LowbitConfig(**settings)}
    for path, options in ((folder / "q", {}), (folder / "src", flying)):
        model = split(path, **options)
        layers = {name: m for name, m in model.named_modules() if isinstance(m, lowbit.Linear)}
        whole = {name for name, layer in layers.items() if not hasattr(layer.qweight, "placements")}
        assert {name for name in layers if ".experts." in name} <= whole
        assert all(layers[name].layout is not None for name in whole)
        assert (len(whole) < len(layers)) == (folder / "cut").exists()
        torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-5)
        name = "again" if options else "again_q"
        model.save_pretrained(folder / name)
        dist.barrier()
        if dist.get_rank() == 0:
            again = lowbit.from_pretrained(folder / name, dtype=torch.float32)
            torch.testing.assert_close(logits(again), expected, rtol=1e-4, atol=1e-5)
        dist.barrier()
        try:
            made = split(path, {"tp_size": 2, "ep_size": 2}, **options)
        except lowbit.SchemeError as error:
            assert "expert parallelism must be off (ep_size=1)" in str(error), error
        else:
            assert made is None  # this version of transformers spells it otherwise


def cut_groups(folder: Path) -> None:
    for group_size in (128, -1):  # o_proj has 192 columns, 96 a process
        settings = LowbitConfig("int4", group_size=group_size, method="rtn")
        try:
            split(folder / "src", quantization_config=settings)
        except lowbit.ShapeError as error:
            assert "o_proj" in str(error) or "down_proj" in str(error), error
            assert "cut" in str(error), error
        else:
            raise AssertionError(f"group_size {group_size} was accepted")


def scales_of_8_bits(folder: Path) -> None:
    """Layers cut along N and along K multiply with the scales and factors of their parts, and are saved whole."""
    expected = torch.load(folder / "expected.pt", weights_only=True)
    model = split(folder / "q")
    layers = {name: m for name, m in model.named_modules() if isinstance(m, lowbit.Linear)}
    assert all(layer.scales.to_local().element_size() == 1 for layer in layers.values())
    assert any(layer.scales.to_local().shape[0] == layer.out_features for layer in layers.values())  # cut along K
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
    model.save_pretrained(folder / "again")
    dist.barrier()
    if dist.get_rank() == 0:
        again, whole = (lowbit.from_pretrained(folder / name, dtype=torch.float32) for name in ("again", "q"))
        for name in layers:
            assert again.get_submodule(name).quant_tensor() == whole.get_submodule(name).quant_tensor(), name
    dist.barrier()


def fully_sharded(folder: Path) -> None:
    from torch.distributed.fsdp import fully_shard

    expected = torch.load(folder / "expected.pt", weights_only=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "q", dtype=torch.float32).to(DEVICE)
    layers = [m for m in model.modules() if isinstance(m, lowbit.Linear)]
    assert all(layer.layout is not None for layer in layers)
    lowbit.unprepare(model)
    assert all(layer.layout is None for layer in layers)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    layer = model.model.layers[0].mlp.up_proj
    assert layer.qweight.to_local().shape[0] * 2 == layer.out_features
    held = {name: t.full_tensor() for name, t in model.state_dict().items() if name.endswith("up_proj.qweight")}
    whole = lowbit.from_pretrained(folder / "q", dtype=torch.float32).state_dict()
    assert held and all(torch.equal(t, whole[name]) for name, t in held.items())
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
    # What is trained is trained in parts too: a norm's gradient is that of one process.
    model.model.norm.weight.grad = None
    model(TOKENS.to(DEVICE)).logits.square().mean().backward()
    gradient = model.model.norm.weight.grad.full_tensor().cpu()
    torch.testing.assert_close(gradient, torch.load(folder / "gradient.pt", weights_only=True), rtol=1e-3, atol=1e-5)


def fully_sharded_packed(folder: Path) -> None:
    """Layers that nobody unprepared: what they compute is right, and they say what their state_dict would need."""
    from torch.distributed.fsdp import fully_shard

    expected = torch.load(folder / "expected.pt", weights_only=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "q", dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
    model(TOKENS).logits.square().mean().backward()
    gradient = model.model.norm.weight.grad.full_tensor()
    torch.testing.assert_close(gradient, torch.load(folder / "gradient.pt", weights_only=True), rtol=1e-3, atol=1e-5)
    layer = model.model.layers[0].mlp.up_proj
    for call in (model.state_dict, layer.quant_tensor, layer.unprepare, layer.dequantize):
        model.reshard()
        for block in model.model.layers:
            block.reshard()
        try:
            call()
        except lowbit.DtypeError as error:
            assert "lowbit.unprepare(model)" in str(error), error
        else:
            raise AssertionError(f"{call} went through")


def fused(folder: Path) -> None:
    """Fused layers that are cut compute the same, and what would need their rows says what to do."""
    from torch.distributed.fsdp import fully_shard

    expected = torch.load(folder / "expected.pt", weights_only=True)
    for change in (lowbit.unprepare, lowbit.prepare):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder / "q", dtype=torch.float32)
        change(lowbit.fuse(model))
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
        model(TOKENS).logits.square().mean().backward()
        gradient = model.model.norm.weight.grad.full_tensor()
        torch.testing.assert_close(
            gradient, torch.load(folder / "gradient.pt", weights_only=True), rtol=1e-3, atol=1e-5
        )
        for block in (model, *model.model.layers):
            block.reshard()
        calls = (
            model.state_dict,
            model.model.layers[0].self_attn.k_proj.quant_tensor,
            lambda m=model: lowbit.unfuse(m),
        )
        for call in calls:
            expect_refusal(call, "call lowbit.unfuse(model) before")
    model = split(folder / "q")
    expect_refusal(lambda: lowbit.fuse(model), "whole in each process, got a q_proj that is cut")
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)


def expect_refusal(call, words: str) -> None:
    try:
        call()
    except lowbit.SchemeError as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"{call} went through")


TASKS = (tensor_parallel, experts, cut_groups, scales_of_8_bits, fully_sharded, fully_sharded_packed, fused)

if __name__ == "__main__":
    task, folder, backend = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    DEVICE = torch.device("cpu")
    if backend == "nccl":
        DEVICE = torch.device("cuda", int(os.environ["RANK"]))
        torch.cuda.set_device(DEVICE)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    dist.init_process_group(backend, rank=int(os.environ["RANK"]), world_size=2)
    {f.__name__: f for f in TASKS}[task](folder)
    dist.destroy_process_group()
    print("same")
