"""Risk: a rotation that is not undone exactly, or that comes out differently on the next machine."""

import pytest
import torch

from lowbit.errors import DtypeError, SchemeError, ShapeError
from lowbit.quantizers import block_hadamard, rotate_activations, rotate_weight, unrotate_weight


def matrix(rotation):
    """R [K, K], float64, entry by entry: the sign of H is the parity of the bits that row and column share."""
    r = torch.zeros(rotation.k, rotation.k, dtype=torch.float64)
    for i, sign in enumerate(rotation.signs().tolist()):
        first = i - i % rotation.block
        for j in range(first, first + rotation.block):
            odd = bin((i - first) & (j - first)).count("1") % 2
            r[i, j] = sign * (-1) ** odd / rotation.block**0.5
    return r


@pytest.mark.parametrize("k, block, expected", [(96, None, 32), (96, 16, 16), (64, None, 64), (7, None, 1), (1, 1, 1)])
def test_weight_and_activations_turn_together(k, block, expected, rng):
    rotation = block_hadamard(k, block, seed=3)
    assert rotation.block == expected
    r = matrix(rotation)
    torch.testing.assert_close(r @ r.T, torch.eye(k).double(), rtol=0, atol=1e-14)
    w, x = (torch.randn(n, k, generator=rng, dtype=torch.float64) for n in (5, 3))
    torch.testing.assert_close(rotate_weight(w, rotation), w @ r, rtol=0, atol=1e-13)
    torch.testing.assert_close(rotate_activations(x, rotation), (r.T @ x.T).T, rtol=0, atol=1e-13)
    product = rotate_activations(x, rotation) @ rotate_weight(w, rotation).T
    torch.testing.assert_close(product, x @ w.T, rtol=0, atol=1e-12)
    torch.testing.assert_close(unrotate_weight(rotate_weight(w, rotation), rotation), w, rtol=0, atol=1e-13)


def test_any_number_of_leading_dimensions_and_float_types(rng):
    rotation = block_hadamard(48)
    x = torch.randn(2, 3, 48, generator=rng)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        turned = rotate_activations(x.to(dtype), rotation)
        assert turned.dtype == dtype and turned.shape == x.shape
        torch.testing.assert_close(turned.double(), x.to(dtype).double() @ matrix(rotation), rtol=1e-2, atol=1e-2)
    assert rotate_activations(x[0, 0], rotation).shape == (48,)
    assert rotate_activations(x[:0], rotation).shape == (0, 3, 48)


def test_an_outlier_is_spread_over_its_block():
    x = torch.zeros(1, 128)
    x[0, 70] = 100
    turned = rotate_activations(x, block_hadamard(128, 64))
    assert turned[0, :64].abs().max() == 0
    torch.testing.assert_close(turned[0, 64:].abs(), torch.full((64,), 12.5))


def test_signs_are_the_same_for_ever():
    """Stored weights depend on them: this list may not change."""
    assert block_hadamard(16, seed=7).signs().tolist() == EXPECTED
    assert not torch.equal(block_hadamard(256, seed=1).signs(), block_hadamard(256, seed=2).signs())


EXPECTED = [1, -1, 1, -1, 1, 1, 1, 1, -1, 1, -1, 1, -1, 1, -1, -1]


@pytest.mark.parametrize(
    "arguments, options, error, words",
    [
        ((0,), {}, ShapeError, "from 1, got 0"),
        ((True,), {}, ShapeError, "from 1, got True"),
        ((96, 64), {}, ShapeError, "power of two that divides 96, at most 32, got 64"),
        ((96, 24), {}, ShapeError, "got 24"),
        ((96,), {"seed": -1}, SchemeError, "seed must be"),
    ],
)
def test_bad_blocks_are_refused(arguments, options, error, words):
    with pytest.raises(error, match=words):
        block_hadamard(*arguments, **options)


def test_bad_tensors_are_refused():
    rotation = block_hadamard(32)
    for turn in (rotate_weight, rotate_activations, unrotate_weight):
        with pytest.raises(ShapeError, match="32 columns"):
            turn(torch.ones(2, 31), rotation)
        with pytest.raises(DtypeError, match="got int64"):
            turn(torch.ones(2, 32).long(), rotation)
