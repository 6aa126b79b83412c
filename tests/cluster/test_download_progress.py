"""Lines about a download: no more than one per 10 % or 10 s, with bytes and rate."""

from __future__ import annotations

import logging

import pytest

from cluster.download_progress import DownloadProgress

MIB = 2**20


def test_lines_come_per_tenth_or_per_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "cluster")
    now, heard = 0.0, list[float]()
    progress = DownloadProgress("m", 100 * MIB, lambda phase, share: heard.append(share), lambda: now)
    for _ in range(50):
        now += 1.0
        progress.add(MIB)  # 1 % a second
    assert [line.split(" (")[0] for line in caplog.messages] == [f"downloading m: {n} %" for n in range(10, 60, 10)]
    assert caplog.messages[0] == "downloading m: 10 % (10.0 MiB of 100.0 MiB, 1.0 MiB/s)"
    caplog.clear()
    for _ in range(50):
        now += 0.01
        progress.add(MIB)
    progress.finish()
    assert len(caplog.messages) == 6 and caplog.messages[-1] == "downloaded m: 100.0 MiB in 50.5 s"
    assert heard == sorted(heard) and len(heard) == 101


def test_a_slow_download_says_so_every_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "cluster")
    now = 0.0
    progress = DownloadProgress("m", 2**40, lambda phase, share: None, lambda: now)
    for _ in range(40):
        now += 1.0
        progress.add(1024)
    assert len(caplog.messages) == 4 and "0 % (10.0 KiB of 1.0 TiB, 1.0 KiB/s)" in caplog.messages[0]


def test_what_was_here_is_no_part_of_the_rate(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "cluster")
    now = 0.0
    progress = DownloadProgress("m", 10 * MIB, lambda phase, share: None, lambda: now, already=5 * MIB)
    now = 2.0
    progress.add(2 * MIB)
    assert caplog.messages == ["downloading m: 70 % (7.0 MiB of 10.0 MiB, 1.0 MiB/s)"]


def test_an_unknown_size(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "cluster")
    now = 0.0
    progress = DownloadProgress("m", 0, lambda phase, share: None, lambda: now)
    now = 10.0
    progress.add(5 * MIB)
    assert caplog.messages == ["downloading m: 5.0 MiB (512.0 KiB/s)"]
