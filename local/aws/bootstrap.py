"""A Lambda runtime client in the standard library, for machines where awslambdaric has no wheel.

Usage: `python bootstrap.py module.function`, with the environment that Lambda gives. Error payloads
and the context have the same shape as those of AWS's client.
"""

import importlib
import io
import json
import os
import sys
import time
import traceback
import urllib.request
from types import SimpleNamespace
from typing import Any

_BASE = f"http://{os.environ['AWS_LAMBDA_RUNTIME_API']}/2018-06-01/runtime"


def _post(path: str, body: bytes) -> None:
    request = urllib.request.Request(_BASE + path, data=body, method="POST")  # noqa: S310 - loopback
    urllib.request.urlopen(request).close()  # noqa: S310


def _payload(error: BaseException, request_id: str) -> bytes:
    frames = traceback.extract_tb(error.__traceback__)
    stack = traceback.format_list([frame for frame in frames if frame.filename != __file__])
    kind = type(error).__name__
    if not request_id and isinstance(error, ImportError):
        kind = "Runtime.ImportModuleError"
    payload = {
        "errorMessage": str(error),
        "errorType": kind,
        "requestId": request_id,
        "stackTrace": stack,
    }
    text = f"[ERROR] {kind}: {error}\rTraceback (most recent call last):\r" + "".join(stack)
    print(text.replace("\n", "\r"), flush=True)
    return json.dumps(payload).encode()


def _context(headers: Any) -> SimpleNamespace:  # noqa: ANN401 - http.client's message
    deadline_ms = int(headers["Lambda-Runtime-Deadline-Ms"])
    return SimpleNamespace(
        aws_request_id=headers["Lambda-Runtime-Aws-Request-Id"],
        invoked_function_arn=headers["Lambda-Runtime-Invoked-Function-Arn"],
        function_name=os.environ["AWS_LAMBDA_FUNCTION_NAME"],
        function_version=os.environ["AWS_LAMBDA_FUNCTION_VERSION"],
        memory_limit_in_mb=os.environ["AWS_LAMBDA_FUNCTION_MEMORY_SIZE"],
        log_group_name=os.environ.get("AWS_LAMBDA_LOG_GROUP_NAME", ""),
        log_stream_name=os.environ.get("AWS_LAMBDA_LOG_STREAM_NAME", ""),
        identity=None,
        client_context=None,
        tenant_id=None,
        get_remaining_time_in_millis=lambda: max(0, deadline_ms - int(time.time() * 1000)),
    )


def main(handler: str) -> None:
    """Import the handler, then serve events until the Runtime API goes away."""
    for stream in (sys.stdout, sys.stderr):  # a killed process must not lose its last words
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    module_name, _, function_name = handler.rpartition(".")
    try:
        module = importlib.import_module(module_name.replace("/", "."))
        function = getattr(module, function_name)
    except BaseException as error:
        _post("/init/error", _payload(error, ""))
        raise
    while True:
        with urllib.request.urlopen(_BASE + "/invocation/next") as event:  # noqa: S310
            body, headers = event.read(), event.headers
        request_id = headers["Lambda-Runtime-Aws-Request-Id"]
        os.environ["_X_AMZN_TRACE_ID"] = headers["Lambda-Runtime-Trace-Id"]
        try:
            answer = json.dumps(function(json.loads(body), _context(headers))).encode()
        except Exception as error:
            _post(f"/invocation/{request_id}/error", _payload(error, request_id))
        else:
            _post(f"/invocation/{request_id}/response", answer)


if __name__ == "__main__":
    sys.path.insert(0, os.environ["LAMBDA_TASK_ROOT"])
    main(sys.argv[1])
