"""Streams: long answers on each of two workers, open while something is done to the cluster."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count

from drill_cluster import DrillCluster
from drill_load import Asked
from drill_questions import WAIT_S, by_grpc, ready, rows, settled
from patience import eventually


class Streams:
    """A long answer or more on each of two workers, to be open for that many seconds at least."""

    def __init__(self, cluster: DrillCluster, seconds: float) -> None:
        self._cluster = cluster
        self._before = settled(cluster, 2)
        self._numbers = count()
        self._rates: dict[str, list[float]] = {one: [] for one in self._before}
        eventually(self._measured, "each worker has shown what it can, so that neither looks slow", WAIT_S)
        eventually(lambda: not any(self._running()), "heartbeats tell that all of it is over", WAIT_S)
        self.tokens = min(int(seconds * max(max(rates) for rates in self._rates.values())), 40_000)
        self._pool = ThreadPoolExecutor(7)
        self._answers: list[Future[Asked]] = []

    def __enter__(self) -> Streams:
        for _ in range(6):
            if sum(running > 0 for running in self._running()) == 2:
                self._gone = self._pool.submit(self._watch)
                return self
            self._answers.append(self._pool.submit(by_grpc, self._cluster, next(self._numbers), tokens=self.tokens))
            eventually(self._all_run, "it runs", 60, poll_s=0.5)
        raise AssertionError("one worker got all the streams")

    def _measured(self) -> bool:
        one = by_grpc(self._cluster, next(self._numbers), tokens=400)
        assert one.error is None, one.error
        self._rates[one.replica].append(400 / (one.ended - one.began))
        return all(len(rates) >= 3 for rates in self._rates.values())

    def _running(self) -> list[int]:
        return [row.running for row in rows(self._cluster)]

    def _all_run(self) -> bool:
        return sum(self._running()) >= sum(not answer.done() for answer in self._answers)

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def until_one_goes(self) -> tuple[str, float]:
        """The worker that takes no more, and when that was seen: at once, whatever else goes on meanwhile."""
        return self._gone.result(60)

    def _watch(self) -> tuple[str, float]:
        gone: set[str] = set()

        def going() -> bool:
            words = ready(self._cluster)[1]["replicas"]
            gone.update(one for one in self._before if words.get(one) != "ready")
            return bool(gone)

        eventually(going, "a worker drains", WAIT_S)
        (victim,) = gone
        return victim, time.time()

    def end(self) -> list[Asked]:
        return [answer.result(WAIT_S) for answer in self._answers]
