"""Write docs/RULES.md from the catalogue, or with --check see if it is stale."""

import re
import sys
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

from nodemend.catalogue import NOT_THERE, load_catalogue
from nodemend.domain.faults import Family, FaultKind, Scope, Verdict
from nodemend.domain.policy import DEFAULT_PLANS
from nodemend.domain.rules import (
    Catalogue,
    Recording,
    Rule,
    XidEntry,
    render_query,
    render_template,
)

ROOT = Path(__file__).resolve().parent.parent
PATH = ROOT / "docs" / "RULES.md"

HEAD = """\
# Detection rules

<!-- Generated from layers/nodemend/nodemend/catalogue by `make schemas`. Do not edit. -->

Each rule is one PromQL query per scan and cluster; its answer lists offenders only. The queries are
shown with their default thresholds and without a cluster's matcher. Thresholds and plans can be set
in the policy under `rules.<id>`, and `rules.<id>.enabled: false` turns a rule off.

| verdict | what it entitles nodemend to do |
|---|---|
"""
VERDICTS = {
    Verdict.FATAL: "repair the node now",
    Verdict.DEGRADED: "repair the node",
    Verdict.SUSPECT: "report; by itself it touches no node",
    Verdict.TELEMETRY: "report; the measurement is sick, not the node",
    Verdict.APPLICATION: "count; the job did it, not the hardware",
}
XID_SOURCES = {
    "nvidia": "NVIDIA's XID catalogue, the immediate actions of 2025-10-29",
    "nvsentinel": "NVIDIA/NVSentinel, commit 42672ae of 2026-08-21",
    "gpud": "leptonai/gpud, its XID catalogue as of 2026-11",
    "eks_nma": "aws/eks-node-monitoring-agent, v1.7.0 as of 2026-11",
}
"""What the columns of tests/data/xid_sources.json were read from, and of when."""
VERIFIED = {
    FaultKind.LEVEL: "a state: asked again now, before anything is touched",
    FaultKind.EVENT: (
        "something that happened: asked again at the time of the evidence, on the same boot of the "
        "node; quiet is no recovery"
    ),
}
XID_HEAD = """\
## XIDs

The action is what the vendor's catalogue advises; which repair follows from it is in
[POLICY.md](POLICY.md#plans). A code means what its row says on the GPUs that stand with it (by
`modelName`), and on all if none do. On other models it is `suspect`,
like a code that is not in the table: it is reported once, and no node is touched.
""".splitlines()
DECISIONS_HEAD = f"""
### Decisions

Each code was compared with four sources: would it touch the node, or leave it? A source that is
*overruled* answers otherwise than nodemend. On codes that are not here all sources agree.

- `nvidia`: {XID_SOURCES["nvidia"]}. Its *contact support* asks for a person and leaves the node;
  where it decides by what no metric carries, or has no bucket, it cannot be overruled.
- `nvsentinel`: {XID_SOURCES["nvsentinel"]}. Its *contact support* is fatal, and what it cannot map
  becomes that.
- `gpud`: {XID_SOURCES["gpud"]}
- `eks_nma`: {XID_SOURCES["eks_nma"]}. Its conditions make node auto repair replace the node.

""".splitlines()


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    names = list(head)
    yield f"| {' | '.join(names)} |"
    yield f"|{'---|' * len(names)}"
    for row in rows:
        cells = (cell.replace("|", r"\|") for cell in row)
        yield f"| {' | '.join(cells)} |"


def finds(rule: Rule) -> str:
    """Return the rule's summary with its variables set apart."""
    return re.sub(r"\$(\w+)", r"*\1*", rule.summary)


def verdict_of(rule: Rule) -> str:
    """Return the verdict as the reader needs it."""
    return "by XID (below)" if rule.is_verdict_by_xid else str(rule.verdict)


def plan_of(rule: Rule) -> str:
    """Return what the default plan does with the rule's findings."""
    if not (rule.is_verdict_by_xid or rule.verdict.is_actionable):
        return "none"
    if rule.is_verdict_by_xid:
        return "by the XID's action (below)"
    plan = DEFAULT_PLANS.get(rule.fault_class, ())
    return ", then ".join(map(str, plan)) or "none: observed"


def names_of(metric: str, catalogue: Catalogue) -> str:
    """Return every name of a metric; a recorded series has its own."""
    names = catalogue.metric_names.get(metric, (metric,))
    return " or ".join(f"`{name}`" for name in names)


def rule_lines(rule: Rule, catalogue: Catalogue) -> Iterator[str]:
    """Yield the section of one rule."""
    yield f"### {rule.id}"
    yield ""
    yield f"Finds: {finds(rule)}."
    yield ""
    thresholds = ", ".join(f"`{name}` {value:g}" for name, value in rule.thresholds.items())
    facts = {
        "Fault class": f"`{rule.fault_class}`",
        "Verdict": verdict_of(rule),
        "Default plan": plan_of(rule),
        "Verified as": VERIFIED[rule.kind],
        "About": f"a {rule.scope}" if rule.scope is not Scope.FLEET else "the fleet",
        "Thresholds": thresholds or "none",
        "Second signal": rule.second_signal,
        "Needs": "; ".join(names_of(metric, catalogue) for metric in rule.metrics),
        "Can do without": "; ".join(
            names_of(metric, catalogue) for metric in rule.used if metric not in rule.metrics
        ),
        "Without it": rule.degraded,
        "Not exported by the project's counters file": rule.opt_in,
        "Why": rule.why,
        "Source": rule.source,
    }
    yield from (f"- {name}: {text}" for name, text in facts.items() if text)
    yield ""
    yield "```promql"
    yield render_query(rule, catalogue.metric_names)
    yield "```"
    yield ""


def family_lines(family: Family, catalogue: Catalogue) -> Iterator[str]:
    """Yield the section of a family: its table, then its rules."""
    rules = catalogue.of_family(family)
    yield f"## Family {family}"
    yield ""
    yield from table(
        ("rule", "fault class", "verdict", "default plan", "finds"),
        (
            (
                f"[{rule.id}](#{rule.id})",
                f"`{rule.fault_class}`",
                verdict_of(rule),
                plan_of(rule),
                finds(rule),
            )
            for rule in rules
        ),
    )
    yield ""
    for rule in rules:
        yield from rule_lines(rule, catalogue)


def gpus_of(entry: XidEntry) -> str:
    """Return the generations that an entry is for, in words; empty: all."""
    return ", ".join(str(one).replace("_", " ").title() for one in entry.generations)


def recording_lines(catalogue: Catalogue) -> Iterator[str]:
    """Yield the recording rules, by group."""
    yield "## Recording rules"
    yield ""
    yield "Deployed by [rules.template.yaml](../rules.template.yaml), a stack of its own. Rules"
    yield "that read them say above what they are without them; the others are for people."
    yield ""

    def row(recording: Recording, interval_s: int) -> tuple[str, ...]:
        query = render_template(recording.promql, recording.record, catalogue.metric_names)
        readers = [f"`{r.id}`" for r in catalogue.rules if recording.record in r.used]
        return (
            f"`{recording.record}`",
            f"{interval_s} s",
            ", ".join(readers) or "people, other recordings",
            recording.why,
            f"`{query}`",
        )

    yield from table(
        ("series", "evaluated every", "read by", "what and why", "query"),
        (row(one, group.interval_s) for group in catalogue.recordings for one in group.recordings),
    )
    yield ""


def xid_lines(xids: Iterable[XidEntry]) -> Iterator[str]:
    """Yield the XID table by verdict and action, then what had to be decided."""
    yield from XID_HEAD
    entries = [entry for each in xids for entry in each.rows if entry.reason != NOT_THERE]

    def group(entry: XidEntry) -> tuple[int, str]:
        return entry.verdict.severity, entry.action

    def name(entry: XidEntry) -> str:
        gpus = gpus_of(entry)
        return f"{entry.code} {entry.mnemonic}" + (f" ({gpus})" if gpus else "")

    rows = []
    for (severity, action), members in groupby(sorted(entries, key=group), key=group):
        codes = sorted(members, key=lambda entry: entry.code)
        named = ", ".join(name(entry) for entry in codes)
        rows.append((str(list(Verdict)[severity]), f"`{action}`", str(len(codes)), named))
    yield from table(("verdict", "action", "codes", "XIDs"), rows)
    yield from decision_lines(entries)


def decision_lines(entries: Iterable[XidEntry]) -> Iterator[str]:
    """Yield what was decided, why, and against whom; one row for codes decided alike."""
    yield from DECISIONS_HEAD
    alike: dict[tuple[str, ...], list[str]] = {}
    for entry in sorted(entries, key=lambda entry: entry.code):
        if entry.reason:
            gpus = gpus_of(entry) or "all"
            overruled = ", ".join(entry.overruled) or "none"
            key = (gpus, f"{entry.verdict}, `{entry.action}`", overruled, entry.reason)
            alike.setdefault(key, []).append(str(entry.code))
    yield from table(
        ("XID", "GPUs", "decision", "overruled", "why"),
        ((", ".join(codes), *decision) for decision, codes in alike.items()),
    )


def document(catalogue: Catalogue) -> str:
    """Return the text of docs/RULES.md."""
    lines = [f"| {verdict} | {text} |" for verdict, text in VERDICTS.items()] + [""]
    for family in Family:
        lines += family_lines(family, catalogue)
    lines += recording_lines(catalogue)
    lines += xid_lines(catalogue.xids.values())
    return HEAD + "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    """Write, or check with --check."""
    text = document(load_catalogue())
    if "--check" not in arguments:
        PATH.parent.mkdir(parents=True, exist_ok=True)
        PATH.write_text(text)
        return 0
    if PATH.is_file() and PATH.read_text() == text:
        return 0
    print("docs/RULES.md: stale or missing: run make schemas", file=sys.stderr)  # noqa: T201
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
