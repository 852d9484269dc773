"""What Lightning saves and loads, translated into calls of the checkpoint room."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.optimizer import _optimizer_to_device
from lightning.pytorch.strategies.ddp import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero.checkpoint import run_state
from lightning_zero.checkpoint.encoding import encode
from lightning_zero.checkpoint.failures import CheckpointError, together
from lightning_zero.checkpoint.folder import is_folder, remove_folder, save_folder
from lightning_zero.checkpoint.foreign import foreign_kind
from lightning_zero.checkpoint.lazy import read_all, unpack, unread
from lightning_zero.checkpoint.loading_code import looked_at
from lightning_zero.checkpoint.packing import Packed, gather_whole, pack
from lightning_zero.checkpoint.random_state import set_random_states
from lightning_zero.endings import Ending, agree_on_ending
from lightning_zero.engine.driven import driver_of, parameters_of
from lightning_zero.errors import PeerFailedError, RankMismatchError, ZeroError
from lightning_zero.precision import ZeroPrecision

if TYPE_CHECKING:
    from lightning.fabric.utilities.types import _PATH
    from lightning.pytorch import Trainer

    from lightning_zero.comm.collectives import Collectives
    from lightning_zero.config import ZeroConfig
    from lightning_zero.engine.engine import ZeroEngine


class CheckpointingStrategy(DDPStrategy):
    """The part of :class:`~lightning_zero.ZeroStrategy` that saves and loads.

    A checkpoint that is about to be saved holds the sharded parameters themselves, a loaded one
    tensors that are read when they are used: nobody holds the whole model for it.
    """

    config: ZeroConfig
    engine: ZeroEngine | None
    _collectives: Collectives
    _saved_run: Mapping[str, Any] = {}
    _is_running = False
    _ending: Ending | None = None
    _loaded_run: Mapping[str, Any] = {}

    def is_interrupted(self) -> bool:
        """Whether the run is ending because of an exception."""
        trainer = None if self.lightning_module is None else self.lightning_module._trainer
        return trainer is not None and trainer.state.status == TrainerStatus.INTERRUPTED

    def ending(self, error: BaseException | None = None) -> Ending | None:
        """What the ranks can still do together while a run is being broken off; None while it is
        not. The first call takes some seconds if not all ranks come here.
        """
        if not (self._is_running and self.is_interrupted()):
            return None
        if self._ending is None:
            error = sys.exc_info()[1] if error is None else error
            self._ending = agree_on_ending(error, self.engine, self._collectives)
        return self._ending

    @property
    def _is_broken(self) -> bool:
        """Whether an error is being handled after which nothing can be saved."""
        ending = self.ending()
        return ending is not None and not ending.saves

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks, unless they can not come any more."""
        ending = self.ending()
        if ending is None:
            if self.engine is not None:
                self.engine.meet()
            super().barrier(*args, **kwargs)
        elif ending.saves:  # the default group may be shut down
            with contextlib.suppress(ZeroError):
                self._collectives.all_gather_object(None, "a barrier after an error")

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Rank ``src``'s object; this rank's own where the ranks can not talk any more."""
        ending = self.ending()
        if ending is None:
            return super().broadcast(obj, src)
        if not ending.saves:
            return obj
        return self._collectives.all_gather_object(obj, "a broadcast after an error")[src]

    # -- saving

    def check_saving(self, trainer: Trainer) -> None:
        """Refuse what could not be saved, before anything is trained. Collective."""
        if self.config.save_format != "sharded":
            return
        places = [getattr(c, "dirpath", None) for c in trainer.checkpoint_callbacks]
        for place in (*places, trainer.default_root_dir):
            if place is not None:
                _folder_path(str(place))
        if type(self.checkpoint_io) is not TorchCheckpointIO:
            raise MisconfigurationException(
                f"With save_format='sharded' every rank writes to the folder itself, and the"
                f" {type(self.checkpoint_io).__name__} would never be called. Remove the plugin, or"
                " pass ZeroStrategy(save_format='full')."
            )
        if trainer.checkpoint_callbacks:
            what = "looking for what a sharded checkpoint can not hold"
            together(self._collectives, what, lambda: self._check_states(trainer))

    def _check_states(self, trainer: Trainer) -> None:
        assert self.lightning_module is not None
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        owners = [(f"callbacks[{c.state_key!r}]", c.state_dict) for c in callbacks]
        owners += [
            (f"state_dict['{name}._extra_state']", module.get_extra_state)
            for name, module in self.lightning_module.named_modules()
            if type(module).get_extra_state is not nn.Module.get_extra_state
        ]
        datamodule = getattr(trainer, "datamodule", None)
        if datamodule is not None:
            owners.append((type(datamodule).__qualname__, datamodule.state_dict))
        for path, state_of in owners:
            try:  # on every rank, for it may be collective
                state = state_of()
            except Exception:  # it may not be ready yet: then the first save tells
                continue
            encode(state, path, is_strict=self.is_global_zero)  # whose states are saved

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state dict, in which sharded parameters stand for their values."""
        if self.engine is None:
            return super().lightning_module_state_dict()
        if self._is_broken:
            return {}
        with self.engine.sharded_state():
            return super().lightning_module_state_dict()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state of an optimizer in its ordinary format, to be saved. Collective.

        Its tensors are there on rank 0 only, or stand for their shards.
        """
        driver = driver_of(optimizer)
        if driver is None:
            return super().optimizer_state(optimizer)
        if self._is_broken:
            return {}
        if self.engine is not None:
            self.engine.meet()
        is_sharded = self.config.save_format == "sharded"
        return driver.state.to_save(is_wanted=self.is_global_zero, is_sharded=is_sharded)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint, to rank 0's path. Collective.

        Nothing is written while a failure is handled that leaves the ranks apart.
        """
        ending = self.ending()
        if ending is not None and not ending.saves:
            warnings.warn(f"'{filepath}' is not saved: {ending.reason}", stacklevel=2)
            return
        try:
            self._save(checkpoint, filepath, storage_options)
        except (PeerFailedError, RankMismatchError) as error:
            if ending is None:
                raise
            # the error that ends the run is the one to be seen
            warnings.warn(f"'{filepath}' is not saved: {error}", stacklevel=2)

    def _save(
        self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None
    ) -> None:
        if self.engine is not None:
            self.engine.meet(is_last=True)
        path = self._collectives.all_gather_object(str(filepath), f"saving '{filepath}'")[0]
        target: Any = filepath if path == str(filepath) else path  # of the type that was passed
        if "optimizer_states" in checkpoint:
            checkpoint = {**checkpoint, run_state.KEY: self._run_state()}
        if self.config.save_format == "full":
            whole = gather_whole(
                checkpoint, self.engine, self._collectives, is_wanted=self.is_global_zero
            )
            write = super().save_checkpoint
            together(
                self._collectives,
                f"writing checkpoint '{path}'",
                lambda: write(run_state.put_away(whole), target, storage_options=storage_options),
            )
            return
        if storage_options is not None:
            raise TypeError(
                "`storage_options` are for a CheckpointIO, and with save_format='sharded' every"
                " rank writes to the folder itself. Leave them out, or use save_format='full'."
            )
        made: list[Packed] = []
        names, is_writer = self._param_names(), self.is_global_zero
        what = f"putting checkpoint '{path}' together"
        together(
            self._collectives,
            what,
            lambda: made.append(pack(checkpoint, names, is_writer=is_writer)),
        )
        (packed,) = made
        info = {
            "step": checkpoint.get("global_step"),
            "epoch": checkpoint.get("epoch"),
            "stage": self.config.stage,
            "world_size": self.world_size,
            "precision": str(self.precision_plugin.precision),
            "optimizers": [type(optimizer).__name__ for optimizer in self.optimizers],
        }
        try:
            save_folder(_folder_path(path), packed.tensors, packed.meta, info, self._collectives)
        finally:
            packed.close()

    def _run_state(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        loop = self.lightning_module.trainer.fit_loop.epoch_loop
        is_automatic = self.lightning_module.automatic_optimization
        return run_state.run_state(
            self.engine,
            self.lightning_module,
            self.root_device,
            self._collectives,
            is_accumulating=is_automatic and loop._should_accumulate(),
            is_sharded=self.config.save_format == "sharded",
        )

    def _param_names(self) -> list[list[str]]:
        assert self.lightning_module is not None
        names = {param: name for name, param in self.lightning_module.named_parameters()}
        return [
            [names.get(param, f"parameter {i}") for i, param in enumerate(parameters_of(optimizer))]
            for optimizer in self.optimizers
        ]

    # -- loading

    @override
    def load_checkpoint(
        self, checkpoint_path: _PATH, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint, a file or a folder. Its tensors are read when they are used."""
        checkpoint = self._read_checkpoint(checkpoint_path, weights_only)
        # hooks see the keys that they see under DDP
        is_dict = isinstance(checkpoint, dict)  # who knows what a plugin reads
        self._loaded_run = run_state.take_out(checkpoint) if is_dict else {}
        return checkpoint

    def _read_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None) -> dict[str, Any]:
        path = _local_path(checkpoint_path)
        if path is not None and is_folder(path):
            return unpack(path)
        if path is not None and path.is_dir():
            raise _not_ours(path)
        if path is not None and path.is_file() and type(self.checkpoint_io) is TorchCheckpointIO:
            with contextlib.suppress(RuntimeError):  # a format of before PyTorch 1.6 has no map
                loaded: dict[str, Any] = torch.load(
                    path, map_location="cpu", mmap=True, weights_only=weights_only
                )
                return loaded
        return super().load_checkpoint(checkpoint_path, weights_only=weights_only)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the states of all optimizers, each rank its shards."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            driver = driver_of(optimizer)
            if driver is not None and not driver.state.has_own_format("load_state_dict"):
                optimizer.load_state_dict(unread(state))
                continue
            optimizer.load_state_dict(read_all(state))
            if driver is None:
                _optimizer_to_device(optimizer, self.root_device)
        run, self._loaded_run = self._loaded_run, {}
        self._saved_run = unread(checkpoint.get(run_state.KEY, run))
        self._restore_random_states()

    def _restore_random_states(self) -> None:
        states = self._saved_run.get("random_states", [])
        if len(states) == self.world_size:
            set_random_states(states[self.global_rank], self.root_device)

    @override
    def on_train_start(self) -> None:
        """Go on with the gradients of a checkpoint. Earlier, Lightning would drop them."""
        assert self.lightning_module is not None
        if self._saved_run:
            run_state.restore_run_gradients(self.engine, self.lightning_module, self._saved_run)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Go on with random numbers within an epoch: making an iterator has drawn some."""
        if batch_idx > 0:
            self._restore_random_states()
        self._saved_run = {}

    @override
    def remove_checkpoint(self, filepath: _PATH) -> None:
        """Delete a checkpoint, a file or a folder, on rank 0."""
        path = _local_path(filepath)
        if path is not None and is_folder(path):
            if self.is_global_zero:
                remove_folder(path)
        else:
            super().remove_checkpoint(filepath)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load full weights, whether the module is sharded at the moment or not."""
        assert self.lightning_module is not None
        is_fitting = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        plugin, state = self.precision_plugin, unread(checkpoint["state_dict"])
        if self.engine is None and is_fitting and isinstance(plugin, ZeroPrecision):
            plugin.prepare_load(self.lightning_module, state)
        for key in looked_at(self.lightning_module, state):
            state[key] = checkpoint["state_dict"][key]
        super().load_model_state_dict({**checkpoint, "state_dict": state}, strict=strict)


def _not_ours(path: Path) -> Exception:
    kind = foreign_kind(path)
    if kind is None:
        return CheckpointError(
            f"The folder '{path}' is no checkpoint: it has no manifest, which is written last."
        )
    out = path.with_name(f"{path.stem}-converted.ckpt")
    return CheckpointError(
        f"The folder '{path}' is a checkpoint of another system ({kind}). Convert it first:"
        f" lightning-zero convert {path} {out}"
    )


def _local_path(path: _PATH) -> Path | None:
    """The path without its ``file://``; None if it is on another file system."""
    protocol, _, rest = str(path).rpartition("://")
    return Path(rest) if protocol in ("", "file", "local") else None


def _folder_path(path: str) -> Path:
    local = _local_path(path)
    if local is None:
        raise MisconfigurationException(
            f"`save_format='sharded'` needs a local or mounted folder, got '{path}'. Pass"
            " ZeroStrategy(save_format='full') to save one file through fsspec."
        )
    return local
