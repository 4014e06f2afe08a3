"""`python -m local run SCENARIO`: rehearse nodemend on this machine."""

import argparse
import logging
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from local.amp.prometheus import PrometheusError
from local.calls import ApiFault
from local.rehearsal import rehearse
from local.result import ResultDocument
from local.scenario import ScenarioError, load_scenario


def api_fault(text: str) -> ApiFault:
    """Parse VERB:STATUS, e.g. evict:403."""
    verb, _, status = text.partition(":")
    if not verb or not status.isdigit() or not 0 <= int(status) <= 599:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not VERB:STATUS; examples: evict:403, query:422, patch:500"
        )
    return ApiFault(verb=verb, status=int(status))


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m local", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run a scenario and judge it")
    run.add_argument("scenario", type=Path, help="a YAML file, see local/scenarios")
    run.add_argument("--json", type=Path, metavar="OUT", help="write the result here")
    run.add_argument(
        "--logs", type=Path, metavar="DIR", help="keep the functions' logs in DIR/logs"
    )
    run.add_argument(
        "--api-fault",
        type=api_fault,
        action="append",
        default=[],
        metavar="VERB:STATUS",
        help="fail every call of this verb, e.g. evict:403; may be repeated",
    )
    options = parser.parse_args(arguments)
    is_terminal = sys.stdout.isatty()
    console = Console(highlight=False, soft_wrap=True, width=None if is_terminal else 120)
    logging.basicConfig(level=logging.ERROR)
    # What the emulation meets while functions fail on purpose is told by the timeline.
    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    if options.json and not options.json.absolute().parent.is_dir():
        print(f"{options.json}: there is no folder {options.json.parent}", file=sys.stderr)
        return 2
    try:
        scenario = load_scenario(options.scenario)
        console.print(f"[bold]{scenario.name}[/bold]  {scenario.description}".rstrip())
        result = rehearse(
            scenario,
            api_faults=options.api_fault,
            announce=lambda t, text: console.print(f"{t:7.1f} s  {text}", markup=False),
            keep_logs=options.logs,
        )
    except (ScenarioError, PrometheusError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    if options.json:
        options.json.write_text(result.model_dump_json(indent=2) + "\n", "utf-8")
    _show(console, result)
    return 0 if result.expectation.met else 1


def _show(console: Console, result: ResultDocument) -> None:
    table = Table(title="What nodemend did", title_justify="left")
    for column in ("t", "function", "action", "target", "result"):
        table.add_column(column, overflow="fold")
    for action in result.actions:
        told = "would be done" if action.dry_run else action.result
        table.add_row(f"{action.t:.1f} s", action.caller, action.verb, action.target, told)
    console.print()
    if result.actions:
        console.print(table)
        console.print()
    else:
        console.print("Nothing was done.")
    if not result.incidents:
        console.print("No incident was opened, and no node was touched.")
    for incident in result.incidents:
        if incident.outcome is None:
            console.print(f"{incident.node} waits, untouched.", markup=False)
            continue
        console.print(f"{incident.outcome}: {incident.text}", markup=False)
        if incident.remedy:
            console.print(f"What a person must do: {incident.remedy}", markup=False)
    for why in result.expectation.why:
        console.print(f"NOT AS EXPECTED: {why}", markup=False)
    if result.expectation.met:
        console.print("As expected.")


if __name__ == "__main__":
    sys.exit(main())
