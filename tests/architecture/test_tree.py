"""The rules of the tree that no linter knows: sizes, docstrings, names, light imports, where things may be used."""

from __future__ import annotations

import ast
import functools
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("cluster", "router", "worker")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if "_pb2" not in path.name)
MODULES = [path for path in SOURCES if path.name != "__init__.py"]

MAX_MEDIAN_LINES = 130
MAX_LINES = 400


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def lines_of(path: Path) -> int:
    return len(path.read_text().splitlines())


def test_files_stay_small() -> None:
    sizes = {name_of(path): lines_of(path) for path in MODULES}
    too_long = {name: size for name, size in sizes.items() if size > MAX_LINES}
    assert not too_long, f"over the hard limit of {MAX_LINES} lines: {too_long}"
    assert statistics.median(sizes.values()) <= MAX_MEDIAN_LINES


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_module_says_what_it_owns(path: Path) -> None:
    doc = ast.get_docstring(ast.parse(path.read_text())) or ""
    for word in ("Owns:", "Does not:", "Invariants:"):
        assert word in doc, f"{name_of(path)} has no {word!r} in its docstring"


def test_every_package_directory_has_an_init_with_a_docstring() -> None:
    for package in PACKAGES:
        for directory in {path.parent for path in (ROOT / package).rglob("*.py")}:
            init = directory / "__init__.py"
            assert init.exists(), f"{name_of(directory)} is not a regular package"
            assert ast.get_docstring(ast.parse(init.read_text())), f"{name_of(init)} has no docstring"


def test_no_module_hides_a_standard_or_installed_one() -> None:
    taken = set(sys.stdlib_module_names) | {"redis", "grpc", "triton", "torch", "ray", "proto", "msgpack"}
    vague = {"utils", "common", "misc", "helpers"}
    wrong = [name_of(p) for p in MODULES if p.stem in taken | vague]
    assert not wrong


def test_environment_is_read_in_two_places_only() -> None:
    allowed = {"cluster/ray_environment.py", "cluster/model_source.py"}
    readers = {name_of(p) for p in MODULES if re.search(r"os\.(environ|getenv)", p.read_text())}
    assert readers <= allowed


LIBRARY_HOMES = {
    "aiohttp": r"cluster/bench/(http_peer|lineup|served_cluster)\.py",
    "matplotlib": r"cluster/bench/plot\.py",
    "ray": r"cluster/(app|coldest_victim|launcher|pinned_version|ray_metrics|serve_app|serve_file)\.py"
    r"|router/(exclusive_port|ingress|prefix_router|serve_dispatcher)\.py|worker/deployment\.py",
    "torch": r"worker/(model_runner|sampler)\.py|worker/(models|kernels|sampling)/.*|worker/kvcache/kv_pool\.py"
    r"|worker/grammar/(logits_mask|mask_worker)\.py|cluster/doctor/(torch_build|attention)\.py"
    r"|cluster/lab/(attention_case|block_sizes|gathered_attention|kernels|kv_layouts|torch_traffic)\.py"
    r"|cluster/lab/(arithmetic|copied_cache|process_pitfalls|stage_attention|stages|steps)\.py",
    "llguidance": r"worker/grammar/.*",
    "triton": r"worker/kernels/triton/.*",
    "transformers": r"worker/models/.*|cluster/tokenizer\.py",
    "redis": r"cluster/index/redis_.*",
    "grpc": r"router/(grpc_api|grpc_convert|status)\.py|cluster/(demo|status_command|bench/record_command)\.py",
    "fastapi": r"router/(http_.*|sse|ingress)\.py",
    "starlette": r"router/(http_.*|sse)\.py",
    "prometheus_client": r"router/metrics_page\.py",
}


@functools.cache
def imported_by(path: Path) -> set[str]:
    """First names of all imports, also those inside functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("library", LIBRARY_HOMES)
def test_each_library_stays_where_it_belongs(library: str) -> None:
    users = {name_of(path) for path in MODULES if library in imported_by(path)}
    assert users, f"nobody uses {library}: the rule is stale"
    strangers = {name for name in users if not re.fullmatch(LIBRARY_HOMES[library], name)}
    assert not strangers


def test_hashing_has_one_home() -> None:
    users = {name_of(p) for p in MODULES if re.search(r"^\s*(import|from) (hashlib|xxhash|mmh3)", p.read_text(), re.M)}
    assert users == {"cluster/core/hashing.py"}


def test_pure_modules_import_in_a_process_without_heavy_libraries() -> None:
    code = (
        "import sys\n"
        "import cluster, cluster.core.request, cluster.core.hashing, router.scoring, worker.engine_assembly\n"
        "heavy = {'ray', 'torch', 'transformers', 'redis', 'grpc', 'numpy', 'fastapi', 'msgpack'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_importing_the_command_loads_no_engine() -> None:
    code = (
        "import sys, cluster.cli\n"
        "heavy = {'ray', 'torch', 'transformers', 'redis', 'grpc'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_every_path_that_the_architecture_page_names_exists() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    paths = re.findall(r"`((?:cluster|router|worker|proto|tests|examples|docs|k8s)/[\w./-]+)`", text)
    assert len(paths) > 20
    missing = [p for p in paths if not (ROOT / p).exists()]
    assert not missing


def test_no_place_or_host_of_a_development_machine_in_the_tree() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in tracked:
        path = ROOT / name
        if path.suffix in {".py", ".md", ".toml", ".yaml", ".yml", ".txt", ""} and path.is_file():
            text = path.read_text(errors="ignore")
            assert "/".join(("", "work", "")) not in text or path == Path(__file__), f"a machine path in {name}"
