"""Checkpoints need transformers, which is an extra."""

import pytest

pytest.importorskip("transformers", reason="checkpoints need the extra hf")
collect_ignore: list[str] = []


@pytest.fixture(autouse=True)
def quiet():
    """transformers reports every loaded file; what matters here is asserted."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """The shipped checkpoint in several files."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from .models import LLAMA

    folder = tmp_path_factory.mktemp("sharded") / "src"
    AutoModelForCausalLM.from_pretrained(LLAMA).save_pretrained(folder, max_shard_size="600KB")
    AutoTokenizer.from_pretrained(LLAMA).save_pretrained(folder)
    assert len(list(folder.glob("*.safetensors"))) > 3
    return folder
