"""What may follow the product before it is rounded to y's type: one row each, in the order of its id."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Epilogue:
    """One epilogue: ``formula`` states, in fp32, what is stored for the accumulated product ``acc``."""

    name: str
    formula: str


EPILOGUES: tuple[Epilogue, ...] = (
    Epilogue("none", "acc"),
    Epilogue("bias", "acc + bias[n]"),
)
