"""Open incidents past their age: told once for each state in which they stay too long."""

from collections.abc import Sequence
from datetime import datetime

from nodemend.application.ports import Announcement
from nodemend.application.watching import Matter, WatchPorts, tell_once
from nodemend.contracts.events import incident_detail
from nodemend.domain.events import DetailType, IncidentEvent
from nodemend.domain.incidents import Incident
from nodemend.domain.reasons import Reason
from nodemend.domain.remedies import remedy_for
from nodemend.domain.watch import STEP, why_overdue


def watch_overdue(cluster: str, incidents: Sequence[Incident], ports: WatchPorts) -> int:
    """Tell of the cluster's overdue incidents; return how many there are, dry runs left out.

    The record is not written: its execution may be at work, and a write of ours would only cost it
    a retry.
    """
    now = ports.clock.now()
    overdue = [
        (incident, *late)
        for incident in incidents
        if incident.cluster == cluster and (late := why_overdue(incident, now)) is not None
    ]
    tell_once(cluster, [_matter(*one) for one in overdue], ports)
    return sum(not incident.dry_run for incident, _, _ in overdue)


def _matter(incident: Incident, reason: Reason, due: datetime) -> Matter:
    def event(since: datetime) -> Announcement:
        told = IncidentEvent(
            event_id=f"{incident.id}-overdue-{incident.state}",
            detail_type=DetailType.INCIDENT_OVERDUE,
            at=since,
            step=STEP,
            dry_run=incident.dry_run,
            reason=reason,
            data={
                "state": incident.state,
                "since": incident.state_since,
                "remedy": remedy_for(reason.code, needs_human=not incident.dry_run),
            },
        )
        detail = dict(incident_detail(incident, told))
        return Announcement(told.event_id, told.detail_type, told.at, detail)

    return Matter(f"overdue/{incident.id}/{incident.state}", due, event)
