"""A scripted Dispatcher and a byte tokenizer, to drive a FrontDoor without Ray or a model.

Every character of ASCII text is one token, and an empty text has none.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from cluster.chat_template import ChatTemplate
from cluster.core.hashing import RouteScheme
from cluster.core.replica import Epoch, WorkerId
from cluster.core.request import FinishReason, GenerationRequest, TokenDelta
from cluster.metric_tools import MetricTools, NoMetrics
from cluster.tokenizer import Tokenizer
from router.attempts import Attempts
from router.front_door import FrontDoor
from router.request_metrics import RequestMetrics
from router.route_explanation import RouteExplanation
from router.route_ledger import RouteLedger
from router.routing_state import RouteHint

CHUNK_TOKENS = 4
EPOCH = Epoch(1)
SCHEME = RouteScheme(tokenizer_revision="t", model_revision="m", chunk_tokens=CHUNK_TOKENS)
HANG = "hang"
SLOW_S = 0.02

Step = TokenDelta | Exception | str | float


def byte_tokenizer(template: str | None = "{% for m in messages %}{{ m.content }}{% endfor %}") -> Tokenizer:
    vocab = {char: number for number, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, ChatTemplate(template, {}))


TOKENIZER = byte_tokenizer()


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text))


def delta(text: str = "", finish: FinishReason | None = None, cached: int | None = None) -> TokenDelta:
    return TokenDelta(request_id="r", token_ids=ids_of(text), finish_reason=finish, cached_tokens=cached)


def answer(text: str, finish: FinishReason = FinishReason.LENGTH) -> list[Step]:
    """One delta per character; the last one ends the answer."""
    return [*[delta(char) for char in text[:-1]], delta(text[-1:], finish)]


@dataclass
class Attempt:
    """What one replica does: yield deltas, raise errors, sleep (a number of seconds) or hang."""

    worker: str
    steps: list[Step]
    request: GenerationRequest | None = None
    hint: RouteHint | None = None
    whole: bool = False
    sent: int = 0
    ending: str = "never asked"


@dataclass
class FakeDispatcher:
    """Plays the attempts in order and books each in the ledger, as the real chooser does."""

    ledger: RouteLedger
    attempts: list[Attempt]
    used: list[Attempt] = field(default_factory=list)

    async def dispatch(
        self, request: GenerationRequest, hint: RouteHint, *, whole: bool = False
    ) -> AsyncGenerator[tuple[WorkerId, TokenDelta], None]:
        assert len(self.used) < len(self.attempts), "dispatched once more than the test expects"
        attempt = self.attempts[len(self.used)]
        self.used.append(attempt)
        attempt.request, attempt.hint, attempt.whole, attempt.ending = request, hint, whole, "running"
        self.ledger.book(request.request_id, WorkerId(attempt.worker), EPOCH, hint.prompt_tokens)
        try:
            for step in attempt.steps:
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, TokenDelta):
                    attempt.sent += 1
                    yield WorkerId(attempt.worker), step
                else:
                    await (asyncio.Event().wait() if step == HANG else asyncio.sleep(float(step)))
            attempt.ending = "exhausted"
        except GeneratorExit:
            attempt.ending = "closed"
            raise
        except asyncio.CancelledError:
            attempt.ending = "cancelled"
            raise
        except Exception:
            attempt.ending = "failed"
            raise


@dataclass
class LedgerAccounting:
    """The load of requests, without all else that a RoutingState does for them. `previewed`: hints of dry runs."""

    ledger: RouteLedger
    previewed: list[RouteHint] = field(default_factory=list)

    def answered(self, request_id: str, cached_tokens: int | None) -> str | None:
        self.ledger.prefill_done(request_id)
        return f"reused={cached_tokens}"

    def release(self, request_id: str) -> None:
        self.ledger.release(request_id)

    def preview(self, hint: RouteHint) -> RouteExplanation:
        self.previewed.append(hint)
        return RouteExplanation(
            request_id=hint.request_id, worker_id=WorkerId("a"), candidates=(), reuse=None, dry_run=True
        )

    def explained(self, request_id: str) -> RouteExplanation | None:
        return None


@dataclass
class DoorWorld:
    """A FrontDoor on a scripted dispatcher, and everything it told its neighbours."""

    attempts: list[Attempt]
    limit: int | None = None
    tokenizer: Tokenizer = TOKENIZER
    seed: int = 7
    clock: Callable[[], float] = time.monotonic
    metric_tools: MetricTools = field(default_factory=NoMetrics)
    lost: list[str] = field(default_factory=list)
    limit_asked_in: list[int] = field(default_factory=list)
    ledger: RouteLedger = field(default_factory=RouteLedger)
    dispatcher: FakeDispatcher = field(init=False)
    accounting: LedgerAccounting = field(init=False)
    door: FrontDoor = field(init=False)

    def __post_init__(self) -> None:
        self.dispatcher = FakeDispatcher(self.ledger, self.attempts)
        self.accounting = LedgerAccounting(self.ledger)
        on_lost: Callable[[WorkerId], None] = self.lost.append
        self.door = FrontDoor(
            model="demo",
            tokenizer=self.tokenizer,
            scheme=SCHEME,
            attempts=Attempts(self.dispatcher, on_lost),
            accounting=self.accounting,
            router_id="me",
            max_model_len=self._limit,
            rng=random.Random(self.seed),
            metrics=RequestMetrics(self.metric_tools, self.clock),
        )

    def _limit(self) -> int | None:
        self.limit_asked_in.append(threading.get_ident())
        return self.limit

    @property
    def hints(self) -> list[RouteHint]:
        return [attempt.hint for attempt in self.dispatcher.used if attempt.hint is not None]

    @property
    def request(self) -> GenerationRequest:
        request = self.dispatcher.used[0].request
        assert request is not None
        return request

    def live(self) -> int:
        """Requests still booked, on any replica of the script."""
        return sum(self.ledger.requests(WorkerId(name), EPOCH) for name in {a.worker for a in self.attempts})

    def uncached(self) -> int:
        return sum(self.ledger.uncached_tokens(WorkerId(name), EPOCH) for name in {a.worker for a in self.attempts})
