"""What people read must be true of the code: names, defaults, examples, paths and links."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from local.rbac import load_rbac
from local.scenario import Expect, InjectedApiFault, Person, ScenarioDocument, TimelineEntry
from nodemend.adapters.kubernetes_cluster import _Request
from nodemend.adapters.outbox import ACTIONS, counters_of
from nodemend.catalogue import load_catalogue
from nodemend.contracts import steps
from nodemend.contracts.alerts import ReceiveAlertRequest, parse_notification
from nodemend.contracts.approving import AnswerApprovalRequest
from nodemend.contracts.dispatch import DispatchEvent
from nodemend.contracts.events import EVENT_MODELS, EventDetail, FaultEnvelope, IncidentDetail
from nodemend.contracts.pausing import SetPauseRequest
from nodemend.contracts.policy import (
    NOT_BUILT_YET,
    SUPPORTED_RUNGS,
    GroupLimitsDocument,
    PolicyDocument,
    check_rules,
    parse_policy,
)
from nodemend.contracts.scan import ScanGpuHealthRequest
from nodemend.contracts.validation import ValidatePolicyRequest
from nodemend.contracts.watch import WatchEvent
from nodemend.domain.errors import PolicyInvalidError
from nodemend.domain.events import DetailType
from nodemend.domain.faults import Mode
from nodemend.domain.incidents import Outcome
from nodemend.domain.remedies import REMEDIES

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
PACKAGE = ROOT / "layers" / "nodemend" / "nodemend"
OWN_MARKDOWN = sorted(
    [*ROOT.glob("*.md"), *DOCS.rglob("*.md")], key=lambda path: path.relative_to(ROOT).as_posix()
)


def _text(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


def _rows(text: str) -> Iterator[list[str]]:
    """Yield the cells of each table row whose first cell is one word in backticks."""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().split("|")[1:-1]]
        if cells and re.fullmatch(r"`[^`]+`", cells[0]):
            yield cells


def _words(cell: str) -> frozenset[str]:
    return frozenset(re.findall(r"`([^`]+)`", cell))


# --- metrics ------------------------------------------------------------------------------------


def _emitted() -> set[tuple[str, frozenset[str]]]:
    """Return (metric, dimensions) of every telemetry call of the package."""
    found: set[tuple[str, frozenset[str]]] = set()
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text("utf-8"))
        loops = [node for node in ast.walk(tree) if isinstance(node, ast.For)]
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and _is_telemetry(call):
                found |= {(name, _dimensions(call)) for name in _names(call, loops)}
    for detail_type in DetailType:
        for dry_run in (True, False):
            detail = {"cluster": "a", "dry_run": dry_run, "outcome": "REPLACED"}
            found |= {(n, frozenset(d)) for n, d in counters_of(detail_type, detail)}
    return found


def _is_telemetry(call: ast.Call) -> bool:
    function = call.func
    return (
        isinstance(function, ast.Attribute)
        and function.attr in ("count", "gauge")
        and "telemetry" in ast.unparse(function.value)
    )


def _names(call: ast.Call, loops: list[ast.For]) -> set[str]:
    first = call.args[0]
    if isinstance(first, ast.Constant):
        return {str(first.value)}
    loop = next(
        loop
        for loop in reversed(loops)
        if any(inner is call for inner in ast.walk(loop)) and ast.unparse(first) in _targets(loop)
    )
    if isinstance(loop.iter, ast.Tuple):
        return {str(ast.literal_eval(item.elts[0])) for item in loop.iter.elts}  # type: ignore[attr-defined]
    assert ast.unparse(loop.iter).startswith("counters_of("), "a metric's name cannot be told"
    return set()


def _targets(loop: ast.For) -> set[str]:
    return {node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)}


def _dimensions(call: ast.Call) -> frozenset[str]:
    return frozenset(keyword.arg for keyword in call.keywords if keyword.arg is not None)


def test_metrics_page_lists_exactly_the_metrics_and_dimensions_that_the_code_emits():
    documented = {
        (cells[0].strip("`"), _words(cells[2]))
        for cells in _rows(_text("docs/METRICS.md"))
        if cells[1] == "Count"
    }
    assert documented == _emitted()


def test_metrics_page_lists_the_actions_and_the_alarms():
    text = _text("docs/METRICS.md")
    assert set(ACTIONS.values()) <= _words(text)
    assert set(_alarms()) <= _words(text)


# --- alarms and runbooks ------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """Reads CloudFormation, whose short forms are tags."""


_Loader.add_multi_constructor("!", lambda _loader, _suffix, _node: None)


def _alarms() -> dict[str, str]:
    resources = yaml.load(_text("template.yaml"), _Loader)["Resources"]  # noqa: S506 - a SafeLoader
    return {
        name: resource["Properties"]["AlarmDescription"]
        for name, resource in resources.items()
        if resource["Type"] == "AWS::CloudWatch::Alarm"
    }


@pytest.mark.parametrize(("alarm", "description"), _alarms().items(), ids=_alarms())
def test_the_runbook_that_an_alarm_names_exists(alarm: str, description: str):
    named = re.search(r"\((docs/runbooks/[a-z-]+\.md)\)", description)
    assert named, f"{alarm} names no runbook"
    assert (ROOT / named.group(1)).is_file()


@pytest.mark.parametrize("code", REMEDIES)
def test_every_code_with_a_remedy_has_a_runbook(code: str):
    index = next(
        line for line in _text("docs/runbooks/README.md").splitlines() if f"`{code}`" in line
    )
    page = re.search(r"\]\(([a-z-]+\.md)\)", index)
    assert page
    assert f"`{code}`" in _text(f"docs/runbooks/{page.group(1)}")


@pytest.mark.parametrize(
    "page",
    [page for page in (DOCS / "runbooks").glob("*.md") if page.name != "README.md"],
    ids=lambda page: page.stem,
)
def test_every_runbook_has_the_four_parts_and_is_in_the_index(page: Path):
    headings = re.findall(r"^## (\w+)", page.read_text("utf-8"), re.MULTILINE)
    assert headings == ["Overview", "Verify", "Investigate", "Fix"]
    assert f"({page.name})" in _text("docs/runbooks/README.md")


# --- events -------------------------------------------------------------------------------------


def _event_sections() -> dict[str, str]:
    parts = re.split(r"^## (.+)$", _text("docs/EVENTS.md"), flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_events_page_has_a_section_for_each_detail_type_and_for_no_other():
    assert set(_event_sections()) - {"Common fields", "Patterns"} == set(DetailType)


@pytest.mark.parametrize("detail_type", DetailType)
def test_events_page_names_every_field_and_its_example_parses(detail_type: DetailType):
    model = EVENT_MODELS[detail_type]
    section = _event_sections()[detail_type]
    is_incident = issubclass(model, IncidentDetail)
    common = IncidentDetail.model_fields if is_incident else EventDetail.model_fields
    documented = {cells[0].strip("`") for cells in _rows(section)}
    assert documented == set(model.model_fields) - set(common)
    example = re.search(r"```json\n(.+?)```", section, re.DOTALL)
    assert example
    model.model_validate_json(example.group(1))


def test_events_page_explains_the_common_fields():
    documented = {cells[0].strip("`") for cells in _rows(_event_sections()["Common fields"])}
    assert documented == set(IncidentDetail.model_fields)


def test_patterns_of_the_events_page_name_real_detail_types_and_outcomes():
    patterns = re.findall(r"```json\n(.+?)```", _event_sections()["Patterns"], re.DOTALL)
    assert patterns
    for pattern in map(json.loads, patterns):
        assert pattern["source"] == ["nodemend"]
        assert set(pattern["detail-type"]) <= set(DetailType)
        assert set(pattern["detail"].get("outcome", ())) <= set(Outcome)


# --- the policy ---------------------------------------------------------------------------------


def _policy_fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any, bool]]:
    """Yield (path, default, is required) as the page writes them."""
    for name, field in model.model_fields.items():
        path = f"{prefix}{name}"
        nested = _model_in(field.annotation)
        is_plain = nested is not None and nested is field.annotation
        if not is_plain:
            default = None if field.is_required() else field.get_default()
            yield path, default, field.is_required()
        if nested is not None and nested is not GroupLimitsDocument:
            yield from _policy_fields(nested, path + _joint(path, is_plain=is_plain))


def _joint(path: str, *, is_plain: bool) -> str:
    if is_plain or path == "approval":
        return "."
    return ".*." if path == "rules" else "[]."


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in getattr(annotation, "__args__", ()):
        found = _model_in(inner)
        if found is not None:
            return found
    return None


def test_policy_page_lists_every_field_with_its_default():
    section = _text("docs/POLICY.md").split("## Fields")[1].split("\n## ")[0]
    documented = {cells[0].strip("`"): cells[2].strip("`") for cells in _rows(section)}
    fields = {path: (default, needed) for path, default, needed in _policy_fields(PolicyDocument)}
    assert set(documented) == set(fields)
    for path, (default, is_required) in fields.items():
        if is_required:
            assert documented[path] == "required", path
        else:
            plain = list(default) if isinstance(default, tuple) else default
            assert yaml.safe_load(documented[path]) == plain, path


def test_policy_page_lists_what_is_not_built_and_the_rungs_that_are():
    text = _text("docs/POLICY.md")
    section = text.split("## Not built yet")[1]
    assert {cells[0].strip("`") for cells in _rows(section)} == NOT_BUILT_YET
    assert "knows `reboot`, `replace` and `human`" in text
    assert {str(rung) for rung in SUPPORTED_RUNGS} == {"reboot", "replace", "human"}


@pytest.mark.parametrize("name", sorted(NOT_BUILT_YET))
def test_a_policy_that_uses_what_is_not_built_is_refused_with_these_words(name: str):
    value: Any = {}
    for part in reversed(name.split(".")):
        value = {part: [{"match": {"a": "b"}, **value}] if part == "groups" else value}
    document = {"schema_version": 1, **value}
    with pytest.raises(PolicyInvalidError, match="is not built yet"):
        parse_policy(document, "1")


def test_the_example_policy_parses_and_is_a_dry_run():
    policy = parse_policy(yaml.safe_load(_text("docs/policy.example.yaml")), "1")
    check_rules(policy, {rule.id: tuple(rule.thresholds) for rule in load_catalogue().rules})
    assert policy.mode is Mode.DRY_RUN
    assert [cluster.name for cluster in policy.clusters] == ["train-a"]


def test_the_commented_parts_of_the_example_policy_parse_too():
    text = re.sub(
        r"^( *)# (matcher:|groups:| +- match|    mode)",
        r"\1\2",
        _text("docs/policy.example.yaml"),
        flags=re.MULTILINE,
    )
    policy = parse_policy(yaml.safe_load(text), "1")
    assert policy.groups[0].mode is Mode.ENFORCE
    assert policy.clusters[0].matcher == 'cluster="train-a"'


def test_the_scenario_of_the_operations_page_parses_and_so_does_its_policy():
    section = _text("docs/OPERATIONS.md").split("## Rehearse a policy")[1].split("\n## ")[0]
    (shown,) = re.findall(r"```yaml\n(.+?)```", section, re.DOTALL)
    scenario = ScenarioDocument.model_validate(yaml.safe_load(shown))
    policy = parse_policy({"schema_version": 1, **scenario.policy}, "1")
    check_rules(policy, {rule.id: tuple(rule.thresholds) for rule in load_catalogue().rules})
    assert set(scenario.expect.events) <= set(DetailType)
    assert {entry.when.event for entry in scenario.timeline if entry.when} <= set(DetailType)


def test_the_operations_page_names_every_way_of_a_scenario():
    section = _text("docs/OPERATIONS.md").split("## Rehearse a policy")[1].split("\n## ")[0]
    section = re.sub(r"```.*?```", "", section, flags=re.DOTALL)
    for model in (TimelineEntry, Expect, InjectedApiFault):
        assert set(model.model_fields) <= _words(section) | {"expect"}, model.__name__
    for field in (Person.model_fields["do"], InjectedApiFault.model_fields["how"]):
        assert set(get_args(field.annotation)) <= _words(section)


# --- sample inputs ------------------------------------------------------------------------------


def _by_hand(data: Any) -> None:
    execution = steps.ExecutionInfo(arn="arn", name="by-hand")
    parsed = steps.AdmitRemediationRequest(execution=execution, input=data).parse_input()
    assert isinstance(parsed, steps.RemediateByHand)


def _admit(data: Any) -> None:
    parsed = steps.AdmitRemediationRequest.model_validate(data).parse_input()
    assert isinstance(parsed, steps.RemediateIncident)


def _faults(data: Any) -> None:
    for record in data["Records"]:
        fault = FaultEnvelope.model_validate_json(record["body"]).detail
        known = {rule.id for rule in load_catalogue().rules}
        for finding in fault.findings:
            assert finding.to_finding(fault.cluster).evidence.rule_id in known


def _hints(data: Any) -> None:
    assert len(DispatchEvent.model_validate(data).to_request().hints) == len(data["Records"])


def _ended(data: Any) -> None:
    assert WatchEvent.model_validate(data).to_request().ended is not None


def _policy(data: Any) -> None:
    document = ValidatePolicyRequest.model_validate(data).document()
    assert document == yaml.safe_load(_text("docs/policy.example.yaml")), "make it anew"


def _alerts(data: Any) -> None:
    for record in data["Records"]:
        notification = parse_notification(ReceiveAlertRequest.model_validate(record))
        assert notification.incomplete is None
        assert [one.node_names for one in notification.alerts] != []


SAMPLES: dict[str, Any] = {
    "alert_sqs": _alerts,
    "remediate_by_hand": _by_hand,
    "scan_ecc": ScanGpuHealthRequest.model_validate,
    "scan_thermal": ScanGpuHealthRequest.model_validate,
    "scan_utilization": ScanGpuHealthRequest.model_validate,
    "gpu_fault_detected_sqs": _faults,
    "dispatch_hint_sqs": _hints,
    "execution_ended": _ended,
    "answer_approval": lambda data: AnswerApprovalRequest.model_validate(data).parse_input(),
    "request_approval": steps.RequestApprovalRequest.model_validate,
    "set_pause": lambda data: SetPauseRequest.model_validate(data).parse_input(),
    "validate_policy": _policy,
    "admit_remediation": _admit,
    "verify_fault": steps.VerifyFaultRequest.model_validate,
    "cordon_node": steps.CordonNodeRequest.model_validate,
    "drain_node": steps.DrainNodeRequest.model_validate,
    "start_repair": steps.StartRepairRequest.model_validate,
    "check_repair": steps.CheckRepairRequest.model_validate,
    "validate_node": steps.ValidateNodeRequest.model_validate,
    "release_node": steps.ReleaseNodeRequest.model_validate,
    "escalate_incident": steps.EscalateIncidentRequest.model_validate,
    "close_incident": steps.CloseIncidentRequest.model_validate,
}


def test_every_sample_input_has_a_check_here():
    assert {path.stem for path in (ROOT / "events").glob("*.json")} == set(SAMPLES)


@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_input_parses_with_the_model_of_its_function(name: str):
    SAMPLES[name](json.loads(_text(f"events/{name}.json")))


def test_a_sample_step_input_with_a_misspelt_field_is_refused():
    data = json.loads(_text("events/drain_node.json"))
    with pytest.raises(ValidationError):
        steps.DrainNodeRequest.model_validate({**data, "incident": data["incident_id"]})


def test_the_input_for_starting_by_hand_is_the_same_in_all_places():
    sample = json.loads(_text("events/remediate_by_hand.json"))
    for page in ("README.md", "docs/OPERATIONS.md"):
        shown = re.search(r'^ *(\{"cluster": .+"requested_by".+\})$', _text(page), re.MULTILINE)
        assert shown, page
        assert json.loads(shown.group(1)) == sample


# --- RBAC ---------------------------------------------------------------------------------------


def _used_in_the_cluster() -> set[tuple[str, str, str]]:
    """Return (API group, resource, verb) of every request that the cluster adapter can send."""
    tree = ast.parse((PACKAGE / "adapters" / "kubernetes_cluster.py").read_text("utf-8"))
    order = list(_Request.__dataclass_fields__)
    path_at, verb_at, resource_at = (order.index(name) for name in ("path", "verb", "resource"))
    used = set()
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        paths = {
            target.id: ast.literal_eval(node.value)
            for node in ast.walk(function)
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
            name = ast.unparse(call.func)
            values = [
                paths.get(ast.unparse(arg)) if isinstance(arg, ast.Name) else _literal(arg)
                for arg in call.args
            ]
            if name == "_Request" and values[resource_at] is not None:
                used.add((_group(values[path_at]), values[resource_at], values[verb_at]))
            elif name in ("self._get", "self._list"):
                used.add((_group(values[0]), values[1], name.removeprefix("self._")))
    return used


def _literal(node: ast.expr) -> Any:
    return node.value if isinstance(node, ast.Constant) else None


def _group(path: str) -> str:
    parts = path.split("/")
    return parts[2] if parts[1] == "apis" else ""


def test_the_rbac_file_grants_exactly_the_calls_that_the_adapter_makes():
    rbac = load_rbac(DOCS / "kubernetes" / "rbac.yaml")
    (binding,) = rbac.bindings
    granted = {
        (group, resource, verb)
        for rule in binding.rules
        for group in rule.groups
        for resource in rule.resources
        for verb in rule.verbs
    }
    assert granted == _used_in_the_cluster()
    assert binding.groups == ("nodemend",)


def test_the_access_entry_puts_the_role_into_the_group_of_the_rbac_file():
    resources = yaml.load(_text("cluster-access.yaml"), _Loader)["Resources"]  # noqa: S506
    entry = resources["AccessEntry"]["Properties"]
    assert (entry["Type"], entry["KubernetesGroups"]) == ("STANDARD", ["nodemend"])


def test_the_cluster_role_allows_exactly_the_aws_actions_that_the_adapters_name():
    text = _text("cluster-access.yaml")
    allowed = set(re.findall(r"\b(?:eks|autoscaling|ec2):[A-Z]\w+", text))
    named = set()
    for name in ("eks_auth.py", "capacity_asg.py", "instances_ec2.py"):
        source = (PACKAGE / "adapters" / name).read_text("utf-8")
        named |= set(re.findall(r'"((?:eks|autoscaling|ec2):[A-Z]\w+)"', source))
    assert allowed == named


# --- paths, targets, links ------------------------------------------------------------------------


def _slug(heading: str) -> str:
    """Return a heading's anchor as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def _anchors(path: Path) -> set[str]:
    text = re.sub(r"```.*?```", "", path.read_text("utf-8"), flags=re.DOTALL)
    return {_slug(heading) for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}


@pytest.mark.parametrize("page", OWN_MARKDOWN, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_relative_link_leads_somewhere(page: Path):
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), f"{link} leads nowhere"
        if anchor:
            assert anchor in _anchors(path), f"{link}: no such heading"


@pytest.mark.parametrize("page", OWN_MARKDOWN, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_make_target_that_a_page_names_exists(page: Path):
    targets = set(re.findall(r"^([a-z-]+):", _text("Makefile"), re.MULTILINE))
    named = set(re.findall(r"(?:`|^)make ([a-z-]+)", page.read_text("utf-8"), re.MULTILINE))
    assert named <= targets


def test_contributing_gives_a_reason_for_each_dependency():
    pyproject = _text("pyproject.toml")
    declared = set(re.findall(r'^  "([a-z0-9-]+)', pyproject.split("[tool.")[0], re.MULTILINE))
    declared |= {"kubernetes"}
    section = _text("CONTRIBUTING.md").split("## Dependencies")[1]
    explained = {
        word
        for line in section.splitlines()
        if line.startswith("| `")
        for word in _words(line.split(" | ")[0])
    }
    assert explained == declared - {"nodemend"}


def test_decisions_have_all_headings_and_are_in_the_index():
    index = _text("docs/adr/README.md")
    headings = [
        "Context",
        "Decision",
        "Implementation",
        "Rationale",
        "Consequences",
        "Alternatives",
    ]
    for page in (DOCS / "adr").glob("0*.md"):
        found = re.findall(r"^## (\w+)", page.read_text("utf-8"), re.MULTILINE)
        assert found == headings, page.name
        assert f"({page.name})" in index


def test_operations_lists_the_metrics_of_every_rule():
    catalogue = load_catalogue()
    section = _text("docs/OPERATIONS.md").split("### Metrics that the rules read")[1]
    section = section.split("\n### ")[0]
    for rule in catalogue.rules:
        assert f"`{rule.id}`" in section
        for name in rule.used:
            assert f"`{catalogue.metric_names.get(name, (name,))[0]}`" in section
