"""Session: all runs, interleaved: for each repetition, for each workload, for each peer.

Interleaving makes the peers share the machine's slow and fast moments. Before a run the session waits for a quiet
machine; a noisy run is recorded, dropped and tried again; a failed one is recorded, and the others go on.

Owns: the order, the tries, the time limit, and what becomes of failures.
Does not: send requests (driver), read /proc (run_meter) or build tables (report).
Invariants: every run has a record, except one that Ctrl-C cut, and texts of its own; nothing runs after the time limit.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from cluster.bench.background_load import BackgroundLoad
from cluster.bench.driver import drive
from cluster.bench.measures import Figure, measure
from cluster.bench.peer import Peer
from cluster.bench.run_meter import Meter, Usage
from cluster.bench.run_record import RunRecord, Verdict
from cluster.bench.workloads import Turn, Workload, write_text, write_texts
from cluster.core.errors import ConfigError, KvrayError

_WARM_UP = ((8, 8), (300, 8))  # words in, tokens out: connections, allocators, code paths


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """salt: makes the texts of this invocation its own.  retries: further tries of a noisy run."""

    salt: str
    repetitions: int = 3
    max_noise: float = 0.12
    quiet_wait_s: float = 25.0
    retries: int = 1
    time_limit_s: float | None = None


async def _nothing() -> None:
    pass


class Session:
    """before_repetition: called as each repetition begins; on_record: with each record as it is made."""

    def __init__(
        self,
        peers: Sequence[Peer],
        workloads: Sequence[Workload],
        words: Sequence[str],
        settings: SessionSettings,
        meter: Meter,
        *,
        load: BackgroundLoad | None = None,
        before_repetition: Callable[[], Awaitable[None]] = _nothing,
        on_record: Callable[[RunRecord], None] = lambda record: None,
    ) -> None:
        self.records: list[RunRecord] = []
        self.interrupted = ""
        self._peers = peers
        self._workloads = workloads
        self._words = words
        self._settings = settings
        self._meter = meter
        self._load = load
        self._before_repetition = before_repetition
        self._on_record = on_record
        self._deadline = float("inf")

    async def warm_up(self) -> None:
        """A few requests that nobody measures. ConfigError when a peer cannot answer at all."""
        for peer in self._peers:
            for words, max_tokens in _WARM_UP:
                rng = random.Random(f"{self._settings.salt}-warm-up-{peer.facts.name}-{words}")
                text = write_text(rng, self._words, words)
                try:
                    await peer.complete(text, max_tokens, caching=True)
                except KvrayError as error:
                    raise ConfigError(f"peer {peer.facts.name} cannot answer: {error.message}") from None

    async def run(self) -> None:
        """Fills `records`. A Ctrl-C or the time limit ends it early; `interrupted` then says so."""
        if self._settings.time_limit_s is not None:
            self._deadline = asyncio.get_running_loop().time() + self._settings.time_limit_s
        try:
            for repetition in range(self._settings.repetitions):
                await self._before_repetition()
                for workload in self._workloads:
                    for peer in self._peers:
                        await self._run_until_kept(peer, workload, repetition)
        except _TimeIsUp:
            self.interrupted = f"stopped after {self._settings.time_limit_s:g} s"
        except asyncio.CancelledError:
            self.interrupted = "stopped by Ctrl-C"

    async def _run_until_kept(self, peer: Peer, workload: Workload, repetition: int) -> None:
        if not workload.caching and not peer.can_defeat_cache:
            return
        for attempt in range(self._settings.retries + 1):
            await self._meter.wait_for_quiet(min(self._settings.quiet_wait_s, self._left_s()))
            if self._left_s() <= 0:
                raise _TimeIsUp
            record = await self._run_once(peer, workload, repetition, attempt)
            self.records.append(record)
            self._on_record(record)
            if record.verdict is not Verdict.NOISY:
                return

    async def _run_once(self, peer: Peer, workload: Workload, repetition: int, attempt: int) -> RunRecord:
        place = f"{workload.name}-{peer.facts.name}-{repetition}-{attempt}"
        texts = write_texts(workload, self._words, f"{self._settings.salt}-{place}")
        began, figures, reason = time.time(), dict[str, Figure](), ""
        if self._load is not None:
            await self._load.start()
        self._meter.start(peer)
        try:
            figures = await self._figures(peer, workload, texts)
        except KvrayError as error:
            reason = error.message
        finally:
            usage = self._meter.stop()
            load_taken = await self._load.stop() if self._load is not None else None
        return RunRecord(
            peer=peer.facts.name,
            workload=workload.name,
            repetition=repetition,
            attempt=attempt,
            verdict=self._verdict(usage, reason),
            at=began,
            figures=figures,
            usage=usage,
            asked_tokens=workload.answer_tokens,
            load_asked=None if self._load is None else self._load.share,
            load_taken=load_taken,
            reason=reason,
        )

    async def _figures(self, peer: Peer, workload: Workload, texts: list[list[Turn]]) -> dict[str, Figure]:
        try:
            async with asyncio.timeout(None if self._left_s() == float("inf") else self._left_s()):
                return measure(await drive(peer, texts, workload.concurrency, caching=workload.caching))
        except TimeoutError:
            raise KvrayError("cut off by the time limit") from None

    def _verdict(self, usage: Usage, reason: str) -> Verdict:
        if reason:
            return Verdict.FAILED
        noisy = usage.noise is not None and usage.noise > self._settings.max_noise
        return Verdict.NOISY if noisy else Verdict.KEPT

    def _left_s(self) -> float:
        return self._deadline - asyncio.get_running_loop().time()


class _TimeIsUp(Exception):
    """The time limit has passed; no further run begins."""
