"""RopeSpec: the frequencies of a model's rotary embedding, from the fields of its config.json.

Rounding follows the fp32 arithmetic in which models are trained: at position 100,000 an inverse frequency that is off
by one part in ten million turns a pair by a hundredth of a radian.

Owns: reading old (rope_theta, rope_scaling) and new (rope_parameters) fields, the kinds of scaling, and the length up
to which the frequencies hold.
Does not: know a model's other fields (worker.models.decoder_spec) or rotate anything.
Invariants: a parameter that is not understood is refused; the frequencies never depend on the length of a sequence.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cluster.core.errors import ConfigError

_DEFAULT_THETA = 10_000.0
_FIELDS = {
    "default": frozenset[str](),
    "dynamic": frozenset({"factor"}),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor"}),
    "longrope": frozenset({"factor", "short_factor", "long_factor", "attention_factor"}),
    "yarn": frozenset({"factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}),
}
_ALWAYS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"})
_WITH_ORIGINAL = ("llama3", "yarn", "longrope")

Scaled = tuple[list[float], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Pair i of a head, the components i and i + rotary_dim / 2, turns by position * inv_freq[i]."""

    inv_freq: tuple[float, ...]  # rotary_dim / 2 numbers, in radians per position
    scaling: float  # multiplies cos and sin
    max_length: int | None  # tokens up to which these frequencies hold; None: for ever

    @property
    def rotary_dim(self) -> int:
        return 2 * len(self.inv_freq)

    @classmethod
    def from_parameters(
        cls, parameters: Mapping[str, Any], *, head_dim: int, max_positions: int, original: int | None = None
    ) -> RopeSpec:
        """From what `rope_parameters` returns; ConfigError says which field cannot be honoured.

        `original` is the original length that config.json gives outside the rotary fields.
        """
        kind = str(parameters["rope_type"])
        if kind not in _FIELDS:
            raise ConfigError(f"its rotary embedding has the unknown type {kind!r}")
        unknown = sorted(parameters.keys() - _FIELDS[kind] - _ALWAYS)
        if unknown:
            raise ConfigError(f"rope parameter {unknown[0]!r} is not known for rope type {kind!r}")
        theta, share = _number(parameters, "rope_theta"), _number(parameters, "partial_rotary_factor", 1.0)
        dim = int(head_dim * share)
        if not 0 < dim <= head_dim or dim % 2:
            raise ConfigError(f"the rotary embedding would turn {dim} of {head_dim} components")
        powers = [_f32(theta ** _f32(i / dim)) for i in range(0, dim, 2)]
        inv_freq, scaling = _KINDS[kind](powers, parameters, max_positions)
        max_length = stable_length(parameters, original or max_positions)
        return cls(inv_freq=tuple(inv_freq), scaling=scaling, max_length=max_length)


def rope_parameters(config: Mapping[str, Any], *, partial_always: bool = False) -> dict[str, Any]:
    """The rotary fields of config.json in one form, as transformers keeps them in `rope_parameters`.

    `partial_always` writes partial_rotary_factor also where the file has none.
    """
    rope = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    rope.setdefault("rope_theta", config.get("rope_theta", _DEFAULT_THETA))
    partial = config.get("partial_rotary_factor", 1.0 if partial_always else None)
    if partial is not None:
        rope.setdefault("partial_rotary_factor", partial)
    rope.setdefault("rope_type", rope.get("type", "default"))
    if rope["rope_type"] in _WITH_ORIGINAL:
        outside = config.get("original_max_position_embeddings")
        if outside is not None:
            rope["original_max_position_embeddings"] = outside
        else:
            rope.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
    return rope


def stable_length(parameters: Mapping[str, Any], otherwise: int) -> int | None:
    """Tokens up to which the frequencies hold, None if for ever.

    Two kinds switch frequencies for a whole batch when one sequence grows past a length; KV would then depend on who
    else is in the batch. `otherwise` is that length where the parameters do not name it.
    """
    if parameters.get("rope_type") not in ("longrope", "dynamic"):
        return None
    return int(parameters.get("original_max_position_embeddings") or otherwise)


def _plain(powers: list[float], parameters: Mapping[str, Any], max_positions: int) -> Scaled:
    return [_f32(1.0 / power) for power in powers], 1.0


def _linear(powers: list[float], parameters: Mapping[str, Any], max_positions: int) -> Scaled:
    factor = _f32(_number(parameters, "factor"))
    return [_f32(_f32(1.0 / power) / factor) for power in powers], 1.0


def _llama3(powers: list[float], parameters: Mapping[str, Any], max_positions: int) -> Scaled:
    """Slow pairs are slowed by `factor`, quick ones are left alone, and those between are mixed."""
    factor, low, high = (_f32(_number(parameters, name)) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    original = _number(parameters, "original_max_position_embeddings")
    scaled = []
    for frequency in _plain(powers, parameters, max_positions)[0]:
        wavelength = _f32(_f32(2 * math.pi) / frequency)
        if wavelength > original / low:
            frequency = _f32(frequency / factor)
        elif wavelength >= original / high:
            share = _f32(_f32(_f32(original / wavelength) - low) / (high - low))
            frequency = _f32(_f32(_f32(_f32(1 - share) * frequency) / factor) + _f32(share * frequency))
        scaled.append(frequency)
    return scaled, 1.0


def _yarn(powers: list[float], parameters: Mapping[str, Any], max_positions: int) -> Scaled:
    """Pairs that turn often within the original length keep their frequency, those that never turn are slowed."""
    original = _number(parameters, "original_max_position_embeddings")
    factor = _number(parameters, "factor", max_positions / original)
    theta, dim = _number(parameters, "rope_theta"), 2 * len(powers)

    def pair_turning(times: float) -> float:
        return dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(theta))

    low = pair_turning(_number(parameters, "beta_fast", 32.0))
    high = pair_turning(_number(parameters, "beta_slow", 1.0))
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    low, width = _f32(low), _f32(high - low if high != low else 0.001)
    scaled = []
    for pair, power in enumerate(powers):
        keep = _f32(1 - min(max(_f32(_f32(pair - low) / width), 0.0), 1.0))
        slow, plain = _f32(1.0 / _f32(_f32(factor) * power)), _f32(1.0 / power)
        scaled.append(_f32(_f32(slow * _f32(1 - keep)) + _f32(plain * keep)))
    return scaled, _yarn_scaling(parameters, factor)


def _yarn_scaling(parameters: Mapping[str, Any], factor: float) -> float:
    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])
    mscale, over_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return magnitude(mscale) / magnitude(over_all) if mscale and over_all else magnitude(1.0)


def _longrope(powers: list[float], parameters: Mapping[str, Any], max_positions: int) -> Scaled:
    """With the factors for short sequences: `max_length` keeps every sequence short."""
    short = parameters.get("short_factor")
    if not isinstance(short, list) or len(short) != len(powers):
        raise ConfigError(f"rope parameter 'short_factor' is not a list of {len(powers)} numbers")
    original = _number(parameters, "original_max_position_embeddings")
    factor = _number(parameters, "factor", max_positions / original)
    scaling = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    pairs = zip(short, powers, strict=True)
    return [_f32(1.0 / _f32(_f32(slower) * power)) for slower, power in pairs], _number(
        parameters, "attention_factor", scaling
    )


_KINDS: dict[str, Callable[[list[float], Mapping[str, Any], int], Scaled]] = {
    "default": _plain,
    "dynamic": _plain,  # within `max_length` nothing is scaled
    "linear": _linear,
    "llama3": _llama3,
    "longrope": _longrope,
    "yarn": _yarn,
}


def _number(parameters: Mapping[str, Any], name: str, otherwise: float | None = None) -> float:
    value = parameters.get(name)
    value = otherwise if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"rope parameter {name!r} is not a positive number: {value!r}")
    return float(value)


def _f32(value: float) -> float:
    """`value` rounded to fp32."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])
