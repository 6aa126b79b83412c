"""ScaledSequence: a request whose KV is kept per block of the trace, while its tokens are counted exactly.

    a prompt of 1,100 tokens, hash ids 0 7 8     tokens  [0, 7, own]     `own` stands for the 76 tokens behind
    300 tokens generated                                 [0, 7, own]
    600 generated                                        [0, 7, own, own']

Owns: the exact counts, and the ids that stand for blocks.
Does not: own blocks or decide anything (scaled_replica).
Invariants: `tokens` has one id for each block that is begun; an id that no hash id of the trace gave is in one
sequence only, so nobody ever finds what is behind the whole blocks of a prompt.
"""

from __future__ import annotations

from collections.abc import Callable

from cluster.core.request import GenerationRequest
from cluster.core.sampling import SamplingParams
from cluster.simulate.mooncake_trace import TraceRequest
from worker.sequence import Sequence, SequenceStatus

_SAMPLING = SamplingParams()


class ScaledSequence(Sequence):
    """total: tokens that need KV before the next one can be sampled.  done: of these, those that have it.

    decoding_since: the replica's count of decode steps when it began to decode, with `total` tokens in the cache.
    """

    __slots__ = ("block", "decoding_since", "done", "generated", "output_tokens", "total")

    def __init__(self, request: TraceRequest, router_id: str, fresh: Callable[[], int]) -> None:
        whole = request.prompt_tokens // request.segment_tokens
        ids = request.hash_ids[:whole] if len(request.hash_ids) == whole else (*request.hash_ids[:whole], fresh())
        super().__init__(
            GenerationRequest(
                request_id=request.request_id, prompt_token_ids=ids, sampling=_SAMPLING, router_id=router_id
            ),
            request.output_tokens,
            (),
        )
        self.block = request.segment_tokens
        self.total = request.prompt_tokens
        self.output_tokens = request.output_tokens
        self.done = self.generated = self.decoding_since = 0

    @property
    def num_uncomputed(self) -> int:
        return self.total - self.done

    @property
    def uncached_tokens(self) -> int:
        if self.status is SequenceStatus.WAITING:
            return max(1, self.total - self.expected_cached * self.block)
        return self.total - self.done

    def num_shared_tokens(self, other: Sequence) -> int:
        """In blocks; the last one of `other` left out, as in the exact form."""
        shared = 0
        for one, two in zip(self.tokens, other.tokens[: len(other.tokens) - 1], strict=False):
            if one != two:
                break
            shared += 1
        return shared
