"""CloudWatch metrics in the Embedded Metric Format: lines on standard output, no API call."""

import logging
import math

from aws_lambda_powertools.metrics.provider.cloudwatch_emf.cloudwatch import (
    AmazonCloudWatchEMFProvider,
)

_logger = logging.getLogger(__name__)

NAMESPACE = "nodemend"


class EmfTelemetry:
    """Prints each metric at once, in an EMF object of its own.

    Powertools' `Metrics` keeps one set of dimensions per process and adds the service's name to
    it, which would multiply every series by the number of functions. Here each call has exactly
    its own dimensions, and nothing is lost if the invocation dies before its end.
    """

    def __init__(self, *, namespace: str = NAMESPACE) -> None:
        self._namespace = namespace

    def count(self, name: str, value: float = 1, **dimensions: str) -> None:
        """Add to a counter."""
        self.gauge(name, value, "Count", **dimensions)

    def gauge(self, name: str, value: float, unit: str, **dimensions: str) -> None:
        """Record a value; one that is no finite number is left out, since CloudWatch has none.

        An empty dimension is written as `unknown`: CloudWatch refuses empty values, and leaving
        it out would make another series.
        """
        if not math.isfinite(value):
            _logger.warning("metric %s is %s and is left out", name, value)
            return
        # An explicit empty service keeps POWERTOOLS_SERVICE_NAME from becoming a dimension.
        metrics = AmazonCloudWatchEMFProvider(namespace=self._namespace, service="")
        for dimension, text in dimensions.items():
            metrics.add_dimension(dimension, text or "unknown")
        metrics.add_metric(name=name, unit=unit, value=value)
        metrics.flush_metrics()
