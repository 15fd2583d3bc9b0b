"""Risk: constants of the plan are fitted by predictions that are not the plan's, or to what chooses worse."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import cost_fit
import fit_split_costs
import fit_tile_costs
import tile_model

PRODUCTS = [(8192, 8192, 256, 4), (4608, 3584, 384, 8), (3584, 14336, 64, 1), (57344, 8192, 2048, 6)]
PRODUCTS += [(2048, 2048, 32, 2), (4096, 1024, 128, 4), (8192, 8192, 32, 4), (8192, 3584, 60, 8), (2880, 2880, 190, 7)]
#: Kinds of weights: whether floats, groups, kind of zeros as tile_us has it.
QUESTIONS = {"int": (False, 128, 4), "float": (True, 128, 0), "fine": (False, 32, 0), "fine float": (True, 32, 0),
             "zeros": (False, 32, 1)}  # fmt: skip


def has_blocks(tile: int, row_tiles: int, product: tile_model.Product) -> bool:
    """As csrc/templates/wide_blocks.cuh says, in other words."""
    fine = product.kind not in ("int", "float")
    if row_tiles == 4:
        return tile in (32, 64) or (tile < 128 and not fine)
    most = (4 if "float" in product.kind else 6) if tile == 32 else 0 if fine else 4
    return product.bits <= most


@pytest.mark.parametrize(("kind", "even"), [(kind, False) for kind in tile_model.KINDS] + [("int", True)])
@pytest.mark.parametrize("product", PRODUCTS)
def test_predictions_of_tiles_are_those_of_the_header(product, kind, even):
    product = tile_model.Product(*product, kind, even)
    n, k, m, bits, *_ = product
    is_float, group, zeros = QUESTIONS[kind]
    zeros = 0 if even else zeros
    tiles, blocks = list(tile_model.costs()), list(tile_model.block_costs().items())
    assert len(tiles) == 10 and len(blocks) == 6
    for tile in tiles:
        us = tile_model.native.tile_us(2, tile, [m, n, k], bits, is_float, False, group, zeros, 90, [132, 66])
        if us >= tile_model.native.kLast:
            continue  # no kernel
        ways = [(tile, 0, 0)]
        for (tokens, row_tiles), (most_steps, *_) in blocks:
            for meet in fit_tile_costs.MEET[: 3 if row_tiles == 8 else 2]:
                tasks = -(-n // (16 * row_tiles)) * -(-m // tile)
                fits = tile_model.steps_of_block(k, meet) <= most_steps and tasks <= {1: 132, 2: 66, 4: 30}[meet]
                if tokens == tile and fits and has_blocks(tile, row_tiles, product):
                    ways.append((tile, row_tiles, meet))
        model = fit_tile_costs.model_of([(product, way) for way in ways], tiles, [name for name, _ in blocks])
        constants = {name: torch.tensor(value, dtype=torch.float64) for name, value in fit_tile_costs.exact().items()}
        assert model(constants).min().item() == pytest.approx(us, rel=1e-4), tile


def test_the_model_of_splits_is_that_of_the_header():
    """By the header's own constants, read by what each of them adds to a prediction of the header."""
    splits = [(8192, 8192, 8, 4, (4, 2, 1, 8, 0)), (37888, 3584, 16, 6, (9, 1, 1, 16, 0)),
              (6144, 4096, 16, 1, (6, 2, 2, 16, 0)), (28672, 4096, 8, 8, (16, 1, 1, 16, 0)),
              (2048, 2048, 16, 3, (2, 4, 2, 8, 0)), (8192, 8192, 16, 5, (4, 2, 2, 8, 1))]  # fmt: skip
    text = (tile_model.ROOT / "csrc/cuda/split.h").read_text()
    constants = {name: [] for name in fit_split_costs.START}
    for kind in ("kHalfCosts", "kWholeCosts", "kTwoCosts"):
        literal = (
            text.split(f"SplitCosts {kind} = ")[1].split(";")[0].replace("f", "").replace("{", "[").replace("}", "]")
        )
        for name, value in zip(fit_split_costs.START, json.loads(literal), strict=True):
            constants[name].append(value)
    constants = {name: torch.tensor(value, dtype=torch.float64) for name, value in constants.items()}
    found = fit_split_costs.model_of([((n, k, tokens, bits), split) for n, k, tokens, bits, split in splits])(constants)
    for us, (n, k, tokens, bits, split) in zip(found.tolist(), splits, strict=True):
        by_header = tile_model.native.split_us(
            -(-n // 16),
            -(-k // 128),
            tokens,
            bits,
            [*split[:3], 1, split[3], 0, split[4]],
            [132, 66],
            fit_split_costs.PLAIN,
        )
        assert us == pytest.approx(by_header, rel=1e-4), split


def test_files_become_products_with_the_least_of_their_times(tmp_path):
    rows = [["int4", 64, 128, 32, 48, 7.0], ["int4", 64, 128, 32, 64, 5.0], ["int4", 64, 128, 32, 64, 6.0],
            ["int4", 64, 128, 32, 64, 2, 4.0], ["int4", 64, 128, 32, 0, None, 1.0], ["int4", 64, 128, 16, 16, 1.0],
            ["int4", 64, 128, 32, 64, [8, 1, 1, 1, 16, 0], 4.5], ["int4", 64, 128, 32, 64, [8, 1, 2, 1, 16, 0], 1.0],
            ["int4", 64, 128, 32, 64, [4, 2, 2, 1, 16, 0], 2.0], ["int4", 64, 128, 32, 64, None, 1.0],
            ["int4", 64, 128, 32, 256, None, 9.0], ["float8_e4m3/32", 64, 128, 32, 64, 1.0],
            ["uint8/32", 64, 128, 32, 64, [8, 1, 1, 2, 8, 4], 8.0],
            ["uint8/32", 64, 128, 32, 256, None, 9.0]]  # fmt: skip
    (tmp_path / "tiles").write_text(json.dumps({"rows": rows}))
    of_n64 = {(64, 0, 0): 4.5, (64, 8, 2): 4.0, (64, 4, 2): 2.0}
    assert fit_tile_costs.products_of([str(tmp_path / "tiles")]) == {
        (64, 128, 32, 4, "int", False): {(48, 0, 0): 7.0, (256, 0, 0): 9.0} | of_n64,
        (64, 128, 32, 8, "zeros", False): {(64, 8, 1): 8.0, (256, 0, 0): 9.0},
    }
    # Of kernels for even scales; and what a table's ranges were judged by, where no sweep has the product.
    found = {(64, 128, 300, 4, "int", True): {(256, 0, 0): 9.0, (208, 0, 0): 8.0}}
    found[64, 128, 300, 5, "int", False] = {(256, 0, 0): 9.0, (208, 0, 0): 8.0}
    rows = [[spec, 64, 128, 300, *rest] for spec in ("int4", "uint5") for rest in ((256, None, 9.0), (208, None, 8.0))]
    (tmp_path / "even").write_text(json.dumps({"date": fit_tile_costs.EVEN_SINCE, "rows": rows}))
    judged = [("float16", 300, 160), ("float16", 416, 208), ("float16", 96, 96), ("bfloat16", 512, 208)]
    rows = [
        ["int4", act, 64, 128, 128, "none", m - 9, m, f"w4a16_gemm_sm90_n{tile}", 1.0, "w4a16_gemm_sm90_n256", 2.0, 1]
        for act, m, tile in judged
    ]
    (tmp_path / "table").write_text(json.dumps({"rows": rows}))
    found[64, 128, 416, 4, "int", True] = {(208, 0, 0): 1.0, (256, 0, 0): 2.0}
    assert fit_tile_costs.products_of([str(tmp_path / "even"), str(tmp_path / "table")]) == found
    rows = [["int4", 64, 128, 8, None, 1.0], ["int4", 64, 128, 8, [2, 4, 1, 2, 8, 4], 3.0],
            ["int4", 64, 128, 8, [2, 4, 1, 3, 8, 6], 2.0], ["int4", 64, 128, 8, [16, 1, 1, 2, 16, 0], 4.0]]  # fmt: skip
    (tmp_path / "splits").write_text(json.dumps({"rows": rows}))
    times = {(2, 4, 1, 8, False): 2.0, (16, 1, 1, 16, False): 4.0}
    assert fit_split_costs.products_of([str(tmp_path / "splits")], []) == {(64, 128, 8, 4): times}
    # Half as fast a day: what others took there counts by what the split that both have took.
    rows = [["int4", 64, 128, 8, [16, 1, 1, 2, 16, 0, False], 8.0], ["int4", 64, 128, 8, [2, 4, 1, 3, 8, 0, True], 2.0],
            ["int2", 64, 128, 8, [2, 4, 1, 3, 8, 0, True], 2.0]]  # fmt: skip
    (tmp_path / "beside").write_text(json.dumps({"rows": rows}))
    found = fit_split_costs.products_of([str(tmp_path / "splits")], [str(tmp_path / "beside")])
    assert found == {(64, 128, 8, 4): times | {(2, 4, 1, 8, True): pytest.approx(1.0)}}


def test_fitted_constants_choose_the_faster_candidate_of_a_device_that_is_not_like_the_model():
    """Candidate 0 takes 2 + work, 1 takes 5 + work / 2; the model knows no start but one for both, so that it can't
    predict both, but choose."""
    work = torch.arange(1.0, 17.0, dtype=torch.float64)
    us = torch.stack([2 + work, 5 + work / 2], dim=1).flatten()
    measured = cost_fit.Measured([i // 2 for i in range(32)], us.tolist())
    twice, second = work.repeat_interleave(2), torch.arange(32) % 2

    def model(c):
        return c["start"] + twice * c["step"][second] + 2.0 * second

    found = measured.fit(model, {"start": 1.0, "step": [1.0, 1.0]})
    lost = measured.lost(model(found))
    assert lost.mean() < 0.005 < measured.lost(model({"start": torch.ones(()), "step": torch.ones(2)})).mean()
    assert "16 products" in cost_fit.summary(lost)
    some = measured.fit(model, {"start": 2.0, "step": [1.0, 1.0]}, only={"step"})
    assert some["start"].item() == 2.0 and (some["step"] != 1.0).all()
