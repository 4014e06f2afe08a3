"""One worker: a process that runs a function's code, and the Runtime API that feeds it.

The process is AWS's runtime client (`awslambdaric`) or, where that does not install, our
`bootstrap.py`. Each worker has a Runtime API on a port of its own: the clients know a host and a
port only, so a shared one could not tell workers apart.
"""

import contextlib
import json
import os
import platform
import queue
import re
import select
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from werkzeug.wrappers import Request, Response

from local.aws.server import LoopbackServer

MAX_RESPONSE_BYTES = 6_291_556
"""Lambda's limit for the answer of a synchronous invocation."""
INIT_TIMEOUT_S = 60.0
"""Generous: Lambda allows 10 s, but a laptop may start a dozen functions at once."""

_PATH = re.compile(r"^/2018-06-01/runtime/invocation/(?:([^/]+)/)?(next|response|error)$")


@dataclass
class Invocation:
    """One event on its way through a worker."""

    payload: bytes
    function_arn: str
    timeout_s: float
    request_id: str = field(default_factory=lambda: str(uuid.uuid4()))
    trace_id: str = ""
    client_context: str = ""
    started_at: float = 0.0
    """Unix seconds at which the worker took it; the time-out counts from here."""
    is_taken: bool = False
    """True once the worker has read it."""
    done: threading.Event = field(default_factory=threading.Event)
    response: bytes | None = None
    error: bytes | None = None


def _trace_id() -> str:
    root = f"1-{int(time.time()):08x}-{uuid.uuid4().hex[:24]}"
    return f"Root={root};Parent={uuid.uuid4().hex[:16]};Sampled=0"


def error_payload(kind: str, message: str) -> bytes:
    """Return an error of the Lambda service itself, as the caller of Invoke sees it."""
    return json.dumps({"errorType": kind, "errorMessage": message}).encode()


class WorkerGoneError(RuntimeError):
    """An idle worker turned out to have ended; the event was not given to it."""


class Worker:
    """A process with one handler, used for one event at a time."""

    def __init__(
        self,
        *,
        command: list[str],
        environment: dict[str, str],
        cwd: Path,
        name: str,
        on_line: Callable[[str], None],
    ) -> None:
        self._command = command
        self._environment = environment
        self._cwd = cwd
        self._name = name
        self._on_line = on_line
        self._inbox: queue.Queue[Invocation] = queue.Queue()
        self._current: Invocation | None = None
        self._closing = threading.Event()
        self._ready = threading.Event()
        self._init_error: bytes | None = None
        self._is_spoiled = False
        self._output_lock = threading.Lock()
        self._partial_line = b""
        self._api = LoopbackServer(self._serve, f"runtime-{name}")
        self._process: subprocess.Popen[bytes] | None = None
        self._output_fd = -1
        self._pump: threading.Thread | None = None
        self._started = 0.0
        self.init_duration_s: float | None = None
        """From process start to the first request for an event; None until then."""
        self.peak_memory_mb = 0.0

    @property
    def is_alive(self) -> bool:
        """True while the process runs and may be given events."""
        return (
            self._process is not None
            and self._process.poll() is None
            and not self._closing.is_set()
            and self._init_error is None
            and not self._is_spoiled
        )

    @property
    def pid(self) -> int:
        """The process id."""
        return self._running.pid

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError(f"worker {self._name} was not started")
        return self._process

    def start(self) -> None:
        """Start the Runtime API and the process; imports go on while this returns."""
        self._api.start()
        self._started = time.monotonic()
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)
        try:
            self._process = subprocess.Popen(
                self._command,
                env={
                    **self._environment,
                    "AWS_LAMBDA_RUNTIME_API": f"127.0.0.1:{self._api.port}",
                },
                cwd=self._cwd,
                stdin=subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                start_new_session=True,  # so that what the handler starts dies with it
            )
        except BaseException:
            os.close(read_end)
            self._api.stop()
            raise
        finally:
            os.close(write_end)
        self._output_fd = read_end
        self._pump = threading.Thread(
            target=self._pump_output, name=f"output-{self._name}", daemon=True
        )
        self._pump.start()

    def run(self, invocation: Invocation) -> None:
        """Give the worker one event and wait for its answer, its death or the time-out.

        Afterwards the invocation has a response or an error. Raises WorkerGoneError if the
        process ended before it took the event.
        """
        if self._await_init(invocation):
            self._current = invocation
            invocation.started_at = time.time()
            self._inbox.put(invocation)
            self._await_answer(invocation)
            self._current = None
        self._sample_memory()
        self.drain_output()

    def _sample_memory(self) -> None:
        self.peak_memory_mb = max(self.peak_memory_mb, _peak_memory_mb(self.pid))

    def _await_init(self, invocation: Invocation) -> bool:
        deadline = time.monotonic() + INIT_TIMEOUT_S
        while not self._ready.wait(0.02):
            if self._init_error is not None:
                invocation.error = self._init_error
            elif self._running.poll() is not None:
                invocation.error = self._exit_error(invocation)
            elif time.monotonic() > deadline:
                invocation.error = error_payload(
                    "Sandbox.Timedout",
                    f"RequestId: {invocation.request_id} Error: init took longer than "
                    f"{INIT_TIMEOUT_S:.2f} seconds",
                )
                self.kill()
            else:
                continue
            invocation.started_at = time.time()
            return False
        return True

    def _await_answer(self, invocation: Invocation) -> None:
        deadline = time.monotonic() + invocation.timeout_s
        while not invocation.done.wait(min(0.05, max(0.001, deadline - time.monotonic()))):
            if self._running.poll() is not None:
                if not invocation.is_taken:
                    raise WorkerGoneError(self._name)
                # Its answer may have arrived in the moment of its death.
                if not invocation.done.wait(0.05):
                    invocation.error = self._exit_error(invocation)
                return
            self._sample_memory()
            if time.monotonic() >= deadline:
                self.kill()
                if not invocation.done.is_set():
                    invocation.error = error_payload(
                        "Sandbox.Timedout",
                        f"RequestId: {invocation.request_id} Error: Task timed out after "
                        f"{invocation.timeout_s:.2f} seconds",
                    )
                return

    def _exit_error(self, invocation: Invocation) -> bytes:
        code = self._running.poll()
        if code is not None and code < 0:
            names = {signal.SIGKILL: "killed", signal.SIGSEGV: "segmentation fault"}
            number = signal.Signals(-code)
            reason = f"with error: signal: {names.get(number, number.name.lower())}"
        elif code:
            reason = f"with error: exit status {code}"
        else:
            reason = "without providing a reason"
        return error_payload(
            "Runtime.ExitError",
            f"RequestId: {invocation.request_id} Error: Runtime exited {reason}",
        )

    # --- the Runtime API ---------------------------------------------------------------------

    def _serve(self, environ: dict[str, Any], start_response: Any) -> Any:  # noqa: ANN401 - WSGI
        request = Request(environ)
        if request.path == "/2018-06-01/runtime/init/error":
            self._init_error = request.get_data()
            return Response(status=202)(environ, start_response)
        match = _PATH.match(request.path)
        if match is None:
            return Response(status=404)(environ, start_response)
        if match[2] == "next":
            return self._serve_next()(environ, start_response)
        return self._take_answer(match[1], match[2], request.get_data())(environ, start_response)

    def _serve_next(self) -> Response:
        if not self._ready.is_set():
            self.init_duration_s = time.monotonic() - self._started
            self._ready.set()
        while not self._closing.is_set():
            try:
                invocation = self._inbox.get(timeout=0.2)
            except queue.Empty:
                continue
            invocation.is_taken = True
            deadline_ms = int((time.time() + invocation.timeout_s) * 1000)
            headers = {
                "Lambda-Runtime-Aws-Request-Id": invocation.request_id,
                "Lambda-Runtime-Deadline-Ms": str(deadline_ms),
                "Lambda-Runtime-Invoked-Function-Arn": invocation.function_arn,
                "Lambda-Runtime-Trace-Id": invocation.trace_id or _trace_id(),
            }
            if invocation.client_context:
                headers["Lambda-Runtime-Client-Context"] = invocation.client_context
            return Response(invocation.payload, headers=headers, content_type="application/json")
        raise ConnectionAbortedError("the worker is closing")

    def _take_answer(self, request_id: str | None, kind: str, body: bytes) -> Response:
        invocation = self._current
        if invocation is None or invocation.request_id != request_id or invocation.done.is_set():
            return _api_error(400, "InvalidRequestID", "Invalid request ID")
        if kind == "error":
            invocation.error = body
        elif len(body) > MAX_RESPONSE_BYTES:
            invocation.error = error_payload(
                "Function.ResponseSizeTooLarge",
                f"Response payload size exceeded maximum allowed payload size "
                f"({MAX_RESPONSE_BYTES} bytes).",
            )
            self._is_spoiled = True  # AWS's client ends itself on this answer
            invocation.done.set()
            return _api_error(413, "RequestEntityTooLarge", "Exceeded maximum allowed payload size")
        else:
            invocation.response = body
        invocation.done.set()
        return Response(status=202)

    # --- output --------------------------------------------------------------------------------

    def drain_output(self) -> None:
        """Read what the process has written up to now, so that its log lines are known."""
        with self._output_lock:
            self._read_output()

    def _pump_output(self) -> None:
        while True:
            with contextlib.suppress(OSError, ValueError):
                select.select([self._output_fd], [], [])
            with self._output_lock:
                if not self._read_output():
                    return

    def _read_output(self) -> bool:
        """Read without blocking; False at the end of the output."""
        while self._output_fd >= 0:
            try:
                chunk = os.read(self._output_fd, 65536)
            except BlockingIOError:
                return True
            if not chunk:
                break
            *lines, self._partial_line = (self._partial_line + chunk).split(b"\n")
            for line in lines:
                self._say(line)
        if self._output_fd >= 0:
            os.close(self._output_fd)
            self._output_fd = -1
            if self._partial_line:
                self._say(self._partial_line)
        return False

    def _say(self, line: bytes) -> None:
        # The client complains when its Runtime API goes away: that is no log of the function.
        if not self._closing.is_set():
            self._on_line(line.decode("utf-8", "replace"))

    # --- the end -------------------------------------------------------------------------------

    def begin_close(self) -> None:
        """Close the Runtime API: an idle worker ends by itself when its request is cut off."""
        self._closing.set()

    def kill(self) -> None:
        """End the process and all that it started, at once."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._running.pid, signal.SIGKILL)
        self._running.wait()

    def close(self, grace_s: float) -> None:
        """End the worker: gently for `grace_s` seconds, then by force."""
        self.begin_close()
        self._api.stop()
        try:
            self._running.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.kill()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._running.pid, signal.SIGKILL)  # what a handler left behind
        if self._pump is not None:
            self._pump.join(2)


def _api_error(status: int, kind: str, message: str) -> Response:
    body = json.dumps({"errorType": kind, "errorMessage": message})
    return Response(body, status=status, content_type="application/json")


def _peak_memory_mb(pid: int) -> float:
    """Peak resident size of a live process; on systems without /proc, its size now."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    if platform.system() == "Darwin":
        answer = subprocess.run(
            ["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True, check=False
        )
        return int(answer.stdout.strip() or 0) / 1024
    return 0.0
