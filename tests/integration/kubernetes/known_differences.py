"""Exchanges that the emulator does not answer as recorded, with the reason.

An exchange on this list that passes fails its test: the list only ever shrinks by being edited.
"""

from collections.abc import Mapping
from typing import Final

_NO_DISCOVERY: Final = (
    "API discovery is not emulated: the clients here are told their paths by their own code"
)
_NO_EVENTS_V1: Final = (
    "events.k8s.io/v1 is not emulated: nodemend writes core/v1 Events, which every version serves"
)

KNOWN_DIFFERENCES: Final[Mapping[str, Mapping[str, str]]] = {
    "eviction": {},
    "pdb": {},
    "nodes": {},
    "pods": {},
    "access": {},
    "crd": {"discovery-group-version": _NO_DISCOVERY},
    "events": {
        "event-get-as-events-v1": _NO_EVENTS_V1,
        "events-v1-create": _NO_EVENTS_V1,
        "events-v1-create-again": _NO_EVENTS_V1,
        "events-v1-get-as-core": _NO_EVENTS_V1,
        "events-v1-create-without-required": _NO_EVENTS_V1,
        "events-v1-create-event-time-seconds": _NO_EVENTS_V1,
        "events-v1-create-event-time-offset": _NO_EVENTS_V1,
        "events-v1-create-long-note": _NO_EVENTS_V1,
        "events-v1-create-reporting-controller-unqualified": _NO_EVENTS_V1,
        "events-v1-create-bad-type": _NO_EVENTS_V1,
    },
    "misc": {
        "discovery-policy": _NO_DISCOVERY,
        "discovery-policy-group": _NO_DISCOVERY,
    },
}
