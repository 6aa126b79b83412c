"""Machines for `ray up`: namespaces of one Linux machine, each with its own address, processes, /tmp, home and sshd.

`ray stop` inside one sees only its own processes, and all ports are free on each. Nothing outside reaches them, and
they reach nothing outside. Ending the `unshare` of a host ends every process in it. Needs root.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

NETWORK = "10.77.0"
OPERATOR = f"{NETWORK}.254"

# The first process of a host: a /tmp of its own in which only `keep` is still the machine's, then sshd if there is a
# configuration for it, and a burial of all orphans.
_INIT = """
import os, subprocess, sys
home, *keep = sys.argv[1:]
def run(*argv): subprocess.run(argv, check=True)
run("mount", "--make-rprivate", "/")
hidden = os.path.join(home, "machine-tmp")
os.makedirs(hidden)
run("mount", "--bind", "/tmp", hidden)
run("mount", "-t", "tmpfs", "tmpfs", "/tmp")
os.chmod("/tmp", 0o1777)
for path in keep:
    if path.startswith("/tmp/"):
        os.makedirs(path)
        run("mount", "--bind", hidden + path.removeprefix("/tmp"), path)
if os.path.exists(home + "/passwd"):
    run("mount", "--bind", home + "/passwd", "/etc/passwd")
if os.path.exists(home + "/sshd_config"):
    run("mount", "-t", "tmpfs", "tmpfs", "/run")
    os.makedirs("/run/sshd", 0o755)
    while not os.path.exists(home + "/network-is-up"):
        __import__("time").sleep(0.05)
    subprocess.Popen([sys.argv[0], "-D", "-f", home + "/sshd_config", "-E", home + "/sshd.log"])
while True:
    try:
        os.wait()
    except ChildProcessError:
        __import__("time").sleep(0.2)
"""


def why_not() -> str | None:
    """Why there can be no such machines here; None when there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "machines made of namespaces need Linux and root"
    for program, package in (
        ("sshd", "openssh-server"),
        ("ssh", "openssh-client"),
        ("rsync", "rsync"),
        ("ip", "iproute2"),
    ):
        if _program(program) is None:
            return f"{program} is missing (package {package})"
    tried = subprocess.run(
        ["unshare", "-mnpf", "--mount-proc", "ip", "link", "add", "probe0", "type", "bridge"],
        capture_output=True,
        text=True,
    )
    return None if tried.returncode == 0 else f"no namespaces here: {tried.stderr.strip()}"


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


class Host:
    """One machine. `keep`: paths below /tmp that it shares with the real one."""

    def __init__(self, address: str, home: Path, keep: Sequence[Path], authorized_key: Path | None = None) -> None:
        self.address, self.home = address, home
        home.mkdir(parents=True)
        if authorized_key is not None:
            self._configure_sshd(authorized_key)
        sshd = _program("sshd") or "sshd"
        argv = [sys.executable, "-S", "-c", _INIT.replace("sys.argv[0]", repr(sshd)), str(home), *map(str, keep)]
        with (home / "init.log").open("wb") as log:
            self._unshare = subprocess.Popen(
                ["unshare", "-mnpf", "--mount-proc", "--kill-child", *argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._init = self._first_child()
        self.ip("link", "set", "lo", "up")

    @property
    def pid(self) -> int:
        return self._init

    @property
    def inside(self) -> tuple[str, ...]:
        """The command in front that brings another one here."""
        return ("nsenter", "--target", str(self._init), "--net", "--mount", "--pid")

    def ip(self, *arguments: str) -> None:
        net = ("nsenter", "--target", str(self._init), "--net")
        subprocess.run([*net, _program("ip") or "ip", *arguments], check=True, capture_output=True, timeout=20)

    def environments(self) -> dict[str, dict[str, str]]:
        """Of every process on this machine but its first and sshd's: command line -> environment."""
        found = {}
        for pid in self._processes():
            try:
                command = (
                    Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                )
                pairs = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            found[f"{command} [{pid}]"] = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
        return found

    def tail(self, name: str) -> str:
        """The ends of Ray's logs of that name, for a failure's message."""
        command = f"tail -n 15 /tmp/ray/session_latest/logs/{name}"
        done = subprocess.run([*self.inside, "sh", "-c", command], capture_output=True, text=True, timeout=20)
        return done.stdout

    def _processes(self) -> list[int]:
        namespace = os.readlink(f"/proc/{self._init}/ns/pid")
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and os.readlink(entry / "ns" / "pid") == namespace:
                    found.append(int(entry.name))
            except OSError:
                continue
        return sorted(set(found) - {self._init})

    def _first_child(self) -> int:
        children = Path(f"/proc/{self._unshare.pid}/task/{self._unshare.pid}/children")
        deadline = time.monotonic() + 20
        while not (found := children.read_text().split()):
            assert self._unshare.poll() is None and time.monotonic() < deadline, (self.home / "init.log").read_text()
            time.sleep(0.02)
        return int(found[0])

    def _configure_sshd(self, authorized_key: Path) -> None:
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.home / "host_key")], check=True)
        lines = (
            f"ListenAddress {self.address}",
            f"HostKey {self.home}/host_key",
            f"AuthorizedKeysFile {authorized_key}",
            f"PidFile {self.home}/sshd.pid",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "PermitRootLogin prohibit-password",
            "StrictModes no",
            "UsePAM no",
        )
        # Not $HOME alone: ssh takes the home from here when it expands ~ itself.
        users = Path("/etc/passwd").read_text()
        (self.home / "passwd").write_text(re.sub(r"(?m)^(root:(?:[^:]*:){4})[^:]*", rf"\g<1>{self.home}", users))
        (self.home / "sshd_config").write_text("\n".join(lines) + "\n")

    def close(self) -> None:
        self._unshare.kill()
        self._unshare.wait(30)


class SshHosts:
    """`operator` is where the client and shared services live; `hosts` have sshd, and `key` opens them."""

    def __init__(self, folder: Path, names: Sequence[str], keep: Sequence[Path]) -> None:
        self._members: list[Host] = []
        self.key = folder / "key"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.key)], check=True)
        try:
            self.operator = self._add(Host(OPERATOR, folder / "operator", keep))
            self.operator.ip("link", "add", "br0", "type", "bridge")
            self.operator.ip("addr", "add", f"{OPERATOR}/24", "dev", "br0")
            self.operator.ip("link", "set", "br0", "up")
            self.hosts = [self._join(number, folder / name, keep) for number, name in enumerate(names, start=10)]
        except BaseException:
            self.close()
            raise

    def _add(self, host: Host) -> Host:
        self._members.append(host)
        return host

    def _join(self, number: int, home: Path, keep: Sequence[Path]) -> Host:
        host = self._add(Host(f"{NETWORK}.{number}", home, keep, Path(f"{self.key}.pub")))
        port = f"port{number}"
        self.operator.ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(host.pid))
        self.operator.ip("link", "set", port, "master", "br0", "up")
        host.ip("addr", "add", f"{host.address}/24", "dev", "eth0")
        host.ip("link", "set", "eth0", "up")
        host.ip("route", "add", "default", "via", OPERATOR)  # Ray asks the route to the world for its own address
        (home / "network-is-up").touch()
        return host

    def run(
        self, argv: Sequence[str], *, env: Mapping[str, str], cwd: Path, timeout_s: float
    ) -> subprocess.CompletedProcess[str]:
        """On the operator's machine; both outputs together."""
        return subprocess.run(
            [*self.operator.inside, "env", "-C", str(cwd), *argv],
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def close(self) -> None:
        for member in reversed(self._members):
            member.close()

    def __enter__(self) -> SshHosts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
