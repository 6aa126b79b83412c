"""Any order of operations on KV memory, found and shrunk by hypothesis, in a model-free world with a naive oracle."""

from __future__ import annotations

import kv_rules
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule


class KvMachine(RuleBasedStateMachine):
    """Its rules are those of kv_rules; after every one the world has checked everything that must hold."""

    life: kv_rules.KvLife

    @initialize(cache=st.sampled_from(["radix", "chunk", "whole", "off"]), num_blocks=st.integers(8, 24))
    def begin(self, cache: str, num_blocks: int) -> None:
        self.life = kv_rules.KvLife(cache, num_blocks)

    def teardown(self) -> None:
        kv_rules.drain(self.life)


def _add_rule(name: str, kv_rule: kv_rules.Rule) -> None:
    def act(self: KvMachine, data: st.DataObject) -> None:
        kv_rule.act(self.life, lambda low, high: data.draw(st.integers(low, high)))

    act.__name__ = name
    possible = precondition(lambda self: bool(kv_rule.possible(self.life)))
    setattr(KvMachine, name, possible(rule(data=st.data())(act)))


for _name, _rule in kv_rules.RULES.items():
    _add_rule(_name, _rule)

TestKvMachine = KvMachine.TestCase
TestKvMachine.settings = settings(stateful_step_count=100, max_examples=40)
