"""What comes after a step that failed for good: the next rung, or a person.

The ladder goes on only where the repair itself has failed. A node that could not be drained is not
replaced, what is unknown is no reason for a stronger repair, and trouble of our own (a lost lease,
a record that keeps changing) is not mended by ending an instance.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from nodemend.domain.events import DetailType
from nodemend.domain.faults import Rung
from nodemend.domain.history import (
    PastIncident,
    Subject,
    attempts_of,
    generation_of,
    gpu,
    instance,
    tried,
)
from nodemend.domain.incidents import (
    Incident,
    IncidentState,
    Outcome,
    decide_end,
    move,
    record,
)
from nodemend.domain.nodes import NodeRef
from nodemend.domain.policy import Policy
from nodemend.domain.reasons import Reason

CHURN_WINDOW = timedelta(hours=24)
"""Replacements further apart than this are not in a row; a day, as the daily rate counts."""

MAX_REPLACEMENTS_OF_REPLACEMENTS = 1
"""Of a replacement that is sick itself one more is made (case R50)."""

LADDER_STATES = frozenset(
    {IncidentState.REPAIRING, IncidentState.CHECKING, IncidentState.VALIDATING}
)
"""Where a failure is one of the repair; before, nothing was repaired yet, after, it is proven."""

NEXT_RUNG_CODES = frozenset({"reboot_not_observed", "reboot_unhealthy", "repair_refused"})
"""Reasons that say that this repair did not work here. A failed replacement has no next rung but
the person: its instance is gone."""

_CAPACITY_ACTION = re.compile(r"^(ec2|autoscaling):")
"""How the reason begins if it was the capacity's API that IAM denied: only another repair may be
allowed then. Where DynamoDB or STS is denied, no repair could be made or noted."""


def next_rung(incident: Incident, reason: Reason) -> Rung:
    """Return what is tried after this failure; `human` if nothing is.

    Example: a reboot that was not observed, under [reboot, replace, human], is followed by replace.
    """
    may_go_on = (
        incident.state in LADDER_STATES
        and not incident.dry_run
        and incident.drain is not None
        and incident.drain.is_drained
        and incident.rung is Rung.REBOOT
        and is_about_repair(reason)
    )
    following = incident.plan[incident.rung_index + 1 :]
    return following[0] if may_go_on and following else Rung.HUMAN


def is_about_repair(reason: Reason) -> bool:
    """Tell whether the reason says that this repair did not work or is not allowed here."""
    is_denied = reason.code == "aws_forbidden" and bool(_CAPACITY_ACTION.match(reason.text))
    return is_denied or reason.code in NEXT_RUNG_CODES


def escalate(
    incident: Incident, reason: Reason, *, step: str, now: datetime, error: str = ""
) -> Incident:
    """Return the incident on its next rung, or with its end decided, and the event that says why.

    On the next rung it stays in ESCALATING until start_repair takes it up, so that a repeated step
    sees that this was decided. The plan's last rung is a person: the node stays as it is, and a
    cordoned node stays cordoned. In a dry run nothing was touched and nobody has to come, so the
    incident is skipped.
    """
    following = next_rung(incident, reason)
    escalating = move(incident, IncidentState.ESCALATING, now)
    recorded = record(
        escalating,
        DetailType.INCIDENT_ESCALATED,
        step=step,
        reason=reason,
        now=now,
        data={"error": error, "next_rung": following} if error else {"next_rung": following},
    )
    if following is Rung.HUMAN:
        outcome = Outcome.SKIPPED if incident.dry_run else Outcome.NEEDS_HUMAN
        return decide_end(recorded, outcome, reason)
    made = (recorded.repair,) if recorded.repair else ()
    return replace(
        recorded,
        rung_index=recorded.rung_index + 1,
        attempts=(*recorded.attempts, *made),
        repair=None,
    )


def is_on_next_rung(incident: Incident) -> bool:
    """Tell whether an escalation has decided on another repair that has not begun yet."""
    return incident.state is IncidentState.ESCALATING and incident.verdict is None


_REMEMBERED = frozenset(
    {
        Outcome.REPLACED,
        Outcome.REBOOTED,
        Outcome.RECOVERED,
        Outcome.ABORTED_BY_OPERATOR,
        Outcome.NEEDS_HUMAN,
    }
)
"""Ends that say something of the machine; what was only observed or skipped does not."""


def past_of(closed: Incident) -> PastIncident | None:
    """Return the closed incident as the record of its machine keeps it; None: not at all.

    A rehearsal is not remembered, and neither is what ended before it was admitted.
    """
    is_told = closed.outcome in _REMEMBERED and not closed.dry_run and bool(closed.execution_arn)
    if not is_told or closed.outcome is None:
        return None
    at = closed.closed_at or closed.state_since
    replacement = closed.repair.replacement_instance_id if closed.repair else ""
    earlier = generation_of(closed.history, closed.node.instance_id, at - CHURN_WINDOW)
    return PastIncident(
        incident_id=closed.id,
        at=at,
        fault=closed.primary.fault_words if closed.primary else str(closed.fault_class),
        outcome=str(closed.outcome),
        instance_id=closed.node.instance_id,
        gpu_uuids=closed.gpu_uuids,
        rungs=closed.rungs_asked,
        replacement_instance_id=replacement,
        generation=earlier + 1 if replacement else 0,
    )


def allowed_plan(
    plan: tuple[Rung, ...], incident: Incident, now: datetime
) -> tuple[tuple[Rung, ...], Reason | None]:
    """Return the plan without a replacement of a replacement of a replacement, and why.

    What goes wrong three times in a row in one place is not the machine: the image, the group or
    the judgement is (case R50). A person who asks by hand has looked.
    """
    if incident.primary is None or Rung.REPLACE not in plan:
        return plan, None
    made = generation_of(incident.history, incident.node.instance_id, now - CHURN_WINDOW)
    if made <= MAX_REPLACEMENTS_OF_REPLACEMENTS:
        return plan, None
    hours = int(CHURN_WINDOW.total_seconds()) // 3600
    return tuple(rung for rung in plan if rung is not Rung.REPLACE), Reason(
        "replacement_of_replacement",
        f"{incident.node.name} is replacement number {made} in a row within {hours} h: a new "
        "instance does not help here",
    )


def subjects_of(node: NodeRef, gpu_uuids: Iterable[str]) -> tuple[Subject, ...]:
    """Return whose record an incident belongs to: the machine's and its sick GPUs'."""
    machine = (instance(node.instance_id),) if node.instance_id else ()
    return (*machine, *(gpu(uuid) for uuid in gpu_uuids))


def offence_of(history: Sequence[PastIncident]) -> Reason:
    """Return the record in one sentence, for the timeline."""
    told = "; ".join(
        f"{past.at.date()} {past.fault} {past.outcome}"
        + (f" after {', '.join(past.rungs)}" if past.rungs else "")
        + (f" by {past.replacement_instance_id}" if past.replacement_instance_id else "")
        for past in history
    )
    return Reason("repeat_offender", f"{len(history)} earlier incidents are known: {told}")


def first_rung(
    plan: tuple[Rung, ...], incident: Incident, policy: Policy, now: datetime
) -> tuple[int, Reason | None]:
    """Return with which rung of the plan the incident begins, and why, if not with the first.

    The same GPU that is faulty again within the policy's window begins after the strongest repair
    that was made for it; a machine that had its number of repairs is a person's. What a person
    asks for by hand begins at the beginning.
    """
    if incident.primary is None:
        return 0, None
    window = policy.attempts.window_s
    made = attempts_of(incident.history, incident.node.instance_id, now - timedelta(seconds=window))
    if made >= policy.attempts.per_node:
        return len(plan), Reason(
            "attempts_exhausted",
            f"{incident.node.name} ({incident.node.instance_id}) had {made} of at most "
            f"{policy.attempts.per_node} repairs within {window} s",
        )
    since = now - timedelta(seconds=policy.repeat_window_s)
    gpus = frozenset({incident.primary.gpu_uuid} - {""})
    earlier = tried(incident.history, gpus, incident.node.instance_id, since)
    spent = {rung for entry in earlier for rung in entry.rungs}
    first = max((plan.index(rung) + 1 for rung in spent if rung in plan), default=0)
    if not first:
        return 0, None
    last = max(earlier, key=lambda entry: entry.at)
    what = f"GPU {incident.primary.gpu_uuid}" if gpus else incident.node.instance_id
    return first, Reason(
        "repeat_offender",
        f"{what} is faulty again: {last.fault} of {last.at.date()} ended {last.outcome} "
        f"({', '.join(last.rungs)}, incident {last.incident_id})",
    )


def reason_of(error_name: str, message: str) -> Reason:
    """Return the reason for an error that ended a step.

    Example:
        >>> reason_of("ClusterForbiddenError", "no").code
        'cluster_forbidden'
        >>> reason_of("States.Timeout", "").code
        'step_timed_out'
    """
    platform = {
        "States.Timeout": "step_timed_out",
        "Sandbox.Timedout": "step_timed_out",
    }
    code = platform.get(error_name)
    if code is None:
        bare = error_name.removesuffix("Error").replace(".", "_")
        code = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", bare).lower() or "unknown_error"
    return Reason(code, message or f"the step ended with {error_name}")
