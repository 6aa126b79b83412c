"""PagedMemory: a MemoryPolicy of blocks, kept by the production BlockManager.

Owns: the translation from token counts to the manager's calls.
Does not: keep books itself.
Invariants: as memory_policy; no prefix cache, so that what is saved here is saved by blocks alone.
"""

from __future__ import annotations

from cluster.core.hashing import RouteScheme
from cluster.lab.mixed_requests import MixedRequest
from worker.kvcache.block_manager import BlockManager
from worker.kvcache.block_pool import BlockPool


class PagedMemory:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        scheme = RouteScheme(tokenizer_revision="lab", model_revision="lab", chunk_tokens=4 * block_size)
        self._manager = BlockManager(BlockPool(num_blocks), None, block_size, scheme)
        self._top = 0
        self.copied = 0
        self.unusable = 0

    @property
    def allocated(self) -> int:
        return self.blocks_in_use * self._manager.block_size

    @property
    def blocks_in_use(self) -> int:
        return self._manager.counts().in_use

    def admit(self, request: MixedRequest) -> bool:
        tokens = range(request.prompt_tokens)
        # a block more for everybody who runs, as the engine's watermark: or they would be preempted at once
        if self._manager.allocate(request.name, tokens, spare_blocks=self._manager.num_sequences) is None:
            return False
        self._manager.commit(request.name, tokens, request.prompt_tokens)
        self._top = max(self._top, self.allocated)
        return True

    def grow(self, name: str, tokens: int) -> bool:
        if not self._manager.append_token(name, tokens):
            return False
        self._manager.commit(name, range(tokens), tokens)
        self._top = max(self._top, self.allocated)
        return True

    def release(self, name: str) -> None:
        self._manager.free(name)

    def take_top(self) -> int:
        self._manager.check_invariants()
        top, self._top = max(self._top, self.allocated), self.allocated
        return top
