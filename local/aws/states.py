"""Step Functions: what moto's interpreter lacks.

- Status events on the default bus when an execution starts and ends, however it ends.
- StopExecution ends an execution at once, also while a task runs, with its error and cause.
- Executions without a name get one (moto mixes them up otherwise).
- SendTaskSuccess and SendTaskFailure tell a closed task (`TaskTimedOut`) from a strange token.
- A retry's wait ends when the stack stops.
"""

import json
import logging
import threading
import time
import uuid
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import boto3
from moto.stepfunctions.parser import utils as parser_utils
from moto.stepfunctions.parser.api import ExecutionStatus
from moto.stepfunctions.parser.asl.component.common.retry import retrier_decl
from moto.stepfunctions.parser.asl.eval.program_state import ProgramStopped
from moto.stepfunctions.parser.asl.utils import boto_client
from moto.stepfunctions.parser.backend.execution import BaseExecutionWorkerCommunication
from moto.stepfunctions.parser.models import stepfunctions_parser_backends
from werkzeug.wrappers import Response

from local.aws.events import EventRouter
from local.aws.front import Front
from local.aws.wire import AwsRequest, error_response

_ACTIONS = frozenset(
    {
        "DescribeExecution",
        "StartExecution",
        "StopExecution",
        "SendTaskFailure",
        "SendTaskHeartbeat",
        "SendTaskSuccess",
    }
)
_JSON = "application/x-amz-json-1.0"


@dataclass(frozen=True, slots=True)
class Execution:
    """One execution as the console shows it."""

    arn: str
    name: str
    state_machine: str
    status: str
    started_at: float
    stopped_at: float | None
    input: Any
    output: Any
    """None unless it SUCCEEDED."""
    error: str | None
    cause: str | None


class StatesService:
    """The state machines of one stack, on moto's interpreter."""

    def __init__(self, front: Front, router: EventRouter) -> None:
        self._front = front
        self._router = router
        self._lock = threading.RLock()
        self._ended: set[str] = set()
        self._started: set[str] = set()
        self._stopping = threading.Event()
        self._clients: dict[tuple[str, str, str], Any] = {}
        self._session: Any = boto3.Session()
        self._original: tuple[Any, Any, Any] | None = None
        front.route("states", self.handle, _ACTIONS)

    # --- hooks into the interpreter ------------------------------------------------------------

    def start(self) -> None:
        """Hook into moto's interpreter."""
        self._original = (
            BaseExecutionWorkerCommunication.terminated,
            retrier_decl.time,
            boto_client.boto3,
        )
        # It reports each failed state as an error of the program; the history has them all.
        logging.getLogger("moto.stepfunctions").setLevel(logging.CRITICAL)
        service = self
        original = BaseExecutionWorkerCommunication.terminated

        def terminated(communication: Any) -> None:  # noqa: ANN401 - moto's class
            service._on_terminated(communication.execution, lambda: original(communication))

        BaseExecutionWorkerCommunication.terminated = terminated
        retrier_decl.time = SimpleNamespace(sleep=self._stopping.wait)
        # The interpreter makes a client for each task from a session that threads may not share.
        boto_client.boto3 = SimpleNamespace(client=self._client)

    def _client(self, **arguments: Any) -> Any:  # noqa: ANN401
        key = (
            arguments["service_name"],
            arguments["region_name"],
            str(arguments.get("endpoint_url")),
        )
        with self._lock:
            if key not in self._clients:
                self._clients[key] = self._session.client(**arguments)
            return self._clients[key]

    def _on_terminated(self, execution: Any, reflect: Any) -> None:  # noqa: ANN401
        with self._lock:
            if execution.exec_arn in self._ended:
                return
            reflect()
            self._finish(execution)

    def _finish(self, execution: Any) -> None:  # noqa: ANN401
        self._ended.add(execution.exec_arn)
        if not self._stopping.is_set():
            self._emit(_snapshot(execution))

    def _emit(self, execution: Execution) -> None:
        stopped = execution.stopped_at
        self._router.emit(
            bus="default",
            source="aws.states",
            detail_type="Step Functions Execution Status Change",
            detail={
                "executionArn": execution.arn,
                "stateMachineArn": execution.state_machine,
                "name": execution.name,
                "status": execution.status,
                "startDate": int(execution.started_at * 1000),
                "stopDate": None if stopped is None else int(stopped * 1000),
                "input": json.dumps(execution.input),
                "inputDetails": {"included": True},
                "output": None if execution.output is None else json.dumps(execution.output),
                "outputDetails": None if execution.output is None else {"included": True},
                "error": execution.error,
                "cause": execution.cause,
            },
            resources=[execution.arn],
            caller="states",
        )

    # --- API -----------------------------------------------------------------------------------

    def handle(self, request: AwsRequest) -> Response:
        """Serve what needs more than moto does."""
        match request.action:
            case "StartExecution":
                return self._start_execution(request)
            case "StopExecution":
                return self._stop_execution(request)
            case "DescribeExecution":
                with self._lock:  # moto sets the status before the output
                    return self._front.ask_moto(request)
        return self._send_task(request)

    def _start_execution(self, request: AwsRequest) -> Response:
        body = dict(request.json)
        if not body.get("name"):
            body["name"] = str(uuid.uuid4())
        with self._lock:
            response = self._front.ask_moto(request, json.dumps(body).encode())
            if response.status_code != 200:
                return response
            arn = json.loads(response.get_data())["executionArn"]
            is_new = arn not in self._started
            self._started.add(arn)
            if is_new:  # within the lock, so that the start is told before the end
                self._emit(_as_running(_snapshot(self._find(arn))))
        return response

    def _stop_execution(self, request: AwsRequest) -> Response:
        body = request.json
        execution = self._find(body.get("executionArn", ""))
        if execution is None:
            message = f"Execution Does Not Exist: '{body.get('executionArn')}'"
            return error_response(request, 400, "ExecutionDoesNotExist", message)
        self._abort(execution, body.get("error"), body.get("cause"))
        stopped = execution.stop_date or datetime.now(UTC)
        return Response(json.dumps({"stopDate": stopped.timestamp()}), content_type=_JSON)

    def _abort(self, execution: Any, error: str | None, cause: str | None) -> None:  # noqa: ANN401
        deadline = time.monotonic() + 2
        while execution.exec_status == ExecutionStatus.RUNNING and time.monotonic() < deadline:
            env = execution.exec_worker.env
            if env is not None and env.is_running():
                break
            time.sleep(0.005)  # its thread has not begun yet
        else:
            return
        with self._lock:
            if execution.exec_arn in self._ended:
                return
            env.set_stop(stop_date=datetime.now(UTC), error=error, cause=cause)
            if not isinstance(env.program_state(), ProgramStopped):
                return
            execution.exec_status = ExecutionStatus.ABORTED
            execution.stop_date = datetime.now(UTC)
            execution.error, execution.cause = error, cause
            self._finish(execution)

    def _send_task(self, request: AwsRequest) -> Response:
        body = request.json
        token = body.get("taskToken", "")
        endpoint = None
        for execution in self._all():
            env = execution.exec_worker.env if execution.exec_worker else None
            endpoint = env.callback_pool_manager.get(token) if env else None
            if endpoint is not None:
                break
        if endpoint is None:
            return error_response(request, 400, "InvalidToken", f"Invalid Token: '{token[:64]}'")
        # moto sets this event when the task is answered, timed out or interrupted.
        if endpoint._notify_event.is_set() or execution.exec_status != ExecutionStatus.RUNNING:
            message = "Task Timed Out: 'Provided task does not exist anymore'"
            return error_response(request, 400, "TaskTimedOut", message)
        if request.action != "SendTaskFailure":
            return self._front.ask_moto(request)
        backend = stepfunctions_parser_backends[self._front.account_id][self._front.region]
        backend.send_task_failure(token, error=body.get("error"), cause=body.get("cause"))
        return Response("{}", content_type=_JSON)

    # --- what is known -------------------------------------------------------------------------

    def _all(self) -> list[Any]:
        backend = stepfunctions_parser_backends[self._front.account_id][self._front.region]
        return [execution for machine in backend.state_machines for execution in machine.executions]

    def _find(self, arn: str) -> Any:  # noqa: ANN401 - moto's class
        return next((known for known in self._all() if known.exec_arn == arn), None)

    def executions(self) -> list[Execution]:
        """Return all executions, oldest first."""
        with self._lock:  # moto sets the status before the output
            known = [_snapshot(execution) for execution in self._all()]
        return sorted(known, key=lambda one: one.started_at)

    def history(self, arn: str) -> list[dict[str, Any]]:
        """Return an execution's history events, as GetExecutionHistory gives them."""
        execution = self._find(arn)
        if execution is None:
            raise LookupError(arn)
        events: list[dict[str, Any]] = execution.to_history_output()["events"]
        return list(events)

    @property
    def running(self) -> int:
        """How many executions run."""
        return sum(known.exec_status == ExecutionStatus.RUNNING for known in self._all())

    # --- the end -------------------------------------------------------------------------------

    def begin_stop(self) -> None:
        """Stop all executions silently, and wake what waits in them."""
        self._stopping.set()
        for execution in self._all():
            env = execution.exec_worker.env if execution.exec_worker else None
            if env is None or execution.exec_status != ExecutionStatus.RUNNING:
                continue
            env.set_stop(stop_date=datetime.now(UTC), error=None, cause=None)
            for endpoint in list(env.callback_pool_manager._pool.values()):
                endpoint.interrupt_all()

    def finish_stop(self, timeout_s: float = 5.0) -> None:
        """Wait for the interpreter's threads and unhook."""
        deadline = time.monotonic() + timeout_s
        for thread in list(parser_utils.TMP_THREADS):
            thread.join(max(0.0, deadline - time.monotonic()))
        parser_utils.TMP_THREADS.clear()
        for client in self._clients.values():
            client.close()
        self._clients.clear()
        if self._original is not None:
            terminated, retrier_decl.time, boto_client.boto3 = self._original
            BaseExecutionWorkerCommunication.terminated = terminated
            self._original = None
            logging.getLogger("moto.stepfunctions").setLevel(logging.NOTSET)


def _snapshot(execution: Any) -> Execution:  # noqa: ANN401 - moto's class
    status = ExecutionStatus(execution.exec_status).value
    return Execution(
        arn=execution.exec_arn,
        name=execution.name,
        state_machine=execution.state_machine_arn,
        status=status,
        started_at=execution.start_date.timestamp(),
        stopped_at=None if execution.stop_date is None else execution.stop_date.timestamp(),
        input=execution.input_data,
        output=execution.output if status == "SUCCEEDED" else None,
        error=execution.error,
        cause=execution.cause,
    )


def _as_running(execution: Execution) -> Execution:
    """Return the execution as at its start: a quick one may have ended by now."""
    return replace(
        execution, status="RUNNING", stopped_at=None, output=None, error=None, cause=None
    )
