"""A small byte-level GPT in plain PyTorch, and text written by it.

Nothing in this file knows how the model is trained. The elements of the two `ModuleList`s are what
stage 3 gathers one at a time; `lightning_zero` finds them without being told.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NUM_BYTES = 256  # one token is one byte
# Each table is a number of bytes and a multiplier for their hash. Two tables for the same bytes:
# n-grams that collide in one hardly ever do in the other.
NGRAM_TABLES = ((2, 7919), (2, 104_729), (3, 7919), (3, 104_729))
LONGEST_NGRAM = 3


class LayerCache:
    """Keys and values of the tokens that one layer has seen, the last `context` of them."""

    def __init__(self, context: int) -> None:
        self.context = context
        self.keys_and_values: Tensor | None = None

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add new tokens; returns all that may be attended to."""
        new = torch.stack((keys, values))
        if self.keys_and_values is not None:
            new = torch.cat((self.keys_and_values, new), dim=-2)
        self.keys_and_values = new[..., -self.context :, :]
        keys, values = self.keys_and_values
        return keys, values


class Cache:
    """What has to be kept between two calls to write text one byte at a time."""

    def __init__(self, layers: int, context: int) -> None:
        self.layers = [LayerCache(context) for _ in range(layers)]
        self.num_seen = 0
        self.last_ids: Tensor | None = None


def rotary_table(start: int, length: int, size: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines (length, size / 2) of the positions from `start`."""
    frequency = 10_000.0 ** (-torch.arange(0, size, 2, device=like.device) / size)
    angle = torch.arange(start, start + length, device=like.device)[:, None] * frequency
    return angle.cos().to(like.dtype), angle.sin().to(like.dtype)


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the pairs of `x` (..., length, size) by their position's angles."""
    cos, sin = table
    a, b = F.rms_norm(x, x.shape[-1:]).chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, table: tuple[Tensor, Tensor], cache: LayerCache | None) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        queries, keys, values = qkv.permute(2, 0, 3, 1, 4)
        queries, keys = rotate(queries, table), rotate(keys, table)
        if cache is not None:
            keys, values = cache.extend(keys, values)
        # After the prompt tokens come one at a time, and each may see all that is in the cache.
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=length > 1)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(
        self, x: Tensor, table: tuple[Tensor, Tensor], cache: LayerCache | None = None
    ) -> Tensor:
        x = x + self.attention(self.attention_norm(x), table, cache)
        return x + self.down(F.relu(self.up(self.mlp_norm(x))).square())


class GPT(nn.Module):
    """Rotary attention and square-ReLU MLPs over embeddings of each byte and the pair and triple
    that it ends.

    A byte says little, so the first layers of a byte-level model mostly learn to spell. Hashed
    tables of `ngram_buckets` rows each do that by look-up: many parameters, hardly any arithmetic,
    which is what makes a few minutes on a CPU enough.
    """

    def __init__(
        self, *, layers: int, width: int, heads: int, context: int, ngram_buckets: int
    ) -> None:
        super().__init__()
        if width % (2 * heads):
            raise ValueError(f"width must be a multiple of 2 x heads, got {width} and {heads}")
        self.context = context
        self.head_size = width // heads
        self.ngram_buckets = ngram_buckets
        self.embed = nn.Embedding(NUM_BYTES, width)
        self.ngrams = nn.ModuleList(nn.Embedding(ngram_buckets, width) for _ in NGRAM_TABLES)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, NUM_BYTES, bias=False)
        self.apply(_initialize)
        # Every block starts as the identity, and every n-gram as no more than its last byte: noise
        # in the rows that are seldom looked up would take the whole run to unlearn.
        for weight in (self.head.weight, *_residual_weights(self.blocks)):
            nn.init.zeros_(weight)
        for ngram in self.ngrams.parameters():
            nn.init.zeros_(ngram)

    def forward(self, ids: Tensor, cache: Cache | None = None) -> Tensor:
        """Logits (batch, length, 256) of the byte after each byte of `ids` (batch, length)."""
        start = cache.num_seen if cache else 0
        x = self.embed(ids) + self._embed_ngrams(ids, cache)
        table = rotary_table(start, ids.shape[1], self.head_size, like=x)
        for index, block in enumerate(self.blocks):
            x = block(x, table, cache.layers[index] if cache else None)
        if cache:
            cache.num_seen += ids.shape[1]
        return self.head(self.norm(x))

    def _embed_ngrams(self, ids: Tensor, cache: Cache | None) -> Tensor:
        num_before = LONGEST_NGRAM - 1
        padded = F.pad(ids, (num_before, 0))
        if cache:
            if cache.last_ids is not None:
                padded[:, :num_before] = cache.last_ids
            cache.last_ids = padded[:, -num_before:]
        length = ids.shape[1]
        keys = [ids]  # the last byte as a number, then the last two, then the last three
        for start in reversed(range(num_before)):
            keys.append(keys[-1] * 257 + padded[:, start : start + length])
        rows = [keys[n - 1] * multiplier % 1_000_003 for n, multiplier in NGRAM_TABLES]
        return torch.stack(
            [table(row % self.ngram_buckets) for table, row in zip(self.ngrams, rows, strict=True)]
        ).sum(0)


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=module.in_features**-0.5)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.35)


def _residual_weights(blocks: nn.ModuleList) -> list[Tensor]:
    """Weights that write to the residual stream."""
    return [
        weight
        for block in blocks
        if isinstance(block, Block)
        for weight in (block.attention.out.weight, block.down.weight)
    ]


@torch.no_grad()
def write(
    gpt: GPT, prompt: bytes, num_bytes: int, temperature: float, top_k: int, seed: int
) -> bytes:
    """Continue `prompt` by `num_bytes` bytes; returns both.

    Needs the whole model: call it where the parameters are plain, as they are after `fit`.
    """
    device = gpt.head.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    cache = Cache(len(gpt.blocks), gpt.context)
    text = bytearray(prompt)
    ids = torch.tensor([list(prompt)], device=device)
    for _ in range(num_bytes):
        logits = gpt(ids, cache)[0, -1]
        best, choices = logits.topk(top_k)
        picked = torch.multinomial((best / temperature).softmax(-1), 1, generator=generator)
        ids = choices[picked].view(1, 1)
        text.append(int(ids))
    return bytes(text)
