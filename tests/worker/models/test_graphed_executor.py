"""GraphedExecutor with a capture that calls the work again: buckets, padding, buffers that stay, what is not captured.

Real capture needs a device: there, benchmarks.gpu_check compares it with transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from fixed_reference import FixedReference
from step_run import StepRun

from cluster.config import CacheConfig, EngineConfig
from cluster.core.errors import ConfigError
from worker.kernels.reference import ReferenceAttention
from worker.models import graphed_executor
from worker.models.attention_hook import ProbeStep
from worker.models.decode_inputs import DecodeInputs
from worker.models.decoder import Decoder
from worker.models.executor import RowSpan, StepRows
from worker.models.graph_capture import Work
from worker.models.graphed_executor import GraphedExecutor, bucket_of
from worker.models.loading import load_executor
from worker.models.torch_executor import TorchExecutor

ModelDir = Callable[[str], Path]
CPU = torch.device("cpu")
PROMPTS = ([5, 77, 31], [9, 9], [54, 54, 12, 88, 3, 41, 60, 17, 29], [8, 70], [33, 4, 5, 6], [7, 7])


class Recorder:
    """Runs what it captures once, as a warm-up does, and calls it again at every replay."""

    def __init__(self) -> None:
        self.captured = self.replayed = 0

    def __call__(self, work: Work) -> Work:
        self.captured += 1
        work()

        def replay() -> torch.Tensor:
            self.replayed += 1
            return work()

        return replay


class Pair:
    """The same steps through a TorchExecutor and through a GraphedExecutor, each with its own pool."""

    def __init__(self, path: Path, most_rows: int = 64, block_size: int = 16, capacity: int = 64) -> None:
        torch.set_num_threads(1)
        model = Decoder.load(path, dtype="float32", device=CPU, free_bytes=2**33)
        self.capture = Recorder()
        self.graphed = GraphedExecutor(model, FixedReference(), self.capture, most_rows=most_rows)
        executors = (TorchExecutor(model, ReferenceAttention()), self.graphed)
        self.runs = [StepRun(executor, [capacity] * len(PROMPTS), block_size) for executor in executors]

    def step(self, parts: Sequence[tuple[int, Sequence[int]]]) -> None:
        wanted, found = (torch.cat(run.step(parts)) for run in self.runs)
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
        eager, graphed = (run.pool.tensor for run in self.runs)
        torch.testing.assert_close(graphed, eager, atol=1e-5, rtol=1e-5, equal_nan=True)  # and nothing else is written

    def prefill(self) -> None:
        self.step(list(enumerate(PROMPTS)))

    def decode(self, sequences: Sequence[int]) -> None:
        self.step([(i, [10 + i]) for i in sequences])


@pytest.mark.parametrize("family", ["llama-tied", "qwen3-layer-types", "mistral-window"])
def test_decode_steps_are_replayed_and_equal_eager_ones(family: str, tiny_model_dir: ModelDir) -> None:
    pair = Pair(tiny_model_dir(family))
    pair.prefill()
    assert (pair.capture.captured, pair.capture.replayed) == (0, 0)
    for sequences in ([0], [4, 1], [0, 1, 2], [5, 4, 3, 2, 1, 0], [2, 0, 1, 3], [3]):
        pair.decode(sequences)
    assert pair.capture.captured == 4  # 1, 2, 4 and 8 rows
    assert pair.capture.replayed == 6
    for _ in range(20):  # over the edges of blocks
        pair.decode([2, 0, 5])
    assert (pair.capture.captured, pair.capture.replayed) == (4, 26)


@pytest.mark.parametrize(("rows", "bucket"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (33, 64), (64, 64), (65, 128)])
def test_buckets(rows: int, bucket: int) -> None:
    assert bucket_of(rows) == bucket


def test_every_other_step_is_computed_as_always(tiny_model_dir: ModelDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphed_executor, "MOST_POSITIONS", 20)
    pair = Pair(tiny_model_dir("llama-tied"), most_rows=3)
    pair.prefill()
    pair.step([(0, [3, 4]), (1, [5])])  # a piece of a prompt beside a decode row
    pair.decode([0, 1, 2, 3])  # too many
    assert pair.capture.captured == 0
    pair.decode([0, 1, 2])
    assert pair.capture.replayed == 1
    pair.step([(2, list(range(10, 19)))])  # 20 positions are taken
    pair.decode([0, 1])
    assert pair.capture.replayed == 2
    pair.decode([0, 2])  # the 21st position
    assert pair.capture.replayed == 2


def test_a_step_that_wants_other_logits_is_not_replayed(tiny_model_dir: ModelDir) -> None:
    pair = Pair(tiny_model_dir("llama-tied"))
    pair.prefill()
    run = pair.runs[1]
    spans = [RowSpan(1, run.lengths[i], run.tables[i]) for i in (0, 1)]
    for wanted in ([], [1], [1, 0]):
        assert len(pair.graphed.compute(StepRows([4, 5], spans, wanted), run.pool)) == len(wanted)
    assert pair.capture.captured == 0


def test_graphs_belong_to_one_pool(tiny_model_dir: ModelDir) -> None:
    pair = Pair(tiny_model_dir("llama-tied"))
    pair.prefill()
    pair.decode([0, 1])
    other = StepRun(pair.graphed, [32, 32])
    other.step([(0, [5, 6]), (1, [7, 8])])
    found = other.step([(0, [9]), (1, [9])])
    assert pair.capture.captured == 2
    assert torch.cat(found).isfinite().all()


def test_a_backend_that_cannot_be_captured_is_refused(tiny_model_dir: ModelDir) -> None:
    model = Decoder.load(tiny_model_dir("llama-tied"), dtype="float32", device=CPU, free_bytes=2**33)
    with pytest.raises(ConfigError, match="CUDA graphs need attention backend triton, and it is reference"):
        GraphedExecutor(model, ReferenceAttention(), Recorder(), most_rows=4)


@pytest.mark.parametrize(
    ("family", "device", "reason"),
    [
        ("llama-tied", "cpu", "the device is cpu"),
        ("gemma2", "cuda", "kvray's own decoder, which cannot run this model"),
    ],
)
def test_where_graphs_are_not_possible_the_option_is_refused(
    family: str, device: str, reason: str, tiny_model_dir: ModelDir
) -> None:
    path = tiny_model_dir(family)
    config = EngineConfig(model=str(path), cuda_graphs=True, threads=1, cache=CacheConfig(kv_memory=2**20))
    with pytest.raises(ConfigError, match=reason):
        load_executor(config, path, torch.device(device), 2**33)


@pytest.mark.parametrize("family", ["llama-tied", "qwen3-layer-types", "phi3-partial"])
def test_the_decoder_reads_no_number_on_the_host(family: str, tiny_model_dir: ModelDir) -> None:
    """A capture cannot; on the meta device a look at a number raises."""
    meta = torch.device("meta")
    model = Decoder.load(tiny_model_dir(family), dtype="float32", device=meta, free_bytes=2**33)
    rows = torch.empty(4, dtype=torch.int64, device=meta)
    logits = model.forward(rows, rows, rows, ProbeStep())
    assert (logits.device.type, logits.shape) == ("meta", (4, model.vocab_size))


def test_inputs_stay_where_they_are_and_start_as_padding() -> None:
    inputs = DecodeInputs(4, 3, 16, CPU)
    buffers = (inputs.token_ids, inputs.positions, inputs.slots, inputs.block_tables)
    places = [buffer.data_ptr() for buffer in buffers]
    assert all(buffer.is_contiguous() for buffer in buffers)
    assert inputs.slots.tolist() == [-1] * 4

    inputs.fill(StepRows([7, 8], [RowSpan(1, 0, [5]), RowSpan(1, 33, [9, 2, 6, 1])], [0, 1]))
    assert inputs.token_ids.tolist() == [7, 8, 0, 0]
    assert inputs.positions.tolist() == [0, 33, 0, 0]
    assert inputs.slots.tolist() == [5 * 16, 6 * 16 + 1, -1, -1]
    assert inputs.block_tables.tolist() == [[5, 0, 0], [9, 2, 6], [0, 0, 0], [0, 0, 0]]

    inputs.fill(StepRows([3], [RowSpan(1, 16, [4, 8])], [0]))
    assert inputs.slots.tolist() == [8 * 16, -1, -1, -1]
    assert inputs.block_tables.tolist() == [[4, 8, 0]] + [[0, 0, 0]] * 3
    assert [buffer.data_ptr() for buffer in buffers] == places
    assert inputs.metadata() is not inputs.metadata()
    assert inputs.metadata().slot_mapping is inputs.slots
