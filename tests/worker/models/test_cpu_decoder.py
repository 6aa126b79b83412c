"""The native decoder gives transformers' logits and tokens, and a row's bits depend on its own sequence alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import element_counter
import native_kernels
import pytest
import tiny_models
import torch
import transformers
from native_kernels import INSTRUCTION_SETS
from step_run import StepRun, make_pool

from worker.kernels import native
from worker.kernels.cpu import CpuAttention
from worker.kernels.reference import ReferenceAttention
from worker.models.cpu_decoder import CpuDecoder
from worker.models.decoder import Decoder
from worker.models.executor import RowSpan, StepRows
from worker.models.torch_executor import TorchExecutor

ModelDir = Callable[[str], Path]

PLENTY = 2**33
PROMPT = [5, 77, 31, 9, 54, 54, 12, 88, 3, 41, 60, 17, 29, 95, 8, 70, 33]
TEXT = [3 + (37 * i * i + 11 * i) % 93 for i in range(300)]
NEW_TOKENS = 64
EXACT = 1e-4

pytestmark = pytest.mark.skipif(native.module() is None, reason="the native kernels are not built in")


@pytest.fixture(autouse=True)
def poisoned_outputs() -> Iterator[None]:
    with native_kernels.poisoned_memory():
        yield


def load(path: Path, dtype: str = "float32", threads: int = 1, isa: str = "", block_size: int = 16) -> CpuDecoder:
    torch.set_num_threads(1)
    return CpuDecoder.load(path, dtype=dtype, threads=threads, free_bytes=PLENTY, block_size=block_size, isa=isa)


@torch.inference_mode()
def transformers_logits(path: Path, tokens: list[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager").eval()
    logits: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


@pytest.mark.parametrize("family", tiny_models.LEAN_FAMILIES)
def test_logits_and_greedy_tokens_equal_transformers(family: str, tiny_model_dir: ModelDir) -> None:
    path = tiny_model_dir(family)
    model = load(path, threads=2)
    run = StepRun(model, [128, 128, 400])
    text, logits = list(PROMPT), [run.feed_in_pieces(PROMPT, 6)]
    for i in range(NEW_TOKENS):  # greedy, while another sequence is prefilled and a third one comes and goes
        text.append(int(logits[-1][-1].argmax()))
        company = [(2, TEXT[i : i + i % 4 * 2]), (1, TEXT[i : i + i % 2])]
        logits.append(run.step([(0, text[-1:]), *(part for part in company if part[1])])[0])

    wanted = transformers_logits(path, text)
    assert wanted[len(PROMPT) - 1 : -1].argmax(-1).tolist() == text[len(PROMPT) :]
    assert (torch.cat(logits) - wanted).abs().max() < EXACT
    for isa in INSTRUCTION_SETS:
        assert (StepRun(load(path, isa=isa), [128]).feed(text) - wanted).abs().max() < EXACT
    assert wanted.std() > 0.5, "the tiny model must have something to say"


@pytest.mark.parametrize("family", tiny_models.LEAN_FAMILIES)
def test_pieces_company_and_threads_do_not_change_bits(family: str, tiny_model_dir: ModelDir) -> None:
    path = tiny_model_dir(family)
    whole = StepRun(load(path), [300]).feed(TEXT)
    for threads in (1, 2, 3):
        model = load(path, threads=threads)
        assert torch.equal(StepRun(model, [300]).feed(TEXT), whole)
        for piece in (3, 7, 16, 32, 33, 100) if threads == 2 else (7, 100):
            assert torch.equal(StepRun(model, [300]).feed_in_pieces(TEXT, piece), whole), piece
        assert torch.equal(StepRun(model, [80]).feed_in_pieces(TEXT[:80], 1), whole[:80])


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", ["llama-untied", "qwen3-layer-types"])
def test_mixed_batches_do_not_change_bits(family: str, dtype: str, isa: str, tiny_model_dir: ModelDir) -> None:
    texts = [TEXT, TEXT[40:], TEXT[::-1], TEXT[7:]]
    path = tiny_model_dir(family)
    alone = [StepRun(load(path, dtype, isa=isa), [300]).feed(text) for text in texts]
    for threads in (1, 2):
        run = StepRun(load(path, dtype, threads=threads, isa=isa), [300] * len(texts))
        for sizes in ([1, 0, 0, 1], [1, 31, 0, 0], [1, 1, 1, 1], [100, 1, 1, 0], [1, 28, 2, 1], [1, 3, 250, 1]):
            parts = [(i, texts[i][run.lengths[i] : run.lengths[i] + size]) for i, size in enumerate(sizes) if size]
            starts = list(run.lengths)
            for (i, tokens), logits in zip(parts, run.step(parts), strict=True):
                assert torch.equal(logits, alone[i][starts[i] : starts[i] + len(tokens)]), (threads, sizes, i)


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("family", ["llama-tied", "qwen2-bias", "qwen3-norms", "phi3-partial"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_no_worse_than_transformers(
    dtype: torch.dtype, family: str, isa: str, tiny_model_dir: ModelDir
) -> None:
    path, tokens = tiny_model_dir(family), TEXT[:60]
    exact, rounded = transformers_logits(path, tokens), transformers_logits(path, tokens, dtype).float()
    model = load(path, str(dtype).removeprefix("torch."), isa=isa)
    ours = StepRun(model, [60]).feed(tokens)
    assert model.dtype == dtype
    assert 0 < (ours - exact).square().mean() < 1.2 * (rounded - exact).square().mean()


def test_only_the_asked_rows_get_logits(tiny_model_dir: ModelDir) -> None:
    model = load(tiny_model_dir("qwen2-bias"))
    pool = make_pool(model, 4, 16)
    whole = model.compute(StepRows(PROMPT, [RowSpan(17, 0, [2, 1])], range(17)), pool).clone()
    for wanted in ([], [16], [3, 0, 3], list(range(17)) * 3):
        logits = model.compute(StepRows(PROMPT, [RowSpan(17, 0, [2, 1])], wanted), pool)
        assert torch.equal(logits, whole[wanted])


def test_a_poisoned_pool_and_a_forked_block_change_nothing(tiny_model_dir: ModelDir) -> None:
    model, fork_at = load(tiny_model_dir("mistral-window"), threads=2), 41
    outputs = []
    for fill in (0.0, math.nan):
        run = StepRun(model, [100, 100], fill=fill)
        logits = [run.feed(TEXT[:fork_at]), *(run.feed([token]) for token in TEXT[fork_at:50])]
        # the second sequence shares the full blocks and gets a copy of the last, in which the first has gone on
        run.tables[1][: fork_at // 16] = run.tables[0][: fork_at // 16]
        run.pool.copy_block(run.tables[0][fork_at // 16], run.tables[1][fork_at // 16])
        run.lengths[1] = fork_at
        logits += [run.step([(1, TEXT[fork_at:44])])[0]]
        logits += run.step([(1, TEXT[44:48]), (0, TEXT[50:60])])
        outputs.append(torch.cat(logits))
    assert outputs[1].isfinite().all()
    assert torch.equal(outputs[1], outputs[0])
    assert torch.equal(outputs[1][50:57], outputs[1][fork_at:48])


@pytest.mark.parametrize("rows", [1, 40])
def test_no_step_gathers_the_kv(rows: int, tiny_model_dir: ModelDir) -> None:
    """What a step produces in torch depends on its rows; the reference, which gathers, shows that the count sees it."""
    path = tiny_model_dir("llama-tied")
    lean = Decoder.load(path, dtype="float32", device=torch.device("cpu"), free_bytes=PLENTY)
    counts: dict[str, list[int]] = {}
    for name, executor in {
        "native": load(path),
        "attention": TorchExecutor(lean, CpuAttention(1)),
        "reference": TorchExecutor(lean, ReferenceAttention()),
    }.items():
        counts[name] = []
        for context in (32, 400):
            run = StepRun(executor, [512])  # type: ignore[arg-type]  # TorchExecutor's attributes are no properties
            run.feed([TEXT[i % 300] for i in range(context)])
            with element_counter.ElementCounter() as counter:
                run.feed(TEXT[:rows])
            counts[name].append(counter.floats)
    assert counts["native"][0] == counts["native"][1]
    assert counts["attention"][0] == counts["attention"][1]
    assert counts["reference"][0] < counts["reference"][1]
