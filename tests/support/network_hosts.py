"""Hosts on one machine: network namespaces with addresses of their own, joined by a bridge that leads nowhere else.

Each host has all ports to itself, so the same services run on every one of them, as on real machines. Needs root.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from process_keeper import Kept

_NETWORK = "10.77.0"
_SLEEP = (sys.executable, "-S", "-c", "import signal; signal.pause()")


def why_not() -> str | None:
    """Why there can be no such hosts here; None when there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None or shutil.which("nsenter") is None:
        return "network namespaces need iproute2 and util-linux"
    tried = subprocess.run(
        ["unshare", "--net", "ip", "link", "add", "probe0", "type", "bridge"], capture_output=True, text=True
    )
    return None if tried.returncode == 0 else f"no network namespaces here: {tried.stderr.strip()}"


class NetworkHost:
    """One namespace. What is kept in it is its own affair; the namespace lasts as long as this object."""

    def __init__(self, number: int, folder: Path) -> None:
        self.address = f"{_NETWORK}.{number}"
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._holder = Kept(_SLEEP, log=folder / "holder.log", inside=("unshare", "--net"))
        self.run("ip", "link", "set", "lo", "up")

    @property
    def inside(self) -> tuple[str, ...]:
        """The command in front that brings another one here."""
        return ("nsenter", f"--net=/proc/{self._holder.pid}/ns/net")

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
        member = NetworkHost(number, folder)
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
