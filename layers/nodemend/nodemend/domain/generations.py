"""Which generation a GPU is of: the same XID does not mean the same on all of them."""

import re
from collections.abc import Mapping
from enum import StrEnum

MODEL_LABELS = ("modelName", "model_name")
"""Labels that carry the model: the GPU metrics' and the link metrics' name for it."""


class Generation(StrEnum):
    """The generations that the vendor's XID catalogue tells apart, oldest first."""

    AMPERE = "ampere"
    HOPPER = "hopper"
    """Grace Hopper included: its catalogue has no column of its own."""
    BLACKWELL = "blackwell"
    GRACE_BLACKWELL = "grace_blackwell"


_GENERATION_BY_CHIP: Mapping[str, Generation] = {
    **dict.fromkeys(
        ("A10", "A10G", "A16", "A2", "A30", "A40", "A100", "A100X", "A800"), Generation.AMPERE
    ),
    **dict.fromkeys(("GH200", "H20", "H100", "H200", "H800"), Generation.HOPPER),
    **dict.fromkeys(("B100", "B200", "B300"), Generation.BLACKWELL),
    **dict.fromkeys(("GB200", "GB300"), Generation.GRACE_BLACKWELL),
}
"""Whole words of a model's name. Ada and workstation cards are not here: the catalogue has no
column for them, and their codes get the careful entry."""


def generation_of(labels: Mapping[str, str]) -> Generation | None:
    """Return the generation that the labels' model is of; None if there is none, or it is new.

    Exporters print the model with blanks or, by option, with dashes.

    Example:
        >>> generation_of({"modelName": "NVIDIA-H100-80GB-HBM3"}).value
        'hopper'
        >>> generation_of({"modelName": "NVIDIA L40S"}) is None
        True
    """
    for label in MODEL_LABELS:
        for word in re.findall(r"[A-Za-z0-9]+", labels.get(label, "")):
            if word.upper() in _GENERATION_BY_CHIP:
                return _GENERATION_BY_CHIP[word.upper()]
    return None
