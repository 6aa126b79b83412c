"""EngineFrame and EngineCommand: the two messages between an engine and its replica process.

Owns: their fields, the engine's modes, and their wire forms (plain lists and dicts; the process port packs them).
Does not: move them (engine_port, engine_loop).
Invariants: one frame per step; events are in the order the tree produced them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from cluster.core.events import CacheEvent
from cluster.core.replica import ReplicaLoad
from cluster.core.request import GenerationRequest, TokenDelta


class EngineMode(StrEnum):
    """PAUSE: keep everything, run nothing.  RESUME: go on, and take requests again.

    DRAIN: take no more requests, and finish what is there, going on if it was paused.
    """

    PAUSE = "pause"
    RESUME = "resume"
    DRAIN = "drain"


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
    """A request to add, the id of one to cancel, or a change of mode. With none it only wakes a loop that waits."""

    add: GenerationRequest | None = None
    cancel: str | None = None
    mode: EngineMode | None = None

    def to_wire(self) -> list[Any]:
        mode = None if self.mode is None else str(self.mode)
        return [None if self.add is None else self.add.to_wire(), self.cancel, mode]

    @classmethod
    def from_wire(cls, wire: list[Any]) -> EngineCommand:
        add, cancel, mode = wire
        request = None if add is None else GenerationRequest.from_wire(add)
        return cls(request, cancel, None if mode is None else EngineMode(mode))
