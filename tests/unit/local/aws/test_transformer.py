"""Input transformers of rules: an event becomes text."""

from local.aws.events import transformed

EVENT = {"detail": {"a": "x", "n": 3, "deep": {"b": "y"}, "list": [1]}}


def test_names_are_replaced_by_what_is_at_their_paths():
    transformer = {
        "InputPathsMap": {"a": "$.detail.a", "n": "$.detail.n", "b": "$.detail.deep.b"},
        "InputTemplate": '"<a> and <n>"\n"<b> <a>"',
    }
    assert transformed(transformer, EVENT) == '"x and 3"\n"y x"'


def test_what_is_not_there_is_empty_and_what_is_no_text_is_json():
    transformer = {
        "InputPathsMap": {"gone": "$.detail.a.b", "list": "$.detail.list"},
        "InputTemplate": "<gone>|<list>|<unknown>",
    }
    assert transformed(transformer, EVENT) == "|[1]|<unknown>"
