"""The prefix experiment: what is found again, by which keying, at which cost (article, section 3).

Owns: the order of its parts, the one loaded model that they share, and the summary.
Does not: measure (prefix_matrix, prefix_times, prefix_branches, prefix_equal, prefix_history, prefix_pressure).
Invariants: a part that needs no model runs before the model is loaded; each part checks the engine's counts.
"""

from __future__ import annotations

from cluster.lab.findings import Findings, LabContext
from cluster.lab.joined_findings import joined
from cluster.lab.lab_engines import ModelEngines
from cluster.lab.prefix_branches import run_branches
from cluster.lab.prefix_equal import run_equal
from cluster.lab.prefix_history import run_history
from cluster.lab.prefix_matrix import run_matrix
from cluster.lab.prefix_pressure import run_pressure
from cluster.lab.prefix_times import run_times

POOL_TOKENS = 8192


def run(context: LabContext) -> Findings:
    parts = [run_matrix(context), run_branches(context), run_pressure(context)]
    context.progress("prefix: loading the model", 0.0)
    engines = ModelEngines(context, POOL_TOKENS)
    parts += [run_times(context, engines), run_equal(context, engines), run_history(context, engines)]
    figures = {name: value for part in parts for name, value in part.figures.items()}
    summary = (
        f"The radix tree finds {figures['chat.radix.hit_share']:.0%} of a chat's prompt tokens and "
        f"{figures['agent.radix.hit_share']:.0%} of an agent's, a hash over the whole prompt "
        f"{figures['chat.whole.hit_share']:.0%} and {figures['agent.whole.hit_share']:.0%}. A found agent prompt of "
        f"{figures['times.agent.prompt_tokens']:,} tokens gives its first token {figures['times.agent.speedup']} times "
        "sooner. What stands behind the first difference is never found: documents in another order, an edit in the "
        "middle of a file, a history that is tokenised anew."
    )
    return joined("prefix", "Prefix caching: what need not be computed", summary, parts)
