"""RequestGate: what is refused at the door, because it could never run here.

Owns: the limits, resolving max_tokens, and the arithmetic of what a request can need at most.
Does not: queue anything, or judge what is free now (scheduler, block_manager).
Invariants: whatever passes fits into the pool alone, with all its rows at full length; a refusal names field and limit.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.core.errors import InvalidRequest, RequestTooLong
from cluster.core.request import GenerationRequest
from cluster.core.sampling import SamplingParams
from worker.kvcache.block_manager import BlockManager

# Log probabilities of a prompt travel in one message, which must stay well below what a token channel carries.
MAX_PROMPT_LOGPROBS = 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """max_queue, max_queue_tokens: requests that may wait, and their tokens.

    prefix_first, ageing_s: the queue's order (worker.scheduling.waiting_queue).  hold_back: wait for a prefix that is
    being computed.  watermark: share of the pool that stays free at admission while others run.
    """

    max_num_seqs: int
    token_budget: int
    max_queue: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_queue_tokens: int | None = None
    prefix_first: bool = True
    ageing_s: float = float("inf")
    hold_back: bool = True
    watermark: float = 0.0
    strict_blocks: bool = False


class RequestGate:
    """Asks the manager for sizes only, which never change."""

    def __init__(self, manager: BlockManager, limits: SchedulerLimits) -> None:
        self._block_size = manager.block_size
        self._num_blocks = manager.capacity_tokens // manager.block_size
        self._limits = limits

    def max_tokens(self, request: GenerationRequest) -> int:
        """The bound on new tokens (>= 1). Raises InvalidRequest or RequestTooLong."""
        prompt, rows = len(request.prompt_token_ids), request.sampling.num_rows
        limit = min(self._limits.max_model_len, self._num_blocks * self._block_size)
        if prompt >= limit:
            raise RequestTooLong(
                "prompt", f"the prompt has {prompt} tokens, but at most {limit - 1} fit (limit {limit})", limit=limit
            )
        if min(request.prompt_token_ids) < 0 or max(request.prompt_token_ids) >= self._limits.vocab_size:
            raise InvalidRequest(
                "token_ids", f"a token id is outside the vocabulary (0 to {self._limits.vocab_size - 1})"
            )
        self._check_sampling(request.sampling, prompt)
        if rows > 1:
            limit = self._limit_of_rows(prompt, limit, request)
        asked = request.sampling.max_tokens
        if asked is None:
            if request.sampling.min_tokens > limit - prompt:
                raise InvalidRequest("min_tokens", f"min_tokens: only {limit - prompt} tokens fit behind the prompt")
            return limit - prompt
        if prompt + asked > limit:
            raise RequestTooLong(
                "max_tokens",
                f"prompt ({prompt} tokens) + max_tokens ({asked}) exceeds the limit of {limit} tokens",
                limit=limit,
            )
        return asked

    def _check_sampling(self, sampling: SamplingParams, prompt: int) -> None:
        """What depends on the vocabulary or the prompt."""
        named = {"stop_token_ids": sampling.stop_token_ids, "logit_bias": [token for token, _ in sampling.logit_bias]}
        for field, tokens in named.items():
            if max(tokens, default=0) >= self._limits.vocab_size:
                last = self._limits.vocab_size - 1
                raise InvalidRequest(field, f"{field} names a token outside the vocabulary (0 to {last})")
        if sampling.prompt_logprobs is not None and prompt * (sampling.prompt_logprobs + 1) > MAX_PROMPT_LOGPROBS:
            most = MAX_PROMPT_LOGPROBS // (sampling.prompt_logprobs + 1)
            raise InvalidRequest(
                "prompt_logprobs",
                f"prompt_logprobs {sampling.prompt_logprobs} is for prompts of up to {most} tokens, not {prompt}",
            )

    def _limit_of_rows(self, prompt: int, limit: int, request: GenerationRequest) -> int:
        """The longest sequence when every row has its own blocks behind the prompt, plus one for copy-on-write."""
        sampling = request.sampling
        field = "beam_width" if sampling.beam_width else "best_of" if sampling.best_of else "n"
        rows = sampling.num_rows
        if rows > self._limits.max_num_seqs:
            most = self._limits.max_num_seqs
            raise InvalidRequest(field, f"{field} {rows}: at most {most} sequences run at the same time")
        behind = (self._num_blocks - -(-prompt // self._block_size)) // rows - 1
        if behind < 1:
            raise RequestTooLong(
                field,
                f"{rows} rows behind a prompt of {prompt} tokens do not fit into {self._num_blocks} blocks",
                limit=limit,
            )
        return min(limit, prompt + behind * self._block_size)
