"""Plays a scenario's timeline: faults, API trouble and what people do."""

import json
import threading
import time
from collections.abc import Callable, Sequence

from local.alerts import publish
from local.amp.model import FaultKind
from local.calls import ApiFault
from local.scenario import Alert, InjectedApiFault, Person, TimelineEntry
from local.world import World

_TICK_S = 0.05


class Timeline:
    """Plays entries on a thread of its own, each at its time or after its event.

    Args:
        entries: What happens.
        world: Where.
        announce: Gets a line of text for each.
    """

    def __init__(
        self, entries: Sequence[TimelineEntry], world: World, announce: Callable[[str], None]
    ) -> None:
        self._world = world
        self._announce = announce
        self._pending = list(entries)
        self._due: list[tuple[float, TimelineEntry]] = []
        self._lifts: list[tuple[float, ApiFault]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._play, name="timeline", daemon=True)
        self.error: Exception | None = None

    def start(self) -> None:
        """Start the clock."""
        now = time.monotonic()
        self._due = [(now + e.at_s, e) for e in self._pending if e.when is None]
        self._pending = [e for e in self._pending if e.when is not None]
        self._thread.start()

    def stop(self) -> None:
        """Stop playing."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def is_over(self) -> bool:
        """True when nothing more will happen by the clock; what waits for events may never."""
        return not self._due

    def _play(self) -> None:
        while not self._stop.wait(_TICK_S):
            try:
                self._step(time.monotonic())
            except Exception as error:
                self.error = error
                return

    def _step(self, now: float) -> None:
        seen = {event.detail_type for event in self._world.stack.events()}
        for entry in [e for e in self._pending if e.when and e.when.event in seen]:
            self._pending.remove(entry)
            self._due.append((now + entry.at_s, entry))
        for due, entry in [item for item in self._due if item[0] <= now]:
            self._do(entry, now)
            self._due.remove((due, entry))
        for until, fault in [item for item in self._lifts if item[0] <= now]:
            self._world.faults.remove(fault)
            self._lifts.remove((until, fault))
            self._announce(f"{fault.verb} works again")

    def _do(self, entry: TimelineEntry, now: float) -> None:
        fleet = self._world.fleet
        if entry.inject is not None:
            node = fleet.node_name(entry.inject.node)
            fleet.exporters.inject(node, entry.inject.gpu, entry.inject.kind, **entry.inject.params)
            if entry.inject.kind is FaultKind.GPU_LOST:
                fleet.lose_gpus(node, entry.inject.gpu)
            told = "".join(f" {key} {value}" for key, value in entry.inject.params.items())
            gpu = "all GPUs" if entry.inject.gpu is None else f"GPU {entry.inject.gpu}"
            self._announce(f"fault: {entry.inject.kind}{told} on {gpu} of {node}")
        elif entry.clear is not None:
            node = fleet.node_name(entry.clear.node)
            fleet.exporters.clear(node, entry.clear.gpu, entry.clear.kind)
            self._announce(f"fault cleared on {node}")
        elif entry.api_fault is not None:
            self._fail_calls(entry.api_fault, now)
        elif entry.person is not None:
            self._person(entry.person)
        elif entry.alert is not None:
            self._alert(entry.alert)

    def _alert(self, alert: Alert) -> None:
        # What the alert is about has been scraped by the time at which a rule could fire.
        self._world.amp.wait_until_scraped()
        node = self._world.fleet.node_name(alert.node)
        publish(self._world.stack, alert, node, cluster=self._world.cluster_name)
        self._announce(f"alert: {alert.alertname} {alert.status} for {node} ({alert.format})")

    def _fail_calls(self, wanted: InjectedApiFault, now: float) -> None:
        fault = ApiFault(
            verb=wanted.verb,
            status=wanted.status,
            service=wanted.service,
            caller=wanted.caller,
            target=wanted.target,
            times=wanted.times,
            headers=wanted.headers,
        )
        self._world.faults.add(fault)
        if wanted.for_s is not None:
            self._lifts.append((now + wanted.for_s, fault))
        who = wanted.caller or "everybody"
        told = "answers" if wanted.how == "refuse" else f"{wanted.how}, then answers"
        self._announce(f"{wanted.verb} {told} {wanted.status} to {who}")

    def _person(self, act: Person) -> None:
        kubernetes = self._world.fleet.kubernetes
        node = self._world.fleet.node_name(act.node)
        match act.do:
            case "cordon" | "uncordon":
                body = {"spec": {"unschedulable": True if act.do == "cordon" else None}}
                kubernetes.act_as(
                    "person",
                    "PATCH",
                    f"/api/v1/nodes/{node}",
                    body=json.dumps(body).encode(),
                    content_type="application/strategic-merge-patch+json",
                )
            case "delete_pdb":
                group = "/apis/policy/v1"
                path = f"{group}/namespaces/{act.namespace}/poddisruptionbudgets/{act.name}"
                kubernetes.act_as("person", "DELETE", path)
            case "delete_pod":
                path = f"/api/v1/namespaces/{act.namespace}/pods/{act.name}"
                kubernetes.act_as("person", "DELETE", path)
            case "pause" | "resume":
                request = {
                    "cluster": self._world.fleet.cluster_name,
                    "paused": act.do == "pause",
                    "reason": act.name or "rehearsal",
                    "requested_by": "person",
                }
                self._world.stack.start_execution(request, machine="SetPause")
            case "approve" | "deny":
                request = {
                    "incident_id": self._asking(node),
                    "answer": "yes" if act.do == "approve" else "no",
                    "why": act.name or "rehearsal",
                    "answered_by": "person",
                }
                self._world.stack.start_execution(request, machine="AnswerApproval")
            case "stop_execution":
                for execution in self._world.stack.executions():
                    if execution.status == "RUNNING":
                        self._world.stack.stop_execution(execution.arn, cause="a person stopped it")
        self._announce(f"a person: {act.do} {node or act.name}".rstrip())

    def _asking(self, node: str) -> str:
        """Return the incident whose request is the newest; of this node, if one is named."""
        for event in reversed(self._world.stack.events()):
            is_wanted = not node or event.detail.get("node", {}).get("name") == node
            if event.detail_type == "Approval Requested" and is_wanted:
                return str(event.detail["incident_id"])
        raise ValueError(f"nobody was asked about {node or 'any node'} yet")
