"""What may happen in a KV world, as rules that a driver picks from: `RULES[name].act(life, draw)`.

`draw(low, high)` gives an int of that range: from a seeded generator, or from hypothesis, which then shrinks it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kv_state import Row
from kv_world import KvWorld

Draw = Callable[[int, int], int]

# Few tokens and much in common: hits, hits in the middle of blocks, and splits at every depth.
PREFIXES = (
    [1] * 17,
    [1] * 6 + [2] * 13,
    [1, 2, 1, 2, 1, 2, 1, 2, 3, 3, 3, 3, 1, 1, 1],
    [1, 2, 1, 2, 1, 2, 1, 2, 3, 3, 3, 1],
)
SALTS = ("", "", "salt")
MAX_ROWS = 8
MAX_TOKENS = 48


class KvLife:
    """A world, and what a scheduler remembers beside it."""

    def __init__(self, cache: str, num_blocks: int = 24) -> None:
        self.world = KvWorld(cache, num_blocks)
        self.preempted: list[Row] = []
        self.groups: list[list[Row]] = []
        self.prompts: list[Row] = []  # the last few that were seen, to be pinned
        self.now_s = 0.0

    @property
    def rows(self) -> list[Row]:
        return list(self.world.rows.values())

    def rows_to_prefill(self) -> list[Row]:
        return [row for row in self.rows if row.uncomputed]

    def rows_to_decode(self) -> list[Row]:
        return [row for row in self.rows if not row.uncomputed and len(row.tokens) < MAX_TOKENS]

    def rows_to_fork(self) -> list[Row]:
        return [row for row in self.rows if row.computed] if len(self.rows) < MAX_ROWS else []

    def groups_to_reorder(self) -> list[list[Row]]:
        """Groups all of whose rows are computed."""
        return [group for group in self.groups if set(group) <= set(self.rows_to_decode())]

    def forget(self, row: Row) -> None:
        self.world.free(row)
        for group in self.groups:
            if row in group:
                group.remove(row)
        self.groups = [group for group in self.groups if group]

    def decode(self, rows: list[Row], draw: Draw) -> None:
        """One new token each; a row that gets no slot for it goes back to where it was."""
        for row in rows:
            self.extend(row, [draw(1, 3)])
        self.world.step({row.name: 1 for row in rows})
        for row in rows:
            self.cut(row)

    def extend(self, row: Row, tokens: list[int]) -> None:
        row.tokens += tokens
        row.prints = self.world.prints(row.salt, row.tokens)

    def cut(self, row: Row) -> None:
        del row.tokens[row.computed :]
        for prints in row.prints:
            del prints[row.computed :]


def _pick(items: list[Row], draw: Draw) -> Row:
    return items[draw(0, len(items) - 1)]


def _admit(life: KvLife, draw: Draw) -> None:
    prefix = PREFIXES[draw(0, len(PREFIXES) - 1)]
    tokens = prefix[: draw(1, len(prefix))] + [draw(1, 3) for _ in range(draw(0, 5))]
    row = life.world.admit(tokens, SALTS[draw(0, len(SALTS) - 1)], spare_blocks=draw(0, 2))
    if row is not None:
        life.prompts = [*life.prompts[-5:], row]


def _readmit(life: KvLife, draw: Draw) -> None:
    row = _pick(life.preempted, draw)
    if life.world.allocate(row):
        life.preempted.remove(row)


def _prefill(life: KvLife, draw: Draw) -> None:
    """Pieces of several prompts in one step."""
    rows = life.rows_to_prefill()[: draw(1, 3)]
    life.world.step({row.name: draw(1, row.uncomputed) for row in rows})


def _decode(life: KvLife, draw: Draw) -> None:
    rows = life.rows_to_decode()
    first = draw(0, len(rows) - 1)
    life.decode(rows[first : first + draw(1, 4)], draw)


def _reserve_only(life: KvLife, draw: Draw) -> None:
    """A row gets its slot, but something else happens before its step."""
    row = _pick(life.rows_to_decode(), draw)
    life.extend(row, [draw(1, 3)])
    life.world.reserve(row)
    life.cut(row)
    life.world.check()


def _suffix(life: KvLife, draw: Draw) -> None:
    """More tokens to prefill behind computed ones, as for the rows of a resumed beam group."""
    row = _pick(life.rows_to_decode(), draw)
    life.extend(row, [draw(1, 3) for _ in range(draw(1, 6))])


def _fork(life: KvLife, draw: Draw) -> None:
    parent = _pick(life.rows_to_fork(), draw)
    life.world.fork(parent, draw(1, parent.computed))


def _start_group(life: KvLife, draw: Draw) -> None:
    parent = _pick(life.rows_to_fork(), draw)
    life.groups.append([life.world.fork(parent, parent.computed) for _ in range(draw(2, 3))])


def _reorder(life: KvLife, draw: Draw) -> None:
    """A beam step: the new rows are forks of chosen old ones, which then go, and each gets a token."""
    groups = life.groups_to_reorder()
    group = groups[draw(0, len(groups) - 1)]
    chosen = [_pick(group, draw) for _ in group]
    rows = [life.world.fork(row, row.computed) for row in chosen]
    for row in list(group):
        life.forget(row)
    life.groups.append(rows)
    life.decode(rows, draw)


def _finish(life: KvLife, draw: Draw) -> None:
    life.forget(_pick(life.rows_to_decode(), draw))


def _abort(life: KvLife, draw: Draw) -> None:
    life.forget(_pick(life.rows, draw))


def _preempt(life: KvLife, draw: Draw) -> None:
    row = _pick(life.rows, draw)
    life.forget(row)
    life.preempted = [*life.preempted[-3:], row]
    life.world.stats["preemptions"] += 1


def _evict(life: KvLife, draw: Draw) -> None:
    """A prompt that nobody had before takes what is free and some of what is idle, and is aborted at once."""
    free, idle, *_ = life.world.manager.counts()
    fill = life.world.admit([1000 + draw(0, 9)] * (4 * (free + draw(0, idle))), "") if free else None
    if fill is not None:
        life.forget(fill)


def _pin(life: KvLife, draw: Draw) -> None:
    row = _pick(life.prompts, draw)
    life.world.pin(f"p{draw(0, 2)}", row.tokens, row.salt, life.now_s + draw(0, 3))


def _unpin(life: KvLife, draw: Draw) -> None:
    life.world.unpin(f"p{draw(0, 2)}")


def _expire(life: KvLife, draw: Draw) -> None:
    life.now_s += draw(0, 2)
    life.world.expire(life.now_s)


def _drop_pins(life: KvLife, draw: Draw) -> None:
    life.world.drop_pins()


def _reset(life: KvLife, draw: Draw) -> None:
    life.world.reset()


def drain(life: KvLife) -> None:
    """Everything goes: only pins and cached blocks stay, then nothing; and all of it can be had by one request."""
    for row in life.rows:
        life.forget(row)
    world = life.world
    assert world.manager.num_sequences == 0
    assert world.manager.counts().in_use == len(world.holders()), "a freed row left blocks in use"
    world.drop_pins()
    total = world.pool.num_blocks
    assert world.manager.counts().in_use == 0
    fill = world.admit([3000] * (4 * total), "")
    assert fill is not None and world.manager.counts() == (0, 0, total, total)
    life.forget(fill)
    assert world.manager.counts() == (total, 0, 0, total)
    assert world.cache is None or not world.cache.present_chunks


class Rule(NamedTuple):
    """`weight`: how often the seeded driver takes it. `possible`: whether there is anything to do it to."""

    weight: int
    act: Callable[[KvLife, Draw], None]
    possible: Callable[[KvLife], object] = lambda life: True


RULES = {
    "admit": Rule(20, _admit, lambda life: len(life.rows) < MAX_ROWS),
    "readmit": Rule(8, _readmit, lambda life: life.preempted and len(life.rows) < MAX_ROWS),
    "prefill": Rule(25, _prefill, KvLife.rows_to_prefill),
    "decode": Rule(30, _decode, KvLife.rows_to_decode),
    "reserve_only": Rule(3, _reserve_only, KvLife.rows_to_decode),
    "suffix": Rule(4, _suffix, KvLife.rows_to_decode),
    "fork": Rule(8, _fork, KvLife.rows_to_fork),
    "start_group": Rule(4, _start_group, KvLife.rows_to_fork),
    "reorder": Rule(10, _reorder, KvLife.groups_to_reorder),
    "finish": Rule(10, _finish, KvLife.rows_to_decode),
    "abort": Rule(3, _abort, lambda life: life.rows),
    "preempt": Rule(5, _preempt, lambda life: life.rows),
    "evict": Rule(3, _evict),
    "pin": Rule(3, _pin, lambda life: life.prompts),
    "unpin": Rule(2, _unpin),
    "expire": Rule(2, _expire),
    "drop_pins": Rule(1, _drop_pins),
    "reset": Rule(3, _reset),
}
