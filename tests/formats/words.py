"""What the writers of several formats share: numbers into words, one bit at a time."""

import random

import torch


def stream(numbers: list[int], bits: int, word: int = 32) -> list[int]:
    """Words of one dense bit stream, from the lowest bit of the first."""
    total = 0
    for i, number in enumerate(numbers):
        total |= number << (i * bits)
    count = -(-len(numbers) * bits // word)
    return [(total >> (word * i)) & ((1 << word) - 1) for i in range(count)]


def planes(numbers: list[int], bits: int) -> list[int]:
    """32-bit words in planes, bit by bit: 32 numbers fill ``bits`` words, those of their lowest bits first."""
    cut = {2: [2], 3: [2, 1], 4: [4], 5: [4, 1], 6: [4, 2], 7: [4, 2, 1], 8: [8]}[bits]
    words = [0] * (len(numbers) * bits // 32)
    for i, number in enumerate(numbers):
        begin = 0  # the first bit of the plane, and its first word
        for width in cut:
            word = i // 32 * bits + begin + i % 32 * width // 32
            part = (number >> begin) & ((1 << width) - 1)
            words[word] |= part << (i % 32 * width % 32)
            begin += width
    return words


def padded(numbers: list[int], bits: int) -> list[int]:
    """32-bit words of 32 // bits whole numbers each."""
    per = 32 // bits
    parts = [numbers[i : i + per] for i in range(0, len(numbers), per)]
    return [sum(number << (i * bits) for i, number in enumerate(part)) for part in parts]


def int32(rows: list[list[int]]) -> torch.Tensor:
    """Words as torch holds them: from 2^31 on they are negative."""
    return torch.tensor([[w - (1 << 32) if w >> 31 else w for w in row] for row in rows], dtype=torch.int32)


def transposed(rows: list[list]) -> list[list]:
    return [list(column) for column in zip(*rows)]


def table(rows: int, columns: int, low: int, high: int, seed: int = 0) -> list[list[int]]:
    """Random whole numbers low..high."""
    pick = random.Random(seed)
    return [[pick.randint(low, high) for _ in range(columns)] for _ in range(rows)]


def floats(rows: int, columns: int, dtype=torch.float16, seed: int = 0) -> torch.Tensor:
    """Random scales, positive and negative, no round numbers."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, columns, generator=generator) / 16).to(dtype)


def only(fmt, tensors: dict[str, torch.Tensor], prefix: str = "m.up"):
    """The weight of a format's only layer, given its tensors by role."""
    keys = {f"{prefix}{fmt.joint}{role}": tensor for role, tensor in tensors.items()}
    (layer,) = fmt.layers(keys)
    assert layer.name == prefix
    return fmt.decode(layer, {role: keys[key] for role, key in layer.tensors.items()})
