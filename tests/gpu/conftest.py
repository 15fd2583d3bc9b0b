"""Everything in this folder is marked ``gpu``, and skipped with the reason where there is no CUDA device."""

import os
import warnings
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
if torch.cuda.is_available():
    # Why: tests of plans expect the plan's kernels, not those that this machine measured.
    os.environ.setdefault("LOWBIT_TUNED", "0")


def why_not() -> str | None:
    """Why nothing of this folder can run here, or None."""
    if not torch.cuda.is_available():
        return f"needs a CUDA device, torch {torch.__version__} finds none"
    return None


def pytest_collection_modifyitems(items):
    reason = why_not()
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def quiet_and_fresh():
    """Nothing compiled by another test, and no warning of what float32 x costs."""
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="x is float32")
        yield
    torch._dynamo.reset()
