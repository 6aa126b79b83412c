"""kill -9 of an engine, then of a worker process: the next requests succeed and nothing credits the dead cache.

Named zz so that it runs last on the shared cluster.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from process_tree import command_of, descendants, parent_of

from cluster.rpc import inference_pb2 as pb

pytestmark = [pytest.mark.cluster, pytest.mark.model, pytest.mark.timeout(300)]


def engines(cluster: Any) -> list[int]:
    return [pid for pid in descendants(cluster.process.pid) if "worker.engine_main" in command_of(pid)]


def ask(cluster: Any, text: str) -> pb.GenerateResponse:
    call = pb.GenerateRequest(text=text, sampling=pb.SamplingOptions(temperature=0, max_tokens=4))
    return cluster.stub().GenerateOnce(call, timeout=60)


def warm_up(cluster: Any, topic: str) -> tuple[str, str]:
    """A long prompt and the replica that holds it."""
    prompt = " ".join(f"Line {n} of the {topic} file says {n * 31 % 97}." for n in range(60))
    replica = ask(cluster, prompt).replica
    time.sleep(0.5)
    assert ask(cluster, prompt).usage.cached_tokens > 500
    return prompt, replica


@pytest.mark.parametrize("victim", ["engine", "worker"])
def test_kill_while_idle(cluster: Any, victim: str) -> None:
    cluster.settled()
    prompt, holder = warm_up(cluster, victim)
    before = {r.worker_id for r in cluster.settled().replicas}
    engine = engine_of(cluster, holder, before)
    os.kill(engine if victim == "engine" else parent_of(engine), signal.SIGKILL)
    for attempt in range(6):
        reply = ask(cluster, prompt)
        assert reply.token_ids
        assert reply.replica != holder
        if attempt == 0:
            assert reply.usage.cached_tokens < 64, "the survivor cannot have had this prompt"
    assert holder not in {r.worker_id for r in cluster.status().replicas}
    after = {r.worker_id for r in cluster.settled(timeout_s=120).replicas}
    assert holder not in after and len(after - before) == 1
    assert len(engines(cluster)) == 2
    (fresh,), (survivor,) = after - before, after & before
    assert next(r for r in cluster.status().replicas if r.worker_id == fresh).indexed_chunks == 0
    reply = ask(cluster, prompt)
    assert reply.replica == survivor, "the new replica is not credited with what the dead one held"
    assert reply.usage.cached_tokens > 500


def engine_of(cluster: Any, worker_id: str, known: set[str]) -> int:
    """The engine child of the replica that served `worker_id`: the one whose CPU time grows when it works."""
    assert worker_id in known
    pids = engines(cluster)
    assert len(pids) == 2

    def cpu(pid: int) -> int:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        return int(fields[11]) + int(fields[12])

    start = {pid: cpu(pid) for pid in pids}
    call = pb.GenerateRequest(
        text=" ".join(f"Line {n} of the probe" for n in range(40)),
        sampling=pb.SamplingOptions(temperature=0, max_tokens=24, ignore_eos=True),
    )
    reply = cluster.stub().GenerateOnce(call, timeout=60)
    busy = max(pids, key=lambda pid: cpu(pid) - start[pid])
    idle = next(pid for pid in pids if pid != busy)
    return busy if reply.replica == worker_id else idle
