"""One dtype, one storage, many parameters.

[Note: who owns storage] A :class:`FlatBuffer` owns ``full``, a 1-D tensor over the flat buffer of a
unit, and ``shard``, this rank's slice of it. Memory is dropped, never emptied: a gather takes new
memory, and to free it means to let go of it, so whatever somebody still holds (a state dict, a
closure, a traceback, what a checkpointed block has saved) stays alive with the values of its time.
What autograd saves for backward would hold all weights from forward to backward; it is remembered
by its place instead ([Note: how a unit is noticed]). ``ParamHandle.view`` is made anew by every
gather. Whoever frees the memory first puts the placeholder into ``param.data``.

 - replicated weights: ``full`` always has its memory and ``shard`` is a view of it;
 - sharded weights: ``shard`` has memory of its own and ``full`` has memory only while the unit is
   gathered;
 - with master weights ``shard`` has memory of its own and a wider dtype, and is rounded into this
   rank's slice of ``full`` when a gather begins. There is no shard of rounded weights.
 - offloaded, ``shard`` rests elsewhere; then there may be one of model weights besides, ``model``,
   which is what gathers read ([Note: where shards rest]).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.comm.collectives import Collectives, OwnedRange
from lightning_zero.engine.dtypes import ParamDtypes
from lightning_zero.engine.layout import FlatLayout
from lightning_zero.engine.offload import Offload, Places
from lightning_zero.engine.shard import HeldShard, RestingShard, Shard
from lightning_zero.pending import Pending

# Kernels run over two vectors of 64 bytes at a time and round the elements of an incomplete pair
# differently in some dtypes. Parameters and shards that start at multiples of this get the same
# roundings as whole parameters.
ALIGNMENT_BYTES = 128


def dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """The strides of a tensor if it fills its memory without holes (in any order of dimensions),
    else row-major ones.
    """
    by_stride = sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1)
    expected = 1
    for stride, size in by_stride:
        if stride != expected:
            return torch.empty(tensor.shape, device="meta").stride()
        expected *= size
    return tensor.stride()


def make_placeholder(param: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of the parameter's shape that takes no memory and reads as NaN (0 for integers)."""
    if not param.numel():
        return torch.empty_like(param, dtype=dtype, device=device, requires_grad=False)
    fill = float("nan") if param.is_floating_point() or param.is_complex() else 0
    shape = (1,) if param.dim() else ()
    return torch.full(shape, fill, dtype=dtype, device=device).expand(param.shape)


class ParamHandle:
    """A parameter of the user's module and its place in a flat buffer.

    Attributes:
        param: the user's own object, which stays in the module for ever.
        fqn: its dotted name (the first one, if it has several).
        plain_class, guard_class: the class that it has while the module may use it directly, and at
            all other times.
        buffer, index: the flat buffer and the slot in it.
        stride: the strides with which it lies there.
        view: its full value as a view of ``buffer.full``, with the parameter's shape and strides;
            ``resting`` while the full value is not there.
        resting: the same without memory, on the meta device.
        placeholder: what ``param.data`` is while the full value is not there.
    """

    __slots__ = (
        "buffer",
        "fqn",
        "guard_class",
        "index",
        "param",
        "placeholder",
        "plain_class",
        "resting",
        "stride",
        "view",
    )

    def __init__(
        self, param: nn.Parameter, fqn: str, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.param = param
        self.fqn = fqn
        self.plain_class = self.guard_class = type(param)
        self.placeholder = make_placeholder(param, dtype, device)
        self.buffer: FlatBuffer
        self.index: int
        self.stride: tuple[int, ...]
        self.view: Tensor
        self.resting: Tensor

    def strided(self, flat: Tensor, offset: int) -> Tensor:
        """The parameter as a view of ``flat``, where its elements begin at ``offset``."""
        return flat.as_strided(self.placeholder.shape, self.stride, flat.storage_offset() + offset)

    def set_data(self, value: Tensor) -> None:
        """``param.data = value``, whatever class the parameter has at the moment."""
        with torch._C.DisableTorchFunctionSubclass():
            self.param.data = value

    def adopt_data(self) -> Tensor:
        """The parameter's present value, also where its ``data`` were replaced."""
        with torch._C.DisableTorchFunctionSubclass():
            data = self.param.data
            if data.data_ptr() != self.view.data_ptr():
                self.view.copy_(data)
                self.param.data = self.view
        return self.view


class FlatBuffer:
    """The parameters of one unit that share dtypes and began with the same ``requires_grad``.

    Built from full parameters; afterwards ``param.data`` is a view of ``full``. Collective: rank
    0's values are sent to all ranks.

    Args:
        index: number of the buffer, the same on all ranks; tells its messages apart.
        name: for error messages.
        handles: the parameters in the order in which they are laid out, all of one dtype.
        dtypes: what they become.
        device: where they will be, wherever they are now.
        collectives: the ranks that share the buffer.
        offload: where shards rest; None: in the memory of the parameters' device.
    """

    def __init__(
        self,
        index: int,
        name: str,
        handles: Sequence[ParamHandle],
        dtypes: ParamDtypes,
        device: torch.device,
        collectives: Collectives,
        offload: Offload | None = None,
    ) -> None:
        first = handles[0].param
        self.index, self.name, self.handles = index, name, tuple(handles)
        self.dtype, self.device = dtypes.model, device
        self.master_dtype = dtypes.master
        self._collectives = collectives
        alignment = max(1, ALIGNMENT_BYTES // dtypes.model.itemsize)
        self.layout = FlatLayout.build(
            [h.param.numel() for h in handles], collectives.world_size, alignment
        )
        initial = torch.zeros(self.layout.numel, dtype=first.dtype, device=self.device)
        for slot_index, (handle, slot) in enumerate(
            zip(self.handles, self.layout.slots, strict=True)
        ):
            handle.buffer, handle.index = self, slot_index
            handle.stride = dense_strides(handle.param)
            handle.strided(initial, slot.offset).copy_(handle.param.detach())
        if self.layout.numel:
            collectives.broadcast(initial, f"the initial weights of {name}")
        self._own = self.layout.shard_range(self.rank)
        self.full = initial.to(self.dtype)
        self._nothing = self.full.new_empty(0)
        self.nbytes = self.full.untyped_storage().nbytes()
        self._place_views(torch.empty(self.layout.numel, dtype=self.dtype, device="meta"))
        for handle in self.handles:
            handle.resting = handle.view
        self._place_views(self.full)
        for handle in self.handles:
            handle.set_data(handle.view)
        self.shard: Shard = HeldShard(self.own_slice)
        self.model: Shard | None = None
        self.owns_shard = self.is_sharded = False
        if initial.dtype == self.master_dtype != self.dtype:
            # exact values are kept, whether they will be stepped or not
            self.shard = HeldShard(initial[self._own.start : self._own.stop].clone())
            self.owns_shard = True
        self.pending = Pending()
        self.offload = offload
        self.places = Places(None, None, False, None)

    @property
    def rank(self) -> int:
        """This process's rank among those that share the buffer."""
        return self._collectives.rank

    @property
    def own_slice(self) -> Tensor:
        """The model weights that this rank's shard is responsible for, as view of ``full``."""
        return self.full[self._own.start : self._own.stop]

    @property
    def has_master(self) -> bool:
        """Whether ``shard`` holds master weights, of which ``full`` holds rounded copies."""
        return self.shard.dtype != self.dtype

    def make_master(self) -> None:
        """Have the shard in the dtype in which it is stepped: some optimizer is going to."""
        if self.shard.dtype != self.master_dtype:
            with self.shard.use() as shard:
                master = shard.to(self.master_dtype)
            self.replace_shard(HeldShard(master))

    def detach_shard(self) -> None:
        """Give the shard memory of its own, here or elsewhere, so that ``full`` can be freed."""
        self.is_sharded = True
        self.settle()
        if not self.owns_shard:
            with self.shard.use() as shard:
                self.replace_shard(HeldShard(shard.clone()))

    def settle(self) -> None:
        """Move the shards to where they rest, if they are not there."""
        if self.offload is None:
            return
        places = self.offload.places(self, is_sharded=self.is_sharded)
        if places.has_model and self.model is None:
            with self.shard.use() as shard:
                weights = shard.to(self.device, self.dtype, copy=True)
            label = f"the weights of {self.name}"
            self.model = self.offload.rest(weights, places.model, label, pinned=True)
        if places.shard is not None and isinstance(self.shard, HeldShard):
            with self.shard.use() as shard:
                label, is_source = (
                    f"the shard of {self.name}",
                    self.is_sharded and self.model is None,
                )
                resting = self.offload.rest(shard, places.shard, label, pinned=is_source)
            self.replace_shard(resting)
        # what was moved away stays there, also if it is frozen later
        before = self.places
        self.places = Places(
            places.shard or before.shard,
            places.model or before.model,
            places.has_model or before.has_model,
            places.grad or before.grad,
        )

    def replace_shard(self, shard: Shard) -> None:
        """Have ``shard`` instead of the present one, whose memory is given back."""
        self.shard.free()
        self.shard, self.owns_shard = shard, True

    def _place_views(self, flat: Tensor) -> None:
        for handle, slot in zip(self.handles, self.layout.slots, strict=True):
            handle.view = handle.strided(flat, slot.offset)

    def allocate(self) -> None:
        """Give ``full`` new memory; the content is undefined until it has been gathered."""
        # what inference mode makes could not be saved for backward if it is kept for training
        with torch.inference_mode(False):
            self.full = torch.empty(self.layout.numel, dtype=self.dtype, device=self.device)
            self._place_views(self.full)

    def free(self) -> None:
        """Let go of the memory of ``full``; parameters become placeholders."""
        for handle in self.handles:
            handle.set_data(handle.placeholder)
            handle.view = handle.resting
        self.full = self._nothing

    def give_back(self) -> None:
        """Give every parameter its full value in host memory of its own, as in a plain module.

        Master weights are gathered for it (collective); without them ``full`` must be gathered.
        """
        masters = self.gather_values(self.shard) if self.has_master else {}
        for handle in self.handles:
            # all of them together need not fit into the device's memory
            handle.view = masters.get(handle, handle.view).to("cpu", copy=True)
            handle.set_data(handle.view)
        self._drop()

    def leave_placeholders(self) -> None:
        """Give all memory back and leave placeholders in the parameters."""
        for handle in self.handles:
            handle.view = handle.placeholder
            handle.set_data(handle.placeholder)
        self._drop()

    def _drop(self) -> None:
        self.full = self._nothing
        self.shard.free()
        if self.model is not None:
            self.model.free()

    def start_load(self) -> None:
        """What a gather reads will be needed soon."""
        if self.is_sharded:
            (self.model or self.shard).start_load()

    def start_gather(self) -> None:
        """Begin to fill ``full`` from all ranks' shards; ``pending`` is the handle. Collective."""
        if not self.layout.numel:
            return
        if not self.is_sharded and self.offload is not None:
            self._gather_published()
            return
        source = self.model or self.shard
        with source.use() as shard:
            if self.offload is not None and isinstance(source, RestingShard):
                self.pending = self._upload_and_gather(self.offload, shard)
                return
            if shard.dtype != self.dtype:
                self.own_slice.copy_(shard)
                shard = self.own_slice
            self.pending = self._all_gather(self.full, shard)

    def _gather_published(self) -> None:
        """The step brings the weights of this rank into ``full``, where all of them are gathered
        from. A rank alone waits for that when it uses them.
        """
        if self.layout.world_size > 1:
            self.pending.wait()
            self.pending = self._all_gather(self.full, self.own_slice)

    def _upload_and_gather(self, offload: Offload, shard: Tensor) -> Pending:
        uploaded = offload.transfers.upload(self.own_slice, shard)
        with offload.transfers.uploading():
            gathered = self._all_gather(self.full, self.own_slice)

        def finish() -> None:
            uploaded.wait()
            gathered.wait()

        return Pending(finish)

    def publish(self, stepped: Tensor, after: Any = None) -> Pending:
        """Bring the stepped shard to the model weights that are apart from it.

        Args:
            stepped: the shard's content.
            after: a point in the stream of the device after which nobody uses the old weights.
        """
        assert self.offload is not None
        if isinstance(self.model, HeldShard):
            return self.offload.transfers.upload(self.model.tensor, stepped, after)
        if self.model is not None:
            self.model.open(is_filled=True).copy_(stepped)
            self.model.close(is_changed=True)
        elif self.owns_shard and not self.is_sharded:
            return self.offload.transfers.upload(self.own_slice, stepped, after)
        return Pending()

    def _all_gather(self, flat: Tensor, shard: Tensor) -> Pending:
        label = f"the weights of {self.name}"
        return self._collectives.start_all_gather(flat, shard, label, self.index)

    def write_own_slice(self, handle: ParamHandle, value: Tensor) -> None:
        """Put this rank's piece of a parameter's full ``value`` into the shard.

        A rounded value replaces only those master weights whose rounded copies it changes.
        """
        where = self.own_range(handle)
        if not len(where):
            return
        written = self.flatten(handle, value)[where.start : where.stop]
        with self.shard.use(write=True) as shard:
            held = self.own_piece(handle, shard)
            written = written.to(held.device)
            if self.has_master and written.dtype == self.dtype:
                written = torch.where(held.to(self.dtype) == written, held, written.to(held.dtype))
            held.copy_(written)
            if self.model is not None:
                with self.model.use(write=True) as model:
                    self.own_piece(handle, model).copy_(held)

    def flatten(self, handle: ParamHandle, value: Tensor) -> Tensor:
        """The elements of ``value`` (of the parameter's shape) as 1-D tensor in the buffer's memory
        order.
        """
        if value.stride() == handle.stride:
            return value.as_strided((value.numel(),), (1,), value.storage_offset())
        flat = torch.empty(value.numel(), dtype=value.dtype, device=value.device)
        handle.strided(flat, 0).copy_(value)
        return flat

    def own_piece(self, handle: ParamHandle, shard: Tensor) -> Tensor:
        """This rank's elements of a parameter, 1-D, as view of a tensor that is laid out like the
        shard; empty if it has none.
        """
        piece = self.layout.piece(handle.index, self.rank)
        return shard[piece.start - self._own.start : piece.stop - self._own.start]

    def own_range(self, handle: ParamHandle) -> range:
        """Which of a parameter's elements, in memory order, are this rank's."""
        piece = self.layout.piece(handle.index, self.rank)
        offset = self.layout.slots[handle.index].offset
        return range(piece.start - offset, piece.stop - offset)

    def gather_values(self, shard: Shard) -> dict[ParamHandle, Tensor]:
        """The full values of all parameters, as views of one new tensor, from one that is laid out
        like the shard. Collective.
        """
        flat = torch.empty(self.layout.numel, dtype=shard.dtype, device=self.device)
        if self.layout.numel:
            with shard.use() as own:
                self._all_gather(flat, own.to(self.device)).wait()
        slots = zip(self.handles, self.layout.slots, strict=True)
        return {handle: handle.strided(flat, slot.offset) for handle, slot in slots}

    def gather_one(self, handle: ParamHandle, shard: Shard, what: str) -> Tensor:
        """One parameter's full value from a tensor that is laid out like ``shard``, in memory of
        its own. Collective.
        """
        if not len(self.own_range(handle)):
            return self.gather_pieces(handle, None, shard.dtype, what)
        with shard.use() as held:
            return self.gather_pieces(handle, self.own_piece(handle, held), shard.dtype, what)

    def gather_pieces(
        self, handle: ParamHandle, own_piece: Tensor | None, dtype: torch.dtype, what: str
    ) -> Tensor:
        """A tensor of a parameter's shape and strides, in memory of its own, from this rank's
        elements of it (1-D; None if it has none) and the others'. Collective.
        """
        slot = self.layout.slots[handle.index]
        shape = handle.placeholder.shape
        # no view of something else: autograd treats views that a function returns differently
        value = torch.empty_strided(shape, handle.stride, dtype=dtype, device=self.device)
        flat = value.as_strided((slot.numel,), (1,))
        ranges = [
            OwnedRange(piece.rank, piece.start - slot.offset, piece.stop - slot.offset)
            for piece in self.layout.pieces(handle.index)
        ]
        own = self.own_range(handle)
        if own_piece is not None:
            flat[own.start : own.stop].copy_(own_piece)
        label = f"{what} of parameter '{handle.fqn}'"
        self._collectives.start_gather_ranges(flat, ranges, label, self.index).wait()
        return value

    def own_pieces(self) -> Iterator[tuple[ParamHandle, int, int]]:
        """Each parameter with the part of it in this rank's shard, as element range of the shard
        (may be empty).
        """
        own = self.layout.shard_range(self.rank)
        for handle in self.handles:
            piece = self.layout.piece(handle.index, self.rank)
            yield handle, piece.start - own.start, piece.stop - own.start
