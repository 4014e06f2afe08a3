"""A policy file, checked as the functions check it, without a deployment and without AWS."""

from functools import cache
from pathlib import Path

import yaml

from nodemend.catalogue import load_catalogue
from nodemend.contracts.policy import check_rules, parse_policy
from nodemend.domain.errors import PolicyInvalidError
from nodemend.domain.policy import Policy
from nodemend.domain.rules import Catalogue
from ops.stack import CommandError


@cache
def catalogue() -> Catalogue:
    """Return the detection data of the package."""
    return load_catalogue()


def read_policy(path: Path) -> tuple[Policy, bytes]:
    """Read and check a policy file.

    Not by way of bootstrap: the command must run where the Kubernetes client is not installed.

    Raises:
        CommandError: naming each wrong field and what would be right.
    """
    try:
        content = path.read_bytes()
        policy = parse_policy(yaml.safe_load(content), path.name)
        check_rules(policy, {rule.id: tuple(rule.thresholds) for rule in catalogue().rules})
    except OSError as error:
        raise CommandError(f"{path} cannot be read: {error.strerror}") from error
    except PolicyInvalidError as error:
        raise CommandError(f"{path}: {' '.join(str(error).split())}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise CommandError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
    return policy, content
