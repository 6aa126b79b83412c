"""`kvray status`: tables from kvray.v1.Cache.Status.

Owns: the table of replicas.  Does not: know more than the RPC says.
Invariants: an unreachable cluster is one line and exit code 1.
"""

from __future__ import annotations

import grpc
from rich.console import Console
from rich.table import Table

from cluster.core.errors import ReplicaLost
from cluster.misses_table import misses_table
from cluster.rpc import inference_pb2, inference_pb2_grpc


def run_status(address: str, *, misses: bool = False, application: str | None = None) -> int:
    """`misses`: also what was not reused, by reason; of the front door that answers. `application`: whose front door,
    where several models are served."""
    metadata = () if application is None else (("application", application),)
    with grpc.insecure_channel(address) as channel:
        try:
            request = inference_pb2.StatusRequest(misses=misses)
            reply = inference_pb2_grpc.CacheStub(channel).Status(request, timeout=10, metadata=metadata)
        except grpc.RpcError as error:
            raise ReplicaLost(f"no cluster answers at {address}: {error.details()}") from None
    table = Table(title=", ".join(reply.models), box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for heading in ("replica", "free", "cached", "in use", "running", "waiting", "hits", "tokens", "preempted"):
        table.add_column(heading, justify="left" if heading == "replica" else "right", no_wrap=True)
    for row in reply.replicas:
        hit_rate = f"{100 * row.hit_tokens / row.query_tokens:.1f} %" if row.query_tokens else "-"
        table.add_row(
            row.worker_id,
            *(str(n) for n in (row.free_blocks, row.cached_blocks, row.in_use_blocks, row.running, row.waiting)),
            hit_rate,
            str(row.generated_tokens),
            str(row.preemptions),
        )
    console = Console()
    console.print(table)
    if misses:
        console.print()
        console.print(misses_table(reply.reuse), highlight=False)
    return 0
