"""Dynamo's offline replayer on one trace; run by bench_replay.py, in the peer's own environment.

    PEER_PYTHON benchmarks/replay_peer.py TRACE REPLICAS BLOCKS SEATS BUDGET SPEED        prints one line of JSON

Its mocker of vLLM with its default step times, round robin, blocks of 512 tokens. TRACE is in the Mooncake format.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from dynamo._core import run_mocker_trace_replay  # type: ignore[import-not-found]

BLOCK = 512


def main() -> None:
    trace, replicas, blocks, seats, budget, speed = sys.argv[1:]
    engine = {
        "backend": "vllm",
        "num_gpu_blocks": int(blocks),
        "block_size": BLOCK,
        "max_num_seqs": int(seats),
        "max_num_batched_tokens": int(budget),
    }
    summary: dict[str, Any] = run_mocker_trace_replay(
        [trace],
        extra_engine_args={"engine": engine},
        num_workers=int(replicas),
        router_mode="round_robin",
        trace_block_size=BLOCK,
        arrival_speedup_ratio=float(speed),
    ).summary
    print(
        json.dumps(
            {
                "requests": summary["completed_requests"],
                "hit_rate": summary["prefix_cache_reused_ratio"],
                "mean_ttft_s": summary["mean_ttft_ms"] / 1000,
                "wall_s": summary["wall_time_ms"] / 1000,
            }
        )
    )


if __name__ == "__main__":
    main()
