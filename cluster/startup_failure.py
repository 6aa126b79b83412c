"""startup_failure: the one line that matters in what Serve says of a replica that could not start.

Serve wraps an error of a replica's start in two tracebacks, in the deployment's message, and the application's message
only names the deployment.

Owns: finding our own error in such a text.
Does not: ask Serve (cluster.launcher).
Invariants: one line; where no error of ours is in it, the last line that says something.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_OURS = re.compile(r"^\s*(?:cluster\.core\.errors\.)(\w+): (.+)$", re.M)


def startup_failure(messages: Iterable[str]) -> str | None:
    """`messages`: of all deployments. None when none says anything."""
    texts = [text for text in messages if text.strip()]
    for text in texts:
        if found := _OURS.findall(text):
            return str(found[-1][1]).strip()
    if not texts:
        return None
    return [line.strip() for line in texts[0].splitlines() if line.strip()][-1]
