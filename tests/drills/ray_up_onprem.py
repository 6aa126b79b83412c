"""cluster/ray_up/onprem.yaml, from `ray up` to an answer and `ray down`, on namespaces that stand for machines.

Run by `make test-long`; writes what it did to docs/drills/ray_up_onprem.log when KVRAY_KEEP_LOG is set. Changed in the
file for it: addresses, user and key, a faked GPU on the worker, a tiny model, and the command that installs (the
machines share this one's Python).
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ssh_hosts
import tiny_models
import yaml
from ssh_hosts import OPERATOR, Host, SshHosts

from cluster.index.private_server import find_server
from cluster.ray_environment import cluster_environment

ROOT = Path(__file__).parents[2]
RAY_UP = ROOT / "cluster" / "ray_up"
LOG = ROOT / "docs" / "drills" / "ray_up_onprem.log"
LOG_HEAD = """\
# tests/drills/ray_up_onprem.py: cluster/ray_up/onprem.yaml on two namespaces of one machine that stood for hosts,
# with a tiny model, a faked GPU and a ready environment in place of the installation. Shortened; times are those of a
# busy machine with two cores, and each is when a command had ended.
"""
REDIS_PORT = 6380
REASON = ssh_hosts.why_not()

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.torch,
    pytest.mark.timeout(900),
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]

# What the installation leaves on a machine, here with this machine's Python.
_TOOLS = {"ray": "ray.scripts.scripts", "serve": "ray.serve.scripts", "kvray": "cluster.cli"}


def ready_made(home: Path) -> None:
    folder = home / ".kvray" / "venv" / "bin"
    folder.mkdir(parents=True)
    for name, module in _TOOLS.items():
        (folder / name).write_text(
            f'#!/bin/sh\nexport PYTHONPATH="$HOME/kvray"\nexec {sys.executable} -m {module} "$@"\n'
        )
        (folder / name).chmod(0o755)


class Drill:
    """The operator's view: commands, their log, and the two machines."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        keep = [path for path in {ROOT, Path(sys.prefix), Path(sys.base_prefix)} if path.is_relative_to("/tmp")]
        self.net = SshHosts(folder, ("head", "worker"), keep)
        self.head, self.worker = self.net.hosts
        self.home = self.net.operator.home
        self.secret, self.token = secrets.token_hex(16), secrets.token_hex(32)
        self.lines: list[str] = []
        self.started = time.monotonic()
        self.succeeded = False
        for host in self.net.hosts:
            ready_made(host.home)
        self.file = self._write_files()
        self.redis = self._start_redis()

    def _write_files(self) -> Path:
        """The operator's secrets, a model, and the two files of the tree with what this drill changes."""
        tiny_models.save_model("llama", self.home / "tiny")
        tiny_models.save_tokenizer(self.home / "tiny")
        (self.home / ".kvray").mkdir()
        secrets_file = self.home / ".kvray" / "secrets.env"
        redis = f"redis://:{self.secret}@{OPERATOR}:{REDIS_PORT}/0"
        secrets_file.write_text(f"RAY_AUTH_TOKEN={self.token}\nKVRAY_REDIS_URL={redis}\n")
        secrets_file.chmod(stat.S_IRUSR | stat.S_IWUSR)

        serve = yaml.safe_load((RAY_UP / "serve_gpu.yaml").read_text())
        args = serve["applications"][0]["args"]
        args["engine"] = {
            "model": "~/models/tiny",
            "device": "cpu",
            "dtype": "float32",
            "max_model_len": 512,
            "threads": 1,
            "cache": {"kv_memory": "64MiB"},
        }
        args["router"]["replicas"] = 1
        args["serve"]["cpus_per_replica"] = 0.5
        (self.home / "serve.yaml").write_text(yaml.safe_dump(serve))

        config = yaml.safe_load((RAY_UP / "onprem.yaml").read_text())
        config["provider"] |= {"head_ip": self.head.address, "worker_ips": [self.worker.address]}
        config["auth"] = {"ssh_user": "root", "ssh_private_key": str(self.net.key)}
        config["min_workers"] = config["max_workers"] = 1
        assert "pip install" in config["setup_commands"][-1]
        config["setup_commands"][-1] = "test -x ~/.kvray/venv/bin/ray"
        config["file_mounts"] |= {
            "~/models/tiny": str(self.home / "tiny"),
            "~/serve.yaml": str(self.home / "serve.yaml"),
        }
        config["worker_start_ray_commands"][-1] += " --num-gpus=1"
        path = self.home / "onprem.yaml"
        path.write_text(yaml.safe_dump(config, sort_keys=False))
        return path

    def _start_redis(self) -> subprocess.Popen[bytes]:
        options = ("--bind", OPERATOR, "--port", str(REDIS_PORT), "--requirepass", self.secret, "--save", "")
        return subprocess.Popen(
            [*self.net.operator.inside, str(find_server()), *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=self.home,
        )

    @property
    def env(self) -> dict[str, str]:
        return {
            "PATH": os.environ["PATH"] + ":/usr/sbin",
            "HOME": str(self.home),
            "PYTHONPATH": str(ROOT),
            "RAY_USAGE_STATS_ENABLED": "0",
            "PYTHONWARNINGS": "ignore",
        }

    def note(self, text: str) -> None:
        for line in text.splitlines():
            self.lines.append(f"[{time.monotonic() - self.started:5.0f} s] {line}")
            print(self.lines[-1], flush=True)

    def run(self, shown: str, *argv: str, quiet: bool = False, timeout_s: float = 500) -> str:
        """On the operator's machine, from the checkout's root; `shown` is what a user would type."""
        done = self.net.run(argv, env=self.env, cwd=ROOT, timeout_s=timeout_s)
        if not quiet or done.returncode:
            self.note(f"$ {shown}\n{done.stdout}")
        assert done.returncode == 0, f"{shown} ended with {done.returncode}: {done.stdout[-2000:]}"
        return done.stdout

    def ray(self, *arguments: str, quiet: bool = False) -> str:
        shown = " ".join(["ray", *(f"'{a}'" if " " in a else a for a in arguments)])
        argv = (sys.executable, "-m", "ray.scripts.scripts", *arguments)
        return self.run(shown.replace(str(self.file), "onprem.yaml"), *argv, quiet=quiet)

    def on_head(self, command: str, *, quiet: bool = False) -> str:
        return self.ray("exec", str(self.file), command, quiet=quiet)

    def wait_until(self, what: str, command: str, pattern: str, timeout_s: float) -> str:
        deadline = time.monotonic() + timeout_s
        while not re.search(pattern, said := self.on_head(command, quiet=True)):
            assert time.monotonic() < deadline, (
                f"not in {timeout_s:.0f} s: {what}: {said}\n{self.head.tail('monitor.*')}"
            )
            time.sleep(2)
        self.note(f"{what}: `{command}` says\n{said}")
        return said

    def close(self) -> None:
        self.net.close()
        self.redis.wait(30)
        if self.succeeded and os.environ.get("KVRAY_KEEP_LOG"):
            LOG.write_text(LOG_HEAD + shortened("\n".join(self.lines), self.folder))


CHATTER = (
    r"^\[ *\d+ s\] *$",
    r"Permanently added|Shared connection|Connection to .* closed|no job control|cannot set terminal|ulimit: open",
    r"^\[ *\d+ s\] [\w./-]+(/|\.\w+)$|\] (sending incremental|sent \d|total size|LICENSE$|key$)|\.bashrc: No such file",
    r"VINFO|VWARN|refers to a file|To ensure this mount|node_provider\.py|cli_output_helpers\.py|commands\.py:(9|394)",
    r"Ray job|ray job|RAY_API_SERVER_ADDRESS|See https|for more information|If connection|view the dashboard|8265\s*$",
    r"Next steps|To add another node|To connect to this|import ray|ray\.init|To terminate the Ray|To view the status",
)


def shortened(text: str, folder: Path) -> str:
    """Without colours, places and chatter."""
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\r", "", text)
    for path, name in ((folder, "DRILL"), (ROOT, "CHECKOUT"), (Path(sys.prefix), "PYTHON")):
        text = text.replace(str(path), name)
    chatter = "|".join(CHATTER)
    lines = [line.rstrip()[:300] for line in text.splitlines() if not re.search(chatter, line)]
    return "\n".join(lines) + "\n"


@pytest.fixture
def drill() -> Iterator[Drill]:
    folder = Path(tempfile.mkdtemp(prefix="kvd-", dir="/var/tmp"))  # short: Ray keeps sockets below; not in /tmp
    running = Drill(folder)
    try:
        yield running
    finally:
        running.close()
        shutil.rmtree(folder, ignore_errors=True)


def ray_processes(host: Host) -> dict[str, dict[str, str]]:
    """Ray's daemons and workers, by their executables and the names they give themselves; and the engines below."""
    words = ("gcs_server", "raylet", "ray::", "dashboard", "monitor.py", "runtime_env", "log_monitor", "engine_main")
    return {name: env for name, env in host.environments().items() if any(word in name for word in words)}


def readable(processes: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """Who renames itself (`ray::...`) writes over parts of its first environment; its children show it still."""
    return {name: env for name, env in processes.items() if name.startswith("/")}


def ask(drill: Drill, address: str) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": "w4 w5 w6 w7 w8 w9", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    url = f"http://{address}:8000/v1/completions"
    command = ("curl", "-sS", "--max-time", "60", url, "-H", "Content-Type: application/json", "-d", json.dumps(body))
    reply: dict[str, Any] = json.loads(drill.run(f"curl {url} -d '{json.dumps(body)}'", *command))
    return reply


def test_from_ray_up_to_an_answer_and_down(drill: Drill) -> None:
    drill.ray("up", "-y", "--no-config-cache", str(drill.file))
    drill.wait_until("the worker is there", "ray status", r"/1\.0 GPU", 240)

    drill.on_head("serve deploy ~/serve.yaml")
    drill.wait_until("the application runs", "serve status", r"kvray:\s+status: RUNNING", 240)
    reply = ask(drill, drill.head.address)
    assert reply["usage"]["completion_tokens"] == 8 and reply["choices"][0]["finish_reason"] == "length"
    again = ask(drill, drill.worker.address)  # HAProxy on the other node, the same replica and its cache
    assert again["choices"][0]["text"] == reply["choices"][0]["text"]
    example = str(ROOT / "examples" / "grpc_client.py")
    address = f"{drill.worker.address}:9000"
    told = drill.run(
        f"python examples/grpc_client.py --address {address} --max-tokens 4 w7",
        *(sys.executable, example, "--address", address, "--max-tokens", "4", "w7"),
    )
    assert "generated by" in told

    flags = cluster_environment(60)
    seen = {host: ray_processes(host) for host in drill.net.hosts}
    checked = {host: readable(processes) for host, processes in seen.items()}
    for host, processes in checked.items():
        wanted = (
            ("gcs_server", "raylet", "monitor.py") if host is drill.head else ("raylet", "log_monitor", "engine_main")
        )
        for word in wanted:
            assert any(word in name for name in processes), f"no {word} on {host.address}: {sorted(processes)}"
        for name, env in processes.items():
            missing = {key: env.get(key) for key, value in flags.items() if env.get(key) != value}
            assert not missing, f"{name} on {host.address}: {missing}"
            assert env.get("RAY_AUTH_TOKEN") == drill.token, name
    workers = [name for name in seen[drill.worker] if "LLMWorker" in name]
    assert len(workers) == 1 and not any("LLMWorker" in name for name in seen[drill.head])
    counts = ", ".join(f"{len(checked[host])} of {len(seen[host])} on {host.address}" for host in drill.net.hosts)
    drill.note(f"processes whose environment can be read have all {len(flags)} flags and the token: {counts}")

    closed = drill.net.run(
        ["curl", "-sS", "--max-time", "5", f"http://{drill.head.address}:8265/api/version"],
        env=drill.env,
        cwd=ROOT,
        timeout_s=20,
    )
    drill.note(f"$ curl http://{drill.head.address}:8265/api/version\n{closed.stdout}")
    assert closed.returncode == 7  # connection refused

    drill.ray("down", "-y", str(drill.file))
    deadline = time.monotonic() + 90
    while (left := {h.address: sorted(ray_processes(h)) for h in drill.net.hosts}) and any(left.values()):
        if time.monotonic() > deadline:
            break
        time.sleep(1)
    assert not left[drill.head.address], left
    drill.note(f"Ray processes left after `ray down`: { {address: len(names) for address, names in left.items()} }")
    drill.succeeded = True
