"""Runner: the engine's view of a model, and the facts it reports when it is loaded.

Owns: the Runner protocol, its answer Sampled, and ModelFacts.
Does not: import torch; `worker.model_runner` implements it for real models, tests implement it with fakes.
Invariants: `run` returns one Sampled per row with `sample`, in batch order, and has written the KV of every
scheduled position when it returns.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Protocol

from cluster.core.errors import KvrayError
from cluster.core.logprobs import TokenLogprob
from worker.batch import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the rest of the replica needs to know of a loaded model and its pool."""

    model: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    device: str
    attention: str
    weight_bytes: int
    kv_bytes_per_token: int
    num_blocks: int
    block_size: int
    model_revision: str
    kv_fingerprint: str

    def to_wire(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> ModelFacts:
        return cls(**{**wire, "eos_token_ids": tuple(wire["eos_token_ids"])})


class Sampled(NamedTuple):
    """What a row with `sample` gave: a token, and what its extras asked for.

    logprob: the token's.  candidates: (token id, log probability) of the best next tokens, best first; what changes the
    logits changes these too.  candidate_logprobs: the model's own of the same tokens, where they are wanted.
    prompt_logprobs: of the prompt tokens behind the scheduled ones.
    error: no token can follow in the row's grammar; the token means nothing then.
    """

    token_id: int
    logprob: TokenLogprob | None = None
    candidates: tuple[tuple[int, float], ...] = ()
    candidate_logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    error: KvrayError | None = None


class Runner(Protocol):
    @property
    def facts(self) -> ModelFacts: ...

    def run(self, batch: Batch) -> list[Sampled]:
        """Copy blocks, compute the batch, write its KV, answer for each row with `sample`."""
