"""The state machines as graphs, and how large an execution of one can grow.

`tools/lint_asl.py` judges what this reads and computes.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from nodemend.contracts.policy import PolicyDocument, worst_case_loops
from nodemend.domain.policy import ApprovalPoint, wait_after

INVOKE = "arn:aws:states:::lambda:invoke"
EVENTS = {"Task": 5, "Choice": 2, "Wait": 2, "Pass": 2, "Succeed": 2, "Fail": 1}
"""History events of one visit. A task is entered, scheduled, started, succeeded or failed, left."""
EVENTS_PER_RETRY = 3
EVENTS_OF_EXECUTION = 2

State = dict[str, Any]


@dataclass(frozen=True)
class Machine:
    """One state machine of the template, with the functions behind its tasks."""

    id: str
    definition: dict[str, Any]
    substitutions: Mapping[str, str]
    """Logical id of the resource by the name of its substitution."""
    timeouts_s: Mapping[str, int]
    """Time-out of every function of the template, by logical id."""

    @property
    def start(self) -> str:
        """Name of the first state."""
        return str(self.definition.get("StartAt"))

    @property
    def states(self) -> dict[str, State]:
        """States by name."""
        found: dict[str, State] = self.definition["States"]
        return found

    @property
    def tasks(self) -> dict[str, State]:
        """Task states by name."""
        return {name: state for name, state in self.states.items() if state["Type"] == "Task"}

    def function_of(self, task: State) -> str | None:
        """Return the logical id of the function that a task runs, if the template has it."""
        given = str(task.get("Parameters", {}).get("FunctionName"))
        name = re.fullmatch(r"\$\{(\w+)\}", given)
        function = self.substitutions.get(name[1]) if name else None
        is_known = task.get("Resource") == INVOKE and function in self.timeouts_s
        return function if is_known else None

    @cached_property
    def reaches(self) -> Mapping[str, frozenset[str]]:
        """States that can follow each state, however late."""
        return {name: self._from(name) for name in self.states}

    def _from(self, name: str, *, is_one_rung: bool = False) -> frozenset[str]:
        found: set[str] = set()
        ahead = self.targets(name, is_one_rung=is_one_rung)
        while ahead:
            target = ahead.pop()
            if target in self.states and target not in found:
                found.add(target)
                ahead += self.targets(target, is_one_rung=is_one_rung)
        return frozenset(found)

    def targets(self, name: str, *, is_one_rung: bool = False) -> list[str]:
        """Return where a state can lead to; on one rung, without the ways to the next."""
        return [
            target
            for way, target in _ways(self.states[name])
            if not (is_one_rung and is_ladder(way))
        ]

    @cached_property
    def _reaches_on_one_rung(self) -> Mapping[str, frozenset[str]]:
        return {name: self._from(name, is_one_rung=True) for name in self.states}

    def loop_of(self, name: str) -> frozenset[str]:
        """Return the states of the loop that a state is in on one rung; empty if it is in none."""
        reaches = self._reaches_on_one_rung
        return frozenset(n for n in reaches[name] if name in reaches[n])

    @cached_property
    def on_one_rung(self) -> frozenset[str]:
        """States that an execution can come to without another rung, or a yes for one."""
        return self._reaches_on_one_rung[self.start] | {self.start}

    @cached_property
    def ladder(self) -> frozenset[str]:
        """States that an execution may come to again because the ladder has another rung."""
        return frozenset(
            name
            for name in self.states
            if {n for n in self.reaches[name] if name in self.reaches[n]} > self.loop_of(name)
        )


LADDER_WORDS = frozenset({"repair", "approve_repair"})
"""Words that lead to a rung once more: the plan bounds them, not a deadline. `repair` is said once
for each further rung, and once more for a reboot whose call had no answer; `approve_repair` once
for each rung that nobody was asked about yet."""

LADDER_VISITS = 4
"""How often they can be said: a plan holds at most two repairs (contracts/policy.py)."""


def is_ladder(rule: Mapping[str, Any]) -> bool:
    """Tell whether a rule of a Choice leads to a rung once more."""
    return rule.get("Variable") == "$.next" and rule.get("StringEquals") in LADDER_WORDS


def _ways(state: State) -> Iterator[tuple[State, str]]:
    for key in ("Next", "Default"):
        if key in state:
            yield state, state[key]
    for way in (*state.get("Choices", ()), *state.get("Catch", ())):
        yield way, way["Next"]


def edges(state: State) -> Iterator[tuple[str, str]]:
    """Yield (why, target) of each way out of a state: the caught names, or an empty string."""
    for way, target in _ways(state):
        yield ",".join(way.get("ErrorEquals", ())), target


# --- reading ------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """YAML with CloudFormation's tags: `!Tag value` becomes `{"Tag": value}`."""


def _construct(loader: _Loader, suffix: str, node: yaml.Node) -> dict[str, Any]:
    if isinstance(node, yaml.ScalarNode):
        return {suffix: loader.construct_scalar(node)}
    if isinstance(node, yaml.SequenceNode):
        return {suffix: loader.construct_sequence(node, deep=True)}
    if isinstance(node, yaml.MappingNode):
        return {suffix: loader.construct_mapping(node, deep=True)}
    raise TypeError(f"unreadable value of !{suffix}")


_Loader.add_multi_constructor("!", _construct)


def load_template(path: Path) -> dict[str, Any]:
    """Read a SAM template."""
    loaded: dict[str, Any] = yaml.load(path.read_text(), Loader=_Loader)  # noqa: S506 - a SafeLoader
    return loaded


def load_machines(path: Path) -> list[Machine]:
    """Return every state machine of a SAM template."""
    template = load_template(path)
    default_s = template.get("Globals", {}).get("Function", {}).get("Timeout", 3)
    timeouts_s = {
        name: int(resource["Properties"].get("Timeout", default_s))
        for name, resource in template["Resources"].items()
        if resource["Type"] == "AWS::Serverless::Function"
    }
    machines = []
    for name, resource in template["Resources"].items():
        if resource["Type"] == "AWS::Serverless::StateMachine":
            properties = resource["Properties"]
            text = (path.parent / properties["DefinitionUri"]).read_text()
            substitutions = {
                key: str(next(iter(value.values()))).removesuffix(".Arn")
                for key, value in properties.get("DefinitionSubstitutions", {}).items()
            }
            machines.append(Machine(name, yaml.safe_load(text), substitutions, timeouts_s))
    return machines


# --- how large an execution can grow ------------------------------------------------------------


def polls_of(policy: PolicyDocument) -> dict[str, int]:
    """Return how often each waiting step can wait under a policy, as its use case counts."""
    check, deadlines = policy.waits.check_poll_s, policy.deadlines
    repairs = (deadlines.reboot_s, deadlines.replace_s)
    return {
        "VerifyFault": worst_case_loops(check, deadlines.verify_s),
        **_approval_polls(policy),
        "DrainNode": worst_case_loops(policy.waits.drain_poll_s, deadlines.drain_s),
        # Each repair of the ladder is waited for in its turn.
        "CheckRepair": sum(worst_case_loops(check, repair_s) for repair_s in repairs),
        "ValidateNode": sum(
            _validation_polls(check, policy.hold_down_s, repair_s) for repair_s in repairs
        ),
    }


def _approval_polls(policy: PolicyDocument) -> dict[str, int]:
    """Return the polls of the steps that wait for a yes, and then for a clear look at the fault.

    A yes before the cordon is for all repairs. Is the first rung one that needs none, the second
    may ask before its repair instead; so two requests are the most in any case.
    """
    if policy.approval is None:
        return {"ApproveCordon": 0, "ApproveRepair": 0}
    once = worst_case_loops(policy.waits.approval_poll_s, policy.approval.timeout_s)
    once += worst_case_loops(policy.waits.check_poll_s, policy.deadlines.verify_s)
    is_cordon = policy.approval.before is ApprovalPoint.CORDON
    return {
        "ApproveCordon": once if is_cordon else 0,
        "ApproveRepair": once if is_cordon else 2 * once,
    }


def _validation_polls(check: tuple[int, ...], hold_down_s: int, repair_s: int) -> int:
    """Return the polls of a validation that is found unclean whenever that costs most polls.

    Clean, it waits for what is left of the hold-down, which may be short. The deadline is looked at
    when it is unclean, so that a last hold-down may begin just before it.
    """
    polls = elapsed_s = 0
    is_over = False
    while not is_over:
        is_over = elapsed_s >= hold_down_s + repair_s
        left_s = hold_down_s
        while left_s > 0:
            left_s -= min(wait_after(check, polls), left_s)
            polls += 1
        elapsed_s += hold_down_s + wait_after(check, polls)
        polls += 1
    return polls


def history_events(
    machine: Machine, policy: PolicyDocument, *, retries_of_polls: bool = False
) -> int:
    """Return the most events that an execution's history can hold under a policy.

    Each task on the way uses up all its retries once; with `retries_of_polls`, in every poll.
    """
    polls = polls_of(policy)

    def cost(name: str, rounds: int) -> int:
        state = machine.states[name]
        attempts = sum(int(retrier.get("MaxAttempts", 3)) for retrier in state.get("Retry", []))
        retries = EVENTS_PER_RETRY * attempts * (rounds if retries_of_polls else 1)
        return EVENTS[state["Type"]] * rounds + retries

    @cache
    def longest(name: str) -> int:
        """Count from a state on; a loop is gone through as a whole, then left for good."""
        part = machine.loop_of(name) or {name}
        rounds = 1 + sum(polls.get(member, 0) for member in part)
        onwards = {target for m in part for target in machine.targets(m, is_one_rung=True)} - part
        here = sum(cost(member, rounds) for member in part)
        return here + max((longest(target) for target in onwards), default=0)

    def rounds_aside(name: str) -> int:
        """Count the rounds of a loop that only such a word leads to: it is on no other way."""
        is_aside = name not in machine.on_one_rung
        return sum(polls.get(member, 0) for member in machine.loop_of(name)) if is_aside else 0

    again = LADDER_VISITS * sum(cost(name, 1) for name in machine.ladder)
    aside = sum(cost(name, rounds) for name in machine.states if (rounds := rounds_aside(name)))
    return longest(machine.start) + again + aside + EVENTS_OF_EXECUTION


Shape = Callable[[int], dict[str, Any]]
_LONGEST = {"verify_s": 86_400, "drain_s": 604_800, "replace_s": 86_400, "reboot_s": 86_400}
_SHORTEST = dict.fromkeys(_LONGEST, 1)
EXTREMES: Mapping[str, Shape] = {
    "drain each second": lambda n: {
        "waits": {"drain_poll_s": [1]},
        "deadlines": {**_SHORTEST, "drain_s": n},
    },
    "verify each second": lambda n: {
        "waits": {"check_poll_s": [1]},
        "deadlines": {**_SHORTEST, "verify_s": n},
    },
    "check each second": lambda n: {
        "waits": {"check_poll_s": [1]},
        "deadlines": {**_SHORTEST, "replace_s": n},
    },
    "hold down each second": lambda n: {
        "waits": {"check_poll_s": [1]},
        "deadlines": _SHORTEST,
        "hold_down_s": n,
    },
    "a second of hold-down between long polls": lambda n: {
        "waits": {"check_poll_s": [max(1, 3600 - n)]},
        "deadlines": {**_SHORTEST, "replace_s": 86_400},
        "hold_down_s": 1,
    },
    "ask before the cordon each second": lambda n: {
        "waits": {"check_poll_s": [3600], "approval_poll_s": [1]},
        "deadlines": _SHORTEST,
        "approval": {"before": "cordon", "timeout_s": n},
    },
    "ask before each repair each second": lambda n: {
        "waits": {"check_poll_s": [3600], "approval_poll_s": [1]},
        "deadlines": _SHORTEST,
        "approval": {"before": "repair", "timeout_s": n},
    },
    "each step polls fast at first, and asks": lambda n: {
        "waits": {
            "check_poll_s": [1] * n + [3600],
            "drain_poll_s": [1] * n + [3600],
            "approval_poll_s": [1] * n + [3600],
        },
        "deadlines": _LONGEST,
        "approval": {"before": "repair", "timeout_s": 86_400},
    },
    "each step polls fast at first": lambda n: {
        "waits": {"check_poll_s": [1] * n + [3600], "drain_poll_s": [1] * n + [3600]},
        "deadlines": _LONGEST,
    },
    "each step polls fast and ends": lambda n: {
        "waits": {"check_poll_s": [1], "drain_poll_s": [1]},
        "deadlines": dict.fromkeys(_LONGEST, n),
        "hold_down_s": n,
    },
}
"""Kinds of policy that poll more often the larger `n` is."""


@cache
def extreme_policies() -> dict[str, PolicyDocument]:
    """Return, of each kind, the policy with the most polls that the model still accepts."""
    found = {name: _largest_accepted(shape) for name, shape in EXTREMES.items()}
    return {name: policy for name, policy in found.items() if policy}


def _largest_accepted(shape: Shape) -> PolicyDocument | None:
    found, low, high = None, 1, 86_400
    while low <= high:
        middle = (low + high) // 2
        try:
            document = {"schema_version": 1, "hold_down_s": 0} | shape(middle)
            found = PolicyDocument.model_validate(document)
            low = middle + 1
        except ValidationError:
            high = middle - 1
    return found


def longest_run_s() -> int:
    """Return how long the waiting steps may take in all at the limits of the policy's model."""
    schema = PolicyDocument.model_json_schema()
    deadlines = schema["$defs"]["DeadlinesDocument"]["properties"]
    verify_s, drain_s, replace_s, reboot_s = (
        int(deadlines[name]["maximum"]) for name in ("verify_s", "drain_s", "replace_s", "reboot_s")
    )
    hold_down_s = int(schema["properties"]["hold_down_s"]["maximum"])
    asked_s = int(schema["$defs"]["ApprovalDocument"]["properties"]["timeout_s"]["maximum"])
    # Each repair has its time twice, to happen and to be proven, and two hold-downs; a yes may be
    # asked for twice, and is followed by another look.
    asking_s = 2 * (asked_s + verify_s)
    return verify_s + asking_s + drain_s + 2 * (replace_s + reboot_s) + 4 * hold_down_s
