"""Check the state machines against the code that they run: `sam validate` does not read the ASL.

Exit code 1 and one line per problem. What is checked, and why it matters:

- names: substitutions, targets, reachability;
- errors: the Retry and Catch lists are a protocol with `domain/errors.py`;
- data: Choice states decide on exactly the words that the step before may answer, and everything is
  plain JSONPath that also the laptop pipeline's interpreter understands;
- ends: every path that the machine controls ends in CloseIncident;
- size: no policy that `contracts/policy.py` accepts can outgrow an execution's 25,000 history
  events or its time-out.
"""

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel

from nodemend.contracts import steps
from nodemend.contracts.policy import PolicyDocument
from nodemend.domain import errors

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.asl import (  # noqa: E402 - a script sees its own folder only
    INVOKE,
    Machine,
    edges,
    extreme_policies,
    history_events,
    load_machines,
    longest_run_s,
    polls_of,
)

REMEDIATION = "RemediateNode"
"""The machine that the protocol of errors and ends is about; others need only be well formed."""
ADMIT = "AdmitRemediation"
"""The step that opens the incident: input that it refuses has none."""
CLOSE = "CloseIncident"
MAX_HISTORY = 25_000
TASK_MARGIN_S = 10
"""Step Functions ends a task later than Lambda ends the function, so that the function's own
time-out is what is reported."""
PLAIN_PATH = re.compile(r"\$(\.[A-Za-z_]\w*)*|\$\$\.Execution\.(Id|Name|Input)")
JSONATA = frozenset({"QueryLanguage", "Arguments", "Output", "Assign", "Condition"})


def leaves(root: type[errors.NodemendError]) -> frozenset[str]:
    """Return the names of the classes below a root that are raised: ASL matches exact names."""
    below = root.__subclasses__()
    return frozenset[str]().union(*map(leaves, below)) if below else frozenset({root.__name__})


RETRYABLE = leaves(errors.RetryableError)
PERMANENT = leaves(errors.PermanentError)
PLATFORM = frozenset(errors.PLATFORM_ERRORS)
TIMEOUTS = frozenset(errors.TIMEOUT_ERRORS)


# --- checks: each yields one line per problem ---------------------------------------------------


def check_substitutions(machine: Machine) -> Iterator[str]:
    """Every `${Name}` is defined, and every definition used."""
    used = set(re.findall(r"\$\{(\w+)\}", yaml.safe_dump(machine.definition)))
    for name in sorted(used - set(machine.substitutions)):
        yield f"${{{name}}} is not in DefinitionSubstitutions"
    for name in sorted(set(machine.substitutions) - used):
        yield f"substitution {name} is not used"
    for name, task in machine.tasks.items():
        if machine.function_of(task) is None:
            yield f"{name}: must invoke a function of the template by {INVOKE}"


def check_targets(machine: Machine) -> Iterator[str]:
    """Every target exists."""
    if machine.start not in machine.states:
        yield f"StartAt {machine.start!r} is no state"
    for name, state in machine.states.items():
        for _, target in edges(state):
            if target not in machine.states:
                yield f"{name}: target {target!r} does not exist"


def check_reachability(machine: Machine) -> Iterator[str]:
    """Every state can be come to."""
    reached = machine.reaches.get(machine.start, frozenset()) | {machine.start}
    for name in sorted(set(machine.states) - reached):
        yield f"{name} is not reachable"


def check_timeouts(machine: Machine) -> Iterator[str]:
    """A task lasts ten seconds longer than its function."""
    for name, task in machine.tasks.items():
        function = machine.function_of(task)
        wanted = machine.timeouts_s[function] + TASK_MARGIN_S if function else None
        if wanted and task.get("TimeoutSeconds") != wanted:
            yield f"{name}: TimeoutSeconds is {task.get('TimeoutSeconds')}, must be {wanted}"


def check_retries(machine: Machine) -> Iterator[str]:
    """Ours and the platform's errors are retried, time-outs once, and never a wildcard."""
    for name, task in machine.tasks.items():
        retriers = task.get("Retry", [])
        named = [error for retrier in retriers for error in retrier["ErrorEquals"]]
        for error in sorted((RETRYABLE | PLATFORM) - set(named)):
            yield f"{name}: does not retry {error}"
        for error in sorted(set(named) - RETRYABLE - PLATFORM):
            yield f"{name}: must not retry {error}"
        for error in sorted({error for error in named if named.count(error) > 1}):
            yield f"{name}: retries {error} twice; the second is never used"
        for retrier in retriers:
            yield from _retrier_problems(name, retrier)


def _retrier_problems(name: str, retrier: Mapping[str, Any]) -> Iterator[str]:
    named = set(retrier["ErrorEquals"])
    if named & TIMEOUTS:
        if retrier.get("MaxAttempts") != 1 or named - TIMEOUTS:
            yield f"{name}: time-outs must have a retrier of their own with MaxAttempts 1"
        return
    if retrier.get("MaxAttempts", 3) < 1:
        yield f"{name}: {sorted(named)[0]} is not retried: MaxAttempts is 0"
    if retrier.get("JitterStrategy") != "FULL" or "MaxDelaySeconds" not in retrier:
        yield f"{name}: retry of {sorted(named)[0]} needs JitterStrategy FULL and MaxDelaySeconds"


def check_catches(machine: Machine) -> Iterator[str]:
    """Permanent errors are caught by name, the last Catch takes all the rest."""
    for name, task in machine.tasks.items():
        lists = [catcher["ErrorEquals"] for catcher in task.get("Catch", [])]
        if not lists or lists[-1] != ["States.ALL"]:
            yield f"{name}: the last Catch must be exactly States.ALL"
        named = {error for caught in lists for error in caught}
        for error in sorted(PERMANENT - named):
            yield f"{name}: does not catch {error}"
        known = RETRYABLE | PERMANENT | PLATFORM
        strange = [e for caught in lists for e in caught if e not in known]
        if lists and lists[-1] == ["States.ALL"]:
            strange.remove("States.ALL")
        for error in strange:
            yield f"{name}: catches {error}, which nothing raises"
        # What handles failures keeps the first one: its own goes beside it.
        has_one = ("failure.$", "$.failure") in _items(task.get("Parameters"))
        wanted = r"\$\.\w+" if has_one else r"\$\.failure"
        for catcher in task.get("Catch", []):
            if not re.fullmatch(wanted, str(catcher.get("ResultPath"))):
                yield f"{name}: Catch of {catcher['ErrorEquals'][0]} must keep it in $.failure"


def check_errors_are_named(machine: Machine) -> Iterator[str]:
    """Every class of errors.py is named in some state."""
    named = {
        error
        for task in machine.tasks.values()
        for handler in (*task.get("Retry", []), *task.get("Catch", []))
        for error in handler["ErrorEquals"]
    }
    for error in sorted((RETRYABLE | PERMANENT) - named):
        yield f"errors.{error} is named in no state"


def check_ends(machine: Machine) -> Iterator[str]:
    """Every path ends in CloseIncident, but for two Fail states.

    One is for input that was refused before an incident existed, the other for a close that failed
    for good: its failed execution arrives at watch_incidents.
    """
    for name, state in machine.states.items():
        if state["Type"] == "Fail":
            for source, why in _ways_to(machine, name):
                is_refused = source == ADMIT and why == "InvalidInputError"
                if source != CLOSE and not is_refused:
                    yield f"{source}: may not end in {name} without {CLOSE}"
        elif (state.get("End") or state["Type"] == "Succeed") and name != CLOSE:
            yield f"{name}: ends the execution without {CLOSE}"
        elif name != CLOSE and CLOSE not in machine.reaches[name]:
            yield f"{name}: never comes to {CLOSE}"


def _ways_to(machine: Machine, target: str) -> list[tuple[str, str]]:
    return [
        (name, why)
        for name, state in machine.states.items()
        for why, to in edges(state)
        if to == target
    ]


def check_words(machine: Machine) -> Iterator[str]:
    """A Choice knows exactly the words that the step before it may answer; its default is `close`.

    A step that always answers `close` needs none.
    """
    for name, task in machine.tasks.items():
        if task.get("OutputPath") != "$.Payload":
            yield f"{name}: OutputPath must be $.Payload, the function's own answer"
        result = _result_of(machine, name)
        if result is None:
            yield f"{name}: contracts/steps.py has no result of its function"
            continue
        field = result.model_fields.get("next")
        words = set(get_args(field.annotation)) if field else set()
        following = machine.states.get(task.get("Next", ""), {"Type": ""})
        rules = following.get("Choices", []) if following["Type"] == "Choice" else []
        known = {rule.get("StringEquals") for rule in rules if rule.get("Variable") == "$.next"}
        if len(known) != len(rules) or known != words - {"close"}:
            yield f"{name}: answers {sorted(words)}, but {task.get('Next')} decides on {known}"
        if words and following.get("Default", task.get("Next")) != CLOSE:
            yield f"{name}: the word close must lead to {CLOSE}"


def _result_of(machine: Machine, task: str) -> type[BaseModel] | None:
    """Return the model of a task's answer: that of its function, which two tasks may share."""
    function = (machine.function_of(machine.tasks[task]) or task).removesuffix("Function")
    found: type[BaseModel] | None = getattr(steps, f"{function}Result", None)
    return found


def check_data(machine: Machine) -> Iterator[str]:
    """Plain JSONPath only, and waits of as many whole seconds as the step before said."""
    for name, state in machine.states.items():
        if state["Type"] == "Wait" and state.get("SecondsPath") != "$.wait_s":
            yield f"{name}: must wait by SecondsPath $.wait_s"
        for key, value in _items(state):
            if key in JSONATA:
                yield f"{name}: {key} is JSONata, which the laptop pipeline cannot run"
            is_path = key.endswith((".$", "Path")) and value is not None
            if is_path and not PLAIN_PATH.fullmatch(str(value)):
                yield f"{name}: {key} must be a plain JSONPath, not {value!r}"


def _items(value: object) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield str(key), inner
            yield from _items(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _items(inner)


# --- size ---------------------------------------------------------------------------------------


def check_size(machine: Machine) -> Iterator[str]:
    """No accepted policy outgrows the history, nor the machine's own time-out."""
    default = PolicyDocument(schema_version=1)
    for name in sorted(n for n in machine.tasks if n in machine.loop_of(n)):
        result = _result_of(machine, name)
        wait = result.model_fields.get("wait_s") if result else None
        if name not in polls_of(default):
            yield f"{name} is in a loop that no deadline of the policy bounds"
        if not wait or wait.annotation is not int:
            yield f"{name}: its wait_s must be whole seconds"
    most = history_events(machine, default, retries_of_polls=True)
    if most >= MAX_HISTORY:
        yield f"the default policy allows {most} history events, AWS {MAX_HISTORY}"
    for kind, policy in extreme_policies().items():
        most = history_events(machine, policy)
        if most >= MAX_HISTORY:
            yield (
                f"contracts/policy.py accepts a policy ({kind}: polls {polls_of(policy)}) that "
                f"allows {most} history events, AWS {MAX_HISTORY}"
            )
    if machine.definition.get("TimeoutSeconds", 0) <= longest_run_s():
        yield f"TimeoutSeconds must be more than the {longest_run_s()} s that a policy may allow"


WELL_FORMED = (
    check_substitutions,
    check_targets,
    check_reachability,
    check_timeouts,
    check_retries,
    check_data,
)
PROTOCOL = (check_catches, check_errors_are_named, check_ends, check_words, check_size)


def problems_of(machine: Machine) -> list[str]:
    """Return what is wrong with a machine, one line each."""
    found = [f"{machine.id}: {line}" for check in WELL_FORMED for line in check(machine)]
    # Walks need every target; what they would say of a broken graph is noise.
    if machine.id == REMEDIATION and not list(check_targets(machine)):
        found += [f"{machine.id}: {line}" for check in PROTOCOL for line in check(machine)]
    return found


def figures_of(machine: Machine) -> str:
    """Return the sizes that check_size judges, for people."""

    def sizes(policy: PolicyDocument) -> str:
        once = history_events(machine, policy)
        always = history_events(machine, policy, retries_of_polls=True)
        return f"{once:,} ({always:,} if every poll used up its retries)"

    worst = max(extreme_policies().values(), key=lambda policy: history_events(machine, policy))
    return (
        f"{machine.id}: at most {sizes(PolicyDocument(schema_version=1))} history events by "
        f"default, {sizes(worst)} under the most extreme policy; AWS allows {MAX_HISTORY:,}"
    )


def main() -> int:
    """Check every state machine of template.yaml."""
    machines = load_machines(ROOT / "template.yaml")
    found = [line for machine in machines for line in problems_of(machine)]
    for line in found:
        print(line, file=sys.stderr)  # noqa: T201
    for machine in machines:
        if machine.id == REMEDIATION:
            print(figures_of(machine))  # noqa: T201
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
