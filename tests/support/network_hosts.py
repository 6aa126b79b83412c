"""Hosts on one machine: network namespaces with addresses of their own, joined by a bridge that leads nowhere else.

Each host has all ports to itself, so the same services run on every one of them, as on real machines. Nothing but the
first host runs on the first core: load on the others cannot starve it, as it could not if they were machines. (Niceness
would not do: Linux weighs it within a session only, and each process of Ray begins one.) Needs root.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from process_keeper import Kept

_NETWORK = "10.77.0"
_SLEEP = (sys.executable, "-S", "-c", "import signal; signal.pause()")


def why_not() -> str | None:
    """Why there can be no such hosts here; None when there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if any(shutil.which(tool) is None for tool in ("ip", "nsenter", "taskset")):
        return "network namespaces need iproute2 and util-linux"
    tried = subprocess.run(
        ["unshare", "--net", "ip", "link", "add", "probe0", "type", "bridge"], capture_output=True, text=True
    )
    return None if tried.returncode == 0 else f"no network namespaces here: {tried.stderr.strip()}"


class NetworkHost:
    """One namespace, on `cores`. What is kept in it is its own affair; it lasts as long as this object."""

    def __init__(self, number: int, folder: Path, cores: Collection[int]) -> None:
        self.address = f"{_NETWORK}.{number}"
        self.folder = folder
        self._cores = ",".join(map(str, sorted(cores)))
        folder.mkdir(parents=True, exist_ok=True)
        self._holder = Kept(_SLEEP, log=folder / "holder.log", inside=("unshare", "--net"))
        self.run("ip", "link", "set", "lo", "up")

    @property
    def inside(self) -> tuple[str, ...]:
        """The command in front that brings another one here."""
        return ("taskset", "--cpu-list", self._cores, "nsenter", f"--net=/proc/{self._holder.pid}/ns/net")

    @property
    def pid(self) -> int:
        return self._holder.pid

    def keep(self, argv: Sequence[str], *, log: str, env: Mapping[str, str]) -> Kept:
        return Kept(argv, log=self.folder / log, env=env, inside=self.inside)

    def run(self, *argv: str) -> None:
        subprocess.run([*self.inside, *argv], check=True, capture_output=True, timeout=20)

    def close(self) -> None:
        self._holder.kill()


class HostNetwork:
    """`switch` is where clients and shared services live; `hosts` are the machines."""

    def __init__(self, folder: Path, hosts: int) -> None:
        self._members: list[NetworkHost] = []
        self._cores = sorted(os.sched_getaffinity(0))
        try:
            self.switch = self._member(254, folder / "switch")
            self.switch.run("ip", "link", "add", "br0", "type", "bridge")
            self.switch.run("ip", "addr", "add", f"{self.switch.address}/24", "dev", "br0")
            self.switch.run("ip", "link", "set", "br0", "up")
            self.hosts = [self._join(number, folder) for number in range(1, hosts + 1)]
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> HostNetwork:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        for member in reversed(self._members):
            member.close()

    def _member(self, number: int, folder: Path) -> NetworkHost:
        cores = self._cores if number == 1 else self._cores[1:] or self._cores
        member = NetworkHost(number, folder, cores)
        self._members.append(member)
        return member

    def _join(self, number: int, folder: Path) -> NetworkHost:
        host = self._member(number, folder / f"h{number}")
        port = f"port{number}"
        peer = ("peer", "name", "eth0", "netns", str(host.pid))
        self.switch.run("ip", "link", "add", port, "type", "veth", *peer)
        self.switch.run("ip", "link", "set", port, "master", "br0", "up")
        host.run("ip", "addr", "add", f"{host.address}/24", "dev", "eth0")
        host.run("ip", "link", "set", "eth0", "up")
        return host
