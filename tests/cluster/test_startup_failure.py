"""One line out of what Serve says of a replica that could not start."""

from __future__ import annotations

import traceback

from cluster.core.errors import ConfigError
from cluster.startup_failure import startup_failure

LINE = "the Hugging Face hub does not give out 'owner/name': HF_TOKEN is wrong or has expired"


def serves_message(error: Exception) -> str:
    """As Serve makes it: the replica's traceback inside another error's, and a sentence of its own before both."""
    try:
        try:
            try:
                raise KeyError("below")
            except KeyError as cause:
                raise error from cause
        except Exception:
            raise RuntimeError(traceback.format_exc()) from None
    except RuntimeError as wrapped:
        inner = "".join(traceback.format_exception(wrapped))
    return f"The deployment failed to start 3 times in a row. See controller logs for details. Error:\n{inner}"


def test_our_error_is_found_inside() -> None:
    assert startup_failure(["", serves_message(ConfigError(LINE))]) == LINE


def test_other_errors_show_their_last_line() -> None:
    assert startup_failure([serves_message(ValueError("odd"))]) == "ValueError: odd"


def test_nothing_to_say() -> None:
    assert startup_failure(["", "  \n"]) is None
    assert startup_failure([]) is None
