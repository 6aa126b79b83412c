"""CpuDecoder: the lean decoder on a CPU, one native call per step.

Weights are packed once into the order in which the kernels read them; a step (embedding, all layers, attention over the
blocks, logits) then runs in C++ without the GIL. See worker/kernels/csrc/decoder.h.

Owns: packing a checkpoint into the native decoder, and handing it steps.
Does not: know the arithmetic (C++), schedule, or choose tokens.
Invariants: as worker.models.executor.Executor; a row's logits do not depend on the other rows, bit for bit.
"""

from __future__ import annotations

import logging
from array import array
from pathlib import Path

import torch

from cluster.core.errors import ConfigError
from worker.kernels import native
from worker.kernels.cpu import CPU_LAYOUT
from worker.kvcache.kv_pool import KvPool
from worker.models.checkpoint import open_checkpoint
from worker.models.decoder_spec import DecoderSpec
from worker.models.decoder_weights import DecoderWeights
from worker.models.executor import StepRows
from worker.models.model_card import CardProperties, ModelCard, dtype_name, read_json, require_memory

logger = logging.getLogger(__name__)

_ROW_MULTIPLE = 8  # of hidden and inner size
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def why_not_native(spec: DecoderSpec, block_size: int) -> str | None:
    """The reason why this model cannot run natively here, None when it can."""
    if native.module() is None:
        return native.why_missing()
    if spec.hidden_size % _ROW_MULTIPLE or spec.intermediate_size % _ROW_MULTIPLE:
        return f"hidden size {spec.hidden_size} and inner size {spec.intermediate_size} are not multiples of 8"
    if native.instruction_set(block_size, spec.head_dim) is None:
        return f"the native kernels do not fit block size {block_size} and head dim {spec.head_dim}"
    return None


class CpuDecoder(CardProperties):
    attention = "cpu"
    kv_layout = CPU_LAYOUT

    def __init__(
        self, spec: DecoderSpec, weights: DecoderWeights, card: ModelCard, *, dtype: torch.dtype, threads: int, isa: str
    ) -> None:
        """`isa` names an instruction set that fits head dim and block size (worker.kernels.native)."""
        self.spec, self.dtype, self._card = spec, dtype, card
        self.weight_bytes = weights.weight_bytes(dtype.itemsize)
        self._native = native.module().Decoder(
            native.thread_pool(threads),
            isa,
            dtype_name(dtype),
            vocab=spec.vocab_size,
            hidden=spec.hidden_size,
            intermediate=spec.intermediate_size,
            layers=spec.num_layers,
            heads=spec.num_heads,
            kv_heads=spec.num_kv_heads,
            dim=spec.head_dim,
            eps=spec.rms_eps,
            inv_freq=list(spec.rope.inv_freq),
            rope_scaling=spec.rope.scaling,
            windows=[window or 0 for window in spec.windows],
        )
        for index, layer in enumerate(weights.layers()):
            names = (name for name in layer.__slots__)
            self._native.set_layer(index, **{name: _plain(getattr(layer, name)) for name in names})
        self._native.set_ends(_plain(weights.embedding), _plain(weights.final_norm), _plain(weights.lm_head))
        self._logits = torch.empty((0, spec.vocab_size))

    @classmethod
    def load(
        cls, model_dir: Path, *, dtype: str, threads: int, free_bytes: int, block_size: int, isa: str = ""
    ) -> CpuDecoder:
        """`dtype` is a torch name or "auto" (the checkpoint's); `isa` bounds the instruction set, for tests."""
        spec = DecoderSpec.from_config(read_json(model_dir / "config.json"))
        card = ModelCard.read(model_dir, spec)
        weights = DecoderWeights(spec, open_checkpoint(model_dir))
        chosen = getattr(torch, str(card.stored_dtype if dtype == "auto" else dtype), None)
        if chosen not in _DTYPES:
            chosen = torch.float32
        require_memory(model_dir.name, weights.weight_bytes(chosen.itemsize), free_bytes, chosen, "cpu")
        fitting = native.instruction_set(block_size, spec.head_dim, isa)
        if fitting is None:
            raise ConfigError(f"cannot run {model_dir.name} natively: {why_not_native(spec, block_size)}")
        logger.info("native kernels: %s, %d threads", fitting, threads)
        return cls(spec, weights, card, dtype=chosen, threads=threads, isa=fitting)

    def compute(self, rows: StepRows, pool: KvPool) -> torch.Tensor:
        wanted = len(rows.logit_rows)
        if wanted > len(self._logits):
            self._logits = torch.empty((2 * wanted, self.spec.vocab_size))
        spans, tables = array("i"), array("i")
        for count, start, block_ids in rows.spans:
            spans.extend((count, start, len(block_ids)))
            tables.extend(block_ids)
        tensor = pool.tensor
        self._native.step(
            tokens=array("i", rows.token_ids),
            spans=spans,
            tables=tables,
            logit_rows=array("i", rows.logit_rows),
            kv=tensor.data_ptr(),
            num_blocks=pool.num_blocks,
            block_stride=tensor.stride(0),
            layer_stride=tensor.stride(1),
            v_offset=tensor.stride(2),
            block_size=pool.geometry.block_size,
            logits=self._logits.data_ptr(),
        )
        return self._logits[:wanted]


def _plain(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """In one of the types that the packer reads."""
    if tensor is None:
        return None
    return (tensor if tensor.dtype in _DTYPES else tensor.float()).contiguous()
