"""Round robin of our simulated fleet beside Dynamo's offline replayer: hit rates of one trace on equal fleets.

    python -m benchmarks.bench_replay PEER_PYTHON TRACE [--replicas 8] [--kv-tokens N...] [--speeds X...]

PEER_PYTHON: of an environment with `ai-dynamo-runtime` (1.6.1 has the replayer, `run_mocker_trace_replay`). Both get
the same arrivals, smeared over the trace's 3 s and rounded to milliseconds, the same blocks of 512 tokens, seats and
token budget. Their step times differ: only hit rates are comparable.

Owns: the common trace, the runs, the table.
Does not: simulate (cluster.simulate), or replay (replay_peer).
Invariants: exit code 1 when two hit rates differ by more than a percentage point.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cluster.simulate.fleet_report import FleetReport, make_fleet_report
from cluster.simulate.fleet_simulation import FleetSettings, FleetSimulation
from cluster.simulate.mooncake_trace import TRACE_BLOCK, TraceRequest, read_trace
from cluster.simulate.policy_lineup import chosen_policies
from cluster.simulate.scaled_replica import ReplicaSettings
from cluster.simulate.step_times import EXAMPLE
from cluster.simulate.trace_variants import at_speed

LIMIT = 0.01


def in_milliseconds(requests: Sequence[TraceRequest]) -> list[TraceRequest]:
    return [request._replace(arrival_s=round(request.arrival_s * 1000) / 1000) for request in requests]


def write(requests: Sequence[TraceRequest], path: Path) -> None:
    with path.open("w") as file:
        for request in requests:
            line = {
                "timestamp": round(request.arrival_s * 1000),
                "input_length": request.prompt_tokens,
                "output_length": request.output_tokens,
                "hash_ids": request.hash_ids,
            }
            file.write(json.dumps(line) + "\n")


def ours(requests: Sequence[TraceRequest], replicas: int, replica: ReplicaSettings, speed: float) -> FleetReport:
    (entry,) = chosen_policies("round_robin")
    settings = FleetSettings(replicas=replicas, replica=replica)
    return make_fleet_report(entry.name, FleetSimulation(at_speed(requests, speed), settings, entry).run(), wall_s=0.0)


def peers(python: Path, trace: Path, replicas: int, replica: ReplicaSettings, speed: float) -> dict[str, Any]:
    script = Path(__file__).with_name("replay_peer.py")
    blocks = replica.kv_tokens // replica.block
    fleet = (replicas, blocks, replica.max_num_seqs, replica.token_budget, speed)
    command = [str(python), str(script), str(trace), *map(str, fleet)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=script.parent)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer_python", type=Path)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--kv-tokens", type=int, nargs="+", default=[1_000_000, 250_000])
    parser.add_argument("--speeds", type=float, nargs="+", default=[1.0])
    options = parser.parse_args(argv)
    requests = in_milliseconds(read_trace(options.trace))
    worst = 0.0
    print("| cache per replica | speed | hit rate, ours | theirs | apart | mean TTFT, ours | theirs |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        common = Path(folder) / "trace.jsonl"
        write(requests, common)
        for kv_tokens in options.kv_tokens:
            replica = ReplicaSettings(kv_tokens=kv_tokens // TRACE_BLOCK * TRACE_BLOCK, step_time=EXAMPLE)
            for speed in options.speeds:
                report = ours(requests, options.replicas, replica, speed)
                theirs = peers(options.peer_python, common, options.replicas, replica, speed)
                assert report.ttft is not None and report.hit_rate is not None
                assert report.finished == theirs["requests"] == len(requests)
                apart = report.hit_rate - theirs["hit_rate"]
                worst = max(worst, abs(apart))
                print(
                    f"| {kv_tokens // 1000} k tokens | {speed:g} | {report.hit_rate:.2%} | {theirs['hit_rate']:.2%} "
                    f"| {100 * apart:+.2f} points | {report.ttft.mean:.3f} s | {theirs['mean_ttft_s']:.3f} s |",
                    flush=True,
                )
    return 0 if worst <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
