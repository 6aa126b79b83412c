"""arithmetic: what the KV of a model weighs (section 1.2), by the account that `kvray plan` gives, and by a tensor.

Owns: the article's example model, and its figures beside ours.
Does not: calculate (cluster.memory_plan, cluster.model_shape and worker.kv_sizing do).
Invariants: the article's figures are written down here and nowhere derived; ours come from production code.
"""

from __future__ import annotations

from typing import Any

import torch

from cluster.config import CacheConfig
from cluster.core.byte_size import format_bytes
from cluster.lab.findings import Claim, Findings, LabContext, Table, Verdict
from cluster.memory_plan import MemoryPlan, Weights, kv_bytes_per_token, plan_memory
from cluster.model_shape import ModelShape, read_shape
from worker.kvcache.kv_pool import KvGeometry, KvPool

# An 8-head GQA decoder of 7 billion parameters: the sizes of Mistral 7B.
EXAMPLE: dict[str, Any] = {
    "model_type": "mistral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "vocab_size": 32000,
    "dtype": "bfloat16",
}
TOKENS, REQUESTS, MEMORY = 4096, 32, 24 * 10**9
BLOCK_SIZE = 16
_KIB, _MIB, _GIB = 2**10, 2**20, 2**30


def run(context: LabContext) -> Findings:
    context.progress("calculating", 0.0)
    grouped = read_shape(EXAMPLE)
    multi = read_shape({**EXAMPLE, "num_key_value_heads": EXAMPLE["num_attention_heads"]})
    parameters = grouped.parameters
    assert parameters is not None, "this family has a formula"
    weights = Weights(parameters=parameters, dtype="bfloat16", source="formula")
    plan = _plan(grouped, weights)
    per_token = plan.kv.bytes_per_token
    block = _block(grouped)
    return Findings(
        experiment="arithmetic",
        title="what KV memory weighs",
        summary="The article's example, a decoder with 32 layers and 8 KV heads of 128 numbers in 16 bits, through "
        "the account "
        "that `kvray plan` prints, and as a tensor of one block.",
        claims=(
            *_sizes(grouped, per_token, block),
            _fits(plan, weights),
            *_heads(plan, kv_bytes_per_token(multi, 2), per_token),
        ),
        tables=(_table(plan, weights),),
        figures={
            "arithmetic.elements_per_layer": 2 * grouped.num_kv_heads * grouped.head_dim,
            "arithmetic.bytes_per_layer": per_token // grouped.num_layers,
            "arithmetic.bytes_per_token": per_token,
            "arithmetic.kib_per_token": per_token / _KIB,
            "arithmetic.mib_per_request": per_token * TOKENS / _MIB,
            "arithmetic.gib_of_requests": per_token * TOKENS * REQUESTS / _GIB,
            "arithmetic.weights_gb": round(weights.num_bytes / 10**9, 2),
            "arithmetic.requests_that_fit": _at_full_length(plan),
            "arithmetic.mha_factor": plan.mha_bytes_per_token / per_token,
            "arithmetic.mha_weighs_like": 2048 * plan.mha_bytes_per_token // per_token,
            "arithmetic.block_bytes": block,
        },
    )


def _plan(shape: ModelShape, weights: Weights) -> MemoryPlan:
    cache = CacheConfig(block_size=BLOCK_SIZE, memory_share=0.95)
    return plan_memory(shape, weights, cache, memory_bytes=MEMORY, max_model_len=TOKENS)


def _block(shape: ModelShape) -> int:
    """Bytes of a real block of that model."""
    geometry = KvGeometry(
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        block_size=BLOCK_SIZE,
        dtype=torch.bfloat16,
    )
    return KvPool(geometry, 1, torch.device("cpu")).tensor.nbytes


def _at_full_length(plan: MemoryPlan) -> int:
    return plan.kv.full_length_requests


def _sizes(shape: ModelShape, per_token: int, block: int) -> tuple[Claim, ...]:
    elements = 2 * shape.num_kv_heads * shape.head_dim
    figures = (
        (
            "A token's KV in one layer is 2 x 8 x 128 = 2,048 numbers, 4 KB",
            "2,048 numbers, 4 KB",
            f"{elements:,} numbers, {per_token / shape.num_layers / _KIB:g} KiB",
            (elements, per_token // shape.num_layers) == (2048, 4 * _KIB),
        ),
        (
            "32 layers: 128 KB a token",
            "128 KB",
            f"{per_token / _KIB:g} KiB by the account; a real block of {BLOCK_SIZE} tokens has {block:,} bytes, "
            f"{block / BLOCK_SIZE / _KIB:g} KiB a token",
            per_token == 128 * _KIB == block // BLOCK_SIZE,
        ),
        (
            "4,096 tokens: 512 MB",
            "512 MB",
            format_bytes(per_token * TOKENS),
            per_token * TOKENS == 512 * _MIB,
        ),
        (
            f"{REQUESTS} such requests: 16 GB",
            "16 GB",
            format_bytes(per_token * TOKENS * REQUESTS),
            per_token * TOKENS * REQUESTS == 16 * _GIB,
        ),
    )
    return tuple(
        Claim("1.2", claim, expected, measured, Verdict.CONFIRMED if right else Verdict.NOT_CONFIRMED)
        for claim, expected, measured, right in figures
    )


def _fits(plan: MemoryPlan, weights: Weights) -> Claim:
    fit = _at_full_length(plan)
    return Claim(
        section="1.2",
        claim="14 GB of weights and 16 GB of KV do not fit into 24 GB",
        expected=f"fewer than {REQUESTS} requests of {TOKENS:,} tokens at once",
        measured=f"{weights.num_bytes / 10**9:.1f} GB of weights leave {format_bytes(plan.request.free_bytes)}: "
        f"{fit} such requests",
        verdict=Verdict.CONFIRMED if fit < REQUESTS else Verdict.NOT_CONFIRMED,
    )


def _heads(plan: MemoryPlan, multi: int, grouped: int) -> tuple[Claim, Claim]:
    factor = plan.mha_bytes_per_token / grouped
    weighs_like = 2048 * multi // grouped
    return (
        Claim(
            section="1.2",
            claim="Without grouped heads (MHA, 32 KV heads instead of 8) the KV is 4 times as large",
            expected="4 times",
            measured=f"{factor:g} times: {multi / _KIB:g} KiB a token",
            verdict=Verdict.CONFIRMED if factor == 4 == multi / grouped else Verdict.NOT_CONFIRMED,
        ),
        Claim(
            section="1.2",
            claim="With MHA, 2,048 tokens then weigh like 4,096",
            expected="like 4,096 tokens",
            measured=f"like {weighs_like:,}: 4 times as much, not twice",
            verdict=Verdict.CONFIRMED if weighs_like == 4096 else Verdict.NOT_CONFIRMED,
        ),
    )


def _table(plan: MemoryPlan, weights: Weights) -> Table:
    rows = [
        ("weights", f"{weights.parameters:,} parameters", format_bytes(weights.num_bytes)),
        ("KV of a token", f"MHA would be {plan.mha_bytes_per_token:,}", f"{plan.kv.bytes_per_token:,} bytes"),
        ("KV pool", f"{plan.kv.num_blocks:,} blocks of {plan.kv.block_size}", format_bytes(plan.kv.num_bytes)),
    ]
    rows += [
        (
            f"requests of {at.tokens:,} tokens",
            f"{at.contiguous} with {TOKENS:,} tokens reserved each",
            f"{at.paged} at once",
        )
        for at in plan.concurrency
    ]
    note = "As `kvray plan` says it; sizes in binary units."
    return Table("The example in 24 GB", ("", "", ""), tuple(rows), note)
