"""Load for a drill, from a process of its own: clients that ask without a pause, and a line for every request.

It ends at SIGINT, when the requests that are under way have been answered. The prompts are words of
tiny_models.WORDS; prompt `n` is the same in every run, and all begin alike.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

import grpc
from patience import eventually
from process_keeper import Kept

from cluster.rpc import inference_pb2 as pb
from cluster.rpc import inference_pb2_grpc as rpc

_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: wall-clock seconds, what came, and from whom. `error` is None for a whole answer."""

    prompt: int
    address: str
    began: float
    first: float | None
    ended: float
    tokens: tuple[int, ...]
    cached_tokens: int
    replica: str
    router: str
    error: str | None


class DrillLoad:
    """A running load, as the test sees it. `pause_s`: between a client's answer and its next question.

    `whole`: answers that are not streamed, which cost the clients next to nothing.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        clients: int,
        tokens: int,
        folder: Path,
        name: str,
        env: Mapping[str, str],
        prompts: int = 8,
        prompt_tokens: int = 96,
        pause_s: float = 0.0,
        whole: bool = False,
        inside: Sequence[str] = (),
    ) -> None:
        self.tokens = tokens
        self._out = folder / f"{name}.jsonl"
        self._out.touch()
        numbers = ["--clients", clients, "--tokens", tokens, "--prompts", prompts, "--prompt-tokens", prompt_tokens]
        numbers += ["--pause-s", pause_s, *(["--whole"] if whole else []), "--out", self._out]
        self._kept = Kept(
            [sys.executable, __file__, *map(str, numbers), *addresses],
            log=folder / f"{name}.log",
            env=env,
            inside=inside,
        )

    def asked(self) -> list[Asked]:
        """What has been answered, or has failed, so far."""
        whole = self._out.read_text().rpartition("\n")[0]
        return [
            Asked(**{**fields, "tokens": tuple(fields["tokens"])}) for fields in map(json.loads, whole.splitlines())
        ]

    def answer_more(self, more: int, timeout_s: float = 90.0) -> None:
        """Come back when so many more were answered. None may have failed."""
        wanted = len(self.asked()) + more
        eventually(lambda: len(self.asked()) >= wanted or self.failures(), f"{more} more answers", timeout_s)
        assert self.failures() == []

    def failures(self) -> list[Asked]:
        """Errors, and answers that are too short."""
        return [asked for asked in self.asked() if asked.error is not None or len(asked.tokens) != self.tokens]

    def end(self) -> list[Asked]:
        """Stop asking, and wait for what is under way."""
        self._kept.interrupt(_TIMEOUT_S)
        said = self._kept.said()
        assert said == "", said
        return self.asked()

    def __enter__(self) -> DrillLoad:
        return self

    def __exit__(self, *error: object) -> None:
        self._kept.kill()


def prompt_ids(number: int, tokens: int) -> list[int]:
    """Half of it is common to all prompts. No special tokens."""
    common = [4 + (7 * place) % 92 for place in range(tokens // 2)]
    return common + [4 + (11 * place + 13 * number + place * number) % 92 for place in range(tokens - tokens // 2)]


def ask(
    address: str, channel: grpc.Channel, number: int, prompt_tokens: int, tokens: int, *, whole: bool = False
) -> Asked:
    """One greedy answer, streamed unless `whole`."""
    call = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=prompt_ids(number, prompt_tokens)),
        sampling=pb.SamplingOptions(temperature=0, max_tokens=tokens, ignore_eos=True),
    )
    began, first, error = time.time(), None, None
    got: list[int] = []
    cached, replica, router = 0, "", ""
    try:
        stub = rpc.InferenceStub(channel)
        if whole:
            reply, told = stub.GenerateOnce.with_call(call, timeout=_TIMEOUT_S)
            chunks: Iterable[Any] = [reply]
        else:
            chunks = told = stub.Generate(call, timeout=_TIMEOUT_S)
        for chunk in chunks:
            first = first or time.time()
            got += chunk.token_ids
            replica, cached = chunk.replica or replica, chunk.usage.cached_tokens
        router = dict(told.trailing_metadata()).get("x-kvray-router", "")
    except grpc.RpcError as problem:
        error = f"{problem.code().name}: {problem.details()}"
    return Asked(number, address, began, first, time.time(), tuple(got), cached, replica, router, error)


def run(options: argparse.Namespace) -> None:
    stop = threading.Event()
    signal.signal(signal.SIGINT, lambda *_: stop.set())
    patient = [("grpc.max_reconnect_backoff_ms", 1000)]  # two minutes by default, so a client would learn of nothing
    channels = {address: grpc.insecure_channel(address, options=patient) for address in options.addresses}
    numbers, lock = count(), threading.Lock()

    def ask_on(client: int, out: Path) -> None:
        address = options.addresses[client % len(options.addresses)]
        while not stop.is_set():
            number = next(numbers) % options.prompts
            asked = ask(address, channels[address], number, options.prompt_tokens, options.tokens, whole=options.whole)
            with lock, out.open("a") as file:
                file.write(json.dumps(asdict(asked)) + "\n")
            stop.wait(options.pause_s if asked.error is None else options.pause_s + 0.5)

    threads = [threading.Thread(target=ask_on, args=(client, options.out)) for client in range(options.clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("clients", "tokens", "prompts", "prompt-tokens"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--pause-s", type=float, required=True)
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("addresses", nargs="+")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
