"""RequestLog: what became of each request of a simulation, and when.

Owns: times of arrival, admission, first and last token; gaps between tokens; duplicated prefill.
Does not: make statistics (sim_report) or move time.
Invariants: gaps are kept as (seconds, how many), because all rows of a step wait equally long: the memory is that of
the steps, not of the tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from itertools import pairwise

from cluster.core.errors import DeadlineExceeded
from cluster.core.request import TokenDelta
from cluster.simulate.mooncake_trace import TraceRequest
from worker.batch import Batch


class RequestRecord:
    """One request. Times in virtual seconds; None until it happened. `refused`: ended by an error."""

    __slots__ = (
        "admitted_s",
        "cached_tokens",
        "expired",
        "finished_s",
        "first_token_s",
        "last_token_s",
        "refused",
        "request",
    )

    def __init__(self, request: TraceRequest) -> None:
        self.request = request
        self.admitted_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s = 0.0
        self.finished_s: float | None = None
        self.cached_tokens = 0
        self.refused = False
        self.expired = False

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.request.arrival_s


class RequestLog:
    def __init__(self) -> None:
        self.records: dict[str, RequestRecord] = {}
        self.gaps = array("d")
        self.gap_counts = array("q")
        self.duplicated_tokens = 0
        self._prefilling: dict[str, RequestRecord] = {}

    def arrived(self, request: TraceRequest) -> None:
        self.records[request.request_id] = RequestRecord(request)

    def begin_step(self, batch: Batch, now_s: float) -> None:
        """Who is admitted, and who computes what another one is computing already."""
        for item in batch.seqs:
            record = self.records[item.seq_id]
            if record.admitted_s is None:
                record.admitted_s = now_s
                shared = max(
                    (_shared_tokens(record.request, one.request) for one in self._prefilling.values()), default=0
                )
                self.duplicated_tokens += max(shared - item.start, 0)
                self._prefilling[item.seq_id] = record
        for item in batch.seqs if self._prefilling else ():
            if item.sample:
                self._prefilling.pop(item.seq_id, None)

    def end_step(self, deltas: Iterable[TokenDelta], before_s: float, now_s: float) -> None:
        """`before_s`: when the step before ended, at which most rows got their last token."""
        in_step = 0
        for delta in deltas:
            record = self.records[delta.request_id]
            if delta.error is not None:
                record.refused = True
                record.expired = isinstance(delta.error, DeadlineExceeded)
                self._prefilling.pop(delta.request_id, None)
                continue
            if record.first_token_s is None:
                record.first_token_s = now_s
                record.cached_tokens = delta.cached_tokens or 0
            elif record.last_token_s == before_s:
                in_step += 1
            else:
                self._gap(now_s - record.last_token_s, 1)
            record.last_token_s = now_s
            if delta.finish_reason is not None:
                record.finished_s = now_s
        if in_step:
            self._gap(now_s - before_s, in_step)

    def decoded(self, seq_ids: Iterable[str], before_s: float, ends_s: list[float]) -> None:
        """Each of these rows got one token at the end of each of these steps."""
        first, in_step = ends_s[0], 0
        num_rows = 0
        for seq_id in seq_ids:
            record = self.records[seq_id]
            num_rows += 1
            if record.last_token_s == before_s:
                in_step += 1
            else:
                self._gap(first - record.last_token_s, 1)
            record.last_token_s = ends_s[-1]
        if in_step:
            self._gap(first - before_s, in_step)
        for earlier, later in pairwise(ends_s):
            self._gap(later - earlier, num_rows)

    def _gap(self, seconds: float, count: int) -> None:
        self.gaps.append(seconds)
        self.gap_counts.append(count)


def _shared_tokens(a: TraceRequest, b: TraceRequest) -> int:
    """Of two prompts, the last token of `a` left out."""
    shared = 0
    for one, other in zip(a.hash_ids, b.hash_ids, strict=False):
        if one != other:
            break
        shared += a.segment_tokens
    return min(shared, a.prompt_tokens - 1, b.prompt_tokens)
