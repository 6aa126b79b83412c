"""SamplingParams: how the next token is chosen, what is told of it, and when a request ends.

Owns: the values and their validation; every wrong value raises `InvalidRequest` naming its field.
Does not: sample (worker.sampler), look for stop strings (cluster.text_stream) or know a vocabulary (worker.request_gate
checks token ids).
Invariants: an instance is always valid; `temperature == 0` means greedy.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from cluster.core.errors import InvalidRequest

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_STOP_TOKENS = 256
MAX_SEED = 2**63 - 1
MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_LOGIT_BIASES = 1024
_MAX_INT = 2**31 - 1

_NUMBERS = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "length_penalty": (-10.0, 10.0),  # length ** it stays a float
}
_POSITIVE = ("top_p", "repetition_penalty")
_INTEGERS = {
    "top_k": (0, _MAX_INT),
    "seed": (-(2**63), MAX_SEED),
    "min_tokens": (0, _MAX_INT),
    "beam_width": (0, MAX_CHOICES),
}
_OPTIONAL_INTEGERS = {
    "max_tokens": (1, _MAX_INT),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
    "n": (1, MAX_CHOICES),
    "best_of": (1, MAX_CHOICES),
}
_FLAGS = ("ignore_eos", "include_stop_str_in_output")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Validated sampling parameters. What changes the logits comes first, in this order: logit_bias, the penalties,
    temperature, min_p, top_k, top_p.

    temperature: >= 0; 0 is greedy.  top_k: 0 means off.  top_p: in (0, 1].
    min_p: the least probability of a token, as a share of the likeliest token's; 0 is off.
    repetition_penalty: in (0, 2], 1 is off; divides positive and multiplies negative logits of the tokens that stand in
    the prompt or the answer.  presence_penalty, frequency_penalty: -2 to 2; taken off the logit of a token that stands
    in the answer, once or once per time.  logit_bias: (token id, -100 to 100) pairs, added to the logits.
    seed: keys the random stream together with the token position.
    max_tokens: >= 1 new tokens, or None for "as many as the model length allows".
    min_tokens: so many tokens come before any end token or stop string counts.
    stop: strings that end the text; returned only with include_stop_str_in_output.  stop_token_ids: ids that end it.
    ignore_eos: do not end at the model's end-of-sequence tokens.
    logprobs: tell each token's log probability, and so many of the likeliest tokens'; None for neither.
    prompt_logprobs: the same of the prompt's tokens. Both are the model's, before everything above.
    n: choices to return, None for one (or all beams).  best_of: samples to draw, of which the n likeliest per token are
    returned.  Sample i draws with seed + i.
    beam_width: > 0 searches with so many beams instead of sampling; temperature, top_k, top_p and min_p do not matter
    then, and the other changes are made to log probabilities.
    length_penalty, early_stopping: as in transformers; a beam's score is log probability / length ** length_penalty.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int | None = None
    best_of: int | None = None
    beam_width: int = 0
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        for name, bounds in _NUMBERS.items():
            _number(name, getattr(self, name), bounds)
        for name in _POSITIVE:
            if getattr(self, name) == 0.0:
                raise InvalidRequest(name, f"{name} must be in (0, {_NUMBERS[name][1]:g}], not 0")
        for name, limits in _INTEGERS.items():
            _integer(name, getattr(self, name), limits)
        for name, limits in _OPTIONAL_INTEGERS.items():
            if (value := getattr(self, name)) is not None:
                _integer(name, value, limits)
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(name, f"{name} must be true or false")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest("min_tokens", f"min_tokens must be at most max_tokens ({self.max_tokens})")
        self._check_stops()
        self._check_bias()
        self._check_choices()

    def _check_stops(self) -> None:
        _tuple("stop", self.stop)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest("stop", f"stop has {len(self.stop)} strings, at most {MAX_STOP_STRINGS} are allowed")
        for text in self.stop:
            if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_LENGTH:
                raise InvalidRequest("stop", f"each stop string must have 1 to {MAX_STOP_LENGTH} characters")
        _tuple("stop_token_ids", self.stop_token_ids)
        if len(self.stop_token_ids) > MAX_STOP_TOKENS:
            raise InvalidRequest("stop_token_ids", f"at most {MAX_STOP_TOKENS} stop_token_ids are allowed")
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, (0, _MAX_INT))

    def _check_bias(self) -> None:
        _tuple("logit_bias", self.logit_bias)
        if len(self.logit_bias) > MAX_LOGIT_BIASES:
            raise InvalidRequest("logit_bias", f"at most {MAX_LOGIT_BIASES} tokens may have a logit_bias")
        for pair in self.logit_bias:
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise InvalidRequest("logit_bias", "logit_bias must be pairs of a token id and a number")
            _integer("logit_bias", pair[0], (0, _MAX_INT))
            _number("logit_bias", pair[1], (-100.0, 100.0))
        if len({token for token, _ in self.logit_bias}) < len(self.logit_bias):
            raise InvalidRequest("logit_bias", "logit_bias names a token twice")

    def _check_choices(self) -> None:
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise InvalidRequest("early_stopping", 'early_stopping must be true, false or "never"')
        if not self.beam_width:
            for field, default in (("length_penalty", 1.0), ("early_stopping", False)):
                if getattr(self, field) != default:
                    raise InvalidRequest(field, f"{field} is for beam search: it needs a beam_width")
        if self.beam_width and self.best_of is not None:
            raise InvalidRequest("best_of", "best_of is for sampling; a beam search returns n of its beam_width beams")
        if self.num_choices > self.num_rows:
            field = "beam_width" if self.beam_width else "best_of"
            raise InvalidRequest(field, f"{field} ({self.num_rows}) must be at least n ({self.num_choices})")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        """The tokens so far matter for the next one's choice."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

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
        return cls(**{name: _plain(value) for name, value in wire.items() if name in known})


def _plain(value: Any) -> Any:
    """Lists of a wire format are tuples here."""
    return tuple(_plain(item) for item in value) if isinstance(value, list) else value


def _number(field: str, value: object, bounds: tuple[float, float]) -> None:
    low, high = bounds
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(field, f"{field} must be a number")
    if not low <= value <= high:  # NaN too
        raise InvalidRequest(field, f"{field} must be between {low:g} and {high:g}")


def _integer(field: str, value: object, bounds: tuple[int, int]) -> None:
    low, high = bounds
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(field, f"{field} must be an integer")
    if not low <= value <= high:
        raise InvalidRequest(field, f"{field} must be between {low} and {high}, not {value}")


def _tuple(field: str, value: object) -> None:
    if not isinstance(value, tuple):  # a bare string would count as its characters
        raise InvalidRequest(field, f"{field} must be a tuple")
