"""Any order of operations on KV memory, found and shrunk by hypothesis, in a model-free world with a naive oracle."""

from __future__ import annotations

import kv_rules
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule


class KvMachine(RuleBasedStateMachine):
    """Its rules are those of kv_rules; after every one the world has checked everything that must hold."""

    life: kv_rules.KvLife
    sound = True  # False from the start of a rule to its good end: a broken world is not drained

    @initialize(cache=st.sampled_from(["radix", "chunk", "whole", "off"]), num_blocks=st.integers(8, 24))
    def begin(self, cache: str, num_blocks: int) -> None:
        self.life = kv_rules.KvLife(cache, num_blocks)

    def teardown(self) -> None:
        if self.sound:
            kv_rules.drain(self.life)


def _add_rule(name: str, kv_rule: kv_rules.Rule) -> None:
    def act(self: KvMachine, data: st.DataObject) -> None:
        self.sound = False
        kv_rule.act(self.life, lambda low, high: data.draw(st.integers(low, high)))
        self.sound = True

    act.__name__ = name
    possible = precondition(lambda self: bool(kv_rule.possible(self.life)))
    setattr(KvMachine, name, possible(rule(data=st.data())(act)))


for _name, _rule in kv_rules.RULES.items():
    _add_rule(_name, _rule)

TestKvMachine = pytest.mark.timeout(900)(KvMachine.TestCase)  # shrinking a failure takes minutes
TestKvMachine.settings = settings(
    stateful_step_count=100, max_examples=40, phases=set(Phase) - {Phase.explain}, report_multiple_bugs=False
)
