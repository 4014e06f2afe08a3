"""The Lambda service: functions, their workers, synchronous and asynchronous invocations."""

import contextlib
import importlib.util
import json
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from local.aws.background import Background
from local.aws.emf import MetricSample, parse_emf
from local.aws.front import Front
from local.aws.runtime import Invocation, Worker, WorkerGoneError, error_payload

_BOOTSTRAP = Path(__file__).with_name("bootstrap.py")


@dataclass(frozen=True)
class FunctionSpec:
    """A function as the template describes it, everything resolved."""

    logical_id: str
    name: str
    short_name: str
    """The caller's name in records of calls."""
    arn: str
    handler: str
    code: Path
    layers: tuple[Path, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    timeout_s: float = 3.0
    memory_mb: int = 128
    runtime: str = "python3.13"
    reserved_concurrency: int | None = None
    log_group: str = ""
    json_logs: bool = False
    log_level: str = ""
    role_arn: str = ""
    dead_letter_arn: str = ""


@dataclass(frozen=True)
class AsyncConfig:
    """What happens to an event whose asynchronous invocation fails."""

    maximum_retry_attempts: int = 2
    on_failure_arn: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """The REPORT line of one invocation."""

    at: float
    function: str
    request_id: str
    duration_ms: float
    init_ms: float | None
    """Set for a cold start only."""
    memory_mb: int
    peak_memory_mb: float
    error: str
    """The error type, or empty."""


@dataclass(frozen=True, slots=True)
class InvokeResult:
    """What Invoke answers."""

    payload: bytes
    function_error: str | None
    request_id: str
    log_tail: str


class ThrottledError(RuntimeError):
    """Reserved concurrency is used up: Lambda answers 429."""


class UnknownFunctionError(LookupError):
    """No function has this name or ARN."""


@dataclass
class _Function:
    spec: FunctionSpec
    condition: threading.Condition = field(default_factory=threading.Condition)
    idle: list[Worker] = field(default_factory=list)
    workers: set[Worker] = field(default_factory=set)
    starting: int = 0
    in_flight: int = 0
    lines: list[str] = field(default_factory=list)
    config: AsyncConfig = field(default_factory=AsyncConfig)


def default_runtime() -> str:
    """Return `awslambdaric` where it is installed, else `bootstrap`."""
    return "awslambdaric" if importlib.util.find_spec("awslambdaric") else "bootstrap"


class LambdaService:
    """Runs the functions of one stack.

    Args:
        front: Where the functions' AWS calls go.
        run_dir: Log files are written to `run_dir/logs/SHORT_NAME.log`.
        runtime: `awslambdaric`, `bootstrap`, or `auto` for the first that is installed.
        environment: Extra variables for every function; the template's win.
        max_workers: Most workers of one function; further invocations wait for a free one.
        async_retry_delays_s: Waits before the retries of a failed asynchronous invocation. Lambda
            waits 60 and 120 s.
    """

    def __init__(
        self,
        front: Front,
        *,
        run_dir: Path,
        runtime: str = "auto",
        environment: dict[str, str] | None = None,
        max_workers: int = 4,
        async_retry_delays_s: tuple[float, ...] = (1.0, 2.0),
    ) -> None:
        self._front = front
        self._log_dir = run_dir / "logs"
        self._runtime = default_runtime() if runtime == "auto" else runtime
        self.environment = dict(environment or {})
        """Extra variables for every function; read when a worker starts."""
        self._max_workers = max_workers
        self._async_retry_delays_s = async_retry_delays_s
        self._functions: dict[str, _Function] = {}
        self._record_lock = threading.Lock()
        self._by_access_key: dict[str, Worker] = {}
        self._metrics: list[MetricSample] = []
        self._reports: list[Report] = []
        self._background = Background("lambda")
        self._stopped = False
        self.on_async_failure: Callable[[str, bytes], None] = lambda _arn, _body: None
        """Sends a record of a finally failed asynchronous event to a queue or topic ARN."""

    # --- functions -----------------------------------------------------------------------------

    def create(self, spec: FunctionSpec) -> None:
        """Make a function known; its first worker starts at the first call."""
        self._log_dir.mkdir(parents=True, exist_ok=True)
        self._functions[spec.name] = _Function(spec)

    def configure_async(self, name_or_arn: str, config: AsyncConfig) -> None:
        """Set retries and the failure destination of asynchronous invocations."""
        self._find(name_or_arn).config = config

    def specs(self) -> list[FunctionSpec]:
        """Return all functions."""
        return [function.spec for function in self._functions.values()]

    def spec(self, name_or_arn: str) -> FunctionSpec:
        """Return one function by name, ARN, logical id or short name."""
        for function in self._functions.values():
            if name_or_arn in (function.spec.logical_id, function.spec.short_name):
                return function.spec
        return self._find(name_or_arn).spec

    def _find(self, name_or_arn: str) -> _Function:
        name = name_or_arn
        if name.startswith("arn:"):
            name = name.split(":")[6]
        name = name.split(":")[0]
        try:
            return self._functions[name]
        except KeyError:
            raise UnknownFunctionError(name_or_arn) from None

    # --- invocations ---------------------------------------------------------------------------

    def invoke(self, name_or_arn: str, payload: bytes, *, client_context: str = "") -> InvokeResult:
        """Run a function and return its answer; raises ThrottledError, UnknownFunctionError."""
        function = self._find(name_or_arn)
        spec = function.spec
        with function.condition:
            if (
                spec.reserved_concurrency is not None
                and function.in_flight >= spec.reserved_concurrency
            ):
                raise ThrottledError(f"Rate Exceeded for {spec.name}")
            function.in_flight += 1
        invocation = Invocation(payload, spec.arn, spec.timeout_s, client_context=client_context)
        try:
            return self._run(function, invocation)
        finally:
            with function.condition:
                function.in_flight -= 1
                function.condition.notify_all()

    def _run(self, function: _Function, invocation: Invocation) -> InvokeResult:
        while True:
            worker = self._acquire(function)
            if worker is None:
                body = error_payload("Runtime.ExitError", "the stack is stopping")
                return InvokeResult(body, "Unhandled", invocation.request_id, "")
            is_cold = worker.init_duration_s is None
            first_line = len(function.lines)
            try:
                worker.run(invocation)
                break
            except WorkerGoneError:
                continue
            finally:
                self._release(function, worker)
        self._report(function, worker, invocation, is_cold=is_cold)
        tail = "\n".join(function.lines[first_line:])[-4096:]
        if invocation.error is not None:
            return InvokeResult(invocation.error, "Unhandled", invocation.request_id, tail)
        return InvokeResult(invocation.response or b"null", None, invocation.request_id, tail)

    def invoke_async(self, name_or_arn: str, payload: bytes) -> str:
        """Run a function in the background, with Lambda's retries; returns the request id."""
        function = self._find(name_or_arn)
        request_id = str(uuid.uuid4())
        name = f"async-{function.spec.short_name}"
        self._background.spawn(lambda: self._run_async(function, payload), name)
        return request_id

    def run_event(self, name_or_arn: str, payload: bytes) -> None:
        """Do what `invoke_async` does, and return when it is done, retries included."""
        self._run_async(self._find(name_or_arn), payload)

    def _run_async(self, function: _Function, payload: bytes) -> None:
        retries = function.config.maximum_retry_attempts
        delays = self._async_retry_delays_s
        for attempt in range(retries + 1):
            result = self._attempt(function, payload)
            if result is None or result.function_error is None:
                return
            if attempt == retries:
                self._send_failure(function, payload, result, attempts=retries + 1)
            elif self._background.stopping.wait(delays[min(attempt, len(delays) - 1)]):
                return

    def _attempt(self, function: _Function, payload: bytes) -> InvokeResult | None:
        """Invoke; a throttled event waits, it does not count as an attempt. None: stopping."""
        while not self._background.stopping.is_set():
            try:
                return self.invoke(function.spec.name, payload)
            except ThrottledError:
                self._background.stopping.wait(0.2)
        return None

    def _send_failure(
        self, function: _Function, payload: bytes, result: InvokeResult, attempts: int
    ) -> None:
        if function.config.on_failure_arn:
            record = {
                "version": "1.0",
                "requestContext": {
                    "requestId": result.request_id,
                    "functionArn": f"{function.spec.arn}:$LATEST",
                    "condition": "RetriesExhausted",
                    "approximateInvokeCount": attempts,
                },
                "requestPayload": json.loads(payload or b"null"),
                "responseContext": {
                    "statusCode": 200,
                    "executedVersion": "$LATEST",
                    "functionError": result.function_error,
                },
                "responsePayload": json.loads(result.payload or b"null"),
            }
            self.on_async_failure(function.config.on_failure_arn, json.dumps(record).encode())
        if function.spec.dead_letter_arn:
            self.on_async_failure(function.spec.dead_letter_arn, payload)

    # --- workers -------------------------------------------------------------------------------

    def _acquire(self, function: _Function) -> Worker | None:
        """Return a worker for one event, starting one if all are busy; None while stopping."""
        with function.condition:
            while True:
                if self._stopped:
                    return None
                while function.idle:
                    worker = function.idle.pop()
                    if worker.is_alive:
                        return worker
                    self._discard(function, worker)
                if len(function.workers) + function.starting < self._max_workers:
                    function.starting += 1
                    break
                function.condition.wait(0.5)
        started: Worker | None = None
        try:
            started = self._start_worker(function)
        finally:
            with function.condition:
                function.starting -= 1
                if started is not None:
                    function.workers.add(started)
                function.condition.notify_all()
        return started

    def _start_worker(self, function: _Function) -> Worker:
        spec = function.spec
        client = (
            [sys.executable, "-m", "awslambdaric"]
            if self._runtime == "awslambdaric"
            else [sys.executable, str(_BOOTSTRAP)]
        )
        credential = self._front.identities.issue(spec.short_name)
        worker = Worker(
            command=[*client, spec.handler],
            environment={**self._worker_environment(spec), **credential.environment()},
            cwd=spec.code,
            name=spec.short_name,
            on_line=lambda line: self._record_line(function, line),
        )
        worker.start()
        with self._record_lock:
            self._by_access_key[credential.access_key_id] = worker
        return worker

    def kill_worker(self, access_key_id: str) -> bool:
        """Kill the process that holds an access key; False if there is none.

        For faults in which a function dies between two lines. The invocation ends with
        `Runtime.ExitError`.
        """
        with self._record_lock:
            worker = self._by_access_key.get(access_key_id)
        if worker is None or not worker.is_alive:
            return False
        worker.kill()
        return True

    def _release(self, function: _Function, worker: Worker) -> None:
        with function.condition:
            if worker.is_alive and not self._stopped:
                function.idle.append(worker)
            else:
                self._discard(function, worker)
            function.condition.notify_all()

    def _discard(self, function: _Function, worker: Worker) -> None:
        function.workers.discard(worker)
        self._background.spawn(lambda: worker.close(0.5), f"close-{function.spec.short_name}")
        if self._background.stopping.is_set():
            worker.close(0)

    def _worker_environment(self, spec: FunctionSpec) -> dict[str, str]:
        """Return what Lambda sets, then the extra variables, then the template's."""
        inherited = {
            name: value
            for name, value in os.environ.items()
            # Coverage of child processes is switched on by variables; PATH is for subprocesses.
            if name in ("PATH", "LD_LIBRARY_PATH", "SYSTEMROOT") or name.startswith("COVERAGE_")
        }
        region = self._front.region
        stream = f"{time.strftime('%Y/%m/%d')}/[$LATEST]{uuid.uuid4().hex}"
        logging_variables = {}
        if spec.json_logs:
            logging_variables["AWS_LAMBDA_LOG_FORMAT"] = "JSON"
        if spec.log_level:
            logging_variables["AWS_LAMBDA_LOG_LEVEL"] = spec.log_level
        return {
            **inherited,
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_ENDPOINT_URL": self._front.url,
            **self.environment,
            **spec.environment,
            "LANG": "en_US.UTF-8",
            "TZ": ":UTC",
            "PYTHONPATH": os.pathsep.join(str(path) for path in (spec.code, *spec.layers)),
            "LAMBDA_TASK_ROOT": str(spec.code),
            "_HANDLER": spec.handler,
            "AWS_EXECUTION_ENV": f"AWS_Lambda_{spec.runtime}",
            "AWS_LAMBDA_FUNCTION_NAME": spec.name,
            "AWS_LAMBDA_FUNCTION_VERSION": "$LATEST",
            "AWS_LAMBDA_FUNCTION_MEMORY_SIZE": str(spec.memory_mb),
            "AWS_LAMBDA_LOG_GROUP_NAME": spec.log_group or f"/aws/lambda/{spec.name}",
            "AWS_LAMBDA_LOG_STREAM_NAME": stream,
            "AWS_LAMBDA_INITIALIZATION_TYPE": "on-demand",
            "AWS_REGION": region,
            "AWS_DEFAULT_REGION": region,
            **logging_variables,
        }

    # --- records -------------------------------------------------------------------------------

    def _record_line(self, function: _Function, line: str) -> None:
        samples = list(parse_emf(line, function.spec.short_name))
        with self._record_lock:
            function.lines.append(line)
            self._metrics.extend(samples)
            with (self._log_dir / f"{function.spec.short_name}.log").open("a") as file:
                file.write(line + "\n")

    def _report(
        self, function: _Function, worker: Worker, invocation: Invocation, *, is_cold: bool
    ) -> None:
        error = ""
        if invocation.error is not None:
            with contextlib.suppress(ValueError, AttributeError):
                error = str(json.loads(invocation.error).get("errorType", "Unhandled"))
            error = error or "Unhandled"
        init_s = worker.init_duration_s if is_cold else None
        report = Report(
            at=time.time(),
            function=function.spec.short_name,
            request_id=invocation.request_id,
            duration_ms=(time.time() - invocation.started_at) * 1000,
            init_ms=None if init_s is None else init_s * 1000,
            memory_mb=function.spec.memory_mb,
            peak_memory_mb=worker.peak_memory_mb,
            error=error,
        )
        with self._record_lock:
            self._reports.append(report)
        self._record_line(function, _report_line(report))

    def logs(self, name_or_arn: str) -> list[str]:
        """Return the lines that a function and the platform have logged."""
        function = self._find(name_or_arn)
        with self._record_lock:
            return list(function.lines)

    def metrics(self) -> list[MetricSample]:
        """Return all metric samples from the functions' output."""
        with self._record_lock:
            return list(self._metrics)

    def reports(self) -> list[Report]:
        """Return one record for each invocation that ended."""
        with self._record_lock:
            return list(self._reports)

    @property
    def in_flight(self) -> int:
        """Invocations that run, wait for a worker, or wait for their next attempt."""
        running = sum(function.in_flight for function in self._functions.values())
        return running + self._background.running

    # --- the end -------------------------------------------------------------------------------

    def stop(self) -> None:
        """End all workers; their invocations end with an error."""
        self._stopped = True
        workers = []
        for function in self._functions.values():
            with function.condition:
                function.condition.notify_all()
                function.condition.wait_for(lambda: not function.starting, timeout=5)  # noqa: B023
                workers += list(function.workers)
        closing = Background("lambda-stop")
        for worker in workers:
            worker.begin_close()
        for worker in workers:
            closing.spawn(partial(worker.close, 1.0), "close")
        closing.stop(timeout_s=10)
        self._background.stop(timeout_s=10)


def _report_line(report: Report) -> str:
    parts = [
        f"REPORT RequestId: {report.request_id}",
        f"Duration: {report.duration_ms:.2f} ms",
        f"Memory Size: {report.memory_mb} MB",
        f"Max Memory Used: {report.peak_memory_mb:.0f} MB",
    ]
    if report.init_ms is not None:
        parts.append(f"Init Duration: {report.init_ms:.2f} ms")
    if report.error:
        parts.append(f"Error Type: {report.error}")
    return "\t".join(parts)
