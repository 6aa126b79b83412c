"""Section `parity`: greedy answers through ModelRunner with each attention backend, against transformers.

transformers is given our prompts and answers in one pass; a token that is not its own choice is a difference, and the
margin is by how much it would have preferred its own. The two round differently, so that near ties may fall otherwise.

Owns: the models, prompts and types, and the margin up to which a difference is a near tie.
Does not: choose tokens (worker) or build models (benchmarks.gpu.random_models).
Invariants: NaN never passes; both sides compute in the same type on the same device.
"""

from __future__ import annotations

import importlib.util
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu.environment import Failed, GpuEnvironment, Setup, Skip
from benchmarks.gpu.greedy import answer_greedily
from benchmarks.gpu.random_models import FAMILIES, save_tiny
from benchmarks.gpu.report import Row
from worker.model_runner import ModelRunner
from worker.models.model_card import dtype_name

LENGTHS = (1, 15, 16, 17, 64, 65, 255, 256, 257, 500)
NEW_TOKENS, PIECE = 32, 200
KV_MEMORY = 256 << 20
NEAR_TIE = {"float32": 1e-4, "bfloat16": 2**-5, "float16": 2**-8}  # shares of the largest logit


@dataclass(frozen=True, slots=True)
class Plan:
    """What is asked of every model."""

    lengths: Sequence[int] = LENGTHS
    new_tokens: int = NEW_TOKENS
    piece: int = PIECE
    kv_memory: int = KV_MEMORY


@dataclass(frozen=True, slots=True)
class Difference:
    prompt: int  # its length
    token: int  # of the answer, from 0
    margin: float
    allowed: float


def parity(environment: GpuEnvironment, plan: Plan | None = None) -> Iterator[Row]:
    if importlib.util.find_spec("transformers") is None:
        yield Row("parity", "skipped", "transformers is not installed")
        return
    with tempfile.TemporaryDirectory() as scratch:
        for path in _models(environment, Path(scratch)):
            for dtype in (environment.half, "float32"):
                yield from _of_model(environment, path, dtype, plan or Plan())


def _models(environment: GpuEnvironment, scratch: Path) -> Iterator[Path]:
    if environment.model is not None:
        yield environment.model
        return
    for family in FAMILIES:
        save_tiny(family, scratch / family)
        yield scratch / family


def _of_model(environment: GpuEnvironment, path: Path, dtype: str, plan: Plan) -> Iterator[Row]:
    teacher = Teacher(path, getattr(torch, dtype), environment.device)
    dice = random.Random(1)
    prompts = [dice.choices(range(3, teacher.vocab_size), k=length) for length in plan.lengths]

    def compare(setup: Setup) -> str:
        config = environment.engine(path, setup, dtype, plan.kv_memory)
        answers = answer_greedily(ModelRunner(config, path), prompts, plan.new_tokens, plan.piece)
        return judge(differences(teacher, prompts, answers), sum(map(len, answers)))

    for setup in environment.setups:
        yield environment.attempt(f"{path.name} {dtype}, {setup}", partial(compare, setup))


class Teacher:
    """transformers' model, and what it thinks of a text."""

    def __init__(self, path: Path, dtype: torch.dtype, device: torch.device) -> None:
        import transformers

        transformers.utils.logging.disable_progress_bar()
        self._device, self.near_tie = device, NEAR_TIE[dtype_name(dtype)]
        self._model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager")
        self._model.to(device).eval()
        self.vocab_size = int(self._model.config.vocab_size)

    @torch.inference_mode()
    def logits(self, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
        """Of every token of the answer, fp32 [len(answer), vocab_size]."""
        text = torch.tensor([[*prompt, *answer]], device=self._device)
        found: torch.Tensor = self._model(text, use_cache=False).logits[0, len(prompt) - 1 : -1]
        return found.float().cpu()


def differences(
    teacher: Teacher, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> list[Difference]:
    found = []
    for prompt, answer in zip(prompts, answers, strict=True):
        logits = teacher.logits(prompt, answer)
        if not bool(logits.isfinite().all()):
            raise Skip("transformers' own logits are not finite")
        found += differences_in(logits, answer, len(prompt), teacher.near_tie)
    return found


def differences_in(logits: torch.Tensor, answer: Sequence[int], prompt: int, near_tie: float) -> list[Difference]:
    best = logits.max(-1).values
    margins = best - logits[torch.arange(len(answer)), torch.tensor(answer)]
    allowed = near_tie * float(logits.abs().max())
    return [Difference(prompt, token, margin, allowed) for token, margin in enumerate(margins.tolist()) if margin != 0]


def judge(found: Sequence[Difference], tokens: int) -> str:
    """One line; Failed when a difference is more than a near tie."""
    if not found:
        return f"all {tokens} tokens equal"
    first, largest = found[0], max(found, key=lambda d: d.margin / d.allowed)
    text = (
        f"{tokens - len(found)} of {tokens} tokens equal; first other: prompt of {first.prompt}, token {first.token}, "
        f"margin {first.margin:.3g}; largest margin {largest.margin:.3g}, allowed {largest.allowed:.3g}"
    )
    if any(not d.margin <= d.allowed for d in found):
        raise Failed(text)
    return text
