"""A progress bar on stderr, without dependencies."""

from __future__ import annotations

import sys
import time


class Progress:
    """Counts steps of a known total: one line redrawn on a terminal, elsewhere a line when the label changes."""

    def __init__(self, total: int, stream=None):
        self.total, self.done, self.label = max(1, total), 0, ""
        self.stream = stream or sys.stderr
        self.began = self.drawn = time.monotonic()
        self.live = self.stream.isatty()

    def start(self, label: str) -> None:
        """Name what the next steps belong to."""
        self.label = label
        if self.live:
            self._draw()
        else:
            print(f"{self.done / self.total:4.0%}  {label}", file=self.stream, flush=True)

    def step(self, count: int = 1) -> None:
        """Count finished steps; draws at most 20 times a second."""
        self.done = min(self.total, self.done + count)
        if self.live and time.monotonic() - self.drawn > 0.05:
            self._draw()

    def note(self, done: int, total: int, label: str) -> None:
        """Show what goes on inside a step (only on a terminal): `label`, number `done` of `total`."""
        self.label = f"{done}/{total} {label}"
        self.step(0)

    def _draw(self) -> None:
        self.drawn = time.monotonic()
        filled = 30 * self.done // self.total
        bar = "#" * filled + "." * (30 - filled)
        seconds = self.drawn - self.began
        self.stream.write(f"\r\033[K[{bar}] {self.done / self.total:4.0%}  {seconds:4.0f} s  {self.label}")
        self.stream.flush()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception) -> None:
        if self.live:
            self.stream.write("\r\033[K")
            self.stream.flush()
