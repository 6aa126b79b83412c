"""`kvray bench record`: the requests of a running cluster as a trace, without their text.

Owns: the call of kvray.v1.Cache.Record, when it ends, and what the user sees.
Does not: know the file's format (cluster.simulate.recorded_trace) or what a front door tells (router.traffic_recorder).
Invariants: an existing file is never overwritten; what was recorded until Ctrl-C or until the cluster went away is in
the file, and each line is whole.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import grpc
from rich.console import Console

from cluster.core.errors import ConfigError, ReplicaLost
from cluster.rpc import inference_pb2, inference_pb2_grpc
from cluster.simulate.recorded_trace import TraceWriter


def run_record(address: str, out: Path, *, seconds: float | None, limit: int | None) -> int:
    """`seconds`, `limit`: when it ends; None: only with Ctrl-C."""
    console = Console(stderr=True)
    try:
        file = out.open("x", encoding="utf-8")
    except FileExistsError:
        raise ConfigError(f"{out} exists; recordings are not overwritten") from None
    except OSError as error:
        raise ConfigError(f"{out}: cannot be written: {error.strerror or error}") from None
    with file, grpc.insecure_channel(address) as channel:
        try:
            count, missed = _record(channel, file, console, seconds, limit)
        except grpc.RpcError as error:
            if not file.tell():
                file.close()
                out.unlink()
            raise ReplicaLost(f"the recording from {address} ended: {_details(error)}") from None
    console.print(f"{count:,} requests in {out}", highlight=False, soft_wrap=True)
    if missed:
        console.print(f"{missed:,} more are not in it: they had no answer, or came too fast", highlight=False)
    return 0


def _record(
    channel: grpc.Channel, file: TextIO, console: Console, seconds: float | None, limit: int | None
) -> tuple[int, int]:
    """How many requests are in the file, and how many are not."""
    call = inference_pb2_grpc.CacheStub(channel).Record(inference_pb2.RecordRequest())
    timer = threading.Timer(0.0 if seconds is None else seconds, call.cancel)
    timer.daemon = True
    writer: TraceWriter | None = None
    missed = 0
    try:
        with console.status("waiting for the cluster; Ctrl-C ends the recording") as status:
            for chunk in _until_cancelled(call):
                if writer is None:
                    writer = TraceWriter(file, chunk.chunk_tokens)
                    if seconds is not None:
                        timer.start()
                missed = chunk.missed
                for one in chunk.requests:
                    if limit is None or writer.count < limit:
                        writer.write(one.arrived_s, one.prompt_tokens, one.output_tokens, one.chunks)
                file.flush()
                status.update(f"{writer.count:,} requests; Ctrl-C ends the recording")
                if limit is not None and writer.count >= limit:
                    break
    except KeyboardInterrupt:
        pass
    finally:
        timer.cancel()
        call.cancel()
    return (0 if writer is None else writer.count), missed


def _until_cancelled(
    call: grpc.CallIterator[inference_pb2.RecordChunk],
) -> Iterator[inference_pb2.RecordChunk]:
    try:
        yield from call
    except grpc.RpcError as error:
        if not isinstance(error, grpc.Call) or error.code() is not grpc.StatusCode.CANCELLED:
            raise


def _details(error: grpc.RpcError) -> str:
    return (error.details() if isinstance(error, grpc.Call) else None) or "no details"
