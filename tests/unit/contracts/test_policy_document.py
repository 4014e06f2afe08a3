"""The policy document: what is accepted, and how what is wrong is named."""

import base64
from datetime import date, time
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from nodemend.contracts.policy import (
    EVENTS_PER_LOOP,
    MAX_HISTORY_EVENTS,
    NOT_BUILT_YET,
    SUPPORTED_RUNGS,
    PolicyDocument,
    check_rules,
    parse_policy,
    worst_case_loops,
)
from nodemend.contracts.validation import ValidatePolicyRequest
from nodemend.domain.errors import PolicyInvalidError
from nodemend.domain.faults import FaultClass, Mode, Rung, Verdict
from nodemend.domain.policy import (
    Attempts,
    BreakerLimits,
    ClusterPolicy,
    Deadlines,
    Limits,
    MaxUnavailable,
    Policy,
    PolicySource,
    ReplacementRate,
    RulePolicy,
    Waits,
)
from nodemend.domain.windows import WEEKDAYS, MaintenanceWindow

A = {"name": "a", "workspace": "ws-1", "region": "eu-central-1"}
HISTORY = 25_000


def parse(**document: Any) -> Policy:
    return parse_policy({"schema_version": 1, **document}, "v7")


def problem(document: object) -> str:
    with pytest.raises(PolicyInvalidError) as caught:
        parse_policy(document, "v7")
    return str(caught.value)


def wrong(**document: Any) -> str:
    return problem({"schema_version": 1, **document})


# --- defaults -------------------------------------------------------------------------------------


def test_a_document_that_says_nothing_is_the_design_s_defaults_in_dry_run() -> None:
    policy = parse()

    assert (policy.version, policy.source) == ("v7", PolicySource.DEPLOYED)
    assert policy.mode is Mode.DRY_RUN
    assert policy.limits == Limits(MaxUnavailable(5, 2), ReplacementRate(4, 20))
    assert policy.waits == Waits((20, 60, 300), (20, 60, 300))
    assert policy.deadlines == Deadlines(verify_s=600, drain_s=1800, replace_s=2700)
    assert (policy.hold_down_s, policy.startup_grace_s) == (600, 1800)
    assert (policy.clusters, policy.groups, policy.plans, policy.rules) == ((), (), {}, {})
    assert policy.exclude == ()


def test_the_defaults_of_the_document_are_those_of_the_domain() -> None:
    deployed = PolicyDocument(schema_version=1).to_policy("built-in")
    built_in = Policy()
    for name in (
        "mode",
        "limits",
        "waits",
        "deadlines",
        "hold_down_s",
        "startup_grace_s",
        "hold_s",
    ):
        assert getattr(deployed, name) == getattr(built_in, name)


def test_everything_that_can_be_said_arrives() -> None:
    policy = parse_policy(
        yaml.safe_load(
            """
            schema_version: 1
            mode: enforce
            clusters:
              - {name: a, workspace: ws-1, region: eu-central-1, matcher: 'cluster="a"'}
              - name: b
                workspace: ws-1
                region: us-gov-west-1
                matcher: 'cluster="b"'
                role_arn: arn:aws-us-gov:iam::123456789012:role/nodemend/b
            groups:
              - match: {pool: h100}
                mode: cordon_only
                limits: {max_unavailable: {count: 1, percent: 10}}
                plans: {thermal: [replace, human]}
            limits:
              max_unavailable: {count: 9, percent: 3.5}
              replacements: {per_hour: 1, per_day: 2}
            plans: {xid: [human], gpu_lost: []}
            waits: {drain_poll_s: [5, 10], check_poll_s: [7]}
            deadlines: {verify_s: 60, drain_s: 120, replace_s: 180}
            hold_down_s: 0
            startup_grace_s: 60
            rules:
              gpu-temperature: {thresholds: {celsius: 85}}
              xid-new: {enabled: false, plan: [replace]}
            exclude: [ip-10-0-1-5.ec2.internal]
            """
        ),
        "v8",
    )
    assert policy.cluster("a") == ClusterPolicy("a", "ws-1", "eu-central-1", 'cluster="a"')
    b = policy.cluster("b")
    assert b is not None
    assert b.role_arn.endswith("role/nodemend/b")
    (group,) = policy.groups
    assert (group.match, group.mode) == ({"pool": "h100"}, Mode.CORDON_ONLY)
    assert group.limits is not None
    assert group.limits.max_unavailable == MaxUnavailable(1, 10)
    assert group.plans == {FaultClass.THERMAL: (Rung.REPLACE, Rung.HUMAN)}
    assert policy.limits == Limits(MaxUnavailable(9, 3.5), ReplacementRate(1, 2))
    assert policy.plans == {FaultClass.XID: (Rung.HUMAN,), FaultClass.GPU_LOST: ()}
    assert policy.waits == Waits((5, 10), (7,))
    assert policy.deadlines == Deadlines(60, 120, 180)
    assert policy.rules["gpu-temperature"] == RulePolicy(thresholds={"celsius": 85})
    assert policy.rules["xid-new"] == RulePolicy(is_enabled=False, plan=(Rung.REPLACE,))
    assert policy.exclude == ("ip-10-0-1-5.ec2.internal",)


def test_breaker_hold_times_and_windows_arrive() -> None:
    policy = parse(
        limits={"breaker": {"percent": 12.5, "min_nodes": 4, "window_s": 300, "cooldown_s": 0}},
        hold_s={"fatal": 30, "degraded": 0},
        maintenance_windows=[
            {"start": "22:30", "duration_s": 3600, "days": ["sat"], "timezone": "Europe/Berlin"},
            {"start": "00:00", "duration_s": 60},
        ],
        fatal_ignores_windows=True,
    )
    assert policy.limits.breaker == BreakerLimits(12.5, 4, 300, 0)
    assert policy.limits.max_unavailable == MaxUnavailable(), "the others keep their defaults"
    assert policy.hold_s == {Verdict.FATAL: 30}
    assert policy.maintenance_windows == (
        MaintenanceWindow(("sat",), time(22, 30), 3600, "Europe/Berlin"),
        MaintenanceWindow(WEEKDAYS, time(), 60, "UTC"),
    )
    assert policy.fatal_ignores_windows


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    breaker=st.fixed_dictionaries(
        {
            "percent": st.floats(0.01, 100),
            "min_nodes": st.integers(2, 2000),
            "window_s": st.integers(60, 86_400),
            "cooldown_s": st.integers(0, 86_400),
        }
    ),
    desired=st.integers(0, 5000),
)
def test_no_accepted_breaker_is_ever_off(breaker: dict[str, Any], desired: int) -> None:
    """Every node at once opens it whatever the bound; and the bound is never less than two."""
    limits = parse(limits={"breaker": breaker}).limits.breaker
    assert limits.bound(desired) >= 2
    assert limits.bound(desired) >= desired * limits.percent / 100
    assert limits.bound(desired) <= max(limits.min_nodes, desired + 1)


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"limits": {"breaker": {"percent": 0}}}, "limits.breaker.percent: "),
        ({"limits": {"breaker": {"min_nodes": 1}}}, "limits.breaker.min_nodes: "),
        ({"limits": {"breaker": {"enabled": False}}}, "limits.breaker.enabled: "),
        ({"hold_s": {"suspect": 5}}, "hold_s.suspect: "),
        ({"hold_s": {"degraded": -1}}, "hold_s.degraded: "),
        ({"maintenance_windows": [{"start": "22:00"}]}, "maintenance_windows.0.duration_s: "),
        ({"maintenance_windows": [{"duration_s": 60}]}, "maintenance_windows.0.start: "),
        (
            {"maintenance_windows": [{"start": "24:00", "duration_s": 60}]},
            "maintenance_windows.0.start: ",
        ),
        (
            {"maintenance_windows": [{"start": 79200, "duration_s": 60}]},
            "maintenance_windows.0.start: ",
        ),
        (
            {"maintenance_windows": [{"start": "1:00", "duration_s": 60, "days": []}]},
            "maintenance_windows.0.days: ",
        ),
        (
            {"maintenance_windows": [{"start": "01:00", "duration_s": 60, "timezone": "CEST/X"}]},
            "no time zone 'CEST/X': use an IANA name",
        ),
        ({"approval": {"before": "drain"}}, "approval.before: "),
        ({"approval": {"rungs": []}}, "approval.rungs: "),
        ({"approval": {"rungs": ["human"]}}, "human is no repair of this version: use reboot, re"),
        ({"approval": {"rungs": ["reset_gpu"]}}, "reset_gpu is no repair of this version"),
        ({"approval": {"rungs": ["replace", "replace"]}}, "a rung stands there twice"),
        ({"approval": {"timeout_s": 0}}, "approval.timeout_s: "),
        ({"approval": {"timeout_s": 86_401}}, "approval.timeout_s: "),
        ({"approval": {"default": "yes"}}, "approval.default: "),
        ({"waits": {"approval_poll_s": []}}, "waits.approval_poll_s: "),
        (
            {"approval": {"timeout_s": 86_400}, "waits": {"approval_poll_s": [1]}},
            "more than an execution's history holds",
        ),
    ],
)
def test_a_wrong_rail_is_named(document: dict[str, Any], words: str) -> None:
    assert words in wrong(**document)


def test_a_group_without_limits_has_none_of_its_own() -> None:
    (group,) = parse(groups=[{"match": {"a": "b"}}]).groups
    assert group.limits is None


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("document", [None, [], "mode: enforce", 1])
def test_what_is_no_mapping_is_refused(document: object) -> None:
    assert "must be a YAML mapping" in problem(document)


@pytest.mark.parametrize("document", [{}, {"schema_version": 2}, {"schema_version": "one"}])
def test_the_schema_version_is_asked_for(document: dict[str, Any]) -> None:
    assert problem(document).startswith("the policy is invalid: schema_version: ")


@pytest.mark.parametrize(
    ("document", "field"),
    [
        ({"mod": "enforce"}, "mod"),
        ({"mode": "on"}, "mode"),
        ({"limits": {"max_unavailable": {"counts": 1}}}, "limits.max_unavailable.counts"),
        ({"limits": {"max_unavailable": {"count": -1}}}, "limits.max_unavailable.count"),
        ({"limits": {"max_unavailable": {"count": 51}}}, "limits.max_unavailable.count"),
        ({"limits": {"max_unavailable": {"percent": 101}}}, "limits.max_unavailable.percent"),
        ({"limits": {"replacements": {"per_hour": "x"}}}, "limits.replacements.per_hour"),
        ({"clusters": [{**A, "name": ""}]}, "clusters.0.name"),
        ({"clusters": [{**A, "workspace": "1"}]}, "clusters.0.workspace"),
        ({"clusters": [{**A, "region": "Frankfurt"}]}, "clusters.0.region"),
        ({"clusters": [{**A, "role_arn": "role/x"}]}, "clusters.0.role_arn"),
        ({"clusters": [{"name": "a"}]}, "clusters.0.workspace"),
        ({"groups": [{"match": {}}]}, "groups.0.match"),
        ({"groups": [{"mode": "enforce"}]}, "groups.0.match"),
        ({"plans": {"sunburn": ["replace"]}}, "plans.sunburn.[key]"),
        ({"plans": {"xid": ["pray"]}}, "plans.xid.0"),
        ({"waits": {"drain_poll_s": []}}, "waits.drain_poll_s"),
        ({"waits": {"drain_poll_s": [0]}}, "waits.drain_poll_s.0"),
        ({"waits": {"check_poll_s": [1.5]}}, "waits.check_poll_s.0"),
        ({"waits": {"check_poll_s": [3601]}}, "waits.check_poll_s.0"),
        ({"deadlines": {"drain_s": 604_801}}, "deadlines.drain_s"),
        ({"deadlines": {"verify_s": 0}}, "deadlines.verify_s"),
        ({"hold_down_s": -1}, "hold_down_s"),
        ({"rules": {"r": {"thresholds": {"a": "hot"}}}}, "rules.r.thresholds.a"),
        ({"rules": {"r": {"window": 5}}}, "rules.r.window"),
        ({"exclude": "n1"}, "exclude"),
    ],
)
def test_each_wrong_field_is_named(document: dict[str, Any], field: str) -> None:
    assert f"{field}: " in wrong(**document)


def test_several_wrong_fields_are_named_together_with_what_was_given() -> None:
    text = wrong(mode="on", hold_down_s="x" * 200)
    assert "mode: " in text
    assert "(given: 'on')" in text
    assert "hold_down_s: " in text
    assert "x" * 78 not in text  # cut


@pytest.mark.parametrize("name", sorted(NOT_BUILT_YET))
def test_what_the_design_names_and_this_version_does_not_do_is_refused_in_these_words(
    name: str,
) -> None:
    *parents, last = name.split(".")
    document: Any = {last: {"x": 1}}
    for parent in reversed(parents):
        document = {parent: document}
    if "groups" in document:
        document = {"groups": [{"match": {"a": "b"}, **document["groups"]}]}

    text = wrong(**document)

    assert "is not built yet in this version: remove it" in text
    assert last in text


def test_a_groups_own_rate_and_breaker_arrive_and_what_it_does_not_name_is_not_bound() -> None:
    limits = {"replacements": {"per_hour": 1}, "breaker": {"percent": 50, "window_s": 900}}
    groups = [{"match": {"a": "b"}, "limits": limits}, {"match": {"a": "c"}, "limits": {}}]

    policy = parse(groups=groups)

    own, other = policy.limits_for({"a": "b"}), policy.limits_for({"a": "c"})
    assert (own.replacements, own.breaker) == (
        ReplacementRate(1, 20),
        BreakerLimits(50, 3, 900, 1800),
    )
    assert (other.replacements, other.breaker) == (None, None)
    assert policy.longest_window_s == 900


def test_a_wrong_limit_of_a_group_is_named() -> None:
    limits = {"replacements": {"per_hour": -1}, "breaker": {"min_nodes": 1}}
    text = wrong(groups=[{"match": {"a": "b"}, "limits": limits}])
    assert "groups.0.limits.replacements.per_hour: " in text
    assert "groups.0.limits.breaker.min_nodes: " in text


@pytest.mark.parametrize("rung", [rung for rung in Rung if rung not in SUPPORTED_RUNGS])
@pytest.mark.parametrize("where", ["plans", "groups", "rules"])
def test_a_rung_that_cannot_be_carried_out_is_refused(rung: Rung, where: str) -> None:
    plan = [str(rung), "replace"]
    documents: dict[str, dict[str, Any]] = {
        "plans": {"plans": {"xid": plan}},
        "groups": {"groups": [{"match": {"a": "b"}, "plans": {"xid": plan}}]},
        "rules": {"rules": {"r": {"plan": plan}}},
    }

    text = wrong(**documents[where])

    assert f"rung {rung} is not built yet: use human, reboot, replace" in text
    assert ("rules.r.plan" if where == "rules" else "plans.xid") in text


def test_a_reboot_after_the_replacement_is_refused() -> None:
    text = wrong(plans={"xid": ["replace", "reboot", "human"]})
    assert "plans.xid: reboot stands after replace, which ends the instance" in text


def test_the_memory_is_bounded_by_what_is_kept() -> None:
    day = 86_400
    given = parse_policy(
        {
            "schema_version": 1,
            "repeat_window_s": 90 * day,
            "attempts": {"per_node": 5, "window_s": 14 * day},
            "deadlines": {"reboot_s": 900},
            "plans": {"xid": ["reboot", "replace", "human"]},
        },
        "1",
    )
    assert (given.repeat_window_s, given.attempts) == (90 * day, Attempts(5, 14 * day))
    assert given.deadlines.reboot_s == 900
    assert "repeat_window_s" in wrong(repeat_window_s=90 * day + 1)
    assert "attempts.per_node" in wrong(attempts={"per_node": 0})


def test_after_a_person_comes_nothing() -> None:
    assert "plans.xid: human must be the last rung" in wrong(plans={"xid": ["human", "replace"]})


def test_a_rung_is_tried_once() -> None:
    text = wrong(plans={"xid": ["replace", "replace", "human"]})
    assert "plans.xid: a rung stands there twice" in text


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("", ""),
        ('c="a"', ""),
        ('c="a"', 'c="a"'),
        # Different texts that may still match one and the same series.
        ('c="a"', 'd="b"'),
        ('c="a"', 'c=~"a|b"'),
        ('c="a"', 'c!="b"'),
        ('c="a"', 'c="a",d="b"'),
        ('c=~"a.*"', 'c=~"b.*"'),
    ],
    ids=str,
)
def test_a_shared_workspace_needs_a_matcher_for_each_cluster(first: str, second: str) -> None:
    clusters = [{**A, "matcher": first}, {**A, "name": "b", "matcher": second}]
    text = wrong(clusters=clusters)
    assert "workspace ws-1 serves 2 clusters: give each a matcher" in text


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ('c="a"', 'c="b"'),
        ('c = "a"', 'd="x",c="b"'),
        ('c="a",d="x"', 'c="a",d="y"'),
        (r'c="say \"a\""', r'c="say \"b\""'),
    ],
    ids=str,
)
def test_matchers_that_fix_one_label_to_distinct_values_share_a_workspace(
    first: str, second: str
) -> None:
    clusters = [{**A, "matcher": first}, {**A, "name": "b", "matcher": second}]
    assert len(parse(clusters=clusters).clusters) == 2


def test_a_label_must_differ_among_all_that_share_a_workspace() -> None:
    matchers = ['c="a",d="x"', 'c="b",d="x"', 'c="b",d="y"']
    clusters = [{**A, "name": f"n{i}", "matcher": one} for i, one in enumerate(matchers)]
    assert "serves 3 clusters" in wrong(clusters=clusters)


def test_a_workspace_of_its_own_needs_no_matcher() -> None:
    assert len(parse(clusters=[A, {**A, "name": "b", "workspace": "ws-2"}]).clusters) == 2


def test_two_clusters_of_one_name_cannot_be_told_apart() -> None:
    assert "two clusters have one name" in wrong(clusters=[A, {**A, "workspace": "ws-2"}])


@pytest.mark.parametrize("number", [".nan", ".inf", "-.inf"])
@pytest.mark.parametrize(
    "field", ["rules: {r: {thresholds: {a: %s}}}", "limits: {max_unavailable: {percent: %s}}"]
)
def test_a_number_that_is_none_would_switch_a_rule_off_silently(number: str, field: str) -> None:
    document = yaml.safe_load("schema_version: 1\n" + field % number)
    assert "finite" in problem(document) or "greater than" in problem(document)


def test_values_that_json_has_no_form_for_are_refused_with_the_way_out() -> None:
    assert "quote it" in wrong(exclude=[date(2026, 5, 1)])
    assert "quote it" in problem({"schema_version": 1, ("a", "b"): 1})


def test_a_document_that_contains_itself_is_refused() -> None:
    document = yaml.safe_load("schema_version: 1\nexclude: &a [*a]")
    assert "a loop?" in problem(document)


# --- loops ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("waits", "deadline", "loops"),
    [((20, 60, 300), 1800, 8), ((300,), 300, 1), ((300,), 301, 2), ((1,), 0, 0), ((7,), 70, 10)],
)
def test_the_most_polls_before_a_deadline(
    waits: tuple[int, ...], deadline: int, loops: int
) -> None:
    assert worst_case_loops(waits, deadline) == loops


def test_the_defaults_and_a_week_of_draining_fit_into_a_history() -> None:
    parse()
    parse(deadlines={"drain_s": 604_800}, waits={"drain_poll_s": [20, 60, 600]})


@pytest.mark.parametrize(
    "document",
    [
        {"deadlines": {"drain_s": 604_800}, "waits": {"drain_poll_s": [20]}},
        {"deadlines": {"replace_s": 86_400}, "waits": {"check_poll_s": [20]}},
        {"deadlines": {"verify_s": 86_400}, "waits": {"check_poll_s": [20]}},
        {"hold_down_s": 86_400, "waits": {"check_poll_s": [60]}},
    ],
)
def test_waits_that_overflow_the_history_are_refused(document: dict[str, Any]) -> None:
    text = wrong(**document)
    assert "more than an execution's history holds" in text
    assert "let the last entries of waits grow" in text


@pytest.mark.parametrize("hold_down_s", range(0, 86_401, 5400))
@pytest.mark.parametrize("last_s", [30, 60, 120])
def test_no_accepted_policy_can_overflow_a_history(hold_down_s: int, last_s: int) -> None:
    replace_s = 3600
    document = {
        "schema_version": 1,
        "hold_down_s": hold_down_s,
        "waits": {"check_poll_s": [last_s], "drain_poll_s": [last_s]},
        "deadlines": {"replace_s": replace_s},
    }
    try:
        parse_policy(document, "v1")
    except PolicyInvalidError:
        return
    # A replacement that is unclean to the last moment and then clean for the whole hold-down:
    # verify, drain, check, and validate for replace_s + hold_down_s, then hold_down_s once more.
    polls = (600 + 1800 + replace_s + replace_s + 2 * hold_down_s) / last_s + 5
    assert polls * EVENTS_PER_LOOP < HISTORY
    assert MAX_HISTORY_EVENTS < HISTORY


# --- rules of the catalogue -----------------------------------------------------------------------


def test_overrides_of_known_rules_and_thresholds_pass() -> None:
    check_rules(parse(rules={"r": {"thresholds": {"a": 1}}}), {"r": ["a", "b"], "s": []})


def test_an_override_of_an_unknown_rule_names_the_known_ones() -> None:
    with pytest.raises(PolicyInvalidError, match=r"rules.x: no such rule: use one of r, s"):
        check_rules(parse(rules={"x": {}}), {"s": [], "r": []})


def test_an_override_of_an_unknown_threshold_names_the_known_ones() -> None:
    with pytest.raises(PolicyInvalidError, match=r"rules.r.thresholds.c: no such .* one of a, b"):
        check_rules(parse(rules={"r": {"thresholds": {"c": 1}}}), {"r": ["b", "a"]})


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("window_s", 0, "no length of time"),
        ("window_s", 0.5, "no length of time"),
        ("window_s", 90.5, "no length of time"),
        ("window_s", -1, "no length of time"),
        ("count", -1, "would match healthy GPUs"),
    ],
)
def test_a_threshold_that_no_query_could_use_is_refused(
    name: str, value: float, words: str
) -> None:
    policy = parse(rules={"r": {"thresholds": {name: value}}})
    with pytest.raises(PolicyInvalidError, match=rf"rules.r.thresholds.{name}: .*{words}"):
        check_rules(policy, {"r": [name]})


@pytest.mark.parametrize(("name", "value"), [("window_s", 1), ("window_s", 90.0), ("count", 0)])
def test_a_threshold_at_its_bound_is_accepted(name: str, value: float) -> None:
    check_rules(parse(rules={"r": {"thresholds": {name: value}}}), {"r": [name]})


# --- the validator's request ----------------------------------------------------------------------


def request(text: bytes) -> ValidatePolicyRequest:
    content = base64.b64encode(text).decode()
    return ValidatePolicyRequest.model_validate(
        {"content": content, "configurationVersion": "9", "uri": "x"}
    )


def test_the_validator_reads_what_appconfig_sends() -> None:
    given = request("schema_version: 1 # é".encode())
    assert (given.document(), given.version) == ({"schema_version": 1}, "9")


@pytest.mark.parametrize(
    "text",
    [b"a: [", b"\xff\xfe\xfa", b"a: b: c", b"!!python/object:os.system {}", b"a: 2026-13-45"],
    ids=["open list", "no utf-8", "two colons", "a tag", "no date"],
)
def test_what_is_no_yaml_is_refused_as_an_invalid_policy(text: bytes) -> None:
    with pytest.raises(PolicyInvalidError, match="no YAML document"):
        request(text).document()


def test_what_is_no_base64_is_refused() -> None:
    with pytest.raises(PolicyInvalidError, match="no YAML document"):
        ValidatePolicyRequest(content="%%%").document()
