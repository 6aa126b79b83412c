"""Decoder: the lean decoder in plain torch, for any device and dtype.

A batch is one flat row of T tokens, as in worker.models.transformers_backend; the kernels that are faster on one device
are checked against this.

Owns: the loaded weights and the forward pass of every family that worker.models.decoder_spec knows.
Does not: read files, allocate KV, choose tokens, or compute attention (the step does).
Invariants: rounding in half precision follows transformers' models; logits are computed only for the rows that asked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from worker.models.attention_hook import AttentionStep, LayerCall
from worker.models.checkpoint import open_checkpoint
from worker.models.decoder_spec import DecoderSpec
from worker.models.decoder_weights import DecoderWeights, LayerWeights
from worker.models.model_card import CardProperties, ModelCard, choose_dtype, read_json, require_memory

Place = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class _Layer:
    weights: LayerWeights
    head_norm: Tensor | None  # [H + Hkv, D]: of the query heads, then of the key heads


class Decoder(CardProperties):
    """A loaded model with the attributes of worker.models.transformers_backend.TransformersModel."""

    def __init__(
        self, spec: DecoderSpec, weights: DecoderWeights, card: ModelCard, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Weights that are already in `dtype` stay where they are: in the mapped files, when the device is the CPU."""
        self.spec, self.dtype, self.device, self._card = spec, dtype, device, card
        self.weight_bytes = weights.weight_bytes(dtype.itemsize)

        def place(tensor: Tensor) -> Tensor:
            return tensor.to(device=device, dtype=dtype)

        self._embedding = place(weights.embedding)
        self._lm_head = self._embedding if weights.lm_head is weights.embedding else place(weights.lm_head)
        self._layers = [_layer(spec, layer, place) for layer in weights.layers()]
        following = [layer.weights.attn_norm for layer in self._layers[1:]]
        self._next_norms = [*following, place(weights.final_norm)]
        self._inv_freq = torch.tensor(spec.rope.inv_freq, dtype=torch.float32, device=device)
        self._scale = spec.head_dim**-0.5

    @classmethod
    def load(cls, model_dir: Path, *, dtype: str, device: torch.device, free_bytes: int) -> Decoder:
        """`dtype` is a torch name or "auto" (the checkpoint's); `free_bytes` is what the device can hold."""
        spec = DecoderSpec.from_config(read_json(model_dir / "config.json"))
        card = ModelCard.read(model_dir, spec)
        weights = DecoderWeights(spec, open_checkpoint(model_dir))
        chosen = choose_dtype(dtype, card.stored_dtype, device)
        require_memory(model_dir.name, weights.weight_bytes(chosen.itemsize), free_bytes, chosen, device.type)
        return cls(spec, weights, card, dtype=chosen, device=device)

    def forward(
        self,
        token_ids: Tensor,  # [T] int64
        positions: Tensor,  # [T] int64
        logit_rows: Tensor,  # [R] int64: the rows whose logits are wanted
        step: AttentionStep,
    ) -> Tensor:  # [R, vocab_size]
        spec, (cos, sin) = self.spec, self._rotation(positions)
        residual = functional.embedding(token_ids, self._embedding)
        normed = _norm(residual, self._layers[0].weights.attn_norm, spec.rms_eps)
        for index, (layer, next_norm) in enumerate(zip(self._layers, self._next_norms, strict=True)):
            weights = layer.weights
            query_key, value = self._project(layer, normed)
            query_key = _rotate(query_key, cos, sin)
            attended = step.attend(
                LayerCall(
                    layer=index,
                    query=query_key[:, : spec.num_heads],
                    key=query_key[:, spec.num_heads :],
                    value=value,
                    scale=self._scale,
                    sliding_window=spec.windows[index],
                    softcap=None,
                )
            )
            attended = functional.linear(attended.flatten(1), weights.out, weights.out_bias)
            normed = _add_norm(residual, attended, weights.mlp_norm, spec.rms_eps)
            normed = _add_norm(residual, _mlp(weights, normed), next_norm, spec.rms_eps)
        return functional.linear(normed[logit_rows], self._lm_head)

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of every position's angles, each [T, 1, rotary_dim / 2]."""
        angles = positions[:, None, None].float() * self._inv_freq
        scaling = self.spec.rope.scaling
        return (angles.cos() * scaling).to(self.dtype), (angles.sin() * scaling).to(self.dtype)

    def _project(self, layer: _Layer, normed: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys [T, H + Hkv, D], and values [T, Hkv, D]."""
        spec = self.spec
        packed = functional.linear(normed, layer.weights.qkv, layer.weights.qkv_bias)
        heads = packed.view(len(normed), -1, spec.head_dim)
        query_key, value = heads.split((spec.num_heads + spec.num_kv_heads, spec.num_kv_heads), dim=1)
        if layer.head_norm is not None:
            query_key = functional.rms_norm(query_key, (spec.head_dim,), None, spec.rms_eps) * layer.head_norm
        return query_key, value


def _layer(spec: DecoderSpec, weights: LayerWeights, place: Place) -> _Layer:
    def placed(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else place(tensor)

    head_norm = None
    if weights.q_norm is not None and weights.k_norm is not None:
        per_head = [weights.q_norm] * spec.num_heads + [weights.k_norm] * spec.num_kv_heads
        head_norm = place(torch.stack(per_head))
    moved = LayerWeights(
        attn_norm=place(weights.attn_norm),
        qkv=place(weights.qkv),
        qkv_bias=placed(weights.qkv_bias),
        q_norm=None,
        k_norm=None,
        out=place(weights.out),
        out_bias=placed(weights.out_bias),
        mlp_norm=place(weights.mlp_norm),
        gate_up=place(weights.gate_up),
        gate_up_bias=placed(weights.gate_up_bias),
        down=place(weights.down),
        down_bias=placed(weights.down_bias),
    )
    return _Layer(moved, head_norm)


def _norm(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm in fp32, rounded before the weight is applied."""
    return functional.rms_norm(rows, weight.shape, None, eps) * weight


def _add_norm(residual: Tensor, change: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Adds `change` to `residual` in place; the norm of the sum."""
    return _norm(residual.add_(change), weight, eps)


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The first 2 * cos.shape[-1] components of every head turned, in pairs of halves; the rest as they are."""
    half = cos.shape[-1]
    first, second, rest = heads.split((half, half, heads.shape[-1] - 2 * half), dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def _mlp(weights: LayerWeights, normed: Tensor) -> Tensor:
    gate, up = functional.linear(normed, weights.gate_up, weights.gate_up_bias).chunk(2, dim=-1)
    return functional.linear(functional.silu(gate) * up, weights.down, weights.down_bias)
