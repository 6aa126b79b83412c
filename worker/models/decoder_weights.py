"""DecoderWeights: a checkpoint seen as the packed matrices of a DecoderSpec.

Owns: which tensors a spec needs and in which shapes, packing them, and tying the output matrix to the embedding.
Does not: read files (worker.models.checkpoint), convert types or compute.
Invariants: every name and shape is checked before the first weight is read, and no stored weight is left unused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch

from cluster.core.errors import ConfigError
from worker.models.checkpoint import Checkpoint
from worker.models.decoder_spec import DecoderSpec

_EMBEDDING, _NORM, _HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
_DERIVED = re.compile(r"\.rotary_emb\.inv_freq$")  # old checkpoints store what config.json says

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer, in the checkpoint's types. H heads and Hkv KV heads of D, I is the MLP's inner size."""

    attn_norm: torch.Tensor  # [hidden]
    qkv: torch.Tensor  # [(H + 2 * Hkv) * D, hidden]: query rows, key rows, value rows
    qkv_bias: torch.Tensor | None  # [(H + 2 * Hkv) * D]
    q_norm: torch.Tensor | None  # [D]
    k_norm: torch.Tensor | None  # [D]
    out: torch.Tensor  # [hidden, H * D]
    out_bias: torch.Tensor | None  # [hidden]
    mlp_norm: torch.Tensor  # [hidden]
    gate_up: torch.Tensor  # [2 * I, hidden]: gate rows, then up rows
    gate_up_bias: torch.Tensor | None  # [2 * I]
    down: torch.Tensor  # [hidden, I]
    down_bias: torch.Tensor | None  # [hidden]


class DecoderWeights:
    """Checked when made; tensors are read when asked for."""

    def __init__(self, spec: DecoderSpec, checkpoint: Checkpoint) -> None:
        """ConfigError names the first tensor that is missing, has another shape or has no place in the spec."""
        self.spec = spec
        self._checkpoint = checkpoint
        stored = checkpoint.names()
        self._embedding_name = _EMBEDDING
        if spec.tie_embeddings and _EMBEDDING not in stored and _HEAD in stored:
            self._embedding_name = _HEAD
        self._shapes = dict(self._expected(stored))
        self._check(stored)

    @cached_property
    def embedding(self) -> torch.Tensor:
        """[vocab_size, hidden_size]"""
        return self._checkpoint.tensor(self._embedding_name)

    @property
    def final_norm(self) -> torch.Tensor:
        """[hidden_size]"""
        return self._checkpoint.tensor(_NORM)

    @cached_property
    def lm_head(self) -> torch.Tensor:
        """[vocab_size, hidden_size]; the very tensor of `embedding` when tied.

        A checkpoint that stores two different matrices is not tied, whatever config.json says.
        """
        if _HEAD not in self._shapes or self._embedding_name == _HEAD:
            return self.embedding
        head = self._checkpoint.tensor(_HEAD)
        if self.spec.tie_embeddings and torch.equal(head, self.embedding):
            return self.embedding
        return head

    def layers(self) -> Iterator[LayerWeights]:
        """First to last, each made when it is asked for."""
        for layer in range(self.spec.num_layers):
            yield self._layer(f"model.layers.{layer}.")

    def weight_bytes(self, itemsize: int) -> int:
        """Bytes of all weights with `itemsize` bytes per number; a tied matrix counts once."""
        numbers = sum(prod(shape) for shape in self._shapes.values())
        twice = self.spec.tie_embeddings and _HEAD in self._shapes and self._embedding_name != _HEAD
        if twice and self.lm_head is self.embedding:
            numbers -= prod(self._shapes[_HEAD])
        return numbers * itemsize

    def _layer(self, prefix: str) -> LayerWeights:
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        if self.spec.fused_checkpoint:
            qkv_parts, gate_up_parts = [f"{attention}qkv_proj"], [f"{mlp}gate_up_proj"]
        else:
            qkv_parts = [f"{attention}{part}_proj" for part in "qkv"]
            gate_up_parts = [f"{mlp}gate_proj", f"{mlp}up_proj"]
        return LayerWeights(
            attn_norm=self._packed([f"{prefix}input_layernorm"]),
            qkv=self._packed(qkv_parts),
            qkv_bias=self._bias(qkv_parts),
            q_norm=self._optional(f"{attention}q_norm.weight"),
            k_norm=self._optional(f"{attention}k_norm.weight"),
            out=self._packed([f"{attention}o_proj"]),
            out_bias=self._bias([f"{attention}o_proj"]),
            mlp_norm=self._packed([f"{prefix}post_attention_layernorm"]),
            gate_up=self._packed(gate_up_parts),
            gate_up_bias=self._bias(gate_up_parts),
            down=self._packed([f"{mlp}down_proj"]),
            down_bias=self._bias([f"{mlp}down_proj"]),
        )

    def _packed(self, parts: list[str], leaf: str = "weight") -> torch.Tensor:
        tensors = [self._checkpoint.tensor(f"{part}.{leaf}") for part in parts]
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

    def _bias(self, parts: list[str]) -> torch.Tensor | None:
        return self._packed(parts, "bias") if f"{parts[0]}.bias" in self._shapes else None

    def _optional(self, name: str) -> torch.Tensor | None:
        return self._checkpoint.tensor(name) if name in self._shapes else None

    def _expected(self, stored: frozenset[str]) -> Iterator[tuple[str, Shape]]:
        spec = self.spec
        matrix = (spec.vocab_size, spec.hidden_size)
        yield self._embedding_name, matrix
        for layer in range(spec.num_layers):
            for name, shape in _layer_shapes(spec):
                yield f"model.layers.{layer}.{name}", shape
        yield _NORM, (spec.hidden_size,)
        if not spec.tie_embeddings or _HEAD in stored:
            yield _HEAD, matrix

    def _check(self, stored: frozenset[str]) -> None:
        for name, shape in self._shapes.items():
            if self._checkpoint.shape(name) != shape:
                raise ConfigError(
                    f"{self._checkpoint.path(name)}: tensor {name} has shape {self._checkpoint.shape(name)}, "
                    f"config.json says {shape}"
                )
        for name in sorted(stored - self._shapes.keys()):
            if _DERIVED.search(name) is None:
                raise ConfigError(
                    f"{self._checkpoint.path(name)}: tensor {name} has no place in a {self.spec.model_type} model "
                    f"of {self.spec.num_layers} layers as config.json describes it"
                )


def _layer_shapes(spec: DecoderSpec) -> Iterator[tuple[str, Shape]]:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    yield "input_layernorm.weight", (hidden,)
    if spec.fused_checkpoint:
        qkv, gate_up = {"qkv": queries + 2 * keys}, {"gate_up": 2 * inner}
    else:
        qkv, gate_up = {"q": queries, "k": keys, "v": keys}, {"gate": inner, "up": inner}
    for part, rows in qkv.items():
        yield from _linear(f"self_attn.{part}_proj", (rows, hidden), spec.qkv_bias)
    if spec.qk_norm:
        yield "self_attn.q_norm.weight", (spec.head_dim,)
        yield "self_attn.k_norm.weight", (spec.head_dim,)
    yield from _linear("self_attn.o_proj", (hidden, queries), spec.out_bias)
    yield "post_attention_layernorm.weight", (hidden,)
    for part, rows in gate_up.items():
        yield from _linear(f"mlp.{part}_proj", (rows, hidden), spec.mlp_bias)
    yield from _linear("mlp.down_proj", (hidden, inner), spec.mlp_bias)


def _linear(name: str, shape: Shape, bias: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", shape
    if bias:
        yield f"{name}.bias", shape[:1]
