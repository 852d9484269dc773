"""Train a byte-level GPT on Python's standard library, sharded by ZeRO, and let it write code.

    python examples/train_gpt.py                                      # 2 CPU processes, or all GPUs
    python examples/train_gpt.py --strategy ddp                       # the same run, unsharded
    python examples/train_gpt.py --offload nvme                       # state in files
    python examples/train_gpt.py --width 768 --heads 12 --layers 12   # with GPUs to spare

Everything here is ordinary Lightning; the one thing that makes it ZeRO is the name of the strategy.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from corpus import CorpusDataModule, pack, unpack
from gpt import GPT, write
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import RichModelSummary, RichProgressBar, TQDMProgressBar
from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics.text import Perplexity

from lightning_zero import OffloadCallback  # the import registers zero1, zero2 and zero3, too

MIB = 2**20
CHECKPOINT = "gpt.ckpt"
LEAST_LR = 0.05  # of the peak, at the end of the cosine


class LitGPT(LightningModule):
    def __init__(
        self, *, model: dict[str, int], lr: float, weight_decay: float, warmup: int, max_steps: int
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.gpt = GPT(**model)
        self.perplexity = Perplexity()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        ids, targets = batch
        loss = F.cross_entropy(self.gpt(ids).flatten(0, 1), targets.flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        ids, targets = batch
        self.perplexity.update(self.gpt(ids), targets)
        # Given the metric itself, Lightning computes it over all batches of all ranks; a mean of
        # the ranks' perplexities would not be the perplexity of the whole.
        self.log("val_ppl", self.perplexity, prog_bar=True)

    def configure_optimizers(self) -> dict[str, Any]:
        parameters = list(self.parameters())
        matrices = [p for p in parameters if p.ndim >= 2]
        vectors = [p for p in parameters if p.ndim < 2]
        optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": self.hparams.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=self.hparams.lr,
            betas=(0.9, 0.95),
            fused=True,
        )
        scheduler = LambdaLR(optimizer, self._lr_factor)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def _lr_factor(self, step: int) -> float:
        """Linear warm-up, then a cosine down to `LEAST_LR`."""
        warmup = min((step + 1) / (self.hparams.warmup + 1), 1.0)
        progress = min(step / self.hparams.max_steps, 1.0)
        return warmup * (LEAST_LR + (1 - LEAST_LR) * 0.5 * (1 + math.cos(math.pi * progress)))


class TokensPerSecond(Callback):
    """Shows how many tokens all ranks together train on in a second, validation left out."""

    SMOOTHING = 0.9

    def __init__(self) -> None:
        self.last_end: float | None = None
        self.rate: float | None = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = time.perf_counter()
        if self.last_end is not None:
            rate = batch[0].numel() * trainer.world_size / (now - self.last_end)
            kept = self.SMOOTHING if self.rate else 0.0
            self.rate = kept * (self.rate or 0.0) + (1 - kept) * rate
            pl_module.log("tokens/s", self.rate, prog_bar=True)
        self.last_end = now

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.last_end = None


class MemoryRows(Callback):
    """Collects what the strategy forecast and measured in bytes, from all ranks.

    At the end of training rather than after it: `fit` leaves a plain, whole module behind.
    """

    def __init__(self) -> None:
        self.kinds: list[str] = []
        self.bytes_by_rank: list[list[list[int]]] = []  # [rank][kind] -> [forecast, measured]
        self.replicated_bytes = 0

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        report = getattr(trainer.strategy, "memory_report", None)
        if report is None:  # DDP keeps no such account
            return
        rows = report()
        parameter_bytes = sum(p.numel() * p.element_size() for p in pl_module.parameters())
        self.replicated_bytes = 4 * parameter_bytes  # weights, gradients and Adam's two moments
        self.kinds = [row.kind for row in rows]
        mine = [[row.forecast_bytes, row.measured_bytes] for row in rows]
        everyone = pl_module.all_gather(torch.tensor(mine, device=pl_module.device))
        self.bytes_by_rank = everyone.view(-1, len(rows), 2).tolist()

    def table(self) -> Table:
        """Bytes of every kind on every rank."""
        table = Table(
            title="MiB on each rank, measured (forecast)",
            caption=f"DDP keeps {self.replicated_bytes / MIB:.2f} MiB on every rank",
        )
        table.add_column("kind")
        for rank in range(len(self.bytes_by_rank)):
            table.add_column(f"rank {rank}", justify="right")
        totals = [
            [sum(column) for column in zip(*rows, strict=True)] for rows in self.bytes_by_rank
        ]
        lines = zip(self.kinds, zip(*self.bytes_by_rank, strict=True), strict=True)
        for kind, pairs in [*lines, ("total", totals)]:
            cells = (f"{measured / MIB:.2f} ({forecast / MIB:.2f})" for forecast, measured in pairs)
            table.add_row(kind, *cells, style="bold" if kind == "total" else None)
        return table


def progress_bar() -> Callback:
    # Rich redraws its bar in place, which only a terminal can do.
    if sys.stdout.isatty():
        return RichProgressBar()
    return TQDMProgressBar(refresh_rate=20)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    where = parser.add_argument_group("where it runs")
    where.add_argument(
        "--strategy",
        default="zero3",
        choices=("zero1", "zero2", "zero3", "ddp"),
        help="how state is kept",
    )
    where.add_argument(
        "--offload",
        choices=("cpu", "nvme"),
        help="where optimizer state and, under zero3, parameters rest",
    )
    where.add_argument("--nvme-path", default="runs/offload", help="folder of --offload nvme")
    where.add_argument(
        "--delayed-update",
        type=int,
        metavar="STEPS",
        help="with --offload cpu: from then on step while the next forward and backward run",
    )
    where.add_argument("--accelerator", default="auto", help="a Lightning accelerator")
    where.add_argument(
        "--devices",
        type=int,
        default=argparse.SUPPRESS,
        help="processes (default: one per GPU, else 2)",
    )
    where.add_argument("--out", type=Path, default=Path("runs/gpt"), help="folder to write to")
    model = parser.add_argument_group("the model")
    model.add_argument("--layers", type=int, default=4)
    model.add_argument("--width", type=int, default=192)
    model.add_argument("--heads", type=int, default=3)
    model.add_argument("--context", type=int, default=256, help="bytes that are seen at once")
    model.add_argument(
        "--ngram-buckets", type=int, default=10_240, help="rows of each n-gram table"
    )
    training = parser.add_argument_group("training")
    training.add_argument("--batch-size", type=int, default=8, help="windows in each process")
    training.add_argument("--max-steps", type=int, default=300, help="optimizer steps")
    training.add_argument("--max-seconds", type=float, default=math.inf, help="stop by then")
    training.add_argument("--lr", type=float, default=8e-3, help="peak learning rate")
    training.add_argument("--warmup", type=int, default=20, help="steps up to the peak")
    training.add_argument("--weight-decay", type=float, default=0.1)
    training.add_argument("--val-bytes", type=int, default=32_768, help="bytes in each validation")
    training.add_argument("--validations", type=int, default=3, help="times to validate")
    training.add_argument("--seed", type=int, default=1)
    sample = parser.add_argument_group("the text that it writes")
    sample.add_argument(
        "--prompt",
        default="class Reader:\n    def __init__(self, ",
        help="what it goes on from (default: %(default)r)",
    )
    sample.add_argument("--sample-bytes", type=int, default=700)
    sample.add_argument("--temperature", type=float, default=0.7)
    sample.add_argument("--top-k", type=int, default=20)
    return parser.parse_args()


def num_processes(options: argparse.Namespace) -> int:
    if "devices" in options:
        return options.devices
    on_gpu = options.accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
    return torch.cuda.device_count() if on_gpu else 2


def make_model(options: argparse.Namespace) -> LitGPT:
    sizes = ("layers", "width", "heads", "context", "ngram_buckets")
    return LitGPT(
        model={name: getattr(options, name) for name in sizes},
        lr=options.lr,
        weight_decay=options.weight_decay,
        warmup=options.warmup,
        max_steps=options.max_steps,
    )


def offload(options: argparse.Namespace) -> list[Callback]:
    if options.offload is None:
        return []
    return [
        OffloadCallback(
            optimizer=options.offload,
            params=options.offload if options.strategy == "zero3" else None,
            nvme_path=options.nvme_path if options.offload == "nvme" else None,
            delayed_update=False if options.delayed_update is None else options.delayed_update,
            force=options.delayed_update is not None,  # on a CPU the delay alone would be of no use
        )
    ]


def make_trainer(options: argparse.Namespace, memory: MemoryRows) -> Trainer:
    limit = options.max_seconds
    max_time = None if math.isinf(limit) else timedelta(seconds=limit)
    # Threads need no care here: Lightning gives each process its part of the cores.
    return Trainer(
        strategy=options.strategy,
        accelerator=options.accelerator,
        devices=num_processes(options),
        max_epochs=1,
        max_time=max_time,
        gradient_clip_val=1.0,
        val_check_interval=math.ceil(options.max_steps / options.validations),
        callbacks=[
            RichModelSummary(max_depth=2),
            TokensPerSecond(),
            memory,
            progress_bar(),
            *offload(options),
        ],
        log_every_n_steps=10,
        default_root_dir=options.out,
        enable_checkpointing=False,
        logger=False,
    )


def report(
    options: argparse.Namespace, trainer: Trainer, model: LitGPT, memory: MemoryRows
) -> None:
    """Print what came of it; on rank 0 only."""
    console = Console()
    if memory.kinds:
        console.print(memory.table())
    perplexity = trainer.callback_metrics.get("val_ppl")
    console.print(f"{trainer.global_step} steps, validation perplexity per byte {perplexity:.3f}")
    console.print(f"checkpoint: {options.out / CHECKPOINT}")
    console.rule("written by the trained model")
    text = write(
        model.gpt.eval(),
        pack(options.prompt.encode()),
        options.sample_bytes,
        temperature=options.temperature,
        top_k=options.top_k,
        seed=options.seed,
    )
    code = unpack(text).decode(errors="replace")
    console.print(Syntax(code, "python", background_color="default", word_wrap=True))


def main() -> None:
    options = parse_options()
    seed_everything(options.seed)
    model = make_model(options)
    data = CorpusDataModule(
        context=options.context,
        batch_size=options.batch_size,
        max_steps=options.max_steps,
        val_bytes=options.val_bytes,
        seed=options.seed,
    )
    memory = MemoryRows()
    trainer = make_trainer(options, memory)
    trainer.fit(model, data)
    trainer.save_checkpoint(
        options.out / CHECKPOINT, weights_only=False
    )  # every rank calls it, one file comes out
    if trainer.is_global_zero:
        report(options, trainer, model, memory)


if __name__ == "__main__":
    # Lightning 2.6 calls what torch 2.13 has deprecated; there is nothing that a user could mend.
    warnings.filterwarnings("ignore", category=FutureWarning, module="lightning")
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
