"""EngineFrame and EngineCommand: the two messages between an engine and its replica process.

Owns: their fields and wire forms (plain lists and dicts, packed with msgpack by the process port).
Does not: move them (engine_port, engine_loop).
Invariants: one frame per step; events are in the order the tree produced them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cluster.core.events import CacheEvent
from cluster.core.replica import ReplicaLoad
from cluster.core.request import GenerationRequest, TokenDelta


@dataclass(frozen=True, slots=True)
class EngineFrame:
    """What one step produced. The load may travel more rarely than the rest (engine_main.FrameWriter)."""

    deltas: tuple[TokenDelta, ...]
    events: tuple[CacheEvent, ...]
    load: ReplicaLoad

    def to_wire(self, *, with_load: bool = True) -> list[Any]:
        load = self.load.to_wire() if with_load else None
        return [[d.to_wire() for d in self.deltas], [e.to_wire() for e in self.events], load]

    @classmethod
    def from_wire(cls, wire: list[Any], load_before: ReplicaLoad) -> EngineFrame:
        """`load_before`: the load of the frame before, for a frame that was sent without one."""
        deltas, events, load = wire
        return cls(
            tuple(TokenDelta.from_wire(d) for d in deltas),
            tuple(CacheEvent.from_wire(e) for e in events),
            load_before if load is None else ReplicaLoad.from_wire(load),
        )


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """Either a request to add, or the id of one to cancel. With neither it only wakes a loop that waits."""

    add: GenerationRequest | None = None
    cancel: str | None = None

    def to_wire(self) -> list[Any]:
        return [None if self.add is None else self.add.to_wire(), self.cancel]

    @classmethod
    def from_wire(cls, wire: list[Any]) -> EngineCommand:
        add, cancel = wire
        return cls(None if add is None else GenerationRequest.from_wire(add), cancel)
