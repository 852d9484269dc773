"""Checksums of files that can be checked block by block.

[Note: running checksums] For every file the manifest keeps the running crc32 after each block of a
MiB. The last one is the crc32 of the file, which any tool can check. And as a crc32 can be
continued from any value, one block can be checked without its predecessors: continue from the value
before it and compare with the value after it. So a rank that reads a part of a file checks what it
reads and nothing else.
"""

from __future__ import annotations

import functools
import zlib
from dataclasses import dataclass

BLOCK = 1 << 20
_POLYNOMIAL = 0xEDB88320


@dataclass(frozen=True)
class FileRecord:
    """What is known of a file.

    Attributes:
        nbytes: its size.
        blocks: the running crc32 after each block (the last block may be shorter).
    """

    nbytes: int
    blocks: tuple[int, ...]

    @property
    def crc32(self) -> int:
        """Of the whole file."""
        return self.blocks[-1] if self.blocks else 0

    @classmethod
    def of(cls, data: bytes) -> FileRecord:
        """The record of a small file."""
        checksum = RunningChecksum()
        checksum.update(memoryview(data))
        return checksum.finish()

    def before(self, index: int) -> int:
        """The running crc32 where a block begins."""
        return self.blocks[index - 1] if index else 0


class RunningChecksum:
    """The checksum of a file while it is written from its beginning to its end."""

    def __init__(self) -> None:
        self.crc = 0
        self.nbytes = 0
        self._blocks: list[int] = []

    def update(self, data: memoryview) -> None:
        """Go on with the next bytes of the file."""
        position = 0
        while position < len(data):
            taken = min(BLOCK - self.nbytes % BLOCK, len(data) - position)
            self.crc = zlib.crc32(data[position : position + taken], self.crc)
            self.nbytes += taken
            position += taken
            if self.nbytes % BLOCK == 0:
                self._blocks.append(self.crc)

    def finish(self) -> FileRecord:
        """The record of the file."""
        tail = [self.crc] if self.nbytes % BLOCK else []
        return FileRecord(self.nbytes, (*self._blocks, *tail))


def crc_of_tail(before: int, after: int, nbytes: int) -> int:
    """The crc32 of the last ``nbytes`` bytes alone, from the running ones before and after them."""
    return after ^ _multiply(_power(8 * nbytes), before)


def _multiply(a: int, b: int) -> int:
    """The product of two polynomials modulo crc32's, the lowest power in the highest bit."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = (b >> 1) ^ (_POLYNOMIAL if b & 1 else 0)
    return product


@functools.lru_cache(maxsize=4096)
def _power(exponent: int) -> int:
    """The polynomial ``x ** exponent`` modulo crc32's."""
    result, square = 1 << 31, 1 << 30
    while exponent:
        if exponent & 1:
            result = _multiply(square, result)
        square = _multiply(square, square)
        exponent >>= 1
    return result
