"""Runs one recorded topic from its first to its last exchange.

`STEPS` of a topic say what happened between the recorded exchanges: the function under an
exchange's name sets the scene for it. After each exchange the controllers settle, unless a step has
paused them: the recordings were taken with hands on the controllers, too.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tests.integration.kubernetes.replay import ApiUnderTest, Exchange, Replay, load
from tests.integration.kubernetes.stage import Controls, Stage

Step = Callable[[Stage], object]
Steps = Mapping[str, Step]


@dataclass(frozen=True)
class Server:
    """What a suite runs against."""

    api: ApiUnderTest
    controls: Controls


def run_topic(topic: str, steps: Steps, server: Server) -> dict[str, list[str]]:
    """Replay a topic; return the differences of each exchange by its name."""
    replay = Replay(server.api)
    stage = Stage(replay, server.controls)
    exchanges = load(topic)
    unknown = set(steps) - {exchange.name for exchange in exchanges}
    assert not unknown, f"steps for exchanges that do not exist: {sorted(unknown)}"
    found: dict[str, list[str]] = {}
    for exchange in exchanges:
        step = steps.get(exchange.name)
        if step is not None:
            step(stage)
        found[exchange.name] = replay.differences(exchange)
        server.controls.settle()
    return found


def judge(exchange: Exchange, differences: list[str], known: Mapping[str, str]) -> None:
    """Fail for a difference that is not known, and for a known one that is none any more."""
    reason = known.get(exchange.name)
    if reason is None:
        assert not differences, "\n".join([exchange.note, *differences])
    else:
        assert differences, f"{exchange.name} now answers as recorded: take it off the list"
