"""Fixtures that more than one part of the tests needs, and the tests that carry the `torch` marker."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_models
from hypothesis import settings

from cluster.model_source import resolve_model

TESTS = Path(__file__).parent
# Files and folders whose every test needs torch in this process or in a child.
TORCH_TESTS = tuple(
    TESTS / name
    for name in (
        "benchmarks",
        "cluster/lab/test_lab_attention.py",
        "cluster/lab/test_lab_short_forms.py",
        "cluster/lab/test_short_runs.py",
        "cluster/lab/test_stages.py",
        "cluster/test_demo_model.py",
        "cluster/test_model_errors.py",
        "cluster/test_offline.py",
        "drills",
        "integration",
        "worker/grammar/test_masks.py",
        "worker/kernels",
        "worker/kvcache/test_kv_pool.py",
        "worker/models",
        "worker/grammar/test_grammar_service.py",
        "worker/test_beam_engine_parity.py",
        "worker/test_beam_search_parity.py",
        "worker/test_constrained_engine.py",
        "worker/test_demo_parity.py",
        "worker/test_engine_main.py",
        "worker/test_engine_process.py",
        "worker/test_model_runner.py",
        "worker/test_pressure.py",
        "worker/test_sampler.py",
        "worker/test_sampling_engine.py",
    )
)


def needs_torch(path: Path) -> bool:
    return any(path.is_relative_to(entry) for entry in TORCH_TESTS)


def without_torch(config: pytest.Config) -> bool:
    return "not torch" in str(config.getoption("markexpr"))


def pytest_configure(config: pytest.Config) -> None:
    """A run that leaves the `torch` tests out has no torch at all: a test that forgot the marker fails.

    Such a run is the quick one: random tests try fewer examples. None has a deadline, because a busy machine is no bug.
    """
    settings.register_profile("full", deadline=None)
    settings.register_profile("quick", deadline=None, max_examples=40)
    settings.load_profile("quick" if without_torch(config) else "full")
    if without_torch(config):
        sys.modules["torch"] = None  # type: ignore[assignment]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Collecting a file imports it, and these files import torch."""
    return True if without_torch(config) and needs_torch(collection_path) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if needs_torch(item.path):
            item.add_marker(pytest.mark.torch)


@pytest.fixture(scope="session")
def demo_model_dir() -> Path:
    """The demo model, fetched and converted on first use (tests that ask for it carry the `model` marker)."""
    return resolve_model("demo")


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`tiny_model_dir("llama")` is a directory with a random fp32 model of that family, without a tokenizer."""
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    built: dict[str, Path] = {}

    def build(family: str) -> Path:
        if family not in built:
            built[family] = tmp_path_factory.mktemp("models") / family
            tiny_models.save_model(family, built[family])
        return built[family]

    return build


@pytest.fixture(scope="session")
def tiny_llama_dir(tiny_model_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that can be served: with a tokenizer and a chat template."""
    path = Path(shutil.copytree(tiny_model_dir("llama"), tmp_path_factory.mktemp("served") / "llama"))
    tiny_models.save_tokenizer(path)
    return path
