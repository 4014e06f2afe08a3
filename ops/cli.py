"""The `nodemend` command."""

import argparse
import getpass
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import boto3
from botocore.exceptions import BotoCoreError

from nodemend.domain.faults import FaultClass
from ops.answering import answer_approval
from ops.coverage import metrics_of, place_of, report
from ops.pausing import set_pause
from ops.policy_check import Question, explain, foretell
from ops.policy_deploy import ALL_AT_ONCE, deploy_policy
from ops.policy_file import read_policy
from ops.stack import CommandError, Stack

StackOf = Callable[[str, str | None], Stack]


def main(
    arguments: Sequence[str] | None = None,
    *,
    stack_of: StackOf | None = None,
    now: Callable[[], datetime] | None = None,
) -> int:
    """Run the command line.

    Args:
        arguments: the words after the command's name; None: those of the process.
        stack_of: opens a stack by name and region; tests give their own.
        now: tells the time.

    Returns:
        The exit status: 0, 1 with one line on standard error, or argparse's 2.
    """
    options = _parser().parse_args(arguments)
    try:
        options.run(options, stack_of or _stack, now or _now)
    except CommandError as error:
        print(f"nodemend: {error}", file=sys.stderr)
        return 1
    return 0


def _stack(name: str, region: str | None) -> Stack:
    try:
        return Stack(name, boto3.Session(region_name=region))
    except BotoCoreError as error:
        raise CommandError(str(error)) from error


def _now() -> datetime:
    return datetime.now(UTC)


# --- commands -----------------------------------------------------------------------------------


def _set_pause(options: argparse.Namespace, stack_of: StackOf, _: Callable[[], datetime]) -> None:
    print(
        set_pause(
            stack_of(options.stack, options.region),
            cluster=options.cluster,
            paused=options.command == "pause",
            reason=options.reason,
            requested_by=options.requested_by or _user(),
        )
    )


def _answer(options: argparse.Namespace, stack_of: StackOf, _: Callable[[], datetime]) -> None:
    print(
        answer_approval(
            stack_of(options.stack, options.region),
            incident_id=options.incident,
            is_yes=options.command == "approve",
            why=options.why,
            rung=options.rung,
            answered_by=options.answered_by or _user(),
        )
    )


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError) as error:
        raise CommandError("--by: who asks cannot be told from the system; name it") from error


def _check(options: argparse.Namespace, _: StackOf, now: Callable[[], datetime]) -> None:
    policy, _content = read_policy(options.file)
    lines = list(explain(policy))
    if options.node:
        question = Question(
            node=options.node,
            labels=options.labels,
            fault=options.fault,
            code=options.code,
            model=options.model,
            rule_id=options.rule,
            fleet=options.fleet,
        )
        lines += ["", *foretell(policy, question, now())]
    print("\n".join(lines))


def _deploy(options: argparse.Namespace, stack_of: StackOf, _: Callable[[], datetime]) -> None:
    done = deploy_policy(
        stack_of(options.stack, options.region), options.file, strategy=options.strategy
    )
    baking = (
        "; AppConfig takes no other deployment until its bake time is over"
        if done.state == "BAKING"
        else ""
    )
    print(f"policy version {done.version} is in force within 30 s{baking}")


def _coverage(options: argparse.Namespace, stack_of: StackOf, now: Callable[[], datetime]) -> None:
    stack = stack_of(options.stack, options.region)
    cluster, policy = place_of(stack, options.cluster, options.policy)
    lines, blind = report(cluster, policy, metrics_of(stack), now())
    print("\n".join(lines))
    if blind:
        raise CommandError(f"{blind} rules are blind in {cluster.name}")


# --- words --------------------------------------------------------------------------------------


def labels_of(text: str) -> dict[str, str]:
    """Parse `key=value,key=value`."""
    pairs = [pair.partition("=") for pair in text.split(",") if pair]
    if any(not key or not equals for key, equals, _ in pairs):
        raise argparse.ArgumentTypeError(f"{text!r} is not key=value,key=value")
    return {key: value for key, _, value in pairs}


def _fault(text: str) -> FaultClass:
    try:
        return FaultClass(text)
    except ValueError:
        known = ", ".join(FaultClass)
        raise argparse.ArgumentTypeError(f"no fault class {text!r}: use one of {known}") from None


def _fleet(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 5000:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 to 5000")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="nodemend", description="Operate nodemend.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, told in (
        ("pause", "nothing new starts in the cluster, and nothing more is changed"),
        ("resume", "let a paused cluster go on"),
    ):
        command = commands.add_parser(name, help=told, description=told)
        command.add_argument("--cluster", required=True, help="as the policy names it")
        command.add_argument("--reason", required=True, help="stands in events and the record")
        command.add_argument("--by", dest="requested_by", default="", help="who asks; default: you")
        _add_stack(command)
        command.set_defaults(run=_set_pause)
    for name, told in (
        ("approve", "say yes to an incident that asks"),
        ("deny", "say no to an incident that asks; the node stays, or becomes, as it was"),
    ):
        command = commands.add_parser(name, help=told, description=told)
        command.add_argument("incident", help="its id, from the request")
        command.add_argument("--why", required=name == "deny", default="", help="stands in events")
        command.add_argument(
            "--rung", choices=("reboot", "replace"), default=None, help="the repair that is meant"
        )
        command.add_argument("--by", dest="answered_by", default="", help="default: you")
        _add_stack(command)
        command.set_defaults(run=_answer)
    coverage = commands.add_parser("coverage", help="what the rules can see, and what is blind")
    coverage.add_argument("--cluster", required=True, help="as the policy names it")
    coverage.add_argument("--policy", type=Path, default=None, help="file that names the cluster")
    _add_stack(coverage)
    coverage.set_defaults(run=_coverage)
    policy = commands.add_parser("policy", help="check or deploy a policy")
    verbs = policy.add_subparsers(dest="verb", required=True)
    _add_check(verbs.add_parser("check", help="explain a policy, and what it would do"))
    deploy = verbs.add_parser("deploy", help="check a policy, and put it into force")
    deploy.add_argument("file", type=Path)
    deploy.add_argument(
        "--strategy", default=ALL_AT_ONCE, help=f"AppConfig strategy; default {ALL_AT_ONCE}"
    )
    _add_stack(deploy)
    deploy.set_defaults(run=_deploy)
    return parser


def _add_check(check: argparse.ArgumentParser) -> None:
    check.add_argument("file", type=Path)
    check.add_argument("--node", default="", help="ask what would happen to this node")
    check.add_argument("--labels", type=labels_of, default={}, metavar="K=V,…")
    check.add_argument("--fault", type=_fault, default=FaultClass.XID, help="default: xid")
    check.add_argument("--code", type=int, default=None, help="the XID")
    check.add_argument("--model", default="", help="the GPU's model, for XIDs: 'NVIDIA H200'")
    check.add_argument("--rule", default="", help="the rule that found it, see docs/RULES.md")
    check.add_argument("--fleet", type=_fleet, default=100, help="nodes of the cluster")
    check.set_defaults(run=_check)


def _add_stack(command: argparse.ArgumentParser) -> None:
    command.add_argument("--stack", default="nodemend", help="CloudFormation stack")
    command.add_argument("--region", default=None, help="default: that of your AWS profile")


if __name__ == "__main__":
    sys.exit(main())
