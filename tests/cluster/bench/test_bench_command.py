"""How a bench ends: every signal that asks for it takes the way of Ctrl-C."""

from __future__ import annotations

import asyncio
import signal

import pytest

from cluster.bench.bench_command import ended_by_signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_cancels_the_run_and_cleaning_up_goes_on(number: signal.Signals) -> None:
    steps: list[str] = []

    async def run() -> None:
        try:
            asyncio.get_running_loop().call_soon(signal.raise_signal, number)
            await asyncio.sleep(60)
        finally:
            steps.append("stopped the children")

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a shell's background job
    try:
        with pytest.raises(KeyboardInterrupt), ended_by_signals():
            asyncio.run(run())
        assert steps == ["stopped the children"]
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
