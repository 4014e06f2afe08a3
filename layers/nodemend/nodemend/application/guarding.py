"""Telling what changed in a guard: stored with the change, sent afterwards, dropped when sent."""

import logging
from functools import partial

from nodemend.application.ports import Announcement, EventBus, Guards
from nodemend.application.steps import update_guard
from nodemend.contracts.events import guard_detail
from nodemend.domain.errors import NodemendError
from nodemend.domain.events import DetailType
from nodemend.domain.guard import Guard, told

logger = logging.getLogger(__name__)


def tell_guard(guard: Guard, *, guards: Guards, bus: EventBus) -> int:
    """Send the guard's events; return how many stay unsent.

    Never raises: what could not be sent stays in the item and is sent by the next dispatch with the
    same event ids, and so is what was sent by somebody who died before it could be dropped.
    """
    if not guard.events:
        return 0
    announcements = [
        Announcement(
            event_id=event.event_id,
            detail_type=DetailType.FLEET_GUARD_CHANGED,
            at=event.at,
            detail=guard_detail(guard.cluster, event),
        )
        for event in guard.events
    ]
    try:
        refused = frozenset(bus.announce(announcements))
        sent = [one.event_id for one in announcements if one.event_id not in refused]
        update_guard(guards, guard.cluster, partial(told, event_ids=sent))
    except NodemendError:
        logger.exception("changes of the guard of %s are not told yet", guard.cluster)
        return len(announcements)
    return len(refused)
