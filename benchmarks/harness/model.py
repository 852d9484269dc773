"""The model and the data that every backend trains: a small GPT on a few random sequences."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SEQUENCES_PER_RANK = 4


class Size(NamedTuple):
    """Shape of a GPT."""

    layers: int
    width: int
    heads: int
    vocab: int


SIZES = {
    "tiny": Size(2, 128, 4, 1024),
    "base": Size(8, 512, 8, 16384),
    "wide": Size(7, 1024, 16, 16384),
}


class Block(nn.Module):
    """Attention and a two-layer perceptron, normalised before each."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, time, width) to the same shape."""
        batch, time, width = x.shape
        heads = self.attention_in(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = (part.transpose(1, 2) for part in heads.unbind(2))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, time, width))
        changed: Tensor = self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))
        return x + changed


class GPT(nn.Module):
    """A decoder-only transformer whose forward returns the loss of next-token prediction."""

    def __init__(self, size: Size, seq: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocab, size.width)
        self.positions = nn.Embedding(seq, size.width)
        self.blocks = nn.ModuleList(Block(size.width, size.heads) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Loss for (batch, time + 1) token ids."""
        inputs, targets = ids[:, :-1], ids[:, 1:]
        places = torch.arange(inputs.shape[1], device=ids.device)
        x = self.tokens(inputs) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def build_model(size: str, seq: int) -> GPT:
    """The same initial weights in every process and for every backend."""
    torch.manual_seed(7)
    model = GPT(SIZES[size], seq)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.02)
    return model


def parameter_bytes(size: str, seq: int) -> int:
    """P: the bytes of all parameters in fp32, without building them."""
    with torch.device("meta"):
        return sum(p.numel() * 4 for p in GPT(SIZES[size], seq).parameters())


def make_batches(size: str, seq: int, micro_batch: int, rank: int, count: int) -> list[Tensor]:
    """`count` batches that walk round a rank's own few sequences, so that the loss falls."""
    generator = torch.Generator().manual_seed(1000 + rank)
    pool = torch.randint(SIZES[size].vocab, (SEQUENCES_PER_RANK, seq + 1), generator=generator)
    order = torch.arange(count * micro_batch) % SEQUENCES_PER_RANK
    return [pool[rows] for rows in order.view(count, micro_batch)]
