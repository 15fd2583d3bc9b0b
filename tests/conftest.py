"""Fixtures that several test files share."""

import pytest
import torch


@pytest.fixture
def rng() -> torch.Generator:
    """A generator with a fixed seed: pass it on, so that no test depends on the tests before it."""
    return torch.Generator().manual_seed(0x10B17)
