"""``ZeroStrategy``: Lightning's hooks, translated into calls of the engine."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import product
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.overrides.distributed import _sync_module_states
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero import allocator
from lightning_zero.comm.collectives import Collectives, SingleRank
from lightning_zero.comm.groups import collectives_for, default_store
from lightning_zero.comm.watch import is_lost_connection, open_sockets
from lightning_zero.config import MEBIBYTE, ZeroConfig
from lightning_zero.engine.checks import check_materialized, names_on_meta
from lightning_zero.engine.driven import check_methods, driver_of, parameters_of
from lightning_zero.engine.engine import ZeroEngine, engine_of
from lightning_zero.engine.memory import MemoryRow, memory_report
from lightning_zero.engine.optimizer import release_optimizer
from lightning_zero.engine.probe import check_element_wise, check_steps_in_parts
from lightning_zero.errors import PeerFailedError, RankMismatchError
from lightning_zero.offload_devices import OffloadPlaces, announce
from lightning_zero.offloading import OffloadingStrategy, offload_config
from lightning_zero.precision import ZeroPrecision, adapt_precision

if TYPE_CHECKING:
    from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
    from lightning.fabric.strategies.registry import _StrategyRegistry
    from lightning.pytorch import Trainer
    from lightning.pytorch.accelerators import Accelerator

_DEVICE_TYPES = ("cpu", "cuda")
_VARIANTS = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}


_NAMES: dict[str, dict[str, Any]] = {
    "zero1": {"stage": 1},
    "zero2": {"stage": 2},
    "zero3": {"stage": 3},
    "zero1_offload": {"stage": 1, "offload_optimizer": "cpu"},
    "zero2_offload": {"stage": 2, "offload_optimizer": "cpu"},
    "zero3_offload": {"stage": 3, "offload_optimizer": "cpu", "offload_params": "cpu"},
    "zero3_nvme": {"stage": 3, "offload_optimizer": "nvme", "offload_params": "nvme"},
}


def _names_its_options(init: Callable[..., None]) -> Callable[..., None]:
    """Have a constructor refuse options that do not exist with the list of those that do."""
    known = inspect.signature(init).parameters.keys() - {"self"}

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        unknown = sorted(kwargs.keys() - known)
        if unknown:
            raise TypeError(
                f"{type(self).__name__} has no option {', '.join(map(repr, unknown))}. Its options"
                f" are {', '.join(sorted(known))}."
            )
        init(self, *args, **kwargs)

    return checked


class ZeroStrategy(OffloadingStrategy):
    """Trains with ZeRO stage 1, 2 or 3: the numbers of DDP, with state sharded over the ranks.

    The module is never wrapped. On one device there is nothing to shard, and training is plain.

    Args:
        stage: 1 shards optimizer state, 2 also gradients, 3 also model weights.
        bucket_bytes: modules smaller than this are gathered and reduced together with their
            neighbours.
        window_bytes: upper bound for weights gathered at the same time under stage 3; the module in
            use and the next one are always allowed. None: twice the median unit.
        broadcast_buffers: send rank 0's module buffers to all ranks when DDP does.
        gather_after_fit: give the module its full weights back when a run ends. False leaves
            placeholders that say so, for models that would not fit.
        unit_classes: module classes to gather as one unit each, whatever their size.
        offload_optimizer: "cpu" or "nvme": where optimizer state, master weights and gradients
            rest.
        offload_params: "cpu" or "nvme": where the parameters of stage 3 rest.
        nvme_path: a folder on a local disk, for "nvme". (:class:`~lightning_zero.OffloadCallback`
            has more options.)
        save_format: "full" saves checkpoints as one ordinary Lightning file, "sharded" as a folder
            into which every rank writes its part. Both load at any stage and on any number of
            ranks.
        stall_timeout: how long all ranks may wait for different operations before they stop with an
            error.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin,
        process_group_backend, timeout,
            start_method: as for Lightning's ``DDPStrategy``.

    Raises:
        ValueError: if an option has a value that is not allowed.
    """

    @_names_its_options
    def __init__(  # noqa: PLR0913  (Lightning fixes half of it, and hides nothing behind **kwargs)
        self,
        stage: Literal[1, 2, 3] = 3,
        *,
        bucket_bytes: int = MEBIBYTE,
        window_bytes: int | None = None,
        broadcast_buffers: bool = True,
        gather_after_fit: bool = True,
        unit_classes: tuple[type[nn.Module], ...] | list[type[nn.Module]] = (),
        offload_optimizer: Literal["cpu", "nvme"] | None = None,
        offload_params: Literal["cpu", "nvme"] | None = None,
        nvme_path: str | os.PathLike[str] | None = None,
        save_format: Literal["full", "sharded"] = "full",
        stall_timeout: timedelta = timedelta(seconds=20),
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self.config = ZeroConfig(
            stage=stage,
            bucket_bytes=bucket_bytes,
            window_bytes=window_bytes,
            broadcast_buffers=broadcast_buffers,
            gather_after_fit=gather_after_fit,
            unit_classes=tuple(unit_classes),
            save_format=save_format,
            offload=offload_config(offload_optimizer, offload_params, nvme_path),
            stall_timeout=stall_timeout,
        )
        self.engine: ZeroEngine | None = None
        self._collectives: Collectives = SingleRank()
        self._held = contextlib.ExitStack()

    def __repr__(self) -> str:
        # other Trainers show it when they refuse it
        return (
            f"<ZeroStrategy(stage={self.config.stage}): for `lightning.pytorch.Trainer`, not for"
            " Fabric or the Trainer of `pytorch_lightning`>"
        )

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """Register zero1, zero2 and zero3, each with ``_offload`` and ``zero3`` with ``_nvme``, and
        all of them with ``_spawn``, ``_fork`` and ``_notebook``.
        """
        for (base, options), (suffix, start_method) in product(_NAMES.items(), _VARIANTS.items()):
            if base + suffix not in strategy_registry:
                offload = "" if len(options) == 1 else ", offloaded"
                strategy_registry.register(
                    base + suffix,
                    cls,
                    description=f"ZeRO stage {options['stage']}{offload}, by '{start_method}'",
                    start_method=start_method,
                    **options,
                )

    # -- set-up

    @property
    @override
    def precision_plugin(self) -> ZeroPrecision:
        """The precision plugin, adapted to sharded weights and gradients."""
        plugin = self._precision_plugin
        return adapt_precision(Precision() if plugin is None else plugin)

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        self._precision_plugin = (
            None if precision_plugin is None else adapt_precision(precision_plugin)
        )

    @override
    def setup_environment(self) -> None:
        """Join the process group and create the groups of the engine. Collective."""
        if self.root_device.type not in _DEVICE_TYPES:
            raise MisconfigurationException(
                f"ZeroStrategy runs on {' and '.join(_DEVICE_TYPES)} devices, got"
                f" {self.root_device}. Pass"
                " Trainer(accelerator='cpu') or accelerator='cuda'."
            )
        before = open_sockets()
        super().setup_environment()
        joined = {fd: name for fd, name in open_sockets().items() if before.get(fd) != name}
        self._collectives = collectives_for(self.root_device, self.config.stall_timeout, joined)
        if self._collectives.watch is not None:
            self._collectives.watch.start(default_store())
        self._is_running, self._ending = True, None

    @override
    def setup(self, trainer: Trainer) -> None:
        """Shard the module and its optimizers. Collective."""
        assert self.accelerator is not None
        assert self.model is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        check_materialized(self.lightning_module)
        if is_fitting:
            self.check_saving(trainer)
        if is_fitting and self._layer_sync:
            self._check_layer_sync()
            self.model = self._layer_sync.apply(self.model)
        places = self.offload_places(is_fitting=is_fitting)
        is_sharded = self.shards_weights(places)
        has_offload = any(places) or (is_fitting and self.parking_place is not None)
        has_engine = (self.world_size > 1 or has_offload) and (is_fitting or is_sharded)
        self.precision_plugin.prepare(
            self.model, self.root_device, is_trained_whole=is_fitting and not has_engine
        )
        if has_engine:
            self._rest_to_device(self.lightning_module)
        else:
            self.model_to_device()
        if is_fitting:
            self.setup_optimizers(trainer)
            _optimizers_to_device(self.optimizers, self.root_device)
        if has_engine:
            self._shard(self.optimizers if is_fitting else [], places)
        else:
            _sync_module_states(self.lightning_module)
        self.setup_precision_plugin()

    def _rest_to_device(self, module: nn.Module) -> None:
        """Move all but parameters, which the engine takes to the device unit by unit."""
        device = self.root_device
        _update_properties(module, device=device)
        module._apply(lambda t: t.data if isinstance(t, nn.Parameter) else t.to(device))

    def _shard(self, optimizers: list[Optimizer], places: OffloadPlaces) -> None:
        assert self.lightning_module is not None
        own = set(self.lightning_module.parameters())
        driven = [
            optimizer for optimizer in optimizers if not own.isdisjoint(parameters_of(optimizer))
        ]
        for optimizer in driven:
            release_optimizer(optimizer)
            check_methods(optimizer)
            check_element_wise(optimizer, self.root_device)
            if any(places):
                check_steps_in_parts(optimizer)
        if "nvme" in places:
            allocator.return_freed_memory()
        elif self.root_device.type == "cpu":
            allocator.retain_freed_memory()
        precision = self.precision_plugin
        offload = self.open_offload(driven, places, precision.policy)
        try:
            self.engine = ZeroEngine(
                self.lightning_module,
                driven,
                self.config,
                self._collectives,
                self.root_device,
                precision.policy,
                precision.forward_context if precision.policy.compute_dtype is not None else None,
                offload,
            )
        except BaseException:
            if offload is not None:
                offload.close()
            raise
        if offload is not None and self.config.offload is not None:
            announce(self.config.offload, offload, self.memory_report())
        # Lightning's wrappers are built from the optimizers' classes, which have just changed
        if optimizers:
            self.optimizers = optimizers

    def _check_layer_sync(self) -> None:
        if self.root_device.type == "cpu":
            raise MisconfigurationException(
                "`sync_batchnorm=True` needs GPUs: torch.nn.SyncBatchNorm does not run on CPU."
                " Pass sync_batchnorm=False."
            )

    # -- steps

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's ``training_step`` on sharded weights."""
        with self._step(is_training=True):
            return super().training_step(*args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's ``validation_step`` on sharded weights."""
        with self._step(is_training=False):
            return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's ``test_step`` on sharded weights."""
        with self._step(is_training=False):
            return super().test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's ``predict_step`` on sharded weights."""
        with self._step(is_training=False):
            return super().predict_step(*args, **kwargs)

    @contextlib.contextmanager
    def _step(self, *, is_training: bool) -> Iterator[None]:
        if self.engine is None:
            yield
            return
        assert self.lightning_module is not None
        if self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            self.engine.sync_buffers_if_due()
        with self.precision_plugin.explained(), self.engine.step_scope(is_training=is_training):
            yield
        self.engine.note_forward(
            synchronizes=is_training
            and self.lightning_module.automatic_optimization
            and not self.engine.grads.is_blocked
        )

    @contextlib.contextmanager
    @override
    def block_backward_sync(self) -> Iterator[None]:
        """An accumulation window: stage 1 keeps gradients unreduced inside."""
        if self.engine is None:
            yield
            return
        with self.engine.grads.blocked():
            yield

    # -- evaluation with different numbers of batches

    @override
    def on_validation_start(self) -> None:
        """Keep weights gathered if the ranks validate on different numbers of batches."""
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        self._hold_if_uneven(
            trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches
        )

    @override
    def on_test_start(self) -> None:
        """Keep weights gathered if the ranks test on different numbers of batches."""
        assert self.lightning_module is not None
        self._hold_if_uneven(self.lightning_module.trainer.num_test_batches)

    @override
    def on_predict_start(self) -> None:
        """Keep weights gathered if the ranks predict on different numbers of batches."""
        assert self.lightning_module is not None
        self._hold_if_uneven(self.lightning_module.trainer.num_predict_batches)

    def _hold_if_uneven(self, num_batches: Any) -> None:
        engine = self.engine
        if engine is None or not engine.weights.has_storage_of_its_own:
            return
        everyones = engine.collectives.all_gather_object(num_batches, "the number of batches")
        if any(numbers != num_batches for numbers in everyones):
            self._held.enter_context(engine.full_params(engine.module, write=False))

    @override
    def on_validation_end(self) -> None:
        """Release held weights."""
        self._held.close()

    @override
    def on_test_end(self) -> None:
        """Release held weights."""
        self._held.close()

    @override
    def on_predict_end(self) -> None:
        """Release held weights."""
        self._held.close()

    def memory_report(self) -> list[MemoryRow]:
        """Bytes of this rank by kind, forecast and measured.

        Call it during ``fit``, e.g. in ``on_train_end``.
        """
        assert self.lightning_module is not None
        return memory_report(self.engine, self.lightning_module, self.optimizers)

    # -- the end

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Tell the other ranks, or say what they told."""
        self.ending(exception)
        watch = self._collectives.watch
        reason = None if watch is None else watch.reason
        if reason is not None and reason is not exception and is_lost_connection(exception):
            # it was one of Lightning's own collectives, or of the user's
            exception.args = (f"{reason} ({exception})",)
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        """Give the module its full weights back and free everything else.

        Collective, unless the run was broken off and not all ranks are there any more.
        """
        ending = self.ending()
        engine, self.engine = self.engine, None
        gather = self.config.gather_after_fit and (ending is None or ending.gathers)
        try:
            if engine is not None:
                self._held.close()
                engine.close(gather=gather)
        except (PeerFailedError, RankMismatchError):
            if ending is None:  # else the error that ends the run is the one to be seen
                raise
        finally:
            self._is_running = False
            self.close_parking()
            if self._collectives.watch is not None:
                self._collectives.watch.stop()
            if engine is not None and self.root_device.type == "cpu":
                allocator.release_freed_memory()
            # what is driven has its state in shards, which are nobody's to move
            optimizers = self._optimizers
            self._optimizers = [o for o in optimizers if driver_of(o) is None]
            module = self._lightning_module
            if module is not None and names_on_meta(module):
                self._lightning_module = None  # moving it would fail, and hide that it was refused
            try:
                super().teardown()
            finally:
                self._optimizers, self._lightning_module = optimizers, module

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        return {
            **state,
            "engine": None,
            "_collectives": SingleRank(),
            "_held": contextlib.ExitStack(),
            "_ending": None,
        }


def full_params(module: nn.Module, write: bool = False) -> contextlib.AbstractContextManager[None]:
    """Make the parameters of ``module`` plain, full tensors inside the context.

    Collective under stage 3: every rank enters and leaves it, in the same order. Inside, the module
        can be called any
    number of times, different on each rank, without communication (generation, evaluation of uneven
    data).

    Args:
        module: the LightningModule or any part of it.
        write: keep what is written to the parameters. Every rank has to write the same.

    Raises:
        RuntimeError: on exit, if a parameter was changed and ``write`` is False.
    """
    engine = engine_of(module)
    return contextlib.nullcontext() if engine is None else engine.full_params(module, write=write)
