"""`kvray bench` and `kvray simulate`: measuring on this machine, and in virtual time.

Owns: these commands' names, options and help.
Does not: do the work; each command hands over to one module, imported only when it runs.
Invariants: as cluster.cli.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from cluster.cli_options import (
    AgeingS,
    AttentionBackend,
    BlockSize,
    ChunkTokens,
    CudaGraphs,
    Device,
    Dtype,
    HoldBack,
    KvMemory,
    MaxModelLen,
    MaxNumSeqs,
    Model,
    Scheduling,
    Threads,
    TokenBudget,
    build_config,
    complain,
    run_command,
)

bench_app = typer.Typer(invoke_without_command=True)


@bench_app.callback()
def bench(  # noqa: PLR0913 - one parameter per option
    context: typer.Context,
    peer: Annotated[list[str] | None, typer.Option(help="NAME=URL of an OpenAI-compatible server; repeatable")] = None,
    pid: Annotated[list[str] | None, typer.Option(help="NAME=PID of that server, for noise and memory")] = None,
    serve: Annotated[bool, typer.Option("--serve", help="start kvray with one replica as the peer kvray")] = False,
    engine: Annotated[bool, typer.Option("--engine", help="add the engine alone, without HTTP")] = False,
    workloads: Annotated[str, typer.Option(help="which ones, in order")] = "W1,W2,W2_off,W3,W4,W5",
    reps: Annotated[int, typer.Option(min=1, help="repetitions of everything")] = 3,
    time_limit: Annotated[float | None, typer.Option(min=0, help="seconds after which no run goes on")] = None,
    background_load: Annotated[float | None, typer.Option(help="keep this share of all cores busy in each run")] = None,
    max_noise: Annotated[float, typer.Option(help="drop runs when others took more than this share")] = 0.12,
    quiet_wait: Annotated[float, typer.Option(min=0, help="seconds to wait for a quiet machine before a run")] = 25.0,
    retries: Annotated[int, typer.Option(min=0, help="further tries of a noisy run")] = 1,
    json: Annotated[Path | None, typer.Option(help="file for every record and the summary")] = None,
    markdown: Annotated[Path | None, typer.Option(help="file for the tables")] = None,
    png: Annotated[Path | None, typer.Option(help="file for a picture (needs matplotlib)")] = None,
    model: Model = "demo",
    dtype: Dtype = "auto",
    kv_memory: KvMemory = "2GiB",
    threads: Threads = 2,
) -> None:
    """Compare kvray, its engine alone and other servers: fixed workloads, interleaved, noisy runs dropped."""
    if context.invoked_subcommand is not None:
        return
    given = {name: value for name, value in locals().items() if name != "context"}
    from cluster.bench.bench_command import run_bench

    run_command(run_bench, given)


@bench_app.command()
def calibrate(  # noqa: PLR0913 - one parameter per option
    seconds: Annotated[float, typer.Option(min=1, help="how long to measure; a slow machine takes longer")] = 60.0,
    json: Annotated[Path | None, typer.Option(help="file for the result, for kvray simulate --step-time")] = None,
    model: Model = "demo",
    dtype: Dtype = "auto",
    device: Device = "auto",
    attention_backend: AttentionBackend = "auto",
    cuda_graphs: CudaGraphs = False,
    kv_memory: KvMemory = None,
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = 64,
    token_budget: TokenBudget = 2048,
    block_size: BlockSize = 16,
    threads: Threads = None,
) -> None:
    """Time engine steps of many shapes on a model and fit the step-time model that kvray simulate uses."""
    chunks = min(max(block_size, 1), 1024)  # as in plan: nothing here has chunks
    engine: dict[str, Any] = {
        "model": model,
        "dtype": dtype,
        "device": device,
        "attention_backend": attention_backend,
        "cuda_graphs": cuda_graphs,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "token_budget": token_budget,
        "threads": threads,
        "cache": {"kv_memory": kv_memory, "block_size": block_size, "chunk_tokens": chunks},
    }
    config = build_config(engine=engine)
    from cluster.bench.calibrate_command import run_calibrate

    run_command(run_calibrate, config.engine, seconds=seconds, json_file=json)


@bench_app.command()
def record(
    out: Annotated[Path, typer.Option(help="new file for the trace, for kvray simulate --trace")],
    address: Annotated[str, typer.Option(help="gRPC address of a running cluster")] = "127.0.0.1:9000",
    seconds: Annotated[float | None, typer.Option(min=0, help="how long (default: until Ctrl-C)")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="end after so many requests")] = None,
) -> None:
    """Record live traffic as a trace without text: times, lengths, and which prompts began alike."""
    from cluster.bench.record_command import run_record

    run_command(run_record, address, out, seconds=seconds, limit=limit)


def simulate(  # noqa: PLR0913 - one parameter per option
    trace: Annotated[
        Path | None, typer.Option(help="requests, from kvray bench record or in the Mooncake format")
    ] = None,
    log: Annotated[Path | None, typer.Option(help="or: OpenAI request bodies with timestamps, one a line")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="with --log: directory of the model's tokenizer")] = None,
    chunk_tokens: ChunkTokens = 64,
    output_tokens: Annotated[int, typer.Option(help="with --log: answers whose length it does not say")] = 256,
    ttft_target: Annotated[
        float | None, typer.Option(help="seconds: also find the fewest replicas whose p90 TTFT keeps this")
    ] = None,
    engine_only: Annotated[bool, typer.Option("--engine-only", help="one replica, without a router")] = False,
    replicas: Annotated[int, typer.Option(help="of the fleet")] = 8,
    policy: Annotated[
        str | None, typer.Option(help="all, or names with commas between (default: all; three with --log)")
    ] = None,
    kv_tokens: Annotated[int | None, typer.Option(help="cache of each replica (default: that of the example)")] = None,
    event_lag: Annotated[float, typer.Option(help="milliseconds until cache events reach the router")] = 0.0,
    kill: Annotated[str | None, typer.Option(help="REPLICA@SECONDS: it dies then, such as 3@120")] = None,
    png: Annotated[Path | None, typer.Option(help="picture of the comparison (needs matplotlib)")] = None,
    speed: Annotated[float | None, typer.Option(help="requests arrive so many times as fast (default: 1)")] = None,
    rate: Annotated[float | None, typer.Option(help="or: so many requests a second on average")] = None,
    load: Annotated[float | None, typer.Option(help="or: this share of what the replicas can do, such as 0.85")] = None,
    limit: Annotated[int | None, typer.Option(help="only the first requests")] = None,
    cold_share: Annotated[float | None, typer.Option(help="change the trace: only this share is cold")] = None,
    kv_blocks: Annotated[int | None, typer.Option(help="size of the pool (default: that of the example)")] = None,
    block_size: BlockSize = 64,
    token_budget: TokenBudget = 2048,
    max_num_seqs: MaxNumSeqs = 64,
    scheduling: Scheduling = "prefix",
    ageing_s: AgeingS = 2.0,
    hold_back: HoldBack = True,
    step_time: Annotated[Path | None, typer.Option(help="file of kvray bench calibrate (default: an example)")] = None,
    seed: Annotated[int, typer.Option(help="of arrivals, tokens and the cold share")] = 0,
    json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Run a trace through the real router, scheduler and KV bookkeeping in virtual time: TTFT by policy."""
    if not engine_only:
        from cluster.simulate_fleet_command import run_fleet
        from cluster.simulate_options import FleetOptions

        fleet = FleetOptions(
            trace=trace,
            log=log,
            tokenizer=tokenizer,
            chunk_tokens=chunk_tokens,
            output_tokens=output_tokens,
            ttft_target=ttft_target,
            replicas=replicas,
            policy=policy,
            speed=speed,
            rate=rate,
            load=load,
            limit=limit,
            cold_share=cold_share,
            kv_tokens=kv_tokens,
            event_lag_ms=event_lag,
            kill=kill,
            step_time=step_time,
            token_budget=token_budget,
            max_num_seqs=max_num_seqs,
            prefix_first=scheduling == "prefix",
            ageing_s=ageing_s,
            hold_back=hold_back,
            seed=seed,
            png=png,
        )
        run_command(run_fleet, fleet, as_json=json)
        return
    from cluster.simulate_command import SimulateOptions, run_simulate

    if trace is None:
        complain("trace", "--engine-only needs --trace")
        raise typer.Exit(2)
    options = SimulateOptions(
        trace=trace,
        engine_only=engine_only,
        speed=speed,
        load=load,
        limit=limit,
        cold_share=cold_share,
        kv_blocks=kv_blocks,
        block_size=block_size,
        step_time=step_time,
        seed=seed,
        engine={
            "token_budget": token_budget,
            "max_num_seqs": max_num_seqs,
            "scheduling": scheduling,
            "ageing_s": ageing_s,
            "hold_back": hold_back,
        },
    )
    run_command(run_simulate, options, as_json=json)
