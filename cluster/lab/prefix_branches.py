"""A, A-B and A-C, then a new branch A-D, under three keyings (article 3.3).

Owns: running the four sequences through branch_keys and through both production caches, and the claims about them.
Does not: keep keys (branch_keys).
Invariants: what the chained model says to be kept equals the blocks that the production chunk table keeps, and those
of the radix tree.
"""

from __future__ import annotations

from typing import NamedTuple

from cluster.core.hashing import RouteScheme, root_hash
from cluster.lab.branch_keys import BranchKeys, ChainedChunks, WholePrefixKeys
from cluster.lab.findings import Claim, Findings, LabContext, Table, Verdict
from cluster.lab.lab_engines import BLOCK_SIZE
from cluster.lab.prompt_sets import Tokens, TokenSource
from worker.kvcache.block_manager import BlockManager
from worker.kvcache.block_pool import BlockPool
from worker.kvcache.chunk_hash_cache import ChunkHashCache
from worker.kvcache.prefix_cache import PrefixCache
from worker.kvcache.radix_tree import RadixTree

CHUNK = 64
A_CHUNKS, B_CHUNKS, C_CHUNKS, D_CHUNKS = 4, 2, 2, 2
NUM_BLOCKS = 256


class Branches(NamedTuple):
    """found, hashed: by the new branch A-D alone; found: None where no lookup was made."""

    entries: int
    kv_tokens: int
    found: int
    hashed: int


def sequences(seed: int = 0) -> tuple[Tokens, Tokens, Tokens, Tokens]:
    """A, A-B, A-C and A-D."""
    source = TokenSource(seed, (0, 1_000_000))
    a = source.take(A_CHUNKS * CHUNK)
    ends = [source.take(count * CHUNK) for count in (B_CHUNKS, C_CHUNKS, D_CHUNKS)]
    return a, a + ends[0], a + ends[1], a + ends[2]


def counted(keys: BranchKeys, seed: int = 0) -> Branches:
    *first, new = sequences(seed)
    for tokens in first:
        keys.lookup(tokens)
        keys.insert(tokens)
    entries, kept, hashed = keys.num_entries, keys.kv_tokens, keys.hashed
    found = keys.lookup(new)
    keys.insert(new)
    return Branches(entries, kept, found, keys.hashed - hashed)


def kept_blocks(kind: str, seed: int = 0) -> tuple[int, int, int]:
    """Blocks that a production cache keeps after A, A-B and A-C, its entries, and what A-D finds of itself."""
    scheme = RouteScheme(tokenizer_revision="lab", model_revision="lab", chunk_tokens=CHUNK)
    pool = BlockPool(NUM_BLOCKS)
    chunk_blocks = CHUNK // BLOCK_SIZE
    tree = RadixTree(pool, BLOCK_SIZE, chunk_blocks)
    table = ChunkHashCache(
        pool, BLOCK_SIZE, chunk_blocks, lambda namespace: root_hash(scheme.with_salt(namespace.salt))
    )
    cache: PrefixCache = tree if kind == "radix" else table
    manager = BlockManager(pool, cache, BLOCK_SIZE, scheme)
    *first, new = sequences(seed)
    for number, tokens in enumerate(first):
        cached = manager.allocate(f"s{number}", tokens)
        assert cached is not None
        manager.take_copies()
        manager.commit(f"s{number}", tokens, len(tokens), tail=True)
        manager.free(f"s{number}")
    manager.check_invariants()
    entries = sum(bool(node.blocks) for node in tree.nodes()) if kind == "radix" else len(cache.present_chunks)
    return manager.counts().cached, entries, manager.cached_prefix(new)


def run_branches(context: LabContext) -> Findings:
    whole, chained = counted(WholePrefixKeys(CHUNK), context.seed), counted(ChainedChunks(CHUNK), context.seed)
    table_blocks, table_entries, table_found = kept_blocks("chunk", context.seed)
    tree_blocks, tree_nodes, tree_found = kept_blocks("radix", context.seed)
    assert (table_blocks * BLOCK_SIZE, table_entries) == (chained.kv_tokens, chained.entries), "model and class differ"
    assert tree_blocks == table_blocks and tree_found == table_found == chained.found
    a, new = A_CHUNKS * CHUNK, (A_CHUNKS + D_CHUNKS) * CHUNK
    figures: dict[str, float | int | str | bool] = {"branches.engine_equals_lab": True}
    for name, branch in (("whole_keys", whole), ("chained", chained)):
        figures[f"branches.{name}.entries"] = branch.entries
        figures[f"branches.{name}.kv_tokens"] = branch.kv_tokens
        figures[f"branches.{name}.new_branch_hashed"] = branch.hashed
    figures["branches.radix.nodes"] = tree_nodes
    figures["branches.radix.kv_tokens"] = tree_blocks * BLOCK_SIZE
    table = Table(
        title=f"A of {a} tokens, then A-B and A-C with {B_CHUNKS * CHUNK} more each",
        header=("keying", "entries", "tokens of KV kept", "a new branch A-D finds", "and hashes, tokens"),
        rows=(
            _row("whole-prefix keys", whole),
            _row("chained chunk hashes", chained),
            ("radix tree", str(tree_nodes), str(tree_blocks * BLOCK_SIZE), str(tree_found), "0 (compares tokens)"),
        ),
        note="Whole-prefix keys are counted with a run of KV of its own for every entry, as the article describes; "
        "the other two rows are the production classes.",
    )
    claims = (
        Claim(
            "3.3",
            "A hash table stores A, A-B and A-C, so A is there again with every branch",
            "A's KV is held more than once",
            f"whole-prefix keys keep {whole.kv_tokens} tokens of KV, chained chunk hashes {chained.kv_tokens}, as many "
            f"as the radix tree: only keys over the whole prefix repeat A",
            Verdict.DEPENDS if chained.kv_tokens < whole.kv_tokens else Verdict.CONFIRMED,
        ),
        Claim(
            "3.3",
            "With hashes a new branch hashes the whole chain again",
            f"more than the {new - a} new tokens",
            f"for A-D, {new} tokens long, whole-prefix keys hash {whole.hashed} tokens, trying from long to short; "
            f"chained chunk hashes {chained.hashed}, each chunk once and the first new one in lookup and insert",
            Verdict.DEPENDS if chained.hashed < whole.hashed else Verdict.CONFIRMED,
        ),
    )
    return Findings("prefix", "Branches", "", claims, (table,), figures=figures)


def _row(name: str, branch: Branches) -> tuple[str, ...]:
    return name, str(branch.entries), str(branch.kv_tokens), str(branch.found), str(branch.hashed)
