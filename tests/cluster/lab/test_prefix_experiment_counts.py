"""The counted parts of the prefix experiment: exact figures, and the engine's hits beside the lab's."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.lab.branch_keys import ChainedChunks, WholePrefixKeys
from cluster.lab.findings import LabContext, Verdict
from cluster.lab.lab_engines import counting_engine
from cluster.lab.prefix_branches import Branches, counted, kept_blocks, run_branches
from cluster.lab.prefix_equal import computed_tokens, equal_requests
from cluster.lab.prefix_keyings import KEYINGS, Keying, run_set
from cluster.lab.prefix_matrix import run_matrix
from cluster.lab.prefix_pressure import FEW, under_pressure
from cluster.lab.prompt_sets import PromptSet, TokenSource, prompt_sets
from cluster.lab.timed_cache import TimedCache, timed_manager

CONTEXT = LabContext(model_dir=Path("unused"), short=True)


def small_sets(vocabulary: tuple[int, int] = (4, 96)) -> list[PromptSet]:
    return prompt_sets(TokenSource(0, vocabulary), longest=320, requests=4)


@pytest.mark.parametrize("keying", KEYINGS, ids=lambda keying: keying.name)
@pytest.mark.parametrize("prompts", small_sets(), ids=lambda prompts: prompts.name)
def test_the_engines_hits_equal_the_labs_count(prompts: PromptSet, keying: Keying) -> None:
    """With 92 tokens in all, beginnings agree by chance as well."""
    reuse = run_set(prompts, keying, counting_engine(1024, **keying.options))
    assert reuse.hits == reuse.counted_hits
    assert len(reuse.first_s) == prompts.num_requests


def test_workloads_find_what_they_share() -> None:
    found = {
        (prompts.name, keying.name): run_set(prompts, keying, counting_engine(1024, **keying.options)).hits
        for prompts in small_sets((100, 32_000))
        for keying in KEYINGS
    }
    assert found["agent", "radix"] == 3 * 300
    assert found["rag", "radix"] == 3 * (6 + 3 * 70)
    assert found["rag-reordered", "radix"] == 76 + 6 + 76  # abc, acb, bac, bca: only a first document is found
    assert found["coding-edit", "radix"] == 3 * 120
    assert found["unique", "radix"] == 0
    assert {hits for (_, keying), hits in found.items() if keying in ("off", "whole")} == {0}
    assert found["agent", "chunk64"] == 3 * 256 and found["agent", "chunk128"] == 3 * 256


def test_prompt_sets_are_the_same_for_the_same_seed() -> None:
    assert small_sets() == small_sets()
    longest = max(
        sum(map(len, turns)) + len(turns) * one.answer_tokens for one in small_sets() for turns in one.conversations
    )
    assert longest <= 320


def test_a_b_and_a_c_under_three_keyings() -> None:
    """A is 4 chunks of 64 tokens, B, C and D are 2 each."""
    # A, A-B and A-C each with its own KV: 4 + 6 + 6 chunks. A-D is hashed at 6, 5 and 4 chunks, then stored as 6.
    assert counted(WholePrefixKeys(64)) == Branches(3, 16 * 64, 4 * 64, (6 + 5 + 4 + 6) * 64)
    # 4 + 2 + 2 chunks; A-D hashes A's 4 and the first of D, finds no more, and stores D's 2.
    assert counted(ChainedChunks(64)) == Branches(8, 8 * 64, 4 * 64, (4 + 1 + 2) * 64)
    assert kept_blocks("chunk") == (8 * 4, 8, 4 * 64)
    assert kept_blocks("radix") == (8 * 4, 3, 4 * 64)


def test_claims_about_branches_hold_for_one_keying_only() -> None:
    findings = run_branches(CONTEXT)
    assert [claim.verdict for claim in findings.claims] == [Verdict.DEPENDS, Verdict.DEPENDS]


def test_100_equal_requests_compute_their_prompt_once() -> None:
    prompt = TokenSource(0, (100, 32_000)).take(200)
    for options, expected in (
        ({"prefix_cache": "off"}, 100 * 200),
        ({}, 200 + 99),
    ):
        record = counting_engine(4096, max_num_seqs=128, **options).run(equal_requests(prompt))  # type: ignore[arg-type]
        assert computed_tokens(record) == expected


def test_without_holding_back_the_first_step_computes_the_prompt_several_times() -> None:
    prompt = TokenSource(0, (100, 32_000)).take(200)
    record = counting_engine(4096, hold_back=False, token_budget=1000).run(equal_requests(prompt, 20))
    assert computed_tokens(record) > 3 * 200


def test_sharing_holds_fewer_blocks_at_the_same_concurrency() -> None:
    off, on = (under_pressure(True, cache, FEW) for cache in ("off", "radix"))
    assert off.preemptions > 0 == on.preemptions
    assert on.peak_blocks < off.peak_blocks
    assert on.computed_tokens == 960 + 20 * 64
    assert on.most_running == off.most_running == FEW


def test_a_timed_cache_answers_as_the_cache_inside() -> None:
    chat = next(prompts for prompts in small_sets() if prompts.name == "chat")
    made: list[TimedCache] = []
    plain, timed = counting_engine(1024), counting_engine(1024, timed_manager(made))
    keying = KEYINGS[-1]
    assert run_set(chat, keying, timed).hits == run_set(chat, keying, plain).hits > 0
    assert made[0].calls > 0 and made[0].seconds > 0


def test_the_matrix_says_what_was_counted() -> None:
    findings = run_matrix(CONTEXT)
    assert findings.figures["counts.engine_equals_lab"] is True
    verdicts = {(claim.section, claim.claim[:5]): claim.verdict for claim in findings.claims}
    assert verdicts["3.4", "RAG o"] is Verdict.DEPENDS
    (table,) = findings.tables
    assert all(len(row) == len(table.header) for row in table.rows)
