"""Reading templates: short forms, intrinsic functions, local code, the transform."""

from pathlib import Path
from typing import Any

import pytest

from local.aws.intrinsics import Resolver
from local.aws.template import (
    Template,
    TemplateError,
    load_template,
    load_yaml,
    substitute_definition,
)

DOCUMENT = {
    "Parameters": {
        "Name": {"Type": "String", "Default": "blue"},
        "Zones": {"Type": "CommaDelimitedList", "Default": "a, b"},
        "Flag": {"Type": "String", "Default": True},
        "Mail": {"Type": "String", "Default": "me@here", "AllowedPattern": ".+@.+"},
    },
    "Mappings": {"Sizes": {"blue": {"memory": 256}}},
    "Conditions": {
        "IsBlue": {"Fn::Equals": [{"Ref": "Name"}, "blue"]},
        "IsRed": {"Fn::Equals": [{"Ref": "Name"}, "red"]},
        "Either": {"Fn::Or": [{"Condition": "IsRed"}, {"Condition": "IsBlue"}]},
        "Both": {"Fn::And": [{"Condition": "IsRed"}, {"Condition": "IsBlue"}]},
        "Neither": {"Fn::Not": [{"Condition": "Either"}]},
    },
    "Resources": {"Queue": {"Type": "AWS::SQS::Queue"}},
}


def resolver(**parameters: str) -> Resolver:
    return Resolver(
        DOCUMENT,
        parameters,
        {"AWS::Region": "eu-west-1", "AWS::StackName": "prod"},
        ref=lambda name: f"ref:{name}",
        attribute=lambda name, attribute: f"{name}/{attribute}",
    )


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("!Ref Name", "blue"),
        ("!Ref Queue", "ref:Queue"),
        ("!Ref Zones", ["a", "b"]),
        ("!Ref Flag", "true"),
        ("!Ref AWS::Region", "eu-west-1"),
        ("!GetAtt Queue.Arn", "Queue/Arn"),
        ("!GetAtt [Queue, Arn]", "Queue/Arn"),
        ("!Sub '${AWS::StackName}-${Name}-${Queue}-${Queue.Arn}-${!kept}'",
         "prod-blue-ref:Queue-Queue/Arn-${kept}"),
        ("!Sub ['${A}-${Name}', {A: !Ref Name}]", "blue-blue"),
        ("!Join ['-', [a, !Ref Name]]", "a-blue"),
        ("!If [IsBlue, yes-it-is, other]", "yes-it-is"),
        ("!If [Neither, yes-it-is, !Ref Name]", "blue"),
        ("!If [Both, 1, 2]", 2),
        ("!Select [1, !Split [',', 'x,y,z']]", "y"),
        ("!Select ['0', !Ref Zones]", "a"),
        ("!FindInMap [Sizes, !Ref Name, memory]", 256),
        ("!GetAZs ''", ["eu-west-1a", "eu-west-1b", "eu-west-1c"]),
        ("!Base64 hello", "aGVsbG8="),
        ("Fn::ToJsonString: {a: !Ref Name}", '{"a": "blue"}'),
        ("{a: !Ref AWS::NoValue, b: !If [IsRed, 1, !Ref AWS::NoValue], c: 1}", {"c": 1}),
        ("[!Ref AWS::NoValue, 2]", [2]),
        ("{Version: 2012-10-17}", {"Version": "2012-10-17"}),
    ],
)  # fmt: skip
def test_intrinsic_functions_resolve(text, value):
    assert resolver().resolve(load_yaml(text)) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("!Ref Nobody", "unknown name: Nobody"),
        ("!GetAtt Nobody.Arn", "unknown resource: Nobody"),
        ("!If [Nobody, 1, 2]", "unknown condition: Nobody"),
        ("!FindInMap [Sizes, green, memory]", "no green.memory in mapping Sizes"),
        ("!ImportValue x", "Fn::ImportValue is not supported"),
    ],
)
def test_what_cannot_be_resolved_is_named(text, message):
    with pytest.raises(TemplateError, match=message):
        resolver().resolve(load_yaml(text))


def test_a_parameter_must_match_its_pattern():
    with pytest.raises(TemplateError, match="Mail: 'nowhere' does not match"):
        resolver(Mail="nowhere")


def test_substitution_is_textual_and_complete():
    text = substitute_definition('{"a": "${Arn}", "b": ${Count}, "c": ${On}}',
                                 {"Arn": "arn:x", "Count": 3, "On": True}, "M")  # fmt: skip
    assert text == '{"a": "arn:x", "b": 3, "c": true}'
    with pytest.raises(TemplateError, match="M: DefinitionSubstitutions has no Other"):
        substitute_definition("${Other}", {}, "M")


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def make(text: str) -> Path:
        (tmp_path / "code").mkdir(exist_ok=True)
        (tmp_path / "machine.asl.yaml").write_text("StartAt: A\nStates: {A: {Type: Succeed}}\n")
        path = tmp_path / "template.yaml"
        path.write_text(text)
        return path

    return make


def load(path: Path) -> Template:
    return load_template(path, {}, "eu-west-1")


def test_a_function_keeps_its_local_folder_and_gets_what_sam_adds(write, tmp_path):
    template = load(
        write(
            "Transform: AWS::Serverless-2016-10-31\n"
            "Globals: {Function: {CodeUri: code/, Runtime: python3.13, Handler: app.handler}}\n"
            "Resources:\n"
            "  F:\n"
            "    Type: AWS::Serverless::Function\n"
            "    Properties:\n"
            "      Policies: [AWSXrayWriteOnlyAccess]\n"
            "      Events: {T: {Type: ScheduleV2, Properties: {ScheduleExpression: rate(1 day)}}}\n"
        )
    )

    assert template.code == {"F": (tmp_path / "code").resolve()}
    types = {resource["Type"] for resource in template.resources.values()}
    assert types == {"AWS::Lambda::Function", "AWS::IAM::Role", "AWS::Scheduler::Schedule"}
    assert template.resources["F"]["Properties"]["Code"]["S3Key"] == "F"


def test_a_definition_in_a_file_is_put_in_place(write):
    template = load(
        write(
            "Transform: AWS::Serverless-2016-10-31\n"
            "Resources:\n"
            "  M:\n"
            "    Type: AWS::Serverless::StateMachine\n"
            "    Properties: {DefinitionUri: machine.asl.yaml, Role: 'arn:aws:iam::1:role/r'}\n"
        )
    )

    text = str(template.resources["M"]["Properties"]["DefinitionString"])
    assert '"StartAt": "A"' in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Description: nothing", "has no Resources"),
        (
            (
                "Resources:\n  M: {Type: AWS::Serverless::StateMachine,\n"
                "      Properties: {DefinitionUri: gone.yaml}}"
            ),
            "M: no such definition",
        ),
        (
            "Resources: {L: {Type: 'AWS::Serverless::LayerVersion', Properties: {}}}",
            "L: code must be a local folder",
        ),
        (
            (
                "Resources:\n  F: {Type: AWS::Serverless::Function,\n"
                "      Properties: {Runtime: python3.13, Handler: a.b}}"
            ),
            "the SAM transform refuses the template",
        ),
    ],
)
def test_templates_that_cannot_be_read_say_why(write, text, message):
    with pytest.raises(TemplateError, match=message):
        load(write(text))
