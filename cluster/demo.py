"""`make demo`: serve, send 12 requests with one system prompt and 4 without, and show what the cache did and why.

Owns: the requests, the printed table and the verdict.
Does not: start processes itself (cluster.launcher) or measure with care (benchmarks do).
Invariants: exits 0 only when every request answered, shared prompts hit the cache, and a hit's first token came in
less than half the time of the cold one.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from dataclasses import dataclass

import grpc
from rich.console import Console

from cluster.config import ClusterConfig, EngineConfig, ServeConfig
from cluster.core.errors import KvrayError
from cluster.free_ports import free_ports
from cluster.launcher import LocalCluster
from cluster.misses_table import reuse_line, route_lines
from cluster.progress import resolve_with_progress
from cluster.rpc import inference_pb2, inference_pb2_grpc
from cluster.serve_command import with_threads

RULES = (
    "You are the assistant of a small library. Answer in one or two short sentences. "
    "Be friendly and plain. If you do not know, say so. "
)
SYSTEM = RULES + " ".join(
    f"Rule {n}: when a visitor asks about shelf {n}, point to row {n % 7 + 1} and remind them that books from it "
    f"may be kept for {n % 4 + 2} weeks."
    for n in range(1, 25)
)
SHARED = (
    "Where is shelf 3?", "How long may I keep a book from shelf 5?", "Do you lend films?", "Say hello to a child.",
    "Where is shelf 12?", "May I eat here?", "What is a library card?", "Where is shelf 20?",
    "How do I find a novel?", "Can I renew a book?", "Who can help me?", "Say goodbye.",
)  # fmt: skip
ALONE = ("Name three rivers.", "What is the capital of France?", "Write one line about rain.", "What is two plus two?")
MAX_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Answer:
    question: str
    shared: bool
    text: str
    replica: str
    prompt_tokens: int
    cached_tokens: int
    first_s: float
    why: inference_pb2.ExplainRouteResponse


def main() -> int:
    console = Console()
    http_port, grpc_port = free_ports(2)
    config = ClusterConfig(
        engine=EngineConfig(model="demo"), serve=ServeConfig(port=http_port, grpc_port=grpc_port, replicas=2)
    )
    cluster = LocalCluster(with_threads(config), show_logs=False)  # they would cut into the answers
    try:
        resolve_with_progress("demo", console)
        with console.status("starting") as line:
            cluster.start(lambda phase: line.update(phase))
        answers = ask_all(cluster.grpc_address, console)
    except (KvrayError, grpc.RpcError) as error:
        console.print(f"the demo failed: {error}", markup=False)
        return 1
    finally:
        cluster.stop()
    return summarise(answers, console)


def ask_all(address: str, console: Console) -> list[Answer]:
    """One after the other; the unrelated prompts are spread between the others."""
    questions = [(q, True) for q in SHARED]
    for place, question in zip((2, 6, 10, 14), ALONE, strict=True):
        questions.insert(place, (question, False))
    answers = []
    with grpc.insecure_channel(address) as channel:
        stub, cache = inference_pb2_grpc.InferenceStub(channel), inference_pb2_grpc.CacheStub(channel)
        for question, shared in questions:
            console.print(f"\n> {question}", style="bold", markup=False)
            answers.append(ask(stub, cache, question, shared, console))
            show(answers[-1], console)
    return answers


def ask(
    stub: inference_pb2_grpc.InferenceStub,
    cache: inference_pb2_grpc.CacheStub,
    question: str,
    shared: bool,
    console: Console,
) -> Answer:
    messages = [inference_pb2.ChatMessage(role="user", content=question)]
    if shared:
        messages.insert(0, inference_pb2.ChatMessage(role="system", content=SYSTEM))
    request = inference_pb2.GenerateRequest(
        chat=inference_pb2.ChatMessages(messages=messages),
        sampling=inference_pb2.SamplingOptions(temperature=0.0, max_tokens=MAX_TOKENS),
    )
    started, first, text = time.monotonic(), None, ""
    last = inference_pb2.GenerateChunk()
    for chunk in stub.Generate(request, timeout=120):
        first = first or time.monotonic() - started
        text += chunk.text
        console.print(chunk.text, end="", markup=False, highlight=False, soft_wrap=True)
        last = chunk
    console.print()
    usage = last.usage
    why = cache.ExplainRoute(inference_pb2.ExplainRouteRequest(request_id=last.request_id), timeout=20)
    return Answer(question, shared, text, last.replica, usage.prompt_tokens, usage.cached_tokens, first or 0.0, why)


def show(answer: Answer, console: Console) -> None:
    """Where it went, and the reasons: what every replica had to offer, and why no more was reused."""
    lines = [
        f"replica {answer.replica}, {answer.prompt_tokens} prompt tokens, {answer.cached_tokens} cached, "
        f"first token after {1000 * answer.first_s:.0f} ms",
        *(f"  {line}" for line in route_lines(answer.why)),
        reuse_line(answer.why.reuse),
    ]
    for line in lines:
        console.print(f"  {line}", style="dim", highlight=False, markup=False, soft_wrap=True)


def summarise(answers: list[Answer], console: Console) -> int:
    shared = [a for a in answers if a.shared]
    cold, warm = shared[0], shared[1:]
    hit_rate = sum(a.cached_tokens for a in answers) / sum(a.prompt_tokens for a in answers)
    warm_first = sorted(a.first_s for a in warm)[len(warm) // 2]
    console.rule("summary")
    console.print(f"requests per replica   {dict(Counter(a.replica for a in answers))}", highlight=False, markup=False)
    console.print(f"hit rate               {100 * hit_rate:.1f} % of prompt tokens", highlight=False)
    console.print(
        f"first token            cold {1000 * cold.first_s:.0f} ms, warm {1000 * warm_first:.0f} ms (median)",
        highlight=False,
    )
    problems = [f"no answer to {a.question!r}" for a in answers if not a.text.strip()]
    problems += [f"{a.question!r} found nothing in the cache" for a in warm if a.cached_tokens == 0]
    if warm_first >= cold.first_s / 2:
        problems.append("a warm first token took more than half the time of a cold one")
    for problem in problems:
        console.print(f"FAILED: {problem}", markup=False)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
