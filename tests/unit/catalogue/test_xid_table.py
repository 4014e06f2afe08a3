"""The XID table against its sources: where it differs from one, it says so and why."""

import json
from pathlib import Path
from typing import Any

import pytest

from nodemend import catalogue as catalogue_module
from nodemend.catalogue import NOT_THERE, load_catalogue
from nodemend.domain.faults import Verdict
from nodemend.domain.findings import _ECHOES, _ROOT_CAUSES
from nodemend.domain.generations import MODEL_LABELS, Generation
from nodemend.domain.rules import WORKLOAD_LABELS, XidEntry
from tools import rules_doc

DATA: dict[str, Any] = json.loads(
    (Path(__file__).resolve().parents[2] / "data" / "xid_sources.json").read_text("utf-8")
)
SOURCES: list[str] = list(DATA["sources"])
CODES: dict[int, dict[str, Any]] = {row["xid"]: row for row in DATA["codes"]}
XIDS = load_catalogue().xids
ROWS = [row for entry in XIDS.values() for row in entry.rows if row.reason != NOT_THERE]
MUST_BE_DECIDED = {63, 64, 74, 94, 95, 109, 119, 120, 121, 136, 142, *range(144, 151), 154}


def name(row: XidEntry) -> str:
    return f"{row.code}-{'-'.join(row.generations) or 'all'}"


def impact(source: str, code: int) -> str:
    """Return what the source does to a node for the code: touches or leaves it, or is open."""
    return str(DATA["impacts"][source][CODES[code][source]])


def ours(row: XidEntry) -> str:
    return "touches" if row.verdict.is_actionable else "leaves"


# --- the copy of the sources --------------------------------------------------------------------


def test_sources_have_a_name_and_a_date_and_every_answer_a_meaning() -> None:
    for source in SOURCES:
        assert DATA["sources"][source]["name"]
        assert DATA["sources"][source]["as_of"].startswith("202")
        assert {row[source] for row in CODES.values()} == set(DATA["impacts"][source])
        assert set(DATA["impacts"][source].values()) <= {"touches", "leaves", "open"}


def test_what_the_sources_answer_disagrees_exactly_where_it_was_flagged() -> None:
    """Guards the meanings given to the answers: they must find the disagreements people saw."""
    for code, row in CODES.items():
        impacts = {impact(source, code) for source in SOURCES} - {"open"}
        assert row["disagree"] == (len(impacts) > 1 and not row["unused"]), code


# --- the table against them ---------------------------------------------------------------------


def test_the_table_has_every_code_of_the_sources_under_its_name_and_no_other() -> None:
    assert len(CODES) == 173
    assert {code: entry.mnemonic for code, entry in XIDS.items()} == {
        code: row["name"] for code, row in CODES.items()
    }


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("row", ROWS, ids=name)
def test_row_does_to_a_node_what_the_source_does_or_overrules_it(
    row: XidEntry, source: str
) -> None:
    is_contradicted = impact(source, row.code) not in (ours(row), "open")

    assert (source in row.overruled) == is_contradicted


@pytest.mark.parametrize("row", ROWS, ids=name)
def test_who_is_overruled_is_a_source_and_hears_why(row: XidEntry) -> None:
    assert set(row.overruled) <= set(SOURCES)
    assert len(row.overruled) == len(set(row.overruled))
    if row.overruled:
        assert len(row.reason.split()) >= 10


@pytest.mark.parametrize(
    "code", sorted(MUST_BE_DECIDED | {code for code, row in CODES.items() if row["disagree"]})
)
def test_code_that_sources_disagree_on_has_a_decision_with_its_reason(code: int) -> None:
    rows = [row for row in XIDS[code].rows if row.reason != NOT_THERE]

    assert rows
    assert all(len(row.reason.split()) >= 10 for row in rows)


@pytest.mark.parametrize("code", [code for code, row in CODES.items() if row["unused"]])
def test_unused_code_is_a_suspicion_on_every_gpu(code: int) -> None:
    assert CODES[code]["generations"] == []
    for generation in (None, *Generation):
        entry = XIDS[code].on(generation)
        assert (entry.verdict, entry.action) == (Verdict.SUSPECT, "none")


# --- generations --------------------------------------------------------------------------------


@pytest.mark.parametrize("code", CODES)
def test_code_means_something_on_the_generations_that_have_it_only(code: int) -> None:
    known = CODES[code]["generations"]
    if not known:  # unused everywhere, or not in the vendor's catalogue
        return
    for generation in Generation:
        is_there = XIDS[code].on(generation).reason != NOT_THERE
        assert is_there == (generation in known)


@pytest.mark.parametrize("code", CODES)
def test_a_generation_that_the_catalogue_does_not_know_gets_the_careful_entry(code: int) -> None:
    careful = XIDS[code].on(None)

    if careful.verdict.is_actionable:
        assert all(XIDS[code].on(one).verdict.is_actionable for one in Generation)
    if any(XIDS[code].on(one).verdict is Verdict.SUSPECT for one in Generation):
        assert careful.verdict is Verdict.SUSPECT


@pytest.mark.parametrize("code", CODES)
def test_without_a_model_what_holds_wherever_the_code_exists_holds(code: int) -> None:
    there = {
        (entry.verdict, entry.action) for entry in XIDS[code].rows if entry.reason != NOT_THERE
    }
    found = XIDS[code].on_gpu({})
    if len(there) == 1:
        assert (found.verdict, found.action) in there
    else:
        assert found == XIDS[code].on(None)


@pytest.mark.parametrize("code", range(144, 151))
@pytest.mark.case("R83")
def test_r83_codes_of_nvlink_5_are_suspicions_and_of_blackwell_alone(code: int) -> None:
    for generation in (None, *Generation):
        assert XIDS[code].on(generation).verdict is Verdict.SUSPECT
    on_blackwell = {XIDS[code].on(one).action for one in list(Generation)[2:]}
    before = {XIDS[code].on(one).action for one in list(Generation)[:2]}

    assert on_blackwell == {"decode_intrinfo"}
    assert before == {"none"}


def test_nvlink_error_acts_up_to_hopper_and_no_further() -> None:
    acts = [one for one in Generation if XIDS[74].on(one).verdict.is_actionable]

    assert acts == [Generation.AMPERE, Generation.HOPPER]
    assert not XIDS[74].on(None).verdict.is_actionable
    assert XIDS[74].on_gpu({}).verdict.is_actionable, "a GPU that reports it has it"
    assert not XIDS[74].on_gpu({"modelName": "NVIDIA L40S"}).verdict.is_actionable


def test_the_label_that_names_the_model_outlives_the_aggregations_of_the_rules() -> None:
    assert not set(MODEL_LABELS) & set(WORKLOAD_LABELS)
    for rule in load_catalogue().rules:
        if rule.is_verdict_by_xid:
            assert "max without ($workload) ([[" in rule.promql.split("unless")[0]


# --- causes and echoes --------------------------------------------------------------------------


@pytest.mark.parametrize("code", [13, 31, 43, 45])
@pytest.mark.case("D23")
def test_d23_what_a_job_did_is_never_a_reason_to_touch_a_node(code: int) -> None:
    for generation in (None, *Generation):
        assert XIDS[code].on(generation).verdict is Verdict.APPLICATION


def test_an_echo_alone_never_acts_and_a_cause_is_no_echo() -> None:
    assert not _ECHOES & _ROOT_CAUSES
    assert set(XIDS) >= _ECHOES | _ROOT_CAUSES
    for code in _ECHOES:
        assert not any(row.verdict.is_actionable for row in XIDS[code].rows)


# --- the loader and the page --------------------------------------------------------------------

HEAD = "code,mnemonic,generations,verdict,action,overruled,reason\n"


def loaded(monkeypatch: pytest.MonkeyPatch, text: str) -> dict[int, XidEntry]:
    read = catalogue_module._read
    monkeypatch.setattr(
        catalogue_module, "_read", lambda name: HEAD + text if name == "xid.csv" else read(name)
    )
    return dict(load_catalogue().xids)


def test_a_code_may_have_a_row_for_all_gpus_and_others_for_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = "5,X,,suspect,none,,\n5,X,hopper,fatal,reset_gpu,gpud nvidia,why\n"
    entry = loaded(monkeypatch, text)[5]

    assert entry.on(Generation.HOPPER).overruled == ("gpud", "nvidia")
    assert entry.on(Generation.HOPPER).verdict is Verdict.FATAL
    for other in (None, Generation.AMPERE, Generation.BLACKWELL, Generation.GRACE_BLACKWELL):
        assert entry.on(other) is entry
    assert (entry.verdict, entry.reason) == (Verdict.SUSPECT, "")


@pytest.mark.parametrize(
    "text",
    [
        "5,X,,suspect,none,,\n5,X,,fatal,reset_gpu,,\n",
        "5,X,hopper,suspect,none,,\n5,X,ampere hopper,fatal,reset_gpu,,\n",
        "5,X,hopper hopper,suspect,none,,\n",
        "5,X,maxwell,suspect,none,,\n",
        "5,X,,bad,none,,\n",
    ],
    ids=["two for all", "two for one", "twice", "no generation", "no verdict"],
)
def test_rows_that_contradict_or_say_nothing_known_are_refused(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"xid.csv: rows of 5|_XidRow"):
        loaded(monkeypatch, text)


def test_the_page_shows_each_decision_with_who_is_overruled_and_why() -> None:
    decided: dict[int, list[tuple[str, ...]]] = {}
    for line in rules_doc.PATH.read_text().split("### Decisions")[1].splitlines():
        codes, *decision = line.strip("| ").split(" | ")
        if codes[:1].isdigit():
            for code in codes.split(", "):
                decided.setdefault(int(code), []).append(tuple(decision))

    assert decided.keys() == {row.code for row in ROWS if row.reason}
    for row in ROWS:
        if row.reason:
            gpus = rules_doc.gpus_of(row) or "all"
            overruled = ", ".join(row.overruled) or "none"
            said = (gpus, f"{row.verdict}, `{row.action}`", overruled, row.reason)
            assert said in decided[row.code]


def test_the_page_names_the_sources_and_their_dates() -> None:
    assert list(rules_doc.XID_SOURCES) == SOURCES
    text = rules_doc.PATH.read_text()
    for source, said in rules_doc.XID_SOURCES.items():
        assert f"- `{source}`: {said}" in text
        assert DATA["sources"][source]["as_of"] in said
