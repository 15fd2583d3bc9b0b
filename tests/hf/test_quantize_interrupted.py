"""Risk: quantizing a checkpoint that is cut off, or disturbed, leaves files that load, loses work or mixes two runs."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import lowbit
from lowbit import FormatError, LowbitError
from lowbit.checkpoint import quantize_files

from .folders import fingerprint


class Stop(Exception):
    pass


def stop_after(count):
    seen = []

    def progress(done, total, name):
        seen.append(name)
        if len(seen) == count:
            raise Stop

    return progress


def test_finished_shards_are_used_again(sharded, tmp_path, monkeypatch):
    options = {"group_size": 64, "method": "rtn"}
    whole = lowbit.quantize_checkpoint(sharded, tmp_path / "whole", **options)
    with pytest.raises(Stop):
        lowbit.quantize_checkpoint(sharded, tmp_path / "q", **options, progress=stop_after(25))
    assert not (tmp_path / "q").exists() and not list(tmp_path.rglob(".q.partial/config.json"))
    kept = sorted(path.name for path in (tmp_path / ".q.partial").glob("*.safetensors"))
    assert 1 <= len(kept) < len(list(sharded.glob("*.safetensors")))
    made = []
    real = quantize_files._write_shard
    monkeypatch.setattr(quantize_files, "_write_shard", lambda path, *rest: made.append(path.name) or real(path, *rest))
    lowbit.quantize_checkpoint(sharded, tmp_path / "q", **options)
    assert sorted([*made, *kept]) == sorted(path.name for path in sharded.glob("*.safetensors"))
    assert {name: f[1] for name, f in fingerprint(tmp_path / "q").items()} == {
        name: f[1] for name, f in fingerprint(whole).items()
    }
    assert not (tmp_path / ".q.partial").exists()


@pytest.mark.parametrize("change", ["settings", "source time", "source size", "journal", "shard", "stray file"])
def test_what_no_longer_fits_is_made_again(sharded, tmp_path, change, monkeypatch):
    src = tmp_path / "src"
    shutil.copytree(sharded, src)
    options = {"group_size": 64, "method": "rtn"}
    with pytest.raises(Stop):
        lowbit.quantize_checkpoint(src, tmp_path / "q", **options, progress=stop_after(25))
    partial = tmp_path / ".q.partial"
    first = sorted(path.name for path in partial.glob("*.safetensors"))[0]
    if change == "settings":
        options["group_size"] = 32
    elif change == "source time":
        os.utime(src / first, ns=(1, 1))
    elif change == "source size":
        tensors = load_file(src / first)
        changed = {name: t.float() for name, t in tensors.items()}
        save_file(changed, src / first, {"format": "pt"})
    elif change == "journal":
        (partial / "journal.json").write_text("{")
    elif change == "shard":
        (partial / first).write_bytes((partial / first).read_bytes()[:-1])
    else:
        (partial / "stray.safetensors").write_bytes(b"x")
    made = []
    real = quantize_files._write_shard
    monkeypatch.setattr(quantize_files, "_write_shard", lambda path, *rest: made.append(path.name) or real(path, *rest))
    lowbit.quantize_checkpoint(src, tmp_path / "q", **options)
    assert (first in made) == (change != "stray file")
    assert not (tmp_path / "q" / "stray.safetensors").exists() and not (tmp_path / "q" / "journal.json").exists()
    monkeypatch.undo()
    lowbit.quantize_checkpoint(src, tmp_path / "again", **options)
    assert {n: f[1] for n, f in fingerprint(tmp_path / "q").items()} == {
        n: f[1] for n, f in fingerprint(tmp_path / "again").items()
    }


def test_a_kill_leaves_nothing_that_loads_and_the_next_run_goes_on(sharded, tmp_path):
    code = (
        "import sys, lowbit, os, signal\n"
        "seen = []\n"
        "def progress(done, total, name):\n"
        "    seen.append(name)\n"
        "    if len(seen) == int(sys.argv[3]): os.kill(os.getpid(), signal.SIGKILL)\n"
        "lowbit.quantize_checkpoint(sys.argv[1], sys.argv[2], group_size=64, method='rtn', progress=progress)\n"
    )
    before = fingerprint(sharded)
    env = {**os.environ, "PYTHONPATH": str(Path(lowbit.__file__).parents[1])}
    for count in (1, 20, 3):
        run = subprocess.run([sys.executable, "-c", code, sharded, tmp_path / "q", str(count)], env=env, timeout=120)
        assert run.returncode == -signal.SIGKILL and not (tmp_path / "q").exists()
        assert not (tmp_path / ".q.partial" / "config.json").exists()
    lowbit.quantize_checkpoint(sharded, tmp_path / "q", group_size=64, method="rtn")
    lowbit.quantize_checkpoint(sharded, tmp_path / "whole", group_size=64, method="rtn")
    assert {n: f[1] for n, f in fingerprint(tmp_path / "q").items()} == {
        n: f[1] for n, f in fingerprint(tmp_path / "whole").items()
    }
    assert fingerprint(sharded) == before


def test_a_full_disk_is_one_sentence(sharded, tmp_path, monkeypatch):
    real, calls = os.fsync, []

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(LowbitError, match="cannot be written: No space left on device; run again") as caught:
        lowbit.quantize_checkpoint(sharded, tmp_path / "q", group_size=64, method="rtn")
    assert "\n" not in str(caught.value) and not (tmp_path / "q").exists()
    monkeypatch.undo()
    assert not list((tmp_path / ".q.partial").glob("*.tmp"))
    lowbit.quantize_checkpoint(sharded, tmp_path / "q", group_size=64, method="rtn")


def test_two_processes_do_not_write_the_same_target(sharded, tmp_path):
    from lowbit.checkpoint.partial import Partial

    with Partial(tmp_path / "q", {}), pytest.raises(LowbitError, match="another process is writing"):
        lowbit.quantize_checkpoint(sharded, tmp_path / "q")


def test_a_source_that_changes_meanwhile_is_noticed(sharded, tmp_path):
    shutil.copytree(sharded, tmp_path / "src")

    def touch(done, total, name):
        for path in (tmp_path / "src").glob("*.safetensors"):
            os.utime(path, ns=(time.time_ns(), time.time_ns()))

    with pytest.raises(FormatError, match="changed while it was read"):
        lowbit.quantize_checkpoint(tmp_path / "src", tmp_path / "q", group_size=64, method="rtn", progress=touch)


def test_memory_stays_below_twice_the_largest_shard(tmp_path):
    """Three files of 48 MB: the peak over an idle process is that of one file, not of the checkpoint."""
    sizes = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 8}
    code = (
        "import sys, json, torch, transformers, lowbit, resource\n"
        "src, dst, sizes = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])\n"
        "transformers.logging.set_verbosity_error()\n"
        "if dst == 'make':\n"
        "    config = transformers.LlamaConfig(vocab_size=256, num_key_value_heads=8, **sizes)\n"
        "    model = transformers.LlamaForCausalLM(config).half()\n"
        "    model.save_pretrained(src, max_shard_size='48MB')\n"
        "else:\n"
        "    lowbit.quantize_checkpoint(src, dst + '0', group_size=64, method='rtn', skip=[r'layers\\.[1-5]'])\n"
        "    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "    lowbit.quantize_checkpoint(src, dst, group_size=64, method='rtn')\n"
        "    print(before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(lowbit.__file__).parents[1]), "MALLOC_ARENA_MAX": "1"}
    rest = [tmp_path / "src", "make", json.dumps(sizes)]
    subprocess.run([sys.executable, "-c", code, *rest], env=env, check=True, timeout=300)
    largest = max(path.stat().st_size for path in (tmp_path / "src").glob("*.safetensors"))
    assert len(list((tmp_path / "src").glob("*.safetensors"))) >= 3 and largest > 30e6
    rest[1] = tmp_path / "q"
    done = subprocess.run([sys.executable, "-c", code, *rest], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    before, after = map(int, done.stdout.split())
    assert (after - before) * 1024 < 2 * largest
