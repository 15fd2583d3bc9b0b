"""Risk: a product on a GPU goes to a tile that is much slower than another one, or to none at all."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from generator.families import families
from lowbit.dtypes import weight_type
from native.build import load

H200 = [132, 66]  # clusters of 1 and of 2 blocks
DECODE, SM80, SM90 = range(3)
NAMES = {"decode": DECODE, "gemm_sm80": SM80, "gemm_sm90": SM90}
TILES = sorted({(NAMES[f.name], dict(v.sizes)["tokens"]) for f in families() if f.name in NAMES for v in f.variants})


@pytest.fixture(scope="module")
def native():
    return load("deal_math")


NONE, ZERO, MIN, WHOLE, UNEVEN = range(5)  # kinds of zeros; UNEVEN: none, and scales that are not even


def chosen(
    native, m, n, k, bits=4, is_float=False, bf16=False, group_size=128, kind=NONE, capability=90, clusters=H200
):
    """(family, tokens) of the tile that is tried first."""

    def us(tile):
        return native.tile_us(*tile, [m, n, k], bits, is_float, bf16, group_size, kind, capability, clusters)

    found = min((tile for tile in TILES if native.is_for(*tile, capability)), key=us)
    assert us(found) < native.kNever
    return found


@pytest.mark.parametrize(
    ("m", "n", "k", "tokens"),
    [
        (8, 57344, 8192, 8),
        (8, 4096, 4096, 8),  # 3.9 us, by n32 6.1
        (16, 4096, 4096, 16),  # 4.3 us, by n32 6.1
        (16, 8192, 28672, 16),  # 34 us, by n32 39
        (16, 7168, 8192, 16),  # 10.8 us, by n32 12.7
        (24, 8192, 8192, 32),
        (40, 8192, 8192, 48),
        (64, 8192, 8192, 64),
        (96, 8192, 8192, 96),
        (128, 8192, 8192, 128),
        (192, 28672, 4096, 192),
        (384, 8192, 8192, 192),  # twice: 70 us, n128 three times 82
        (512, 4096, 4096, 128),  # 25 us and 33
        (1024, 8192, 8192, 256),
        (4096, 8192, 8192, 256),
    ],
)
def test_what_was_measured_to_be_faster_is_tried_first(native, m, n, k, tokens):
    assert chosen(native, m, n, k) == (SM90, tokens)


@pytest.mark.parametrize("m", [1, 2, 3, 4])
def test_few_rows_are_those_of_decode(native, m):
    assert chosen(native, m, 8192, 8192, 2) == (DECODE, {1: 1, 2: 2}.get(m, 4))


@pytest.mark.parametrize(
    ("m", "n", "k", "bits", "tile"),
    [
        (4, 8192, 8192, 4, (SM90, 8)),  # 9.9 us, by n4 10.2
        (4, 4096, 4096, 8, (SM90, 8)),  # 5.3 us, by n4 5.4
        (1, 4608, 3584, 8, (DECODE, 2)),  # 5.3 us, by n1 5.6
        (1, 5120, 17408, 5, (DECODE, 4)),  # 15.6 us, by n1 16.8
        (1, 4096, 12288, 5, (DECODE, 1)),  # 8.5 us, by n8 9.5
        (2, 4096, 14336, 2, (DECODE, 4)),  # 6.6 us, by n2 7.1
        (4, 5120, 17408, 2, (DECODE, 4)),  # 10.0 us, by n8 11.7
        (1, 4096, 4096, 3, (DECODE, 1)),  # 3.0 us, by n4 3.5
        (1, 55296, 5120, 3, (DECODE, 1)),  # 30.0 us, by n4 30.8
        (1, 2048, 2048, 4, (DECODE, 4)),  # 2.0 us, by n1 2.4
        (1, 5120, 5120, 6, (DECODE, 4)),  # 6.2 us, by n1 7.2
        (4, 4096, 4096, 4, (SM90, 8)),  # 3.7 us, by n4 3.9
        (16, 4096, 14336, 4, (SM90, 16)),  # 10.6 us, by n32 12.3
        (4, 28672, 4096, 8, (DECODE, 4)),  # 30.7 us, by n8 31.8
    ],
)
def test_few_rows_take_the_family_that_was_measured_to_be_faster(native, m, n, k, bits, tile):
    assert chosen(native, m, n, k, bits) == tile


@pytest.mark.parametrize("bits", [1, 3, 4, 8])
def test_few_rows_of_many_k_take_a_tile_by_which_x_passes_where_clusters_share_tiles_unevenly(native, bits):
    assert chosen(native, 4, 4096, 14336, bits)[0] == SM90  # W4 9.5 us, by n4 10.2
    for m in (1, 2, 3, 4):
        assert chosen(native, m, 5120, 27648, bits)[0] == DECODE
    for m in (1, 2):
        assert chosen(native, m, 4096, 14336, bits)[0] == (SM90 if m == 2 and bits == 4 else DECODE)


def test_up_to_16_rows_no_weight_is_rounded(native):
    """Tiles of more tokens round weights whose scales change within 128 k, or zeros added after the scale."""
    for m in (5, 8, 9, 16):
        assert chosen(native, m, 4096, 4096, group_size=64)[1] <= 16
        assert chosen(native, m, 4096, 4096, kind=MIN)[1] <= 16
        assert chosen(native, m, 4096, 4096, kind=ZERO, bf16=True)[1] <= 16
        assert chosen(native, m, 4608, 3584)[1] == chosen(native, m, 4608, 3584, group_size=-1)[1]
        for bits, tokens in ((3, 64), (4, 128), (5, 144), (6, 96), (7, 96), (7, 256)):
            exact, rounded = (
                native.tile_us(SM90, tokens, [m, 4096, 4096], bits, False, bf16, 128, NONE, 90, H200)
                for bf16 in (True, False)
            )
            assert rounded > 1e3 * exact, "after all that round none"


def test_the_plan_and_the_list_of_kernels_agree_on_fine_groups(native):
    """A tile that is listed for them and never tried would be dead; one that is tried and not there, a refusal."""
    for family in (f for f in families() if f.name in NAMES):
        for variant in family.variants:
            tile = NAMES[family.name], dict(variant.sizes)["tokens"]
            for name in ("int4", "float3_e1m1", "float4_e2m1", "float8_e4m3"):
                if not re.fullmatch(variant.weights, name):
                    continue
                groups, bits, is_float = (16, 32, 64, 128), weight_type(name).bits, name.startswith("float")
                us = [native.tile_us(*tile, [1, 512, 512], bits, is_float, False, g, NONE, 90, H200) for g in groups]
                found = [group for group, one in zip(groups, us, strict=True) if one < native.kNever]
                assert found == [g for g in groups if g >= variant.least_group], (family.name, variant.name, name)


def test_whole_zeros_cost_nothing_with_many_tokens_and_others_have_fewer_tiles(native):
    """Zeros of GPTQ and AWQ are part of the number that a value is made with; with groups below 128 they are as any."""
    for m in (40, 64, 96, 192, 256):
        assert chosen(native, m, 8192, 8192, kind=WHOLE) == chosen(native, m, 8192, 8192, kind=UNEVEN)
        us = [
            native.tile_us(SM90, 64, [m, 8192, 8192], 4, False, False, 128, kind, 90, H200)
            for kind in (UNEVEN, ZERO, WHOLE)
        ]
        assert us[0] == us[2] < us[1]
    for tokens in (48, 96, 144, 160, 192, 208):
        us = [
            native.tile_us(SM90, tokens, [tokens, 8192, 8192], 4, False, False, group, kind, 90, H200)
            for group, kind in ((128, ZERO), (128, MIN), (64, WHOLE), (128, WHOLE))
        ]
        assert [one < native.kNever for one in us] == [False, False, False, True]
    assert chosen(native, 16, 7168, 8192, kind=WHOLE, bf16=True)[1] == 16


def test_even_scales_cost_less_where_a_value_takes_one_instruction(native):
    """fp16 x alone, where multiprocessors idle, so that time is not power: 4096 x 4096; n32 and n256 are the same."""

    def us(tokens, bits, kind, bf16=False):
        return native.tile_us(SM90, tokens, [tokens, 4096, 4096], bits, False, bf16, 128, kind, 90, H200)

    for bits in (2, 4, 8):
        for tokens in (64, 96):
            assert us(tokens, bits, NONE) < us(tokens, bits, UNEVEN)
            assert us(tokens, bits, NONE, bf16=True) == us(tokens, bits, UNEVEN, bf16=True)
        assert all(us(tokens, bits, NONE) == us(tokens, bits, UNEVEN) for tokens in (32, 256))
    for m in (9, 16):  # no product of few rows rounds weights
        assert native.tile_us(SM90, 48, [m, 8192, 8192], 4, False, False, 128, NONE, 90, H200) > 1e3
        assert native.tile_us(SM90, 48, [m, 8192, 8192], 4, False, False, 128, UNEVEN, 90, H200) < 1e3


def test_columns_of_256_that_are_not_there_cost_less(native):
    """float8 has no tile between: 8192 x 8192, 136 rows, n256 46.8 us, n128 twice 56.0; 224 rows 57.0 and 62.0."""
    assert [native.columns_of_each(256, m) for m in (1, 160, 161, 200, 225, 256, 257, 384, 385, 450)] == [
        160, 160, 192, 224, 256, 256, 160, 192, 224, 256,
    ]  # fmt: skip
    assert all(native.columns_of_each(tile, m) == tile for tile in (32, 64, 128, 208) for m in (1, 100, 300))
    us = [
        [native.tile_us(SM90, t, [m, 8192, 8192], 8, True, False, 128, NONE, 90, H200) for m in (136, 192, 224, 256)]
        for t in (128, 256)
    ]
    assert us[1] == sorted(set(us[1])) and all(large < small for small, large in zip(*us, strict=True))


def test_zeros_cost_more_with_fewer_tokens(native):
    assert chosen(native, 16, 8192, 8192, kind=ZERO)[1] == 16  # uint4: 15.1 us, by n32 18.8
    assert chosen(native, 64, 8192, 8192, kind=ZERO)[1] == 64


def test_a_tile_without_a_kernel_for_the_weight_is_not_tried(native):
    for m in (1, 2, 4):
        assert chosen(native, m, 8192, 8192, is_float=True) == (SM90, 8)  # 11.0 us, by n1 11.3
        assert chosen(native, m, 8192, 8192, is_float=True, kind=ZERO) == (SM90, 8)
        assert chosen(native, m, 8192, 8192, group_size=16) == (SM90, 8)
        assert chosen(native, m, 8192, 8192, group_size=16, capability=80) == (SM80, 8)
    for m, tokens in ((48, 48), (96, 96), (192, 192)):
        assert chosen(native, m, 28672, 4096, group_size=256) == (SM90, tokens)
        assert chosen(native, m, 28672, 4096, group_size=64)[1] in (64, 128, 256)


def test_one_row_of_short_groups_is_decodes(native):
    """n8 takes up to twice as long: int1 at 8192 x 8192 11.9 us, n1 6.7; int8 at 4608 x 3584 8.9 and 7.6."""
    for group, kind in ((32, NONE), (64, NONE), (32, WHOLE), (64, MIN)):
        for bits, n, k in ((1, 8192, 8192), (8, 4608, 3584), (4, 57344, 8192), (4, 4096, 14336)):
            for capability in (80, 90):
                options = {"group_size": group, "kind": kind, "capability": capability}
                assert chosen(native, 1, n, k, bits, **options) == (DECODE, 1)
                assert chosen(native, 2, n, k, bits, **options)[0] != DECODE
    for group in (16, 32):  # float4_e2m1: 57344 x 8192 79.5 and 69.6 us by n8, 70.8 and 65.2 by n1
        for n, k in ((57344, 8192), (4096, 4096), (4608, 3584)):
            assert chosen(native, 1, n, k, is_float=True, group_size=group) == (DECODE, 1)
    assert chosen(native, 1, 8192, 8192, is_float=True, group_size=16) == (DECODE, 1)  # 12.4 us, n8 13.9
    assert chosen(native, 1, 8192, 8192, is_float=True, group_size=64) == (SM90, 8)  # 11.3 us, n1 12.2
    assert chosen(native, 1, 8192, 8192, 8, is_float=True, group_size=64) == (SM90, 8)


@pytest.mark.parametrize("group", [32, 128])
def test_floats_cost_more_beside_bf16_which_has_an_instruction_more_a_value(native, group):
    for tokens in (32, 64, 128, 256):
        fp16, bf16 = (
            native.tile_us(SM90, tokens, [tokens, 8192, 8192], 4, True, bf16, group, NONE, 90, H200)
            for bf16 in (False, True)
        )
        assert fp16 < bf16 < 1.3 * fp16, tokens
    integers = [native.tile_us(SM90, 32, [32, 8192, 8192], 4, False, b, group, NONE, 90, H200) for b in (False, True)]
    assert integers[0] == integers[1]


def test_integers_that_are_rounded_beside_fp16_cost_less_there_than_exact_ones_beside_bf16(native):
    """Where multiprocessors idle, so that time is not power."""

    def us(bits, tokens, bf16, group=128, kind=UNEVEN):
        return native.tile_us(SM90, tokens, [tokens, 4096, 4096], bits, False, bf16, group, kind, 90, H200)

    for bits, tokens in ((3, 64), (5, 64), (3, 96), (2, 128), (8, 128), (5, 192), (6, 208)):
        assert 0.9 * us(bits, tokens, True) < us(bits, tokens, False) < us(bits, tokens, True), (bits, tokens)
        assert us(bits, tokens, False, kind=WHOLE) < us(bits, tokens, True, kind=WHOLE), (bits, tokens)
    for bits, tokens, group in ((8, 64, 128), (4, 96, 128), (4, 256, 128), (5, 64, 32)):
        assert us(bits, tokens, False, group) == us(bits, tokens, True, group), (bits, tokens, group)


def test_floats_that_are_looked_up_go_to_decode_where_it_is_faster(native):
    """By nvidia-h200/sweep_splits_20261128_kinds*.json."""
    for bits, m, n, k, found in (
        (3, 1, 8192, 8192, (DECODE, 4)),  # 9.9 us, by n1 10.1, n8 10.7
        (3, 4, 8192, 8192, (SM90, 8)),  # 10.75 us, by n4 11.1
        (3, 1, 57344, 8192, (DECODE, 1)),  # 51.7 us, by n8 60.5
        (3, 4, 57344, 8192, (DECODE, 4)),  # 54.6 us, by n8 60.5
        (4, 1, 4608, 3584, (SM90, 8)),  # 5.2 us, by n1 5.3
        (4, 1, 8192, 8192, (SM90, 8)),  # 11.0 us, by n1 11.3
        (4, 4, 57344, 8192, (SM90, 8)),  # 61.8 us, by n4 62.2
        (8, 1, 57344, 8192, (DECODE, 1)),  # 111.0 us, by n8 121.2
        (8, 1, 8192, 8192, (SM90, 8)),  # 18.2 us, by n1 18.6
    ):
        assert chosen(native, m, n, k, bits, is_float=True) == found


def test_every_tile_of_gemm_sm90_has_a_cost(native):
    """One that is added to the list of kernels without a cost would never be tried."""
    for tile in (tile for tile in TILES if tile[0] == SM90):
        us = [
            native.tile_us(*tile, [tile[1], 8192, 8192], bits, False, False, 128, NONE, 90, H200)
            for bits in range(1, 9)
        ]
        assert 1 < min(us) and max(us) < 1000, tile


@given(
    m=st.integers(1, 1 << 20),
    n=st.integers(1, 1 << 20),
    k=st.integers(1, 1 << 20),
    bits=st.integers(1, 8),
    is_float=st.booleans(),
    bf16=st.booleans(),
    group_size=st.sampled_from([16, 32, 64, 128, 256, -1]),
    kind=st.sampled_from([NONE, ZERO, MIN]),
    capability=st.sampled_from([80, 86, 89, 90, 100, 120]),
    clusters=st.tuples(st.integers(1, 200), st.integers(0, 100)),
)
def test_there_is_a_tile_for_every_product(
    native, m, n, k, bits, is_float, bf16, group_size, kind, capability, clusters
):
    family, tokens = chosen(native, m, n, k, bits, is_float, bf16, group_size, kind, capability, list(clusters))
    assert m <= tokens or family == SM80 or tokens > 16
    if capability != 90:
        fine = 0 < group_size < 128
        one_row = bits == 4 if is_float else group_size in (32, 64)
        tiles = [
            t
            for f, t in TILES
            if native.is_for(f, t, capability)
            and (f != DECODE or (not (is_float and kind) and (not fine or (one_row and t == 1))))
        ]
        smallest = min((t for t in tiles if t >= m), default=128)
        assert tokens == smallest, "the smallest that holds all, or the largest, repeated"


@pytest.mark.parametrize(
    ("capability", "tiles"),
    [
        (80, []),
        (86, []),
        (90, [8, 16, 32, 48, 64, 96, 128, 144, 160, 192, 208, 256]),
        (100, [8, 16]),
        (103, [8, 16]),
        (110, [8, 16]),
        (120, []),
    ],
)
def test_tiles_of_gemm_sm90_are_left_to_devices_that_have_what_they_need(native, capability, tiles):
    """Those of the other families are for all."""
    assert [tokens for family, tokens in TILES if family == SM90 and native.is_for(2, tokens, capability)] == tiles
    assert all(native.is_for(family, 16, capability) for family in (0, 1))


NONE, ZERO, MIN, WHOLE = range(4)


@pytest.mark.parametrize("group_size", [16, 64, 128, -1])
@pytest.mark.parametrize("fp32_scales", [False, True])
def test_codebooks_and_scales_of_float32_have_the_kernels_that_read_them(native, group_size, fp32_scales):
    """The templates refuse all others, and a forced kernel or a tuned one must not be tried in vain."""

    fine, few, wide = 0 < group_size < 128, [8, 16], [32, 64, 128, 256]
    wgmma = [32, 48, 64, 96, 128, 144, 160, 192, 208, 256]

    def tiles(family, bits, kind=NONE, is_float=False, codebook=False):
        sizes = {DECODE: (1, 2, 4), SM80: (8, 16, 32, 48, 64, 96, 128), SM90: (*few, *wgmma)}
        asked = (bits, is_float, codebook, group_size, kind, fp32_scales)
        return [t for t in sizes[family] if native.has_kernel(family, t, *asked)]

    readable = not (fp32_scales and group_size == 16)
    book = few + (wide if fine else wgmma)
    # Tiles that are no powers of two are not built for codebooks: no row of the manifest asks for them.
    assert [t for t in tiles(SM90, 4, codebook=True) if t.bit_count() == 1] == (
        [t for t in book if t.bit_count() == 1] * readable
    )
    assert (
        not tiles(SM90, 4, MIN, codebook=True)
        and not tiles(DECODE, 4, codebook=True)
        and not tiles(SM80, 4, codebook=True)
    )
    if fp32_scales:
        assert not tiles(DECODE, 4) and not tiles(SM80, 4)
        assert tiles(SM90, 4) == tiles(SM90, 2, ZERO) == few * readable
        assert tiles(SM90, 8, ZERO) == tiles(SM90, 8, MIN, is_float=True) == few * readable
        assert [t for t in tiles(SM90, 4, is_float=True) if t.bit_count() == 1] == (few + wide * (not fine)) * readable
        # Those that round values to fp16 would round scales of fp32 too.
        most = [t for t in wgmma if t >= 144]
        for bits, rounding in ((5, [64, 128, *most]), (6, [64, 96, 128, *most]), (7, [64, 96, 128, *most]), (8, [128])):
            exact = [t for t in few + wgmma * (not fine) if t not in rounding]
            assert tiles(SM90, bits) == tiles(SM90, bits, WHOLE) == exact * readable
    else:
        assert tiles(SM80, 4) and set(few + wide) <= set(tiles(SM90, 4, ZERO))
        assert tiles(DECODE, 4) == ([1, 2, 4] if not fine else [1] if group_size >= 32 else [])
        assert tiles(DECODE, 4, is_float=True) == ([1] if fine else [1, 2, 4])
        assert tiles(DECODE, 8, is_float=True) == ([] if fine else [1, 2, 4])
