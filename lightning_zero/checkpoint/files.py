"""Tensors to files and back, in one pass over the bytes and without copies of whole tensors."""

from __future__ import annotations

import contextlib
import ctypes
import os
import zlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from lightning_zero.checkpoint import envelope
from lightning_zero.checkpoint.checksum import (
    BLOCK,
    FileRecord,
    RunningChecksum,
    crc_of_tail,
)
from lightning_zero.checkpoint.failures import CheckpointError, CorruptCheckpointError

# What is staged at once of tensors whose memory is not what the file holds: on another device,
# strided, of another dtype.
_STAGE = 8 << 20
# Tensors that are copied next to their envelopes, to be summed and written at once.
_SMALL = 32 << 10
# How much is read or written at once: it is still in the processor's cache when it is summed.
_RUN = 256 << 10
# From how many blocks on a second thread helps to read them. Checksums cost about as much time as a
# fast disk, and each thread sums what it has just read.
_SHARED = 4
# How much is written before the disk is told to begin.
_FLUSH = 64 << 20


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, not copied. Valid while the tensor lives."""
    nbytes = tensor.numel() * tensor.element_size()
    if not nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_char * nbytes).from_address(tensor.data_ptr())).cast("B")


def sync(path: Path) -> None:
    """Wait until the disk has a file, or the names in a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_file(path: Path, data: bytes) -> FileRecord:
    """Write a small file durably."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord.of(data)


class TensorFile:
    """A new file, to which tensors are written one after the other. A context manager; the file is
    durable once the context has been left without an error.

    Attributes:
        record: size and checksums, once the file is complete.
    """

    record: FileRecord

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("xb", buffering=_RUN)
        self._checksum = RunningChecksum()
        self._flusher: ThreadPoolExecutor | None = None
        self._flushing: Future[None] | None = None
        self._unflushed = 0

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            if kind is None:
                self._file.flush()
                self._wait_for_flush()
                os.fsync(self._file.fileno())
                self.record = self._checksum.finish()
        finally:
            if self._flusher is not None:
                self._flusher.shutdown()
            self._file.close()

    def write(self, tensor: Tensor) -> tuple[int, int]:
        """Append a tensor.

        Returns:
            Where its item begins in the file, and how long the item is.
        """
        shape, dtype = tuple(tensor.shape), tensor.dtype
        begin, nbytes = self._checksum.nbytes, tensor.numel() * tensor.element_size()
        head = envelope.head(shape, dtype)
        if nbytes <= _SMALL:
            (piece,) = row_major_pieces(tensor)
            data = memory_of(piece)
            tail = envelope.tail(shape, dtype, zlib.crc32(data))
            self._append(memoryview(b"".join((head, data, tail))))
        else:
            self._append(memoryview(head))
            before = self._checksum.crc
            for piece in row_major_pieces(tensor):
                self._append(memory_of(piece))
            crc = crc_of_tail(before, self._checksum.crc, nbytes)
            self._append(memoryview(envelope.tail(shape, dtype, crc)))
        return begin, self._checksum.nbytes - begin

    def _append(self, data: memoryview) -> None:
        for start in range(0, len(data), _RUN):
            part = data[start : start + _RUN]
            self._checksum.update(part)
            self._file.write(part)
            self._unflushed += len(part)
            if self._unflushed >= _FLUSH:
                # The disk works while the next bytes are summed and copied to its cache.
                self._file.flush()
                self._wait_for_flush()
                self._flusher = self._flusher or ThreadPoolExecutor(1)
                self._flushing = self._flusher.submit(_flush, self._file.fileno())
                self._unflushed = 0

    def _wait_for_flush(self) -> None:
        """Raises what the disk has to complain of."""
        if self._flushing is not None:
            self._flushing.result()


def row_major_pieces(tensor: Tensor) -> Iterator[Tensor]:
    """A tensor as contiguous CPU tensors, in row-major order.

    The tensor itself if it is one, else copies of bounded size.
    """
    tensor = tensor.detach()
    if tensor.device.type == "cpu" and tensor.is_contiguous() and not _is_lazy(tensor):
        yield tensor
    elif tensor.numel() * tensor.element_size() <= _STAGE:
        yield tensor.contiguous().cpu().resolve_conj().resolve_neg()
    else:
        dim = next(dim for dim, size in enumerate(tensor.shape) if size > 1)
        for half in tensor.tensor_split(2, dim):
            yield from row_major_pieces(half)


def _flush(handle: int) -> None:
    getattr(os, "fdatasync", os.fsync)(handle)


def _is_lazy(tensor: Tensor) -> bool:
    return tensor.is_conj() or tensor.is_neg()


class CheckedFile:
    """A file of a checkpoint, all that is read of which is checked. A context manager.

    Raises:
        CorruptCheckpointError: if it is missing, has another size, or other bytes.
    """

    def __init__(self, path: Path, record: FileRecord) -> None:
        self._path, self._record = path, record
        try:
            self._handle = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            raise CorruptCheckpointError(f"'{path}' is missing") from None
        self._edge: tuple[int, memoryview] = (-1, memoryview(b""))
        self._helper: ThreadPoolExecutor | None = None

    def __enter__(self) -> CheckedFile:
        check_size(self._path, os.fstat(self._handle).st_size, self._record)
        return self

    def __exit__(self, *failure: object) -> None:
        if self._helper is not None:
            self._helper.shutdown()
        os.close(self._handle)

    def read_into(self, start: int, out: memoryview) -> None:
        """Read from byte ``start`` on."""
        stop = start + len(out)
        if not 0 <= start <= stop <= self._record.nbytes:
            raise CorruptCheckpointError(f"'{self._path}' does not hold bytes {start} .. {stop}")
        whole: deque[tuple[int, memoryview]] = deque()
        position = start
        while position < stop:
            index = position // BLOCK
            begin, end = index * BLOCK, min((index + 1) * BLOCK, self._record.nbytes)
            into = out[position - start : min(stop, end) - start]
            if len(into) == end - begin:
                whole.append((index, into))
            else:
                into[:] = self._edge_block(index, end - begin)[position - begin :][: len(into)]
            position += len(into)
        self._read_blocks(whole)

    def read_tensor(
        self, start: int, stride: tuple[int, ...], dtype: torch.dtype, target: Tensor
    ) -> None:
        """Fill a tensor, of any strides, dtype and device, with elements of the file.

        Args:
            start: the byte at which its first element is.
            stride: how far apart elements are in the file, per dimension.
            dtype: of the elements in the file.
            target: what is filled, of the shape that is wanted.
        """
        if not target.numel():
            return
        lengths = tuple(target.shape)
        reach = sum((n - 1) * step for n, step in zip(lengths, stride, strict=True)) + 1
        is_run = reach == target.numel()
        if is_run and target.dtype == dtype and target.device.type == "cpu" and _is_plain(target):
            self.read_into(start, memory_of(target))
        elif reach * dtype.itemsize <= _STAGE:
            staged = torch.empty(reach, dtype=dtype)
            self.read_into(start, memory_of(staged))
            target.copy_(staged.as_strided(lengths, stride))
        else:
            # the dimension whose parts lie farthest apart
            dim = max((d for d, n in enumerate(lengths) if n > 1), key=lambda d: stride[d])
            half = lengths[dim] // 2
            self.read_tensor(start, stride, dtype, target.narrow(dim, 0, half))
            start += half * stride[dim] * dtype.itemsize
            self.read_tensor(start, stride, dtype, target.narrow(dim, half, lengths[dim] - half))

    def _read_blocks(self, blocks: deque[tuple[int, memoryview]]) -> None:
        helper: Future[None] | None = None
        if len(blocks) >= _SHARED:
            self._helper = self._helper or ThreadPoolExecutor(1)
            helper = self._helper.submit(self._read_next, blocks)
        try:
            self._read_next(blocks)
        finally:
            if helper is not None:
                helper.result()

    def _read_next(self, blocks: deque[tuple[int, memoryview]]) -> None:
        """Take blocks until there are none."""
        with contextlib.suppress(IndexError):
            while True:
                self._read_block(*blocks.popleft())

    def _edge_block(self, index: int, nbytes: int) -> memoryview:
        # Small tensors share a block, so the last one is kept.
        if self._edge[0] != index:
            data = memoryview(bytearray(nbytes))
            self._read_block(index, data)
            self._edge = (index, data)
        return self._edge[1]

    def _read_block(self, index: int, out: memoryview) -> None:
        crc = self._record.before(index)
        position = 0
        while position < len(out):
            part = out[position : position + _RUN]
            taken = os.preadv(self._handle, [part], index * BLOCK + position)
            if not taken:
                raise CorruptCheckpointError(f"'{self._path}' has become shorter")
            crc = zlib.crc32(part[:taken], crc)
            position += taken
        if crc != self._record.blocks[index]:
            where = f"bytes {index * BLOCK} .. {index * BLOCK + len(out)}"
            raise CorruptCheckpointError(
                f"'{self._path}' is damaged: {where} are not what was written"
            )


def _is_plain(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and not _is_lazy(tensor)


def check_size(path: Path, nbytes: int, record: FileRecord) -> None:
    """Raise :class:`CorruptCheckpointError` if a file does not have the size that was written."""
    if nbytes != record.nbytes:
        raise CorruptCheckpointError(
            f"'{path}' has {nbytes} bytes, but {record.nbytes} were written"
        )


def read_small_file(path: Path, record: FileRecord | None) -> bytes:
    """A whole small file; checked if there is a record of it."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise CorruptCheckpointError(f"'{path}' is missing") from None
    except IsADirectoryError as error:
        raise CheckpointError(str(error)) from None
    if record is not None:
        check_size(path, len(data), record)
        if FileRecord.of(data) != record:
            raise CorruptCheckpointError(f"'{path}' is damaged: it is not what was written")
    return data
