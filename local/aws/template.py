"""Reads a SAM template: YAML tags, local code folders, state machine definitions, the transform.

The transform is AWS's own (`aws-sam-translator`), offline: names of managed policies are resolved
from the list that it ships.
"""

import copy
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

_SHORT_FORMS = {"Ref": "Ref", "Condition": "Condition"}


class TemplateError(ValueError):
    """The template cannot be deployed here; the message says which part and why."""


class _CfnLoader(yaml.SafeLoader):
    """YAML with CloudFormation's short forms (`!Ref`, `!Sub`…)."""


def _construct_tag(loader: yaml.SafeLoader, suffix: str, node: yaml.Node) -> dict[str, Any]:
    name = _SHORT_FORMS.get(suffix, f"Fn::{suffix}")
    if isinstance(node, yaml.ScalarNode):
        value: Any = loader.construct_scalar(node)
        if suffix == "GetAtt":
            value = value.split(".", 1)
    elif isinstance(node, yaml.SequenceNode):
        value = loader.construct_sequence(node, deep=True)
    elif isinstance(node, yaml.MappingNode):
        value = loader.construct_mapping(node, deep=True)
    else:
        raise TemplateError(f"unreadable value of !{suffix}")
    return {name: value}


_CfnLoader.add_multi_constructor("!", _construct_tag)
# CloudFormation takes "2012-10-17" as text, YAML 1.1 as a date.
_CfnLoader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def load_yaml(text: str) -> Any:  # noqa: ANN401 - any YAML document
    """Parse YAML with CloudFormation's tags."""
    return yaml.load(text, Loader=_CfnLoader)  # noqa: S506 - a SafeLoader


@dataclass(frozen=True)
class Template:
    """A template after the SAM transform: CloudFormation only."""

    document: dict[str, Any]
    code: Mapping[str, Path]
    """Folder of each function and layer, by logical id."""

    @property
    def resources(self) -> dict[str, dict[str, Any]]:
        """Resources by logical id."""
        resources: dict[str, dict[str, Any]] = self.document.get("Resources", {})
        return resources


def load_template(path: Path, parameters: Mapping[str, str], region: str) -> Template:
    """Read and transform a template.

    Args:
        path: The SAM template; `CodeUri`, `ContentUri` and `DefinitionUri` are relative to it.
        parameters: Values of template parameters.
        region: For the transform's own intrinsics.
    """
    document = load_yaml(path.read_text())
    if not isinstance(document, dict) or "Resources" not in document:
        raise TemplateError(f"{path} has no Resources")
    code = _replace_local_files(document, path.parent)
    return Template(_transform(document, parameters, region), code)


def _replace_local_files(document: dict[str, Any], base: Path) -> dict[str, Path]:
    """Put placeholders for code, and definitions in place, as `sam package` does."""
    code: dict[str, Path] = {}
    common = document.get("Globals", {}).get("Function", {}).pop("CodeUri", None)
    for logical_id, resource in document["Resources"].items():
        properties = resource.setdefault("Properties", {}) or {}
        resource["Properties"] = properties
        match resource.get("Type"):
            case "AWS::Serverless::Function":
                folder = properties.get("CodeUri", common)
                if isinstance(folder, str):
                    code[logical_id] = _folder(base, folder, logical_id)
                    properties["CodeUri"] = f"s3://local/{logical_id}"
            case "AWS::Serverless::LayerVersion":
                code[logical_id] = _folder(base, properties.get("ContentUri"), logical_id)
                properties["ContentUri"] = f"s3://local/{logical_id}"
            case "AWS::Serverless::StateMachine":
                _inline_definition(properties, base, logical_id)
    return code


def _folder(base: Path, value: object, logical_id: str) -> Path:
    if not isinstance(value, str):
        raise TemplateError(f"{logical_id}: code must be a local folder, not {value!r}")
    folder = (base / value).resolve()
    if not folder.is_dir():
        raise TemplateError(f"{logical_id}: no such folder: {folder}")
    return folder


def _inline_definition(properties: dict[str, Any], base: Path, logical_id: str) -> None:
    uri = properties.pop("DefinitionUri", None)
    if uri is None:
        return
    if not isinstance(uri, str) or not (base / uri).is_file():
        raise TemplateError(f"{logical_id}: no such definition: {uri!r}")
    properties["Definition"] = yaml.safe_load((base / uri).read_text())


def _transform(
    document: dict[str, Any], parameters: Mapping[str, str], region: str
) -> dict[str, Any]:
    # Imported here: they cost 0.3 s, which readers of a plain template need not pay.
    import boto3  # noqa: PLC0415
    from samtranslator.model.exceptions import InvalidDocumentException  # noqa: PLC0415
    from samtranslator.parser.parser import Parser  # noqa: PLC0415
    from samtranslator.translator.translator import Translator  # noqa: PLC0415
    from samtranslator.utils.py27hash_fix import (  # noqa: PLC0415
        to_py27_compatible_template,
        undo_mark_unicode_str_in_template,
    )

    # It warns at its end that its own usage metrics were not sent.
    logging.getLogger("samtranslator.metrics").setLevel(logging.ERROR)
    fragment = copy.deepcopy(document)
    values = {name: str(value) for name, value in parameters.items()}
    try:
        to_py27_compatible_template(fragment, values)
        translator = Translator({}, Parser(), boto_session=boto3.Session(region_name=region))
        translated = translator.translate(
            fragment, parameter_values=values, get_managed_policy_map=dict
        )
    except InvalidDocumentException as error:
        causes = "; ".join(str(cause.message) for cause in error.causes) or str(error)
        raise TemplateError(f"the SAM transform refuses the template: {causes}") from error
    plain: dict[str, Any] = json.loads(
        json.dumps(undo_mark_unicode_str_in_template(translated), default=str)
    )
    return plain


_SUBSTITUTION = re.compile(r"\$\{([A-Za-z0-9_]+)\}")


def substitute_definition(definition: str, values: Mapping[str, object], logical_id: str) -> str:
    """Fill the `${Name}` of a state machine's definition; an unknown name is an error.

    The replacement is textual, as CloudFormation's is: a number in quotes stays text.
    """

    def replace(match: re.Match[str]) -> str:
        if match[1] not in values:
            raise TemplateError(f"{logical_id}: DefinitionSubstitutions has no {match[1]}")
        value = values[match[1]]
        return str(value).lower() if isinstance(value, bool) else str(value)

    return _SUBSTITUTION.sub(replace, definition)
