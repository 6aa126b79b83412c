"""Stages: the article's learning order as things that answer prompts, each one more than the one before.

    no KV cache        every token computes its whole history
    contiguous cache   one tensor per request, reserved for the longest length
    blocks             the production block manager and pool, read by the readable reference kernel
    prefix cache       the same with the radix tree
    kernel             the same with the native attention kernel
    native step        the whole step native, as kvray serves

Owns: greedy answers of one request after the other, and the rows computed on the way.
Does not: time (steps).
Invariants: every stage has the same weights in fp32, so that all answers must be the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from cluster.core.hashing import RouteScheme
from cluster.lab.stage_attention import ContiguousCache, WholeHistory
from worker.kvcache.block_manager import BlockManager
from worker.kvcache.block_pool import BlockPool
from worker.kvcache.kv_pool import KvGeometry, KvPool
from worker.kvcache.radix_tree import RadixTree
from worker.models.attention_hook import AttentionStep
from worker.models.decoder import Decoder
from worker.models.executor import Executor, RowSpan, StepRows

BLOCK_SIZE = 16
CHUNK_BLOCKS = 4


class Stage(Protocol):
    """computed: rows of the model, so far.  kv_bytes: most KV memory held for a request."""

    computed: int
    kv_bytes: int

    def start(self, prompt: Sequence[int]) -> int:
        """The first token behind a new prompt."""

    def next(self) -> int: ...

    def end(self) -> None: ...


class Recompute:
    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._tokens: list[int] = []
        self.computed = 0
        self.kv_bytes = 0

    def start(self, prompt: Sequence[int]) -> int:
        self._tokens = list(prompt)
        return self.next()

    def next(self) -> int:
        token = _greedy(self._decoder, self._tokens, 0, WholeHistory())
        self.computed += len(self._tokens)
        self._tokens.append(token)
        return token

    def end(self) -> None:
        pass


class Contiguous:
    def __init__(self, decoder: Decoder, geometry: KvGeometry, longest: int) -> None:
        self._decoder = decoder
        self._geometry = geometry
        self._longest = longest
        self._last = 0
        self._cache = ContiguousCache(geometry, 0)
        self.computed = 0
        self.kv_bytes = 0

    def start(self, prompt: Sequence[int]) -> int:
        self._cache = ContiguousCache(self._geometry, self._longest)
        self.kv_bytes = self._cache.tensor.nbytes
        return self._feed(prompt)

    def next(self) -> int:
        return self._feed([self._last])

    def end(self) -> None:
        pass

    def _feed(self, tokens: Sequence[int]) -> int:
        self._last = _greedy(self._decoder, tokens, self._cache.length, self._cache)
        self._cache.length += len(tokens)
        self.computed += len(tokens)
        return self._last


class Paged:
    """Blocks from the production manager. `prefix_cache`: with the radix tree."""

    def __init__(self, executor: Executor, geometry: KvGeometry, num_blocks: int, *, prefix_cache: bool) -> None:
        self._executor = executor
        self._pool = KvPool(geometry, num_blocks, torch.device("cpu"))
        pool = BlockPool(num_blocks)
        tree = RadixTree(pool, BLOCK_SIZE, CHUNK_BLOCKS) if prefix_cache else None
        scheme = RouteScheme(tokenizer_revision="lab", model_revision="lab", chunk_tokens=CHUNK_BLOCKS * BLOCK_SIZE)
        self._manager = BlockManager(pool, tree, BLOCK_SIZE, scheme)
        self._tokens: list[int] = []
        self._name = 0
        self.computed = 0
        self.kv_bytes = 0

    def start(self, prompt: Sequence[int]) -> int:
        self._name += 1
        self._tokens = list(prompt)
        cached = self._manager.allocate(str(self._name), self._tokens)
        assert cached is not None, "the pool is too small"
        return self._compute(cached, tail=True)

    def next(self) -> int:
        room = self._manager.append_token(str(self._name), len(self._tokens))
        assert room, "the pool is too small"
        return self._compute(len(self._tokens) - 1)

    def end(self) -> None:
        self._manager.free(str(self._name))
        self._manager.check_invariants()

    def _compute(self, start: int, *, tail: bool = False) -> int:
        name, tokens = str(self._name), self._tokens
        for source, target in self._manager.take_copies():
            self._pool.copy_block(source, target)
        self._manager.check_writable(name, start, len(tokens))
        blocks = self._manager.get_block_ids(name)
        self.kv_bytes = max(self.kv_bytes, len(blocks) * self._pool.geometry.bytes_per_block)
        rows = StepRows(tokens[start:], [RowSpan(len(tokens) - start, start, blocks)], [len(tokens) - start - 1])
        token = int(self._executor.compute(rows, self._pool)[0].argmax())
        self._manager.commit(name, tokens, len(tokens), tail=tail)
        self.computed += len(tokens) - start
        tokens.append(token)
        return token


def _greedy(decoder: Decoder, tokens: Sequence[int], start: int, step: AttentionStep) -> int:
    rows = len(tokens)
    positions = torch.arange(start, start + rows)
    logits = decoder.forward(torch.tensor(tokens), positions, torch.tensor([rows - 1]), step)
    return int(logits[0].argmax())
