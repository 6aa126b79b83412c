"""SeenPrompts: the longest common beginning is exact, memory is bounded, a lookup is cheap however long a prompt is."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from fake_routing import CHUNK, hashes_of

from cluster.core.hashing import ChunkHash, pack_tokens
from router import seen_prompts
from router.seen_prompts import NOTHING_SEEN, Seen, SeenPrompts

ROOT = ChunkHash(b"root")


def add(prompts: SeenPrompts, tokens: Sequence[int]) -> None:
    prompts.add(ROOT, hashes_of(tokens), pack_tokens(tokens))


def find(prompts: SeenPrompts, tokens: Sequence[int]) -> Seen:
    return prompts.find(ROOT, hashes_of(tokens), pack_tokens(tokens))


def expected(earlier: Sequence[Sequence[int]], tokens: Sequence[int]) -> Seen:
    """By comparing with every prompt, token by token."""

    def common(other: Sequence[int]) -> int:
        pairs = zip(other, tokens, strict=False)
        return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(other), len(tokens)))

    longest = max(map(common, earlier), default=0)
    forked = any(common(p) == longest and len(p) > longest and len(tokens) > longest for p in earlier)
    return Seen(longest, forked and longest > 0)


@pytest.mark.parametrize("seed", range(8))
def test_it_agrees_with_comparing_everything(seed: int) -> None:
    rng = random.Random(seed)
    prompts = SeenPrompts(CHUNK)
    earlier: list[list[int]] = []
    for _ in range(300):
        base = rng.choice(earlier) if earlier and rng.random() < 0.8 else []
        new = [*base[: rng.randrange(len(base) + 1)], *(rng.randrange(3) << 8 * rng.randrange(3) for _ in range(9))]
        tokens = new[: rng.randrange(1, len(new) + 1)]
        assert find(prompts, tokens) == expected(earlier, tokens)
        add(prompts, tokens)
        earlier.append(tokens)
        assert find(prompts, tokens) == Seen(len(tokens), False)


def test_namespaces_share_nothing() -> None:
    prompts = SeenPrompts(CHUNK)
    add(prompts, range(3))
    tokens = pack_tokens(range(3))
    assert prompts.find(ChunkHash(b"other"), (), tokens) == NOTHING_SEEN
    assert prompts.find(ROOT, (), tokens) == Seen(3)


def test_memory_is_bounded_and_what_comes_again_stays() -> None:
    limit = 200_000
    prompts = SeenPrompts(CHUNK, max_bytes=limit)
    often = list(range(64))
    for number in range(500):
        add(prompts, often)
        add(prompts, range(1000 * number + 1000, 1000 * number + 1040))
        assert prompts.size_bytes <= limit * 1.5
    assert find(prompts, often) == Seen(64)
    assert find(prompts, range(1000, 1040)) == NOTHING_SEEN
    assert find(prompts, range(500_000, 500_040)) == Seen(40)


def test_a_prompt_that_is_larger_than_the_memory_is_not_kept() -> None:
    prompts = SeenPrompts(CHUNK, max_bytes=10_000)
    add(prompts, range(40))
    add(prompts, range(1000, 2000))
    assert (find(prompts, range(40)).tokens, find(prompts, range(1000, 2000)).tokens) == (40, 0)


def test_a_lookup_compares_a_few_chunks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = SeenPrompts(CHUNK)
    tokens = list(range(100_000))
    add(prompts, tokens)
    compared = []
    inner = seen_prompts._common_tokens

    def counted(a: bytes, b: bytes) -> int:
        compared.append(len(a))
        return inner(a, b)

    monkeypatch.setattr(seen_prompts, "_common_tokens", counted)
    assert find(prompts, [*tokens[:77_777], 1, *tokens[77_778:]]) == Seen(77_777, True)
    assert len(compared) <= 2 and max(compared) <= 4 * CHUNK
