"""The generation of a GPU, from the model that its metrics carry."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodemend.domain.generations import Generation, generation_of


@pytest.mark.parametrize(
    ("model", "generation"),
    [
        ("NVIDIA A100-SXM4-40GB", Generation.AMPERE),
        ("A100-SXM4-80GB", Generation.AMPERE),
        ("NVIDIA A800-SXM4-80GB", Generation.AMPERE),
        ("NVIDIA A10G", Generation.AMPERE),
        ("NVIDIA H100 80GB HBM3", Generation.HOPPER),
        ("NVIDIA-H100-80GB-HBM3", Generation.HOPPER),
        ("NVIDIA H100 NVL", Generation.HOPPER),
        ("NVIDIA H200", Generation.HOPPER),
        ("NVIDIA GH200 480GB", Generation.HOPPER),
        ("NVIDIA B200", Generation.BLACKWELL),
        ("nvidia_b300_sxm6_ac", Generation.BLACKWELL),
        ("NVIDIA GB200", Generation.GRACE_BLACKWELL),
        ("NVIDIA-GB300", Generation.GRACE_BLACKWELL),
        ("Tesla V100-SXM2-16GB", None),
        ("NVIDIA L40S", None),
        ("NVIDIA RTX A6000", None),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", None),
        ("NVIDIA B2000", None),
        ("NVIDIA XH100", None),
        ("NVIDIA Graphics Device", None),
        ("", None),
    ],
)
@pytest.mark.parametrize("label", ["modelName", "model_name"])
def test_a_model_is_of_one_generation_or_of_none_that_is_known(
    model: str, generation: Generation | None, label: str
) -> None:
    assert generation_of({label: model, "Hostname": "a100"}) is generation


def test_the_label_that_says_something_counts() -> None:
    assert generation_of({"modelName": "", "model_name": "NVIDIA B200"}) is Generation.BLACKWELL
    assert generation_of({"gpu": "0"}) is None


@given(st.text())
def test_no_model_breaks_it(model: str) -> None:
    assert generation_of({"modelName": model}) in (None, *Generation)
