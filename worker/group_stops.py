"""Stop strings inside the engine, for requests with several rows.

Owns: telling whether a row's newest token completed a stop string.
Does not: cut text (cluster.text_stream does, for every request) or end rows (sequence_group, beam_search).
Invariants: the work per token does not grow with the text.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

Decode = Callable[[Seq[int]], str]


def stop_finder(
    stop: tuple[str, ...], decode: Decode | None, min_tokens: int = 0
) -> Callable[[tuple[int, ...]], bool] | None:
    """Whether the newest token of a text completed a stop string, and not one of the first `min_tokens`.

    Only the end is decoded: a character is at most four tokens, so the last tokens hold every string that ends now.
    """
    if not stop or decode is None:
        return None
    reach = 4 * max(len(text) for text in stop) + 8

    def found(tokens: tuple[int, ...]) -> bool:
        if len(tokens) <= min_tokens:
            return False
        end = decode(tokens[-reach:])
        hits = [text for text in stop if text in end]
        if not hits or not min_tokens:
            return bool(hits)
        before = len(decode(tokens[-reach:-1]))  # an earlier one, in the first tokens, does not count
        return any(end.find(text, max(0, before - len(text) + 1)) >= 0 for text in hits)

    return found
