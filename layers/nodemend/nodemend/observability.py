"""Structured logs: Powertools' logger for the handlers and everything below them.

Metrics are printed by `adapters/telemetry_emf.py`; traces come from active tracing on Lambda and
Step Functions, without an SDK.
"""

from aws_lambda_powertools import Logger

logger = Logger(service="nodemend")
"""The handlers' logger; its level comes from POWERTOOLS_LOG_LEVEL. Its name is the package's, so
the stdlib loggers of all modules (`nodemend.…`) print in its form and with its keys."""
