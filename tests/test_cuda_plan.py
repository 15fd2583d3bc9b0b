"""Risk: a product on a GPU goes to a tile that is much slower than another one, or to none at all."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from native.build import load

H200 = [132, 66]  # clusters of 1 and of 2 blocks
TILES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@pytest.fixture(scope="module")
def native():
    return load("cut_math")


@pytest.mark.parametrize(
    ("m", "n", "k", "tokens"),
    [
        (1, 8192, 8192, 1),
        (4, 8192, 8192, 4),
        (100, 8192, 8192, 100),
        (256, 8192, 8192, 128),  # 51 us, by the tile of 256 tokens 54
        (512, 8192, 8192, 256),  # 94 us, by that of 128 more than 100
        (1024, 8192, 8192, 256),
        (4096, 8192, 8192, 256),
        (256, 4096, 4096, 128),  # 18 us and 21
        (512, 4096, 4096, 128),  # 27 us and 34
        (1024, 4096, 4096, 256),
    ],
)
def test_what_was_measured_to_be_faster_is_tried_first(native, m, n, k, tokens):
    assert native.first_tile(m, n, k, 4, 90, H200) == tokens


@pytest.mark.parametrize("bits, tokens", [(1, 8), (2, 8), (3, 4), (8, 4)])
def test_few_rows_of_many_k_take_a_tile_by_which_x_passes(native, bits, tokens):
    assert native.first_tile(4, 4096, 14336, bits, 90, H200) == tokens
    assert native.first_tile(2, 4096, 14336, bits, 90, H200) == 2
    assert native.first_tile(1, 4096, 14336, bits, 90, H200) == 1
    assert native.first_tile(1, 5120, 27648, bits, 90, H200) == 2


@given(
    m=st.integers(1, 1 << 20),
    n=st.integers(1, 1 << 20),
    k=st.integers(1, 1 << 20),
    bits=st.integers(1, 8),
    capability=st.sampled_from([80, 86, 89, 90, 100, 120]),
    clusters=st.tuples(st.integers(1, 200), st.integers(0, 100)),
)
def test_there_is_a_tile_for_every_product(native, m, n, k, bits, capability, clusters):
    found = native.first_tile(m, n, k, bits, capability, list(clusters))
    assert found <= 256 and (found >= m or found in (128, 256))
    assert capability == 90 or found == min(m, 128), "the largest tile there, repeated"


@pytest.mark.parametrize(
    ("capability", "tiles"),
    [(80, []), (86, []), (90, [8, 16, 32, 64, 128, 256]), (100, [8, 16]), (103, [8, 16]), (110, [8, 16]), (120, [])],
)
def test_tiles_of_gemm_sm90_are_left_to_devices_that_have_what_they_need(native, capability, tiles):
    """Those of the other families are for all."""
    assert [tokens for tokens in (8, 16, 32, 64, 128, 256) if native.is_for(2, tokens, capability)] == tiles
    assert all(native.is_for(family, 16, capability) for family in (0, 1))
