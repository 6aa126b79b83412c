"""OfflineEngine: the engine in this process, without Ray and Redis, for `kvray generate`, scripts and the lab.

Owns: one engine on a thread, the tokenizer, and text streams over its token deltas.
Does not: serve other processes.
Invariants: the same scheduler, cache and model code as a served replica; leaving a stream early frees its blocks.
"""

from __future__ import annotations

import queue
import uuid
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from cluster.answer import AnswerStreams
from cluster.config import EngineConfig
from cluster.core.constraint import Constraint
from cluster.core.errors import ReplicaLost
from cluster.core.logprobs import PromptLogprobs, TokenLogprob
from cluster.core.replica import ReplicaLoad
from cluster.core.request import FinishReason, GenerationRequest, TokenDelta
from cluster.core.sampling import SamplingParams
from cluster.tokenizer import Tokenizer
from worker.engine_factory import build_engine
from worker.engine_thread import ThreadEnginePort
from worker.frame import EngineCommand, EngineFrame


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflinePiece:
    """New text and tokens of one choice. All else as in TokenDelta; `index` is its choice."""

    text: str
    token_ids: tuple[int, ...]
    cached_tokens: int | None
    finish_reason: FinishReason | None
    index: int = 0
    score: float | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class OfflineEngine:
    """Context manager. Several threads may generate at the same time."""

    def __init__(self, config: EngineConfig, model_dir: Path) -> None:
        self.tokenizer = Tokenizer.from_dir(model_dir)
        self._streams: dict[str, queue.SimpleQueue[TokenDelta]] = {}
        self.load = ReplicaLoad()
        self._port = ThreadEnginePort(lambda: build_engine(config, str(model_dir)))
        self.facts = self._port.start(self)

    def chat(
        self, messages: Sequence[Mapping[str, Any]], sampling: SamplingParams, *, constraint: Constraint | None = None
    ) -> Iterator[OfflinePiece]:
        """Apply the model's chat template, then generate."""
        return self.generate(self.tokenizer.apply_chat_template(messages), sampling, constraint=constraint)

    def generate(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams,
        cache_salt: str = "",
        *,
        constraint: Constraint | None = None,
    ) -> Iterator[OfflinePiece]:
        """Stream the answer to a text or to token ids. Raises the typed errors of cluster.core.errors.

        Only requests of the same `cache_salt` share KV. `constraint`: what the answer must look like; the first one
        waits about a second until the vocabulary is ready for it.
        """
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        request = GenerationRequest(
            request_id=uuid.uuid4().hex,
            prompt_token_ids=tuple(token_ids),
            sampling=sampling,
            cache_salt=cache_salt,
            constraint=constraint,
        )
        answers = AnswerStreams(self.tokenizer, sampling)
        with closing(self._deltas(request)) as deltas:
            for delta in deltas:
                piece = answers.feed(delta)
                if piece is None:
                    continue
                yield OfflinePiece(
                    text=piece.text,
                    token_ids=piece.token_ids,
                    cached_tokens=delta.cached_tokens,
                    finish_reason=piece.finish_reason,
                    index=delta.choice,
                    score=delta.score,
                    logprobs=piece.logprobs,
                    prompt_logprobs=piece.prompt_logprobs,
                )
                if answers.done:
                    return

    def close(self) -> None:
        self._port.close()

    def __enter__(self) -> OfflineEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def on_frame(self, frame: EngineFrame) -> None:
        """EngineSink; on the engine's thread."""
        self.load = frame.load
        for delta in frame.deltas:
            stream = self._streams.get(delta.request_id)
            if stream is not None:
                stream.put(delta)

    def on_exit(self, reason: str) -> None:
        """EngineSink; on the engine's thread."""
        for request_id, stream in list(self._streams.items()):
            stream.put(TokenDelta(request_id=request_id, error=ReplicaLost(f"the engine ended: {reason}")))

    def _deltas(self, request: GenerationRequest) -> Generator[TokenDelta, None, None]:
        stream: queue.SimpleQueue[TokenDelta] = queue.SimpleQueue()
        self._streams[request.request_id] = stream
        done = False
        try:
            self._port.send(EngineCommand(add=request))
            while not done:
                delta = stream.get()
                done = delta.last
                if delta.error is not None:
                    raise delta.error
                yield delta
        finally:
            del self._streams[request.request_id]
            if not done:
                with suppress(ReplicaLost):  # a dead engine has nothing to cancel
                    self._port.send(EngineCommand(cancel=request.request_id))
