"""The options that several commands share, and how a command line becomes configuration.

Owns: option types with their help, and building ClusterConfig, SamplingParams and Constraint with one line per mistake.
Does not: know the commands (cluster.cli, cli_lab, cli_measure) or do their work.
Invariants: a wrong option ends the command with exit code 2 and names the option; a KvrayError is one line.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from cluster.config import ClusterConfig
from cluster.core.constraint import Constraint
from cluster.core.errors import ConfigError, InvalidRequest, KvrayError
from cluster.core.request import check_constrained_sampling
from cluster.core.sampling import SamplingParams

Model = Annotated[
    str, typer.Option(help="demo, a Hugging Face id, a local directory, s3://bucket/path or gs://bucket/path")
]
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
MaxQueue = Annotated[int, typer.Option(help="requests that may wait per replica; more are refused")]
MaxQueueTokens = Annotated[int | None, typer.Option(help="their prompt tokens, at most (default: no bound)")]
Scheduling = Annotated[str, typer.Option(help="prefix (longest cached prefix first) or fcfs")]
AgeingS = Annotated[float, typer.Option(help="prefix: seconds after which nobody is overtaken any more")]
HoldBack = Annotated[bool, typer.Option(help="wait for a prefix that another request is computing")]
Watermark = Annotated[float, typer.Option(help="share of the KV pool kept free for running requests at admission")]

_ENGINE_OPTIONS = (
    "model",
    "dtype",
    "device",
    "attention_backend",
    "cuda_graphs",
    "max_model_len",
    "max_num_seqs",
    "token_budget",
    "max_queue",
    "max_queue_tokens",
    "scheduling",
    "ageing_s",
    "hold_back",
    "watermark",
    "threads",
    "strict_blocks",
    "log_blocks",
)
_CACHE_OPTIONS = ("kv_memory", "block_size", "chunk_tokens", "prefix_cache", "partial_reuse")


def engine_options(values: dict[str, Any]) -> dict[str, Any]:
    engine = {name: values[name] for name in _ENGINE_OPTIONS if name in values}
    engine["cache"] = {name: values[name] for name in _CACHE_OPTIONS}
    return engine


def build_config(**parts: Any) -> ClusterConfig:
    try:
        return ClusterConfig.model_validate(parts)
    except ValidationError as error:
        for problem in error.errors():
            complain(str(problem["loc"][-1]), problem["msg"].removeprefix("Value error, "))
        raise typer.Exit(2) from None


def given_with_config(context: typer.Context, places: dict[str, Any]) -> dict[str, Any]:
    """Of `places` those that were given, else None. Any other option beside --config ends the command."""
    given = {
        name
        for name in context.params
        if (source := context.get_parameter_source(name)) is not None and source.name == "COMMANDLINE"
    }
    wrong = sorted(given - set(places) - {"config_file"})
    for name in wrong:
        complain(name, "the file of --config says it, in the args of each application")
    if wrong:
        raise typer.Exit(2)
    return {name: value if name in given else None for name, value in places.items()}


def build_sampling(**values: Any) -> SamplingParams:
    try:
        return SamplingParams(**values)
    except InvalidRequest as error:
        complain(error.field, error.message)
        raise typer.Exit(2) from None


def build_constraint(options: dict[str, Any], sampling: SamplingParams) -> Constraint | None:
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
        complain(name, f"cannot be read: {error}")
        raise typer.Exit(2) from None
    except InvalidRequest as error:
        complain(error.field, error.message)
        raise typer.Exit(2) from None
    return constraint


def complain(name: str, message: str) -> None:
    typer.echo(f"kvray: --{name.replace('_', '-')}: {message}", err=True)


def run_command(command: Any, *args: Any, **options: Any) -> None:
    try:
        code = command(*args, **options)
    except KvrayError as error:
        typer.echo(f"kvray: {error.message}", err=True)
        raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from None
    raise typer.Exit(code or 0)
