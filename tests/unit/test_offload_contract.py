"""What every offload device promises, whatever it is made of."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_zero.offload import movers
from lightning_zero.offload.device import OffloadDevice, Slab
from lightning_zero.offload.disk import Disk
from lightning_zero.offload.host import HostMemory

NUMELS = [0, 1, 7, 1023, 4096, 70_000]
DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float64,
    torch.complex64,
    torch.int64,
    torch.uint8,
    torch.bool,
]
SLABS = st.lists(
    st.tuples(st.sampled_from(NUMELS), st.sampled_from(DTYPES)), min_size=1, max_size=4
)
OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "overwrite",
                "overwrite",
                "change",
                "look",
                "look",
                "start",
                "release",
                "wait",
                "renew",
            ]
        ),
        st.integers(0, 3),
    ),
    max_size=40,
)
BUDGET = 100_000

Maker = Callable[[Path], OffloadDevice]
DEVICES: dict[str, Maker] = {
    "cpu": lambda folder: HostMemory(),
    "direct": lambda folder: Disk(folder, BUDGET),
    "plain": lambda folder: Disk(folder, BUDGET, use_direct=False),
    "one thread": lambda folder: Disk(folder, BUDGET, num_threads=1),
}


@contextmanager
def opened(kind: str) -> Iterator[OffloadDevice]:
    # small chunks: most slabs of these tests are moved by several threads
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(movers, "CHUNK_BYTES", 16 << 10),
    ):
        device = DEVICES[kind](Path(folder))
        try:
            yield device
        finally:
            device.close()
        assert not list(Path(folder).iterdir())


def raw(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def content(slab: Slab, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(
        0, 2 if slab.dtype == torch.bool else 256, (slab.nbytes,), generator=generator
    )
    return values.to(torch.uint8)


class Model:
    """A device next to what its slabs should hold."""

    def __init__(self, device: OffloadDevice, kinds: list[tuple[int, torch.dtype]]) -> None:
        self.device, self.kinds = device, kinds
        self.slabs = [self._make(index) for index in range(len(kinds))]
        self.expected: list[Tensor | None] = [None] * len(kinds)
        self.seed = 0

    def _make(self, index: int) -> Slab:
        numel, dtype = self.kinds[index]
        return self.device.make_slab(numel, dtype, f"slab {index}")

    def overwrite(self, index: int) -> None:
        slab = self.slabs[index]
        self.seed += 1
        expected = content(slab, self.seed)
        target = slab.prepare()
        assert target.shape == (slab.numel,)
        assert target.dtype == slab.dtype
        if slab.numel:
            raw(target).copy_(expected)
        slab.start_store()
        self.expected[index] = expected

    def look(self, index: int) -> None:
        slab, expected = self.slabs[index], self.expected[index]
        if expected is None:
            with pytest.raises(RuntimeError, match=f"slab {index}.*nothing was ever stored"):
                slab.load()
        else:
            assert torch.equal(raw(slab.load()), expected)

    def change(self, index: int) -> None:
        slab, expected = self.slabs[index], self.expected[index]
        if expected is not None:
            content_bytes = raw(slab.load())
            assert torch.equal(content_bytes, expected)
            content_bytes.bitwise_xor_(torch.tensor(1, dtype=torch.uint8))
            slab.start_store()
            self.expected[index] = expected ^ 1

    def start(self, index: int) -> None:
        if self.expected[index] is not None:
            self.slabs[index].start_load()

    def release(self, index: int) -> None:
        self.slabs[index].release()

    def wait(self, index: int) -> None:
        self.device.wait()

    def renew(self, index: int) -> None:
        self.slabs[index].close()
        self.slabs[index].close()
        self.slabs[index] = self._make(index)
        self.expected[index] = None


@pytest.mark.parametrize("kind", DEVICES)
@given(kinds=SLABS, operations=OPERATIONS)
def test_a_slab_holds_what_was_stored_last(
    kind: str, kinds: list[tuple[int, torch.dtype]], operations: list[tuple[str, int]]
) -> None:
    with opened(kind) as device:
        model = Model(device, kinds)
        for name, index in operations:
            getattr(model, name)(index % len(kinds))
        assert device.resting_bytes == sum(slab.nbytes for slab in model.slabs)
        for index in range(len(kinds)):
            model.look(index)
            model.release(index)
        device.wait()
        assert device.staging_bytes <= BUDGET


@pytest.mark.parametrize("kind", DEVICES)
def test_release_keeps_what_was_stored_and_forgets_what_was_only_prepared(kind: str) -> None:
    with opened(kind) as device:
        slab = device.make_slab(9, torch.float32, "moment")
        slab.release()
        slab.prepare()
        slab.release()
        with pytest.raises(RuntimeError, match=r"'moment'.*nothing was ever stored"):
            slab.start_load()
        slab.prepare().fill_(4)
        slab.start_store()
        slab.load()
        slab.release()
        slab.release()
        assert slab.load().tolist() == [4.0] * 9


@pytest.mark.parametrize("kind", DEVICES)
def test_the_order_of_calls_is_checked(kind: str) -> None:
    with opened(kind) as device:
        slab = device.make_slab(9, torch.float32, "moment")
        with pytest.raises(RuntimeError, match="'moment'"):
            slab.start_store()
        with pytest.raises(ValueError, match="-1"):
            device.make_slab(-1, torch.float32, "moment")
        slab.prepare()
        slab.close()
        slab.release()
        for use in (slab.load, slab.start_load, slab.prepare, slab.start_store):
            with pytest.raises(RuntimeError, match=r"'moment'.* closed"):
                use()
        assert device.resting_bytes == 0


@pytest.mark.parametrize("kind", DEVICES)
def test_a_closed_device_holds_nothing(kind: str) -> None:
    with opened(kind) as device:
        slabs = [device.make_slab(numel, torch.float32, "moment") for numel in NUMELS]
        for slab in slabs[1:]:
            slab.prepare().zero_()
        slabs[2].start_store()
        assert device.resting_bytes == 4 * sum(NUMELS)
        device.close()
        device.close()
        slabs[3].close()
        assert device.resting_bytes == device.staging_bytes == 0
        with pytest.raises(RuntimeError, match="closed"):
            device.make_slab(1, torch.float32, "moment")
        with pytest.raises(RuntimeError, match="closed"):
            slabs[1].load()


@pytest.mark.parametrize("kind", DEVICES)
def test_content_is_aligned_for_every_dtype(kind: str) -> None:
    with opened(kind) as device:
        for dtype in DTYPES:
            tensor = device.make_slab(7, dtype, "moment").prepare()
            assert tensor.data_ptr() % 16 == 0
            assert tensor.is_contiguous()
