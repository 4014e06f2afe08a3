"""Structured logs: Powertools' logger for the handlers, and the same form for the package's own.

Metrics are printed by `adapters/telemetry_emf.py`; traces come from active tracing on Lambda and
Step Functions, without an SDK.
"""

from aws_lambda_powertools import Logger
from aws_lambda_powertools.logging.utils import copy_config_to_registered_loggers

logger = Logger(service="nodemend")
"""The handlers' logger; its level comes from POWERTOOLS_LOG_LEVEL."""


def configure_package_loggers() -> None:
    """Give the package's stdlib loggers the structured form. Called once per container."""
    copy_config_to_registered_loggers(source_logger=logger, include={"nodemend"})
