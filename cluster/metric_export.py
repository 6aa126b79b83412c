"""MetricExport: what a process counts anyway, handed to a metrics library every few seconds.

Owns: one metric per name, and turning totals into growth.
Does not: count anything, or know the library (cluster.metric_tools).
Invariants: a counter that begins again from 0 (the engine did) is never taken back; a reading that cannot be exported
is logged once and stops nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from cluster.core.metric_reading import MetricKind, MetricReading
from cluster.metric_tools import Counter, Gauge, MetricTools

logger = logging.getLogger(__name__)

INTERVAL_S = 2.0


class MetricExport:
    """`read`: the readings of now."""

    def __init__(self, tools: MetricTools, read: Callable[[], Iterable[MetricReading]]) -> None:
        self._tools = tools
        self._read = read
        self._gauges: dict[str, Gauge] = {}
        self._counters: dict[str, Counter] = {}
        self._totals: dict[str, float] = {}
        self._complained = False

    def export(self) -> None:
        for reading in self._read():
            if reading.kind is MetricKind.GAUGE:
                self._gauge(reading).set(reading.value)
            else:
                self._count(reading)

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            try:
                self.export()
            except Exception:
                if not self._complained:
                    logger.exception("metrics cannot be exported")
                self._complained = True
            await asyncio.sleep(INTERVAL_S)

    def _gauge(self, reading: MetricReading) -> Gauge:
        gauge = self._gauges.get(reading.name)
        if gauge is None:
            gauge = self._gauges[reading.name] = self._tools.gauge(reading.name, reading.help)
        return gauge

    def _count(self, reading: MetricReading) -> None:
        counter = self._counters.get(reading.name)
        if counter is None:
            counter = self._counters[reading.name] = self._tools.counter(reading.name, reading.help)
        before = self._totals.get(reading.name, 0.0)
        growth = reading.value - before if reading.value >= before else reading.value
        self._totals[reading.name] = reading.value
        if growth > 0:
            counter.inc(growth)
