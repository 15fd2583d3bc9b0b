"""Risk: a calibrated run that goes on after a kill gives other bytes than one that was left alone, or mixes two runs.

The oracle is a run that nothing disturbed.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

import lowbit
from lowbit import LowbitError
from lowbit.checkpoint import block_store, calibrated_files, quantize_files

from .test_streamed import IDS, source

OPTIONS = {"group_size": 32, "method": "gptq", "calibration": IDS}
#: An OPT with a layer in front of the blocks and one behind; AWQ changes norms. Mixtral: experts, some of them starved.
KINDS = {
    "gptq": ("Llama", {}, {}),
    "awq": ("OPT", {"word_embed_proj_dim": 32, "tie_word_embeddings": False}, {"lm_head": "int8", "method": "awq"}),
    "experts": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False}, {}),
}


class Stop(Exception):
    pass


def quantize(src, dst, **changes):
    """The progress of a run: (layers done, layers in all, name) of each call before the first file."""
    seen, stop = [], changes.pop("stop", None)

    def progress(*step):
        seen.append(step)
        if len(seen) == stop:
            raise Stop

    lowbit.quantize_checkpoint(src, dst, "int4", **{**OPTIONS, **changes}, progress=progress)
    total = seen[0][1]
    return [step for step in seen if step[1] == total]


def contents(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(Path(folder).rglob("*")) if p.is_file()}


def interrupted(src, dst, stop=16, **changes):
    """Stop in the third block."""
    with pytest.raises(Stop):
        quantize(src, dst, stop=stop, **changes)
    assert not dst.exists()
    return dst.with_name(f".{dst.name}.partial")


@pytest.fixture(scope="module")
def src(tmp_path_factory):
    return source(tmp_path_factory.mktemp("llama") / "src")


@pytest.fixture(scope="module")
def whole(src, tmp_path_factory):
    dst = tmp_path_factory.mktemp("whole") / "q"
    quantize(src, dst)
    return contents(dst)


@pytest.mark.filterwarnings("ignore:.*too few calibration tokens")
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_is_killed_and_started_again_gives_the_same_bytes(tmp_path, kind):
    name, sizes, changes = KINDS[kind]
    src = source(tmp_path / "src", name, **sizes)
    options = {**OPTIONS, **changes}
    torch.save({**options, "calibration": IDS}, tmp_path / "options")
    code = (
        "import os, signal, sys, torch, lowbit\n"
        "src, dst, options, left = sys.argv[1:]\n"
        "real, left = os.fsync, int(left)\n"
        "def fsync(descriptor):\n"
        "    global left\n"
        "    left -= 1\n"
        "    if left == 0: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    real(descriptor)\n"
        "os.fsync = fsync\n"
        "lowbit.quantize_checkpoint(src, dst, 'int4', **torch.load(options))\n"
    )
    # Why also what is there: another version of transformers would be another run.
    path = [str(Path(lowbit.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    partial = tmp_path / ".q.partial"
    # What is being written: the first block; the journal behind the next one; hidden states; a file of the checkpoint.
    for count in (2, 10, 7, 12) if kind == "gptq" else (10, 12):
        command = [sys.executable, "-W", "ignore", "-c", code, src, tmp_path / "q", tmp_path / "options", str(count)]
        done = subprocess.run(list(map(str, command)), env=env, timeout=300, capture_output=True, text=True)
        assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
        assert not (tmp_path / "q").exists() and not (partial / "config.json").exists()
        with pytest.raises(LowbitError):
            lowbit.from_pretrained(partial)
    blocks = json.loads((partial / "blocks" / "journal.json").read_text())["blocks"]
    steps = quantize(src, tmp_path / "q", **changes)
    assert blocks >= 2 and (not steps or steps[0][0] > 6), "finished blocks were made again"
    quantize(src, tmp_path / "whole", **changes)
    assert contents(tmp_path / "q") == contents(tmp_path / "whole")
    assert not partial.exists()


def test_a_disk_that_is_full_at_any_moment_costs_one_block(src, whole, tmp_path, monkeypatch):
    real, left, first, runs = os.fsync, [0], [], 0

    def full(descriptor):
        left[0] -= 1
        if left[0] <= 0:
            raise OSError(28, "No space left on device")
        real(descriptor)

    def progress(done, total, name):
        if total == 21 and len(first) < runs:
            first.append(done)

    monkeypatch.setattr(os, "fsync", full)
    while not (tmp_path / "q").exists():
        runs += 1
        left[0] = 6 + runs % 2  # a block takes five
        try:
            lowbit.quantize_checkpoint(src, tmp_path / "q", "int4", **OPTIONS, progress=progress)
        except LowbitError as error:
            assert "No space left on device; run again" in str(error) and "\n" not in str(error)
            assert not list((tmp_path / ".q.partial").rglob("*.tmp"))
        assert runs < 40
    assert first == [1, 8, 15] and runs > 4 and contents(tmp_path / "q") == whole


@pytest.mark.parametrize("change", ["settings", "order", "calibration", "source", "config", "version"])
def test_nothing_is_used_again_that_was_made_of_something_else(src, tmp_path, change, monkeypatch):
    shutil.copytree(src, tmp_path / "src")
    src = tmp_path / "src"
    two = {r"\.up_proj$": {"dtype": "int8"}, r"\.layers\.0\.": {"dtype": "uint3"}}
    interrupted(src, tmp_path / "q", dynamic=two)
    changes = {"dynamic": two}
    if change == "settings":
        changes["method"] = "awq"
    elif change == "order":
        changes["dynamic"] = dict(reversed(two.items()))
    elif change == "calibration":
        changes["calibration"] = IDS.flip(0)
    elif change == "source":
        os.utime(sorted(src.glob("*.safetensors"))[-1], ns=(1, 1))
    elif change == "config":
        config = json.loads((src / "config.json").read_text())
        (src / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-2}))
    else:
        monkeypatch.setattr(calibrated_files, "__version__", "0.0.0")
    assert quantize(src, tmp_path / "q", **changes)[0][0] == 1
    quantize(src, tmp_path / "again", **changes)
    assert contents(tmp_path / "q") == contents(tmp_path / "again")


def flip(path):
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "a bit of a block": lambda blocks: flip(blocks / "part-0.safetensors"),
    "a bit of the hidden states": lambda blocks: flip(next(blocks.glob("hidden-*"))),
    "a block cut off": lambda blocks: os.truncate(blocks / "part-1.safetensors", 100),
    "a block lost": lambda blocks: (blocks / "part-1.safetensors").unlink(),
    "hidden states lost": lambda blocks: next(blocks.glob("hidden-*")).unlink(),
    "the journal cut off": lambda blocks: os.truncate(blocks / "journal.json", 60),
    "the journal of text": lambda blocks: (blocks / "journal.json").write_text('"journal"'),
    "a path outside": lambda blocks: rename_in_journal(blocks, "part-1.safetensors", "../blocks/part-1.safetensors"),
    "a folder as a block": lambda blocks: (flip(blocks / "part-0.safetensors"), (blocks / "part-7").mkdir()),
}


def rename_in_journal(blocks, old, new):
    journal = json.loads((blocks / "journal.json").read_text())
    journal["files"][new] = journal["files"].pop(old)
    (blocks / "journal.json").write_text(json.dumps(journal))


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damaged_blocks_are_made_again(src, whole, tmp_path, damage):
    damage(interrupted(src, tmp_path / "q") / "blocks")
    assert quantize(src, tmp_path / "q")[0][0] == 1
    assert contents(tmp_path / "q") == whole


def test_what_no_journal_lists_is_removed_and_the_rest_is_used(src, whole, tmp_path):
    blocks = interrupted(src, tmp_path / "q") / "blocks"
    before = sorted(path.name for path in blocks.iterdir())
    shutil.copy(blocks / "part-0.safetensors", blocks / "part-2.safetensors")  # of a block that was not finished
    (blocks / ".hidden-3.safetensors.1.tmp").write_bytes(b"x" * 50)
    assert before == ["hidden-2.safetensors", "journal.json", "part-0.safetensors", "part-1.safetensors"]
    assert quantize(src, tmp_path / "q")[0][:2] == (15, 21)
    assert contents(tmp_path / "q") == whole


def test_files_of_a_run_whose_blocks_are_lost_are_written_again(src, whole, tmp_path, monkeypatch):
    partial = interrupted(src, tmp_path / "q", stop=21 + 22)
    done = sorted(path.name for path in partial.glob("*.safetensors"))
    assert 1 <= len(done) < len(list(src.glob("*.safetensors")))
    made, real = [], quantize_files._write_shard
    monkeypatch.setattr(quantize_files, "_write_shard", lambda path, *rest: made.append(path.name) or real(path, *rest))
    flip(partial / "blocks" / "part-1.safetensors")
    with pytest.raises(Stop):  # not even when that run is cut off too
        quantize(src, tmp_path / "q", stop=3)
    assert not list(partial.glob("*.safetensors"))
    quantize(src, tmp_path / "q")
    assert made == sorted(path.name for path in src.glob("*.safetensors"))
    assert contents(tmp_path / "q") == whole


def test_a_kill_before_the_last_rename_calibrates_nothing_again(src, whole, tmp_path, monkeypatch):
    real = os.rename
    monkeypatch.setattr(os, "rename", lambda *_: (_ for _ in ()).throw(Stop))
    with pytest.raises(Stop):
        quantize(src, tmp_path / "q")
    assert not (tmp_path / ".q.partial" / "blocks").exists()
    monkeypatch.setattr(os, "rename", real)
    # Why not the journal: it goes first. A run that is killed before that finds it, and all files.
    monkeypatch.setattr(quantize_files.Partial, "publish", lambda self: (_ for _ in ()).throw(Stop))
    with pytest.raises(Stop):
        quantize(src, tmp_path / "r")
    shutil.rmtree(tmp_path / ".r.partial" / "blocks")
    monkeypatch.undo()
    monkeypatch.setattr(calibrated_files, "quantize_calibrated", None)
    lowbit.quantize_checkpoint(src, tmp_path / "r", "int4", **OPTIONS)
    assert contents(tmp_path / "r") == whole


def test_a_run_that_goes_on_holds_no_finished_block(src, tmp_path, monkeypatch):
    interrupted(src, tmp_path / "q")
    seen, real = [], calibrated_files.CalibratedModel.done

    def done(self, *args):
        seen.append({n for n, p in self.streamed.model.named_parameters() if p.device.type != "meta"})
        real(self, *args)

    monkeypatch.setattr(calibrated_files.CalibratedModel, "done", done)
    quantize(src, tmp_path / "q")
    around = {"model.embed_tokens.weight", "model.norm.weight"}
    assert len(seen) == 3  # the first block, which shows how blocks are called; the third; what is behind
    assert not any(".layers.0." in name or ".layers.1." in name for name in seen[1]) and around <= seen[1]
    assert any(".layers.2." in name for name in seen[1])


def test_the_warning_of_starved_experts_names_all_of_them(tmp_path):
    name, sizes, _ = KINDS["experts"]
    src = source(tmp_path / "src", name, **sizes)
    few = {"calibration": IDS[:2]}
    with pytest.warns(UserWarning, match="too few calibration tokens") as alone:
        quantize(src, tmp_path / "whole", **few)
    interrupted(src, tmp_path / "q", stop=40, **few)
    assert json.loads((tmp_path / ".q.partial" / "blocks" / "journal.json").read_text())["starved"]
    with pytest.warns(UserWarning, match="too few calibration tokens") as resumed:
        quantize(src, tmp_path / "q", **few)
    assert [str(w.message) for w in resumed] == [str(w.message) for w in alone]
    assert contents(tmp_path / "q") == contents(tmp_path / "whole")


def test_hidden_states_are_the_only_ones_on_disk(src, tmp_path, monkeypatch):
    sizes, real = [], block_store.BlockStore.finish

    def finish(self, *args, **options):
        real(self, *args, **options)
        sizes.append(sum(path.stat().st_size for path in self.folder.glob("hidden-*")))

    monkeypatch.setattr(block_store.BlockStore, "finish", finish)
    quantize(src, tmp_path / "q")
    states = IDS.numel() * 64 * 4
    assert len(sizes) == 4 and sizes[2:] == [0, 0] and all(states <= size < 1.1 * states for size in sizes[:2])


def test_transformers_is_named_in_what_results_depend_on(src):
    found = calibrated_files.depends_on(lowbit.checkpoint.source.Source(src), IDS)
    assert found["versions"]["transformers"] == transformers.__version__
    assert found == json.loads(json.dumps(found))
    assert found["tokens"] == calibrated_files.depends_on(lowbit.checkpoint.source.Source(src), IDS.int())["tokens"]
