"""Finds the constants of a model of times, from times of several candidates (tiles, splits) for each of many products.

First those that predict times best: the least squares of logarithms, where what is far slower than the fastest
candidate counts little. Then those that choose best: what is lost to the fastest candidate by one drawn from a softmax
of the predictions, which is smooth where a choice is not, with the squares beside it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent

Constants = dict[str, torch.Tensor]  # natural logarithms, so that they stay positive
Model = Callable[
    [Constants], torch.Tensor
]  # predicts the microseconds of every candidate, from the constants themselves

SLOWER = 5.0  # a candidate that takes 1 + s of the fastest one's time counts exp(-SLOWER * s)
SHARP = 40.0  # of the softmax: candidates 1 / SHARP apart differ by e
SQUARES = 2.0  # what the mean square counts beside what is lost


TWELVE = (
    "6144x4096 4096x14336 28672x4096 10240x8192 8192x28672 7168x8192 8192x3584 4608x3584 37888x3584 55296x5120 "
    "5120x27648 3584x14336"
)
#: What counts more than once: shapes that the targets are for, and the smallest ones, of which few splits are good.
COUNTS = {tuple(map(int, shape.split("x"))): 3 for shape in TWELVE.split()}
COUNTS |= {(4096, 4096): 6, (8192, 8192): 8, (57344, 8192): 5, (2048, 2048): 8, (2048, 6144): 4}


class Measured:
    """Candidates side by side: ``product[i]`` is the number of candidate i's product, ``us[i]`` what it took.
    ``counts``: how often a product counts."""

    def __init__(self, product: list[int], us: list[float], counts: list[int] | None = None):
        self.product, self.us = torch.tensor(product), torch.tensor(us, dtype=torch.float64)
        self.count = max(product) + 1
        self.counts = torch.tensor(counts or [1] * self.count, dtype=torch.float64)
        self.least = self._each(self.us, "amin")
        self.slower = self.us / self.least[self.product] - 1

    def _each(self, values: torch.Tensor, how: str) -> torch.Tensor:
        start = torch.full((self.count,), torch.inf if how == "amin" else -torch.inf, dtype=torch.float64)
        return start.scatter_reduce(0, self.product, values, how)

    def lost(self, predicted: torch.Tensor) -> torch.Tensor:
        """For each product, how much slower the candidate with the least prediction is than the fastest one."""
        chosen = predicted <= self._each(predicted, "amin")[self.product]
        return self._each(torch.where(chosen, self.slower, -torch.inf), "amax")

    def _softly_lost(self, predicted: torch.Tensor, sharp: float) -> torch.Tensor:
        score = -sharp * predicted.log()
        share = (score - self._each(score.detach(), "amax")[self.product]).exp()
        total = torch.zeros(self.count, dtype=torch.float64).scatter_add(0, self.product, share)
        return (share / total[self.product] * self.slower * self.counts[self.product]).sum() / self.counts.sum()

    def fit(
        self, model: Model, start: dict[str, object], steps: int = 800, sharp: float = SHARP,
        axes: dict[str, int] | None = None, only: set[str] | None = None,
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        """The constants, found by Adam from those of ``start`` (numbers, or nested lists of them). axes: which one of
        some constants counts kinds of blocks; those of the last kind are found then, and all others stay. only: names
        of constants that are found; all others stay."""
        begin = {name: torch.as_tensor(value, dtype=torch.float64).log() for name, value in start.items()}
        logs = {name: value.clone().requires_grad_() for name, value in begin.items()}

        def own(name: str) -> torch.Tensor:
            if only is not None and name not in only:
                return begin[name]
            if axes is None:
                return logs[name]
            moves = torch.zeros_like(begin[name], dtype=torch.bool)
            if name in axes:
                moves.select(axes[name], -1).fill_(True)
            return torch.where(moves, logs[name], begin[name])

        counts = (-SLOWER * self.slower).exp() * self.counts[self.product]
        for rate, chooses in ((0.03, False), (0.01, True)):
            optimizer = torch.optim.Adam(list(logs.values()), lr=rate)
            for _ in range(steps):
                optimizer.zero_grad()
                predicted = model({name: own(name).exp() for name in logs})
                square = (counts * (predicted.log() - self.us.log()) ** 2).sum() / counts.sum()
                (SQUARES * square + self._softly_lost(predicted, sharp) if chooses else square).backward()
                optimizer.step()
        return {name: own(name).detach().exp() for name in logs}


def beside(found: dict, others: dict) -> dict:
    """Times of candidates by product, and those of others, each product's by what the candidates that both have took:
    another device, or day, is a little slower or faster. A product that ``found`` has no times of stays as it is; one
    without such candidates is left out."""
    merged = others | found
    for product in others.keys() & found.keys():
        known, times = found[product], others[product]
        both = [way for way in times if way in known]
        if both:
            drift = sum(math.log(known[way] / times[way]) for way in both) / len(both)
            merged[product] = {way: us * math.exp(drift) for way, us in times.items()} | known
    return merged


def kind_of(split: tuple[int, ...]) -> int:
    """The kind of blocks of a split, the numbers of ``struct Split``: of half of a multiprocessor, of all of it, two of
    half of it on each."""
    return 2 if split[6] else int(split[4] == 16)


def summary(lost: torch.Tensor) -> str:
    return (
        f"{len(lost)} products, {lost.mean():.2%} lost, {lost.max():.0%} at worst, "
        f"within 5% in {(lost < 0.05).double().mean():.1%}"
    )


def constants(header: str, name: str) -> list:
    """Those of a C++ initializer."""
    text = re.sub(r"//.*", "", (ROOT / header).read_text())
    body = re.sub(r",\s*\}", "}", re.search(rf"{name} = (\{{.*?\}});", text, re.DOTALL).group(1))
    return json.loads(re.sub(r"(\d\.\d*(e-?\d+)?|\d+e-?\d+)f", r"\1", body).replace("{", "[").replace("}", "]"))


def all_kinds(header: str, *names: str) -> list[torch.Tensor]:
    """Each constant of several kinds of blocks, side by side."""
    kinds = [constants(header, name) for name in names]
    return [torch.tensor(each, dtype=torch.float64) for each in zip(*kinds, strict=True)]
