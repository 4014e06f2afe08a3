"""Every reason that can call a person comes with what that person must do."""

import ast
from pathlib import Path

import pytest

import nodemend
from nodemend.domain import errors
from nodemend.domain.escalation import reason_of
from nodemend.domain.pods import EvictionVerdict
from nodemend.domain.remedies import REMEDIES, remedy_for

SOURCE = Path(nodemend.__file__).parent

CALLS_NOBODY = {
    # what was done
    "admitted", "confirmed", "cordon_lost", "drained", "dry_run", "proven", "reboot", "recovered",
    "replace", "replaced", "restored", "node_gone", "node_leaving", "not_cordoned_by_us",
    # ends that leave nothing to do
    "already_gone", "already_open", "approved", "cluster_unknown", "excluded", "expired",
    "no_terminal_action",
    "node_replaced", "not_confirmed", "rebooted", "superseded", "uncordoned", "unresolved_node",
    "unverifiable", "warm_up",
    # what is waited for
    "breaker_open", "capacity_guard", "hold", "maintenance_window", "node_busy", "node_paused",
    "paused", "rate_limit", "second_signal",
    # what stops a whole cluster, and what ends that
    "cooled_down", "fleet_signal_suspect", "fleet_unhealthy", "resumed",
    # what nodemend cannot see, told by Scan Blind
    "exported_in_part", "label_missing", "not_exported", "not_recorded", "nothing_exported",
    "rule_failing", "rule_slow", "rule_stale",
    # inside another reason only
    "before_last_close", "boot_unknown", "identity_ambiguous", "too_old", "metrics_missing",
    "no_finding", "rule_unknown",
}  # fmt: skip
"""Codes in the source that never end NEEDS_HUMAN by themselves. A new code belongs here or into
REMEDIES, and this test asks which."""


def codes_in_source() -> dict[str, str]:
    """Return the literal code of every Reason that the decisions make, and where."""
    found = {}
    for folder in ("domain", "application"):
        for path in sorted((SOURCE / folder).glob("*.py")):
            for call in ast.walk(ast.parse(path.read_text())):
                if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
                    continue
                if call.func.id == "Reason" and isinstance(call.args[0], ast.Constant):
                    found[str(call.args[0].value)] = path.name
    return found


def test_every_code_in_the_source_has_a_remedy_or_calls_nobody() -> None:
    codes = codes_in_source()
    assert len(codes) > 30
    undecided = {
        code: where
        for code, where in codes.items()
        if code not in REMEDIES and code not in CALLS_NOBODY
    }
    assert undecided == {}


def test_the_list_of_codes_that_call_nobody_has_none_too_many() -> None:
    assert CALLS_NOBODY - set(codes_in_source()) == set()


@pytest.mark.parametrize(
    "verdict",
    [
        EvictionVerdict.BLOCKED_BY_PDB,
        EvictionVerdict.BLOCKED_BY_MULTIPLE_PDBS,
        EvictionVerdict.NAMESPACE_TERMINATING,
    ],
)
def test_every_block_of_a_drain_has_a_remedy(verdict: EvictionVerdict) -> None:
    assert str(verdict) in REMEDIES


ENDS_A_STEP = [
    cls.__name__
    for root in (errors.RetryableError, errors.PermanentError)
    for cls in root.__subclasses__()
    if cls is not errors.SupersededError
]


@pytest.mark.parametrize("name", [*ENDS_A_STEP, *errors.TIMEOUT_ERRORS])
def test_every_error_that_can_end_a_step_has_a_remedy(name: str) -> None:
    assert reason_of(name, "").code in REMEDIES


@pytest.mark.parametrize("text", REMEDIES.values())
def test_a_remedy_is_a_sentence(text: str) -> None:
    assert text[0].isupper()
    assert text.rstrip().endswith(".")
    assert "  " not in text


def test_what_has_no_remedy_of_its_own_still_tells_a_person_where_to_look() -> None:
    assert "timeline" in remedy_for("value", needs_human=True)
    assert remedy_for("value", needs_human=False) == ""
    assert remedy_for("lease_lost", needs_human=False) == REMEDIES["lease_lost"]
