"""Copies between the device that computes the model and host memory.

[Note: stream order] On CUDA uploads and downloads run on streams of their own. A copy begins after
everything that the calling thread's current stream was given before, and its :class:`Pending`
orders the current stream (uploads) or the host (downloads) after it. Tensors of the device that a
copy in flight reads are kept until it has ended. On the CPU every copy is done at once.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_zero.pending import Pending

_SLOT_BYTES = 8 << 20
_NUM_SLOTS = 3
_MAX_DOWNLOADS = 3


class Transfers:
    """Copies to and from ``device``.

    Args:
        device: the device that computes the model.
        pins: whether page-locked staging memory of some megabytes may be used for uploads from
            pageable memory; without it such uploads block the calling thread.

    Attributes:
        device: see above.
        uploaded_bytes, downloaded_bytes: payload so far, also where the device is the host.
        peak_pinned_bytes: page-locked staging memory.
    """

    def __init__(self, device: torch.device, *, pins: bool = True) -> None:
        self._is_cuda = device.type == "cuda"
        self.device, self._pins = device, pins and self._is_cuda
        self.uploaded_bytes = self.downloaded_bytes = self.peak_pinned_bytes = 0
        self._up: Any = torch.cuda.Stream(device) if self._is_cuda else None
        self._down: Any = torch.cuda.Stream(device) if self._is_cuda else None
        self._slots: deque[tuple[Tensor, Any]] = deque()
        self._slots_lock = threading.Lock()  # weights are uploaded while others are being stepped
        self._reading: deque[tuple[Any, Tensor, Tensor]] = deque()

    @property
    def is_on_host(self) -> bool:
        """Whether the device's memory is host memory."""
        return not self._is_cuda

    def now(self) -> Any:
        """A point in the current stream, for ``after``; None on the CPU."""
        return torch.cuda.current_stream(self.device).record_event() if self._is_cuda else None

    def barrier(self) -> Any:
        """A point after everything in the current stream and all uploads so far; None on the CPU.

        After it nobody reads the sources of these uploads any more.
        """
        if not self._is_cuda:
            return None
        self._up.wait_event(self.now())
        return self._up.record_event()

    @contextlib.contextmanager
    def uploading(self, after: Any = None) -> Iterator[None]:
        """Work of the device that is given inside comes after earlier uploads and ``after``."""
        if not self._is_cuda:
            yield
            return
        self._up.wait_event(self.now() if after is None else after)
        with torch.cuda.stream(self._up):
            yield

    def upload(self, target: Tensor, source: Tensor, after: Any = None) -> Pending:
        """Copy ``source``, in host memory, to ``target`` on the device, cast to its dtype.

        Both are 1-D. ``source`` may be changed at once unless it is page-locked: then only after
        the wait.
        """
        self.uploaded_bytes += target.numel() * target.element_size()
        if not self._is_cuda:
            target.copy_(source)
            return Pending()
        with self.uploading(after):
            if source.is_pinned() and source.dtype == target.dtype:
                target.copy_(source, non_blocking=True)
            elif self._pins:
                with self._slots_lock:
                    self._upload_in_slots(target, source)
            else:
                target.copy_(source.to(target.dtype))
            event = self._up.record_event()
        return Pending(lambda: torch.cuda.current_stream(self.device).wait_event(event))

    def _upload_in_slots(self, target: Tensor, source: Tensor) -> None:
        """Through page-locked memory, piece by piece: the next is filled while one is sent."""
        step = _SLOT_BYTES // target.element_size()
        for start in range(0, target.numel(), step):
            piece = target[start : start + step]
            raw, event = self._next_slot()
            event.synchronize()
            slot = raw.view(target.dtype)[: piece.numel()]
            slot.copy_(source[start : start + step])
            piece.copy_(slot, non_blocking=True)
            event.record(self._up)

    def _next_slot(self) -> tuple[Tensor, Any]:
        if len(self._slots) < _NUM_SLOTS:
            raw = torch.empty(_SLOT_BYTES, dtype=torch.uint8, pin_memory=True)
            self._slots.appendleft((raw, torch.cuda.Event()))
            self.peak_pinned_bytes += _SLOT_BYTES
        self._slots.rotate(-1)
        return self._slots[-1]

    def download(self, target: Tensor, source: Tensor) -> Pending:
        """Copy ``source``, on the device, to ``target`` in host memory, cast to its dtype.

        ``source`` must not be changed any more; it is kept as long as it is needed. Copies to
        page-locked memory of the same dtype go on in the background; others block.
        """
        self.downloaded_bytes += source.numel() * source.element_size()
        if not self._is_cuda:
            target.copy_(source)
            return Pending()
        self._down.wait_event(self.now())
        with torch.cuda.stream(self._down):
            same = source.to(target.dtype)
            target.copy_(same, non_blocking=target.is_pinned())
            event = self._down.record_event()
        self._reading.append((event, source, same))
        # a device that computes faster than it sends must not fill its memory with what waits
        reading = self._reading
        while reading and (len(reading) > _MAX_DOWNLOADS or reading[0][0].query()):
            reading.popleft()[0].synchronize()
        return Pending(event.synchronize)

    def close(self) -> None:
        """Wait for all copies and drop the staging memory."""
        if self._is_cuda:
            self._up.synchronize()
            self._down.synchronize()
        self._slots.clear()
        self._reading.clear()
