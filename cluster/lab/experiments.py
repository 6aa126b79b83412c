"""The experiments by name, in the article's order, and where each one lives.

Owns: the names, their one-line help, and importing one when it is wanted.
Does not: run them (lab_run).
Invariants: nothing is imported until it runs, so that the command starts fast and one broken experiment hurts no other.
"""

from __future__ import annotations

import importlib
from typing import NamedTuple, cast

from cluster.lab.findings import Experiment


class Entry(NamedTuple):
    """module: has `run(context) -> Findings`."""

    module: str
    help: str

    def load(self) -> Experiment:
        return cast(Experiment, importlib.import_module(self.module).run)


EXPERIMENTS = {
    "steps": Entry("cluster.lab.steps", "From no KV cache to a paged kernel, one stage after the other."),
    "arithmetic": Entry("cluster.lab.arithmetic", "What the KV of a model weighs, by the project's own account."),
    "memory": Entry("cluster.lab.memory", "The same requests with reserved, growing and paged KV memory."),
    "blocks": Entry("cluster.lab.block_life", "The life of a few blocks, as drawn by kvray lab blocks."),
    "block-size": Entry("cluster.lab.block_sizes", "Waste, reuse and speed by block size; layouts compared."),
    "beam": Entry("cluster.lab.beam", "What beams share, and copy-on-write."),
    "kernels": Entry("cluster.lab.kernels", "Gather-then-attend against paged attention: time and bytes."),
    "prefix": Entry("cluster.lab.prefix", "Prefix caches under five workloads, and what decides their gain."),
    "journal": Entry("cluster.lab.journal_check", "Two runs compared block by block."),
    "pitfalls": Entry("cluster.lab.pitfalls", "Each pitfall provoked, and the check that catches it."),
}
