"""ModelRunner: one model, its KV pool and its sampler; it turns a Batch into tensors and back into token ids.

Owns: start-up (load, size the pool, say the account once) and the step.
Does not: schedule, allocate blocks, or know requests beyond one step.
Invariants: as worker.runner.Runner; nothing outlives a step but the weights and the pool.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import cast

import torch

from cluster.config import EngineConfig
from cluster.core.errors import ConfigError
from worker import kv_sizing
from worker.batch import Batch
from worker.grammar.grammar_state import GrammarState
from worker.grammar.mask_worker import MaskWorker
from worker.kvcache.kv_pool import KvGeometry, KvPool
from worker.models.executor import RowSpan, StepRows
from worker.models.fingerprint import kv_fingerprint, model_revision
from worker.models.loading import load_executor
from worker.models.model_card import dtype_name
from worker.runner import ModelFacts, Sampled
from worker.sampler import Sampler
from worker.sampling.answers import answer, prompt_rows

logger = logging.getLogger(__name__)

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


class ModelRunner:
    """The Runner for real models. `masks`: where those of constrained rows are prepared."""

    def __init__(self, config: EngineConfig, model_dir: Path, masks: MaskWorker | None = None) -> None:
        self._device = _device(config.device)
        self._model = load_executor(config, model_dir, self._device, free_bytes(self._device))
        self._sampler = Sampler()
        self._masks = MaskWorker() if masks is None else masks
        geometry = self._kv_geometry(config.cache.block_size)
        plan = self._plan(config, geometry)
        self.pool = KvPool(geometry, plan.num_blocks, self._device)
        self._facts = self._build_facts(config, model_dir, plan)
        self._log_account(plan)

    @property
    def facts(self) -> ModelFacts:
        return self._facts

    @torch.inference_mode()
    def run(self, batch: Batch) -> list[Sampled]:
        if not batch.seqs:
            return []
        for source, target in batch.copies:
            self.pool.copy_block(source, target)
        logits = self._model.compute(_rows(batch), self.pool)
        sampled = [seq for seq in batch.seqs if seq.sample]
        if not sampled:
            return []
        if all(seq.grammar is None for seq in sampled):
            return answer(self._sampler, logits, sampled)
        states = cast("list[GrammarState | None]", [seq.grammar for seq in sampled])  # the masks' owner made them
        masks, failed = self._masks.masks(states, logits.shape[-1], logits.device)
        found = answer(self._sampler, logits, sampled, masks)
        return [one._replace(error=failed.get(row)) for row, one in enumerate(found)] if failed else found

    def _kv_geometry(self, block_size: int) -> KvGeometry:
        geometry = self._model.geometry
        return KvGeometry(
            num_layers=geometry.num_layers,
            num_kv_heads=geometry.num_kv_heads,
            head_dim=geometry.head_dim,
            block_size=block_size,
            dtype=self._model.dtype,
        )

    def _plan(self, config: EngineConfig, geometry: KvGeometry) -> kv_sizing.KvPlan:
        return kv_sizing.plan_kv(
            kv_sizing.KvRequest(
                bytes_per_token=geometry.bytes_per_token,
                block_size=geometry.block_size,
                free_bytes=free_bytes(self._device),
                kv_memory=config.cache.kv_memory,
                memory_share=config.cache.memory_share,
                model_limit=self._model.model_limit,
                max_model_len=config.max_model_len,
            )
        )

    def _build_facts(self, config: EngineConfig, model_dir: Path, plan: kv_sizing.KvPlan) -> ModelFacts:
        model, geometry = self._model, self._model.geometry
        revision = model_revision(model_dir)
        fingerprint = kv_fingerprint(
            revision,
            dtype=dtype_name(model.dtype),
            num_layers=geometry.num_layers,
            num_kv_heads=geometry.num_kv_heads,
            head_dim=geometry.head_dim,
            block_size=plan.block_size,
            layout=model.kv_layout,
            rope=model.rope_parameters,
        )
        return ModelFacts(
            model=model_dir.name if config.model == str(model_dir) else config.model,
            vocab_size=model.vocab_size,
            max_model_len=plan.max_model_len,
            eos_token_ids=model.eos_token_ids,
            num_layers=geometry.num_layers,
            num_heads=geometry.num_heads,
            num_kv_heads=geometry.num_kv_heads,
            head_dim=geometry.head_dim,
            dtype=dtype_name(model.dtype),
            device=self._device.type,
            attention=model.attention,
            weight_bytes=model.weight_bytes,
            kv_bytes_per_token=plan.bytes_per_token,
            num_blocks=plan.num_blocks,
            block_size=plan.block_size,
            model_revision=revision,
            kv_fingerprint=fingerprint,
        )

    def _log_account(self, plan: kv_sizing.KvPlan) -> None:
        if plan.warning is not None:
            logger.warning("%s", plan.warning)
        facts = self._facts
        account = kv_sizing.account_text(plan, weight_bytes=facts.weight_bytes, weights_dtype=facts.dtype)
        logger.info("%s on %s, attention %s\n%s", facts.model, facts.device, facts.attention, account)


def _rows(batch: Batch) -> StepRows:
    tokens: list[int] = []
    spans, logit_rows = [], []
    of_prompts: list[int] = []  # behind all others, as worker.sampling.answers wants them
    for seq in batch.seqs:
        tokens.extend(seq.token_ids)
        spans.append(RowSpan(len(seq.token_ids), seq.start, seq.block_ids))
        if seq.sample:
            logit_rows.append(len(tokens) - 1)
            if seq.extras is not None:
                of_prompts.extend(range(len(tokens) - 1 - prompt_rows(seq), len(tokens) - 1))
    return StepRows(tokens, spans, logit_rows + of_prompts)


def free_bytes(device: torch.device) -> int:
    """Memory that the device can still give, in bytes; in a container no more than its limit allows."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if not _MEMINFO.exists():  # not Linux: half of what is installed
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    available = kv_sizing.available_memory(_MEMINFO.read_text())
    limit, current, stat = (_CGROUP / name for name in ("memory.max", "memory.current", "memory.stat"))
    if not (limit.exists() and current.exists() and stat.exists()):
        return available
    return min(available, kv_sizing.container_memory(limit.read_text(), current.read_text(), stat.read_text()))


def _device(wanted: str) -> torch.device:
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but torch finds no CUDA device; use --device cpu or auto")
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(wanted)
