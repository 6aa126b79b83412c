"""A world around BlockManager without a model, whose every operation is checked against a naive oracle (kv_state).

A wrong share, a copy that is missing or late, a block freed too early or a table that was not remapped shows as a
foreign fingerprint. Copies are carried out as late as allowed: right before the next write. Slots that nobody may
read are erased there, so that right content never turns up by luck.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

from kv_state import BLOCK_SIZE, CACHES, Accounts, KvState, Pinned, Row, blocks_for

from worker.kvcache.prefix_cache import CacheNamespace


class KvWorld(KvState):
    """Each method is one operation, and makes sure of everything that must hold afterwards."""

    def __init__(self, cache: str, num_blocks: int = 24) -> None:
        super().__init__(CACHES[cache], num_blocks)
        self._names = (f"r{number}" for number in itertools.count())

    def admit(self, tokens: Sequence[int], salt: str, spare_blocks: int = 0) -> Row | None:
        row = Row(next(self._names), salt, list(tokens), self.prints(salt, tokens))
        return row if self.allocate(row, spare_blocks) else None

    def allocate(self, row: Row, spare_blocks: int = 0) -> bool:
        """Admit a new row, or one that was preempted. Refused exactly when the blocks are not there."""
        before = self.accounts()
        hit = self.findable(row.salt, row.tokens[:-1])
        shared = self._cached_blocks(row.salt, row.tokens[:hit])
        wanted = blocks_for(len(row.tokens)) - len(shared)
        room = before.counts.free + len(before.idle - set(shared)) - spare_blocks
        cached = self.manager.allocate(row.name, row.tokens, row.salt, spare_blocks=spare_blocks)
        assert (cached is None) == (wanted > room), f"{wanted} blocks wanted, room for {room}, but it got {cached}"
        if cached is None:
            assert self.accounts() == before, "a refused allocate changed something"
        else:
            without_tail = wanted == room and cached == len(shared) * BLOCK_SIZE  # locking the tail takes a block
            assert cached == hit or without_tail, f"{hit} tokens are cached, but {cached} were found"
            row.computed, row.committed, row.reserved = cached, len(shared), len(row.tokens)
            row.known = row.shares = False
            self.rows[row.name] = row
            assert self.manager.get_block_ids(row.name)[: len(shared)] == shared, "a hit is not shared"
            self._check_evicted(before, wanted - before.counts.free)
            self.stats.update({"admits": 1, "hits": cached})
        self.check()
        return cached is not None

    def reserve(self, row: Row) -> bool:
        """Slots for all tokens of the row; refused exactly when the blocks are not there. The caller checks."""
        before, blocks = self.accounts(), self.manager.get_block_ids(row.name)
        index, offset = divmod(row.computed, BLOCK_SIZE)
        split = index < len(blocks) and not self._may_write(blocks[index], offset)
        wanted = max(0, blocks_for(len(row.tokens)) - len(blocks)) + split
        room = before.counts.free + len(before.idle)
        done = self.manager.append_token(row.name, len(row.tokens))
        assert done == (wanted <= room), f"{wanted} blocks wanted, room for {room}, but the answer is {done}"
        if done:
            row.reserved = max(row.reserved, len(row.tokens))
            self._check_evicted(before, wanted - before.counts.free)
        else:
            assert self.accounts() == before, "a refused append_token changed something"
        return done

    def step(self, counts: dict[str, int]) -> None:
        """One batch, so many tokens of each row: all reserve, then all write, then all commit."""
        ready: list[tuple[Row, int]] = []
        for name, count in counts.items():
            row = self.rows[name]
            if (row.reserved >= len(row.tokens) and not row.shares) or self.reserve(row):
                ready.append((row, row.computed + count))
        self.check()  # takes the copies of all rows at once, so their order matters
        for row, end in ready:
            self.manager.check_writable(row.name, row.computed, end)
        self._carry_out_copies()
        self.check_histories(self.pages)
        for row, end in ready:
            self._write(row, end)
        for row, end in ready:
            self._commit(row, end)

    def fork(self, parent: Row, length: int) -> Row:
        prints = [layer[:length] for layer in parent.prints]
        child = Row(next(self._names), parent.salt, parent.tokens[:length], prints, length)
        self.manager.fork(parent.name, child.name, length)
        child.committed = min(parent.committed, length // BLOCK_SIZE)
        child.known, child.reserved = parent.known, length
        parent.shares = child.shares = child.prompt_done = True
        self.rows[child.name] = child
        self.stats["forks"] += 1
        self.check()
        return child

    def free(self, row: Row) -> None:
        """Finish, abort or preempt: what was computed can be found, to the token."""
        self.manager.free(row.name)
        del self.rows[row.name]
        self.check()
        if row.known and row.committed == row.computed // BLOCK_SIZE:
            self.assert_found(row.salt, row.tokens[: row.computed])
        before = self.accounts()
        self.manager.free(row.name)
        assert self.accounts() == before, "freeing twice is not harmless"

    def pin(self, name: str, tokens: Sequence[int], salt: str, until_s: float) -> None:
        whole = self.findable(salt, tokens) // BLOCK_SIZE * BLOCK_SIZE
        blocks = self._cached_blocks(salt, tokens[:whole])
        pinned = self.manager.pin(name, tokens, salt, until_s=until_s)
        assert pinned == whole, f"{pinned} tokens pinned of {whole} cached"
        self.pins.pop(name, None)
        if blocks:
            self.pins[name] = Pinned(salt, list(tokens[:pinned]), blocks, until_s)
            self.stats["pins"] += 1
        self.check()

    def unpin(self, name: str) -> None:
        assert self.manager.unpin(name) == (self.pins.pop(name, None) is not None)
        self.check()

    def expire(self, now_s: float) -> None:
        self.manager.expire_pins(now_s)
        self.pins = {name: pin for name, pin in self.pins.items() if pin.until_s > now_s}
        self.check()

    def drop_pins(self) -> None:
        assert self.manager.drop_pins() == bool(self.pins)
        self.pins.clear()
        self.check()

    def reset(self) -> None:
        self.manager.reset_cache()
        self.pins.clear()
        for row in self.rows.values():
            row.committed = 0
        self.check()
        assert not self.content.claims, "blocks are cached after a reset"

    def _cached_blocks(self, salt: str, tokens: Sequence[int]) -> list[int]:
        """The whole blocks that a lookup finds for these tokens, all of which are findable."""
        if self.cache is None:
            return []
        hit = self.cache.match(CacheNamespace(salt=salt), tokens, touch=False)
        assert len(hit.blocks) == len(tokens) // BLOCK_SIZE, "a lookup misses what the pages hold"
        return list(hit.blocks)

    def _check_evicted(self, before: Accounts, missing: int) -> None:
        """No more is evicted than is missing, give or take the cache's unit of eviction."""
        gone = sum(not self.pool.is_cached(block) for block in before.idle)
        missing = max(0, missing)
        assert missing <= gone <= missing + (self.kind.slack if missing else 0), f"{gone} evicted, {missing} missing"
        self.stats["evictions"] += gone

    def _may_write(self, block: int, offset: int) -> bool:
        offered = 0 if self.cache is None else self.cache.claimed_slots(block)
        return self.holders()[block] == 1 and offered <= offset

    def _carry_out_copies(self) -> None:
        """And erase every slot that nobody may read: those neither computed by a row nor offered by the cache."""
        for source, target in self.pending:
            self.pages[target] = [list(layer) for layer in self.pages[source]]
        self.pending.clear()
        valid: Counter[int] = Counter({block: len(claim[0]) for block, claim in self.content.claims.items()})
        for row in self.rows.values():
            blocks = self.manager.get_block_ids(row.name)
            for number, slots in self.spans(row):
                valid[blocks[number]] = max(valid[blocks[number]], slots)
        for block, page in enumerate(self.pages):
            for layer in page:
                layer[valid[block] :] = [None] * (BLOCK_SIZE - valid[block])

    def _write(self, row: Row, end: int) -> None:
        blocks = self.manager.get_block_ids(row.name)
        for position in range(row.computed, end):
            page = self.pages[blocks[position // BLOCK_SIZE]]
            for layer, prints in zip(page, row.prints, strict=True):
                layer[position % BLOCK_SIZE] = prints[position]
        self.stats["tokens"] += end - row.computed

    def _commit(self, row: Row, end: int) -> None:
        completes = end == len(row.tokens) and not row.prompt_done
        self.manager.commit(row.name, row.tokens, end, tail=completes)
        row.computed, row.known = end, True
        row.committed = end // BLOCK_SIZE
        row.prompt_done |= completes
        self.check()
        if completes:
            self.assert_found(row.salt, row.tokens)
