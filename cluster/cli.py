"""The `kvray` command.

Owns: the commands' names, options and help, and exit codes (0 good, 1 failed, 2 cannot be done as asked: wrong options,
or a model that cannot run here).
Does not: do the work; each command hands over to one module, imported only when it runs.
Invariants: a KvrayError ends the command with one line on stderr, never with a traceback.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from cluster.cli_lab import lab
from cluster.cli_measure import bench_app, simulate
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
    LogBlocks,
    MaxModelLen,
    MaxNumSeqs,
    MaxQueue,
    MaxQueueTokens,
    Model,
    PartialReuse,
    PrefixCache,
    Scheduling,
    StrictBlocks,
    Threads,
    TokenBudget,
    Watermark,
    build_config,
    build_constraint,
    build_sampling,
    complain,
    engine_options,
    given_with_config,
    run_command,
)

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
app.add_typer(lab, name="lab")
app.add_typer(bench_app, name="bench")
app.command()(simulate)


@app.callback()
def _root() -> None:
    """Serve large language models on a Ray cluster: paged KV pool, radix prefix cache, prefix-aware routing."""


@app.command()
def serve(  # noqa: PLR0913 - one parameter per option
    context: typer.Context,
    config_file: Annotated[
        Path | None,
        typer.Option("--config", help="Serve config file with all options; goes with --host, ports and --redis-url"),
    ] = None,
    model: Model = "demo",
    served_model_name: Annotated[str | None, typer.Option(help="name that clients use")] = None,
    replicas: Annotated[int, typer.Option(help="worker replicas")] = 2,
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="HTTP port")] = 8000,
    grpc_port: Annotated[int, typer.Option(help="gRPC port")] = 9000,
    redis_url: Annotated[str | None, typer.Option(help="Redis or Valkey (default: a private server)")] = None,
    policy: Annotated[str, typer.Option(help="estimated_ttft, least_uncached or round_robin")] = "estimated_ttft",
    dtype: Dtype = "auto",
    device: Device = "auto",
    attention_backend: AttentionBackend = "auto",
    cuda_graphs: CudaGraphs = False,
    kv_memory: KvMemory = None,
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = 64,
    token_budget: TokenBudget = 2048,
    max_queue: MaxQueue = 1024,
    max_queue_tokens: MaxQueueTokens = None,
    scheduling: Scheduling = "prefix",
    ageing_s: AgeingS = 2.0,
    hold_back: HoldBack = True,
    watermark: Watermark = 0.01,
    block_size: BlockSize = 16,
    chunk_tokens: ChunkTokens = 64,
    threads: Threads = None,
    prefix_cache: PrefixCache = "radix",
    partial_reuse: PartialReuse = True,
    strict_blocks: StrictBlocks = False,
    log_blocks: LogBlocks = False,
) -> None:
    """Start a cluster on this machine and serve until Ctrl-C."""
    if config_file is not None:
        places = given_with_config(
            context, {"host": host, "port": port, "grpc_port": grpc_port, "redis_url": redis_url}
        )
        from cluster.serve_command import run_serve_file

        run_command(run_serve_file, config_file, **places)
    config = build_config(
        engine=engine_options(locals()),
        index={"redis_url": redis_url},
        router={"policy": policy},
        serve={"host": host, "port": port, "grpc_port": grpc_port, "replicas": replicas},
        served_model_name=served_model_name,
    )
    from cluster.serve_command import run_serve

    run_command(run_serve, config)


@app.command()
def generate(  # noqa: PLR0913 - one parameter per option
    prompt: Annotated[str, typer.Argument(help="the prompt; - reads it from standard input")],
    model: Model = "demo",
    chat: Annotated[bool, typer.Option(help="treat the prompt as a user message and apply the chat template")] = True,
    max_tokens: Annotated[int, typer.Option(help="longest answer, in tokens")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 is off")] = 0,
    top_p: Annotated[float, typer.Option(help="1 is off")] = 1.0,
    min_p: Annotated[float, typer.Option(help="least share of the likeliest token's probability; 0 is off")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="above 0, up to 2; 1 is off")] = 1.0,
    presence_penalty: Annotated[float, typer.Option(help="-2 to 2; 0 is off")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="-2 to 2; 0 is off")] = 0.0,
    seed: Annotated[int, typer.Option(help="keys the random stream")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="text that ends the answer; may be repeated")] = None,
    include_stop: Annotated[bool, typer.Option("--include-stop", help="print the stop text, too")] = False,
    min_tokens: Annotated[int, typer.Option(help="shortest answer, in tokens")] = 0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="go on past the model's end")] = False,
    logprobs: Annotated[int | None, typer.Option(help="log probabilities and so many alternatives (--json)")] = None,
    prompt_logprobs: Annotated[int | None, typer.Option(help="the same of the prompt (--json)")] = None,
    n: Annotated[int | None, typer.Option("--n", help="answers (default: one, or all beams)")] = None,
    best_of: Annotated[int | None, typer.Option(help="draw so many samples and show the n likeliest")] = None,
    beam_width: Annotated[int, typer.Option(help="beam search with so many beams; 0 is off")] = 0,
    length_penalty: Annotated[float, typer.Option(help="beams: above 0 favours long answers")] = 1.0,
    json_object: Annotated[bool, typer.Option("--json-object", help="the answer is a JSON object")] = False,
    json_schema: Annotated[Path | None, typer.Option(help="file with the JSON Schema of the answer")] = None,
    regex: Annotated[str | None, typer.Option(help="the whole answer matches it")] = None,
    choice: Annotated[list[str] | None, typer.Option(help="a possible answer; may be repeated")] = None,
    grammar: Annotated[Path | None, typer.Option(help="file with the answer's grammar, in llguidance's Lark")] = None,
    json: Annotated[bool, typer.Option("--json", help="print one JSON object instead of streaming text")] = False,
    dtype: Dtype = "auto",
    device: Device = "auto",
    attention_backend: AttentionBackend = "auto",
    cuda_graphs: CudaGraphs = False,
    kv_memory: KvMemory = None,
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = 64,
    token_budget: TokenBudget = 2048,
    block_size: BlockSize = 16,
    chunk_tokens: ChunkTokens = 64,
    threads: Threads = None,
    prefix_cache: PrefixCache = "radix",
    partial_reuse: PartialReuse = True,
    strict_blocks: StrictBlocks = False,
    log_blocks: LogBlocks = False,
) -> None:
    """Answer one prompt with the engine in this process, without Ray and Redis."""
    config = build_config(engine=engine_options(locals()))
    sampling = build_sampling(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
        min_tokens=min_tokens,
        ignore_eos=ignore_eos,
        stop=tuple(stop or ()),
        include_stop_str_in_output=include_stop,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        n=n,
        best_of=best_of,
        beam_width=beam_width,
        length_penalty=length_penalty,
    )
    if (logprobs, prompt_logprobs) != (None, None) and not json:
        complain("logprobs" if prompt_logprobs is None else "prompt_logprobs", "log probabilities need --json")
        raise typer.Exit(2)
    given = {"json_object": json_object, "json_schema": json_schema, "regex": regex, "choice": choice}
    constraint = build_constraint({**given, "grammar": grammar}, sampling)
    from cluster.generate_command import run_generate

    text = sys.stdin.read() if prompt == "-" else prompt
    run_command(run_generate, config.engine, text, sampling, chat=chat, as_json=json, constraint=constraint)


@app.command()
def status(
    address: Annotated[str, typer.Option(help="gRPC address of a running cluster")] = "127.0.0.1:9000",
    misses: Annotated[bool, typer.Option("--misses", help="also show why prompts were not reused")] = False,
    application: Annotated[str | None, typer.Option(help="where a config file serves several models: whose")] = None,
) -> None:
    """Show the replicas of a running cluster: blocks, hit rate, work."""
    from cluster.status_command import run_status

    run_command(run_status, address, misses=misses, application=application)


@app.command()
def doctor(
    model: Annotated[str, typer.Option(help="a local directory, for its sizes; nothing is fetched")] = "demo",
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="HTTP port")] = 8000,
    grpc_port: Annotated[int, typer.Option(help="gRPC port")] = 9000,
    redis_url: Annotated[str | None, typer.Option(help="Redis or Valkey (default: a private server)")] = None,
    device: Device = "auto",
    attention_backend: AttentionBackend = "auto",
    block_size: BlockSize = 16,
    json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Check this machine: device, driver, torch, attention backend, Redis, ports, Ray. Exit code 1 when one failed."""
    chunks = min(max(block_size, 1), 1024)  # as in plan: nothing here has chunks
    cache = {"block_size": block_size, "chunk_tokens": chunks}
    engine = {"model": model, "device": device, "attention_backend": attention_backend, "cache": cache}
    serve = {"host": host, "port": port, "grpc_port": grpc_port}
    config = build_config(engine=engine, index={"redis_url": redis_url}, serve=serve)
    from cluster.doctor_command import run_doctor

    run_command(run_doctor, config, as_json=json)


@app.command()
def plan(
    memory: Annotated[str, typer.Option(help="memory of the device, such as 24GB or 22.5GiB")],
    model: Model = "demo",
    dtype: Dtype = "auto",
    block_size: BlockSize = 16,
    max_model_len: MaxModelLen = None,
    memory_share: Annotated[float, typer.Option(help="share of what the weights leave free that becomes KV")] = 0.25,
    kv_memory: KvMemory = None,
    json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Show the memory account of a model without loading it: weights, KV, requests at once."""
    chunks = min(max(block_size, 1), 1024)  # a plan has none; this suits every block size, also a wrong one
    cache = {"block_size": block_size, "chunk_tokens": chunks, "memory_share": memory_share, "kv_memory": kv_memory}
    config = build_config(engine={"model": model, "dtype": dtype, "max_model_len": max_model_len, "cache": cache})
    from cluster.plan_command import run_plan

    run_command(run_plan, config, memory, as_json=json)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
