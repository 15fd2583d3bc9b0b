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
