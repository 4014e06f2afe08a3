"""Runs one scenario from end to end and judges it."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from local.aws.events import RecordedEvent
from local.calls import ApiCall, ApiFault
from local.result import (
    ActionRow,
    EventRow,
    Expectation,
    IncidentRow,
    MetricRow,
    MutationRow,
    NodeRow,
    ResultDocument,
)
from local.scenario import ScenarioDocument
from local.timeline import Timeline
from local.world import World

_POLL_S = 0.1
_ACTIONS = {
    ("cordon_node", "patch"): "cordon",
    ("drain_node", "evict"): "evict",
    ("release_node", "patch"): "release",
    ("drain_node", "patch"): "release",
    ("start_repair", "patch"): "release",
    ("request_approval", "patch"): "release",
    ("watch_incidents", "patch"): "release",
    ("start_repair", "RebootInstances"): "reboot",
    ("start_repair", "TerminateInstanceInAutoScalingGroup"): "replace",
}
"""What a function's call means, in the words of a scenario's `expect.actions`."""

_LOST = "answer lost"
"""Result of a call that was carried out and whose caller never heard of it."""

_PLANNED = {"Node Cordoned": "cordon", "Repair Started": "replace"}
_ENDS = ("Incident Closed", "Incident Rejected")


@dataclass(slots=True)
class _Watch:
    """What the loop has seen so far; it tells each event once."""

    told: int = 0
    last_change: float = field(default_factory=time.monotonic)
    open: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)


def rehearse(
    scenario: ScenarioDocument,
    *,
    api_faults: Iterable[ApiFault] = (),
    announce: Callable[[float, str], None],
    keep_logs: Path | None = None,
) -> ResultDocument:
    """Run the scenario and return what happened.

    Args:
        scenario: The scenario.
        api_faults: Calls that fail all the time.
        announce: Gets seconds since the start, and a line of text, for each thing that happens.
        keep_logs: Folder for the functions' logs.

    Raises:
        PrometheusError: Prometheus is missing or does not start.
        ScenarioError, ValueError: a name in the timeline is unknown.
    """
    started = time.time()
    lock = threading.Lock()

    def say(text: str) -> None:
        with lock:
            announce(time.time() - started, text)

    with World(scenario, announce=say, keep_logs=keep_logs) as world:
        for fault in api_faults:
            world.faults.add(fault)
        started = time.time()
        timeline = Timeline(scenario.whole_timeline, world, say)
        timeline.start()
        try:
            if scenario.start.by == "hand":
                _start_by_hand(scenario, world, say)
            world.stack.scheduler.start_clock(scenario.seconds_per_minute)
            _watch(scenario, world, timeline, say)
        finally:
            timeline.stop()
        if timeline.error is not None:
            raise timeline.error
        return _result(scenario, world, started)


def _start_by_hand(scenario: ScenarioDocument, world: World, say: Callable[[str], None]) -> None:
    request = {
        "cluster": scenario.cluster.name,
        "node": world.fleet.node_name(scenario.start.node),
        "reason": scenario.start.reason,
        "requested_by": scenario.start.requested_by,
    }
    world.stack.start_execution(request, name=f"by-hand-{scenario.name}", machine="RemediateNode")
    say(f"a person starts a remediation of {request['node']}")


def _ours(events: Iterable[RecordedEvent]) -> list[RecordedEvent]:
    return [event for event in events if event.source == "nodemend"]


def _watch(
    scenario: ScenarioDocument, world: World, timeline: Timeline, say: Callable[[str], None]
) -> None:
    """Wait until all is said and done, or the time is up."""
    watch = _Watch()
    end = time.monotonic() + scenario.limits.run_s
    while time.monotonic() < end and timeline.error is None:
        time.sleep(_POLL_S)
        _tell_news(world, watch, say)
        is_running = any(e.status == "RUNNING" for e in world.stack.executions())
        is_open = len(watch.open) > sum(scenario.expect.waiting.values())
        if is_running or is_open or not timeline.is_over:
            watch.last_change = time.monotonic()
            continue
        if time.monotonic() - watch.last_change >= scenario.limits.settle_s:
            return
    if timeline.error is None:
        say("the rehearsal's time is up")


def _tell_news(world: World, watch: _Watch, say: Callable[[str], None]) -> None:
    events = _ours(world.stack.events())
    for event in events[watch.told :]:
        say(_line(event))
        incident = str(event.detail.get("incident_id", ""))
        if event.detail_type in _ENDS:
            watch.open.discard(incident)
            watch.ended.add(incident)
        elif incident and incident not in watch.ended:
            watch.open.add(incident)
        watch.last_change = time.monotonic()
    watch.told = len(events)


def _line(event: RecordedEvent) -> str:
    detail = event.detail
    if event.detail_type == "GPU Fault Detected":
        found = "; ".join(f["summary"] for f in detail["findings"])
        names = detail["findings"][0]["node_names"]
        return f"{event.detail_type} on {names[0] if names else '(no node)'}: {found}"
    if event.detail_type == "Scan Blind":
        first = detail["rules"][0]
        blind = ", ".join(rule["rule_id"] for rule in detail["rules"])
        return f"{event.detail_type}: {blind}: {first['reason']['text']}"
    outcome = f" {detail['outcome']}" if detail.get("outcome") else ""
    dry = " (dry run)" if detail.get("dry_run") else ""
    return f"{event.detail_type}{outcome}{dry}: {detail['reason']['text']}"


# --- the result ---------------------------------------------------------------------------------


def _result(scenario: ScenarioDocument, world: World, started: float) -> ResultDocument:
    events = _ours(world.stack.events())
    incidents = _incidents(events)
    calls = [call for call in world.calls.calls() if not _is_report(call)]
    actions = _actions(calls, events, incidents, world, started)
    result = ResultDocument(
        scenario=scenario.name,
        outcome=incidents[0].outcome if incidents else None,
        actions=actions,
        events=[_event_row(event, started) for event in events],
        metrics=_metrics(world),
        api_mutations=[
            MutationRow(
                t=round(call.at - started, 3),
                service=call.service,
                verb=call.verb,
                target=call.target,
                caller=call.caller,
            )
            for call in calls
            if call.is_mutation
        ],
        incidents=incidents,
        nodes=_nodes(world),
        expectation=Expectation(met=True, why=[]),
    )
    why = judge(scenario, result, world)
    return result.model_copy(update={"expectation": Expectation(met=not why, why=why)})


def _is_report(call: ApiCall) -> bool:
    """Kubernetes Events tell people what was done; they change nothing."""
    return call.service == "kubernetes" and call.target.startswith("events")


def _event_row(event: RecordedEvent, started: float) -> EventRow:
    detail = event.detail
    reason = detail.get("reason") or {}
    return EventRow(
        t=round(event.at - started, 3),
        detail_type=event.detail_type,
        incident=str(detail.get("incident_id", "")),
        step=str(detail.get("step", "")),
        outcome=detail.get("outcome"),
        reason=str(reason.get("code", "")),
        text=str(reason.get("text", "")),
        dry_run=bool(detail.get("dry_run", False)),
        event_id=str(detail["event_id"]),
    )


def _incidents(events: Sequence[RecordedEvent]) -> list[IncidentRow]:
    rows: dict[str, IncidentRow] = {}
    for event in events:
        detail = event.detail
        incident = detail.get("incident_id")
        if not incident:
            continue
        row = rows.setdefault(
            incident,
            IncidentRow(
                id=incident,
                node=detail["node"]["name"],
                origin="",
                state="open",
                outcome=None,
                reason="",
                text="",
            ),
        )
        row.origin = detail.get("origin", row.origin)
        if event.detail_type in _ENDS:
            row.state = "closed"
            row.outcome = detail.get("outcome") or row.outcome
            row.reason = detail["reason"]["code"]
            row.text = detail["reason"]["text"]
            row.remedy = detail.get("remedy", "")
    return list(rows.values())


def _actions(
    calls: Sequence[ApiCall],
    events: Sequence[RecordedEvent],
    incidents: Sequence[IncidentRow],
    world: World,
    started: float,
) -> list[ActionRow]:
    """What was done, from the calls; what would have been done, from the events of dry runs."""
    first = incidents[0].id if incidents else ""
    by_node = {row.node: row.id for row in incidents}
    rows = []
    refused = set()
    for call in calls:
        verb = _ACTIONS.get((call.caller, call.verb))
        if verb is None:
            continue
        if not call.is_mutation:
            # A refused call is told once: how often it was tried depends on the clock.
            if call.status < 400 or (verb, call.target, call.status) in refused:
                continue
            refused.add((verb, call.target, call.status))
        target = call.target
        node = world.fleet.node_name(world.fleet.role_of(target.rpartition("/")[2]))
        rows.append(
            ActionRow(
                t=round(call.at - started, 3),
                incident=by_node.get(node, first),
                caller=call.caller,
                verb=verb,
                target=target,
                dry_run=False,
                result=str(call.status) if call.status else _LOST,
            )
        )
    for event in events:
        rows.extend(_planned(event, started))
    return sorted(rows, key=lambda row: row.t)


def _planned(event: RecordedEvent, started: float) -> list[ActionRow]:
    detail = event.detail
    if not detail.get("dry_run"):
        return []
    verb = _PLANNED.get(event.detail_type)
    targets = [f"nodes/{detail['node']['name']}"]
    if event.detail_type == "Node Drained":
        verb, targets = "evict", [f"pods/{pod}" for pod in detail.get("would_evict", [])]
    if verb is None:
        return []
    return [
        ActionRow(
            t=round(event.at - started, 3),
            incident=detail["incident_id"],
            caller=detail["step"],
            verb=verb,
            target=target,
            dry_run=True,
            result="planned",
        )
        for target in targets
    ]


def _metrics(world: World) -> list[MetricRow]:
    rows: dict[tuple[str, tuple[tuple[str, str], ...]], MetricRow] = {}
    for sample in world.stack.metrics():
        key = (sample.name, tuple(sorted(sample.dimensions.items())))
        row = rows.setdefault(
            key, MetricRow(name=sample.name, dimensions=sample.dimensions, samples=0, sum=0)
        )
        row.samples += 1
        row.sum += sample.value
    return [rows[key] for key in sorted(rows)]


def _nodes(world: World) -> list[NodeRow]:
    rows = []
    for node in world.fleet.kubernetes.nodes():
        spec: dict[str, Any] = node["spec"]
        instance_id = str(spec["providerID"]).rpartition("/")[2]
        rows.append(
            NodeRow(
                name=node["metadata"]["name"],
                uid=node["metadata"]["uid"],
                instance_id=instance_id,
                unschedulable=bool(spec.get("unschedulable", False)),
                taints=list(spec.get("taints", ())),
                annotations=dict(node["metadata"].get("annotations", {})),
                role=world.fleet.role_of(instance_id),
            )
        )
    return sorted(rows, key=lambda row: row.role)


# --- the judgement ------------------------------------------------------------------------------


def judge(scenario: ScenarioDocument, result: ResultDocument, world: World) -> list[str]:
    """Return why the expectation is not met; empty if it is."""
    expect = scenario.expect
    why = []
    waiting = _waiting(result)
    outcomes = [
        incident.outcome
        for incident in result.incidents
        if not (expect.waiting and incident.id in waiting)
    ]
    wanted = expect.wanted_outcomes
    if outcomes != wanted:
        why.append(f"outcome: expected {wanted or 'no incident'}, got {outcomes or 'no incident'}")
    reasons = [incident.reason for incident in result.incidents]
    if expect.reason is not None and reasons != [expect.reason]:
        why.append(f"reason: expected {expect.reason}, got {reasons}")
    done = list(
        dict.fromkeys(
            action.verb
            for action in result.actions
            if action.dry_run or action.result == _LOST or action.result.startswith("2")
        )
    )
    if expect.actions is not None and done != list(expect.actions):
        why.append(f"actions: expected {list(expect.actions)}, got {done}")
    why += _touched(expect.untouched, result, world)
    held = Counter(waiting.values())
    if expect.waiting and held != Counter(expect.waiting):
        why.append(f"waiting: expected {expect.waiting}, got {dict(held)}")
    told = Counter(event.detail_type for event in result.events)
    why += [
        f"counts: expected {count} x {detail_type}, got {told[detail_type]}"
        for detail_type, count in expect.counts.items()
        if told[detail_type] != count
    ]
    sent = iter(event.detail_type for event in result.events)
    why += [
        f"events: {detail_type} was not sent, or not in this order"
        for detail_type in expect.events
        if detail_type not in sent
    ]
    return why


def _waiting(result: ResultDocument) -> dict[str, str]:
    """Return what each incident that is still open was last said to wait for, by its id."""
    still_open = {incident.id for incident in result.incidents if incident.state == "open"}
    return {
        event.incident: event.reason
        for event in result.events
        if event.incident in still_open and event.detail_type == "Incident Waiting"
    }


def _touched(untouched: Sequence[str], result: ResultDocument, world: World) -> list[str]:
    if not untouched:
        return []
    changed = {
        (mutation.target, mutation.caller)
        for mutation in result.api_mutations
        if mutation.caller not in ("person", "kubelet")
    }
    if "all" in untouched:
        return [f"untouched: {caller} changed {target}" for target, caller in sorted(changed)]
    names = {f"nodes/{world.fleet.node_name(role)}": role for role in untouched}
    instances = {i: role for i, role in world.fleet.roles.items() if role in untouched}
    return [
        f"untouched: {caller} changed {names.get(target) or instances[target]}"
        for target, caller in sorted(changed)
        if target in names or target in instances
    ]
