"""The `kvray` command.

Owns: option names and help, building a ClusterConfig from them, and exit codes (0 good, 1 failed, 2 cannot be done
as asked: wrong options, or a model that cannot run here).
Does not: do the work; each command hands over to one module, imported only when it runs.
Invariants: a KvrayError ends the command with one line on stderr, never with a traceback.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from cluster.config import ClusterConfig
from cluster.core.constraint import Constraint
from cluster.core.errors import ConfigError, InvalidRequest, KvrayError
from cluster.core.request import check_constrained_sampling
from cluster.core.sampling import SamplingParams

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
lab = typer.Typer(no_args_is_help=True, help="Experiments that show how KV memory is shared.")
journal = typer.Typer(no_args_is_help=True, help="Record what happens to the KV blocks, and compare recordings.")
lab.add_typer(journal, name="journal")
app.add_typer(lab, name="lab")

Model = Annotated[str, typer.Option(help="demo, a Hugging Face id, or a local directory")]
Dtype = Annotated[str, typer.Option(help="auto (as stored), float32, bfloat16 or float16")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda")]
AttentionBackend = Annotated[
    str, typer.Option(help="auto, cpu (native kernels), flash, triton (both CUDA) or reference")
]
CudaGraphs = Annotated[bool, typer.Option("--cuda-graphs", help="replay decode steps as CUDA graphs (needs triton)")]
KvMemory = Annotated[
    str | None, typer.Option(help="KV memory per replica, such as 2GiB (default: a share of what is free)")
]
MaxModelLen = Annotated[int | None, typer.Option(help="longest prompt + answer, in tokens")]
MaxNumSeqs = Annotated[int, typer.Option(help="sequences that run at the same time")]
TokenBudget = Annotated[int, typer.Option(help="tokens per engine step")]
BlockSize = Annotated[int, typer.Option(help="tokens per KV block")]
ChunkTokens = Annotated[int, typer.Option(help="tokens per routing chunk, a multiple of the block size")]
Threads = Annotated[int | None, typer.Option(help="CPU threads per replica (default: cores / replicas)")]
PrefixCache = Annotated[str, typer.Option(help="radix, chunk (whole chunks only) or off")]
PartialReuse = Annotated[bool, typer.Option(help="reuse part of a cached block by copying it")]
StrictBlocks = Annotated[bool, typer.Option(help="check before every KV write that nobody else uses the block")]
LogBlocks = Annotated[bool, typer.Option(help="log what happens to each KV block, one line per block")]


@app.callback()
def _root() -> None:
    """Serve large language models on a Ray cluster: paged KV pool, radix prefix cache, prefix-aware routing."""


@app.command()
def serve(  # noqa: PLR0913 - one parameter per option
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
    block_size: BlockSize = 16,
    chunk_tokens: ChunkTokens = 64,
    threads: Threads = None,
    prefix_cache: PrefixCache = "radix",
    partial_reuse: PartialReuse = True,
    strict_blocks: StrictBlocks = False,
    log_blocks: LogBlocks = False,
) -> None:
    """Start a cluster on this machine and serve until Ctrl-C."""
    config = _config(
        engine=_engine_options(locals()),
        index={"redis_url": redis_url},
        router={"policy": policy},
        serve={"host": host, "port": port, "grpc_port": grpc_port, "replicas": replicas},
        served_model_name=served_model_name,
    )
    from cluster.serve_command import run_serve

    _run(run_serve, config)


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
    config = _config(engine=_engine_options(locals()))
    sampling = _sampling(
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
        _complain("logprobs" if prompt_logprobs is None else "prompt_logprobs", "log probabilities need --json")
        raise typer.Exit(2)
    given = {"json_object": json_object, "json_schema": json_schema, "regex": regex, "choice": choice}
    constraint = _constraint({**given, "grammar": grammar}, sampling)
    from cluster.generate_command import run_generate

    text = sys.stdin.read() if prompt == "-" else prompt
    _run(run_generate, config.engine, text, sampling, chat=chat, as_json=json, constraint=constraint)


@app.command()
def status(
    address: Annotated[str, typer.Option(help="gRPC address of a running cluster")] = "127.0.0.1:9000",
) -> None:
    """Show the replicas of a running cluster: blocks, hit rate, work."""
    from cluster.status_command import run_status

    _run(run_status, address)


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
    config = _config(engine=engine, index={"redis_url": redis_url}, serve=serve)
    from cluster.doctor_command import run_doctor

    _run(run_doctor, config, as_json=json)


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
    config = _config(engine={"model": model, "dtype": dtype, "max_model_len": max_model_len, "cache": cache})
    from cluster.plan_command import run_plan

    _run(run_plan, config, memory, as_json=json)


@app.command()
def bench(  # noqa: PLR0913 - one parameter per option
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
    given = dict(locals())
    from cluster.bench.bench_command import run_bench

    _run(run_bench, given)


@lab.command()
def blocks() -> None:
    """Draw block tables step by step: share, fork, copy-on-write, free, evict. Needs no model."""
    from cluster.lab.blocks import run_blocks

    _run(run_blocks)


@journal.command()
def record(
    file: Annotated[Path, typer.Argument(help="file to write, one JSON object a line", dir_okay=False)],
    partial_reuse: PartialReuse = True,
) -> None:
    """Run a small fixed workload and write its block journal."""
    from cluster.lab.journal import run_record

    _run(run_record, file, partial_reuse=partial_reuse)


JournalFile = Annotated[Path, typer.Argument(help="a recorded journal", exists=True, dir_okay=False)]


@journal.command()
def diff(a: JournalFile, b: JournalFile) -> None:
    """Print the first difference of two journals (exit code 1), or say that they are equal (0)."""
    from cluster.lab.journal import run_diff

    _run(run_diff, a, b)


_ENGINE_OPTIONS = (
    "model",
    "dtype",
    "device",
    "attention_backend",
    "cuda_graphs",
    "max_model_len",
    "max_num_seqs",
    "token_budget",
    "threads",
    "strict_blocks",
    "log_blocks",
)
_CACHE_OPTIONS = ("kv_memory", "block_size", "chunk_tokens", "prefix_cache", "partial_reuse")


def _engine_options(values: dict[str, Any]) -> dict[str, Any]:
    engine = {name: values[name] for name in _ENGINE_OPTIONS}
    engine["cache"] = {name: values[name] for name in _CACHE_OPTIONS}
    return engine


def _config(**parts: Any) -> ClusterConfig:
    try:
        return ClusterConfig.model_validate(parts)
    except ValidationError as error:
        for problem in error.errors():
            _complain(str(problem["loc"][-1]), problem["msg"].removeprefix("Value error, "))
        raise typer.Exit(2) from None


def _sampling(**values: Any) -> SamplingParams:
    try:
        return SamplingParams(**values)
    except InvalidRequest as error:
        _complain(error.field, error.message)
        raise typer.Exit(2) from None


def _constraint(options: dict[str, Any], sampling: SamplingParams) -> Constraint | None:
    """Of the one option that is given; a path stands for its file's text."""
    given = {name: value for name, value in options.items() if value not in (None, False, [])}
    if not given:
        return None
    name, value = next(iter(given.items()))
    try:
        if len(given) > 1:
            raise InvalidRequest(list(given)[1], "an answer has one constraint")
        make = getattr(Constraint, name)
        text = value.read_text(encoding="utf-8") if isinstance(value, Path) else value
        constraint: Constraint = make() if value is True else make(text)
        check_constrained_sampling(constraint, sampling)
    except (OSError, UnicodeDecodeError) as error:
        _complain(name, f"cannot be read: {error}")
        raise typer.Exit(2) from None
    except InvalidRequest as error:
        _complain(error.field, error.message)
        raise typer.Exit(2) from None
    return constraint


def _complain(name: str, message: str) -> None:
    typer.echo(f"kvray: --{name.replace('_', '-')}: {message}", err=True)


def _run(command: Any, *args: Any, **options: Any) -> None:
    try:
        code = command(*args, **options)
    except KvrayError as error:
        typer.echo(f"kvray: {error.message}", err=True)
        raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from None
    raise typer.Exit(code or 0)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
