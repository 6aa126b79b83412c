"""SamplingParams: how the next token is chosen and when a request ends.

Owns: the values and their validation; every wrong value raises `InvalidRequest` naming its field.
Does not: sample (worker.sampler) or look for stop strings (cluster.text_stream).
Invariants: an instance is always valid; `temperature == 0` means greedy.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from cluster.core.errors import InvalidRequest

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_SEED = 2**63 - 1
MAX_CHOICES = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Validated sampling parameters.

    temperature: >= 0; 0 is greedy.  top_k: 0 means off.  top_p: in (0, 1].
    seed: keys the random stream together with the token position.
    max_tokens: >= 1 new tokens, or None for "as many as the model length allows".
    stop: strings that end the text (never returned).  stop_token_ids: ids that end it.
    ignore_eos: do not end at the model's end-of-sequence tokens.
    n: choices to return, None for one (or all beams).  best_of: samples to draw, of which the n likeliest per token are
    returned.  Sample i draws with seed + i.
    beam_width: > 0 searches with so many beams instead of sampling; temperature, top_k and top_p do not matter then.
    length_penalty, early_stopping: as in transformers; a beam's score is log probability / length ** length_penalty.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int | None = None
    best_of: int | None = None
    beam_width: int = 0
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, low=0.0, high=100.0)
        _number("top_p", self.top_p, low=0.0, high=1.0)
        if self.top_p == 0.0:
            raise InvalidRequest("top_p", "top_p must be in (0, 1], not 0")
        _integer("top_k", self.top_k, low=0, high=2**31 - 1)
        _integer("seed", self.seed, low=-(2**63), high=MAX_SEED)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, low=1, high=2**31 - 1)
        _tuple("stop", self.stop)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest("stop", f"stop has {len(self.stop)} strings, at most {MAX_STOP_STRINGS} are allowed")
        for text in self.stop:
            if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_LENGTH:
                raise InvalidRequest("stop", f"each stop string must have 1 to {MAX_STOP_LENGTH} characters")
        _tuple("stop_token_ids", self.stop_token_ids)
        if len(self.stop_token_ids) > 256:
            raise InvalidRequest("stop_token_ids", "at most 256 stop_token_ids are allowed")
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, low=0, high=2**31 - 1)
        if not isinstance(self.ignore_eos, bool):
            raise InvalidRequest("ignore_eos", "ignore_eos must be true or false")
        self._check_choices()

    def _check_choices(self) -> None:
        for name, value in (("n", self.n), ("best_of", self.best_of)):
            if value is not None:
                _integer(name, value, low=1, high=MAX_CHOICES)
        _integer("beam_width", self.beam_width, low=0, high=MAX_CHOICES)
        _number("length_penalty", self.length_penalty, low=-10.0, high=10.0)  # length ** it stays a float
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise InvalidRequest("early_stopping", 'early_stopping must be true, false or "never"')
        if self.beam_width and self.best_of is not None:
            raise InvalidRequest("best_of", "best_of is for sampling; a beam search returns n of its beam_width beams")
        if self.num_choices > self.num_rows:
            field = "beam_width" if self.beam_width else "best_of"
            raise InvalidRequest(field, f"{field} ({self.num_rows}) must be at least n ({self.num_choices})")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def num_choices(self) -> int:
        """Answers that are returned."""
        return self.n if self.n is not None else max(self.beam_width, 1)

    @property
    def num_rows(self) -> int:
        """Sequences that run side by side for them."""
        return self.beam_width or self.best_of or self.num_choices

    def to_wire(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> SamplingParams:
        known = {f.name for f in fields(cls)}
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in wire.items() if k in known}
        return cls(**values)


def _number(field: str, value: object, *, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(field, f"{field} must be a number")
    if not low <= value <= high:  # NaN too
        raise InvalidRequest(field, f"{field} must be between {low:g} and {high:g}")


def _integer(field: str, value: object, *, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(field, f"{field} must be an integer")
    if not low <= value <= high:
        raise InvalidRequest(field, f"{field} must be between {low} and {high}, not {value}")


def _tuple(field: str, value: object) -> None:
    if not isinstance(value, tuple):  # a bare string would count as its characters
        raise InvalidRequest(field, f"{field} must be a tuple")
