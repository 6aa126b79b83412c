"""Any Hugging Face causal LM on the paged pool, through transformers' attention interface.

A batch is one flat row of T tokens with explicit position ids and no transformers cache: linear layers do not care
which sequence a row belongs to, and attention, the only part that does, is ours.

Owns: loading, the refusals at load, the geometry found by a probe run, and the forward pass.
Does not: allocate KV, choose tokens, or pick the attention kernel.
Invariants: a model that loaded asks for nothing that paged attention does not compute; logits are computed only for
the rows that asked for them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from cluster.core.errors import ConfigError
from worker.models import attention_hook, compatibility
from worker.models.attention_hook import AttentionStep, ProbeStep
from worker.models.fingerprint import checkpoint_bytes
from worker.models.model_card import ModelGeometry, choose_dtype, require_memory
from worker.models.model_card import dtype_name as dtype_name


class TransformersModel:
    """A loaded model. Its weights stay as transformers made them; only attention is replaced."""

    def __init__(self, model_dir: Path, *, dtype: str, device: torch.device, free_bytes: int) -> None:
        """`dtype` is a torch name or "auto" (the checkpoint's); `free_bytes` is what the device can hold."""
        attention_hook.register()
        self.device = device
        config = compatibility.read_config(model_dir)
        self.text_config: Any = config.get_text_config()
        self.dtype = choose_dtype(dtype, config.dtype or self.text_config.dtype, device)
        needed = checkpoint_bytes(model_dir, self.dtype.itemsize)
        require_memory(model_dir.name, needed, free_bytes, self.dtype, device.type)
        self._model = _load(model_dir, self.dtype).to(device).eval()
        self.weight_bytes = sum(parameter.nbytes for parameter in self._model.parameters())
        self.geometry = self._probe(model_dir.name)

    @property
    def vocab_size(self) -> int:
        return int(self.text_config.vocab_size)

    @property
    def model_limit(self) -> int:
        return compatibility.length_limit(self.text_config)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """From generation_config.json, else config.json; one id, a list or none."""
        eos = self._model.generation_config.eos_token_id
        if eos is None:
            eos = self.text_config.eos_token_id
        if eos is None:
            return ()
        return (eos,) if isinstance(eos, int) else tuple(eos)

    @property
    def rope_parameters(self) -> dict[str, Any]:
        return dict(getattr(self.text_config, "rope_parameters", None) or {})

    def forward(
        self,
        token_ids: torch.Tensor,  # [T] int64
        positions: torch.Tensor,  # [T] int64
        logit_rows: torch.Tensor,  # [R] int64: the rows whose logits are wanted
        step: AttentionStep,
    ) -> torch.Tensor:  # [R, vocab_size]
        output = self._model(
            input_ids=token_ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=logit_rows,
            kvray_step=step,
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    def _probe(self, name: str) -> ModelGeometry:
        probe = ProbeStep()
        rows = torch.arange(2, device=self.device)
        try:
            with torch.inference_mode():
                logits = self.forward(rows, rows, rows[-1:], probe)
        except ConfigError as error:
            raise ConfigError(f"cannot serve {name}: {error.message}") from None
        if logits.shape != (1, self.vocab_size):
            raise ConfigError(f"cannot serve {name}: it does not return logits for chosen rows only")
        reason = compatibility.refuse_calls(probe.calls, self.text_config)
        if reason is not None:
            raise ConfigError(f"cannot serve {name}: {reason}")
        first = probe.calls[0]
        return ModelGeometry(
            num_layers=len(probe.calls),
            num_heads=first.query.shape[1],
            num_kv_heads=first.key.shape[1],
            head_dim=first.key.shape[2],
        )


def _load(model_dir: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    try:
        return AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=dtype, attn_implementation=attention_hook.ATTENTION_NAME, local_files_only=True
        )
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        raise ConfigError(f"cannot load {model_dir}: {str(error).splitlines()[0]}") from error
