"""Write the JSON Schemas of everything that others program against, or with --check see if stale.

Schemas of what nodemend says (events, results) allow fields that they do not name: contracts are
additive, and a consumer must not break on a new field. Schemas of what it reads (policy, input by
hand, scenario) refuse them, as the code does.
"""

import json
import sys
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from nodemend.contracts.approving import AnswerApproval
from nodemend.contracts.events import EVENT_MODELS, SOURCE
from nodemend.contracts.pausing import SetPause
from nodemend.contracts.policy import PolicyDocument
from nodemend.contracts.steps import RemediateByHand
from nodemend.domain.events import DetailType

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from local.result import ResultDocument  # noqa: E402 - a script sees its own folder only
from local.scenario import ScenarioDocument  # noqa: E402

DIALECT = "https://json-schema.org/draft/2020-12/schema"
FOLDERS = ("events/schemas", "local/schemas")


def kebab(detail_type: str) -> str:
    """Return a detail-type as a file's name.

    Example:
        >>> kebab("GPU Fault Detected")
        'gpu-fault-detected'
    """
    return detail_type.lower().replace(" ", "-")


def schema_of(model: type[BaseModel], name: str, title: str, *, is_open: bool) -> dict[str, Any]:
    """Return the published schema of a model.

    Args:
        model: its docstring becomes the description; it must have a literal `schema_version`.
        name: last part of the schema's id.
        title: the schema's title.
        is_open: whether fields that are not named are allowed.
    """
    schema = model.model_json_schema()
    if is_open:
        _open(schema)
    version = get_args(model.model_fields["schema_version"].annotation)[0]
    head = {
        "$schema": DIALECT,
        "$id": f"urn:nodemend:{name}:{version}",
        "title": title,
        "description": schema.pop("description"),
        "version": str(version),
    }
    return {**head, **{key: value for key, value in schema.items() if key not in head}}


def _open(schema: object) -> None:
    if isinstance(schema, dict):
        if schema.get("additionalProperties") is False:
            del schema["additionalProperties"]
        for value in schema.values():
            _open(value)
    elif isinstance(schema, list):
        for value in schema:
            _open(value)


def event_schema(detail_type: DetailType) -> dict[str, Any]:
    """Return the schema of an event's `detail`, with the keys of EventBridge's schema registry."""
    model = EVENT_MODELS[detail_type]
    schema = schema_of(model, f"event:{kebab(detail_type)}", str(detail_type), is_open=True)
    return {
        **schema,
        "x-amazon-events-source": SOURCE,
        "x-amazon-events-detail-type": str(detail_type),
    }


def documents() -> dict[str, str]:
    """Return the text of every schema by its path in the repository."""
    schemas = {f"events/schemas/{kebab(kind)}.json": event_schema(kind) for kind in EVENT_MODELS}
    for path, model, title, is_open in (
        ("events/schemas/policy.json", PolicyDocument, "nodemend policy", False),
        (
            "events/schemas/remediate_by_hand.json",
            RemediateByHand,
            "nodemend remediation by hand",
            False,
        ),
        ("events/schemas/answer_approval.json", AnswerApproval, "nodemend answer", False),
        ("events/schemas/set_pause.json", SetPause, "nodemend pause", False),
        ("local/schemas/scenario.json", ScenarioDocument, "nodemend scenario", False),
        ("local/schemas/result.json", ResultDocument, "nodemend result", True),
    ):
        schemas[path] = schema_of(model, Path(path).stem, title, is_open=is_open)
    return {
        path: json.dumps(schema, indent=2, ensure_ascii=False) + "\n"
        for path, schema in schemas.items()
    }


def stale_files(root: Path) -> list[str]:
    """Return one line for each file that is missing, differs, or has no model any more."""
    wanted = documents()
    found = {
        path.relative_to(root).as_posix(): path.read_text()
        for folder in FOLDERS
        for path in sorted((root / folder).glob("*.json"))
    }
    lines = [f"{path}: stale or missing" for path in wanted if found.get(path) != wanted[path]]
    return lines + [f"{path}: has no model" for path in sorted(set(found) - set(wanted))]


def write(root: Path) -> None:
    """Write every schema, and remove those that have no model."""
    wanted = documents()
    for folder in FOLDERS:
        (root / folder).mkdir(parents=True, exist_ok=True)
        for path in (root / folder).glob("*.json"):
            if path.relative_to(root).as_posix() not in wanted:
                path.unlink()
    for name, text in wanted.items():
        (root / name).write_text(text)


def main(arguments: list[str]) -> int:
    """Write, or check with --check."""
    if "--check" not in arguments:
        write(ROOT)
        return 0
    lines = stale_files(ROOT)
    for line in lines:
        print(f"{line}: run make schemas", file=sys.stderr)  # noqa: T201
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
