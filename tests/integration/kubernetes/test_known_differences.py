"""The list of exchanges that are not answered as recorded names real exchanges, with reasons."""

import pytest

from tests.integration.kubernetes.known_differences import KNOWN_DIFFERENCES
from tests.integration.kubernetes.replay import load


@pytest.mark.parametrize("topic", KNOWN_DIFFERENCES)
def test_every_known_difference_is_an_exchange_and_has_a_reason(topic: str) -> None:
    recorded = {exchange.name for exchange in load(topic)}
    known = KNOWN_DIFFERENCES[topic]
    print(f"{topic}: {len(recorded) - len(known)} of {len(recorded)} as recorded")  # noqa: T201 - the list is to be seen
    for name, reason in known.items():
        print(f"  {name}: {reason}")  # noqa: T201
    assert set(known) <= recorded
    assert all(reason.strip() for reason in known.values())


@pytest.mark.parametrize("topic", ["eviction", "pdb"])
def test_eviction_and_budgets_are_answered_without_exception(topic: str) -> None:
    assert KNOWN_DIFFERENCES[topic] == {}
