"""Prints how much of the pipeline was disturbed, and in how many ways."""

from typing import Any

from _pytest.terminal import TerminalReporter

SWEEP, PAIRS = "crash_sweep", "crash_pairs"


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    """Print the number of points; it comes with the reports, also from other processes."""
    told: dict[str, list[Any]] = {SWEEP: [], PAIRS: []}
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            told.setdefault(str(name), []).append(value)
    if told[SWEEP]:
        calls = {name: number for name, _, number, _ in told[SWEEP]}
        kinds = {kind for _, kind, _, _ in told[SWEEP]}
        points = sum(hit for _, _, _, hit in told[SWEEP])
        terminalreporter.write_line(
            f"crash anywhere: {len(calls)} scenarios, {sum(calls.values())} calls of ports "
            f"x {len(kinds)} kinds of fault = {points} points survived"
        )
    for text in told[PAIRS]:
        terminalreporter.write_line(f"crash anywhere: {text}")
