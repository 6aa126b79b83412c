"""The frequencies equal those that transformers computes in fp32, up to the last bit of a few of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Phi3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from cluster.core.errors import ConfigError
from worker.models.rope import RopeSpec, rope_parameters, stable_length

ULP = 2**-22  # two units in the last place of fp32, relative
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CASES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 1e4},
    {"rope_type": "default", "rope_theta": 1e6},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
    {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    {**LLAMA3, "rope_theta": 5e5, "original_max_position_embeddings": 8192},
    {**LLAMA3, "rope_theta": 1e4, "factor": 32.0, "original_max_position_embeddings": 256},
    {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768},
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 0.7}
    | {"mscale_all_dim": 1.0, "beta_fast": 16, "beta_slow": 2},
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64, "truncate": False}
    | {"attention_factor": 1.25},
]


def spec_of(parameters: dict[str, Any], head_dim: int, max_positions: int = 131072) -> RopeSpec:
    return RopeSpec.from_parameters(parameters, head_dim=head_dim, max_positions=max_positions)


def assert_same(spec: RopeSpec, inv_freq: torch.Tensor, scaling: float) -> None:
    assert spec.rotary_dim == 2 * len(inv_freq)
    torch.testing.assert_close(torch.tensor(spec.inv_freq), inv_freq, rtol=ULP, atol=0)
    assert spec.scaling == pytest.approx(scaling, rel=1e-12)


@pytest.mark.parametrize("head_dim", [8, 64, 80, 128])
@pytest.mark.parametrize("parameters", CASES, ids=lambda case: case["rope_type"])
def test_equal_to_transformers(parameters: dict[str, Any], head_dim: int) -> None:
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=131072,
        rope_parameters=dict(parameters),
    )
    if parameters["rope_type"] == "default":
        wanted = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        wanted = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config)
    assert_same(spec_of(parameters, head_dim), *wanted)


def test_llama3_has_all_three_regimes_in_the_cases() -> None:
    plain = spec_of({"rope_type": "default", "rope_theta": 1e4}, 64)
    scaled = spec_of(CASES[5], 64)
    ratios = {round(a / b, 4) for a, b in zip(plain.inv_freq, scaled.inv_freq, strict=True)}
    assert {1.0, 32.0} < ratios


@pytest.mark.parametrize("extra", [{}, {"factor": 2.0}, {"attention_factor": 1.5}])
@pytest.mark.parametrize("partial", [1.0, 0.75])
def test_longrope_and_partial_rotary(partial: float, extra: dict[str, float]) -> None:
    count = int(32 * partial) // 2
    factors = [1.0 + 0.1 * i for i in range(count)]
    parameters = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": partial, **extra}
    parameters |= {"short_factor": factors, "long_factor": [9.0] * count}
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "max_position_embeddings": 131072, "pad_token_id": 0}
    config = Phi3Config(**sizes, rope_parameters=dict(parameters), original_max_position_embeddings=4096)
    wanted = ROPE_INIT_FUNCTIONS["longrope"](config)
    spec = spec_of({**parameters, "original_max_position_embeddings": 4096}, 32)
    assert_same(spec, *wanted)
    assert spec.max_length == 4096


def test_partial_rotary_without_scaling() -> None:
    parameters = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.4}
    config = Phi3Config(hidden_size=320, num_attention_heads=4, pad_token_id=0, rope_parameters=dict(parameters))
    assert_same(spec_of(parameters, 80), *Phi3RotaryEmbedding.compute_default_rope_parameters(config))


def test_stable_length() -> None:
    assert stable_length({"rope_type": "llama3", "original_max_position_embeddings": 8}, 5) is None
    assert stable_length({"rope_type": "dynamic"}, 5) == 5
    assert stable_length({"rope_type": "longrope", "original_max_position_embeddings": 8}, 5) == 8


def test_old_and_new_fields_mean_the_same() -> None:
    old = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = {"rope_parameters": {"rope_type": "linear", "type": "linear", "factor": 2.0, "rope_theta": 5e5}}
    assert rope_parameters(old) == rope_parameters(new)
    assert rope_parameters({}) == {"rope_type": "default", "rope_theta": 10_000.0}


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"rope_type": "mrope"}, "unknown type 'mrope'"),
        ({"rope_type": "default", "mrope_section": [1, 2]}, "'mrope_section' is not known for rope type 'default'"),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 3}, "'beta_fast' is not known"),
        ({"rope_type": "default", "rope_theta": None}, "'rope_theta' is not a positive number: None"),
        ({"rope_type": "default", "rope_theta": True}, "'rope_theta' is not a positive number: True"),
        ({"rope_type": "linear"}, "'factor' is not a positive number"),
        ({"rope_type": "linear", "factor": "2"}, "'factor' is not a positive number"),
        ({"rope_type": "default", "partial_rotary_factor": 0.99}, "would turn 15 of 16"),
        ({"rope_type": "default", "partial_rotary_factor": 1.5}, "would turn 24 of 16"),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}, "'short_factor' is not a list of 8"),
        ({"rope_type": "longrope", "short_factor": 1.0}, "'short_factor' is not a list of 8"),
    ],
)
def test_refusals(parameters: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        spec_of({"rope_theta": 1e4, "original_max_position_embeddings": 64, **parameters}, 16)
