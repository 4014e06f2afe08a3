"""The Lambda runtime, with AWS's own client and with ours: both must behave alike."""

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from local.aws.lambdas import AsyncConfig, LambdaService, ThrottledError, UnknownFunctionError


def ask(lambdas: LambdaService, name: str, event: object = None) -> Any:
    result = lambdas.invoke(name, json.dumps(event).encode())
    assert result.function_error is None, result.payload
    return json.loads(result.payload)


def fail(lambdas: LambdaService, name: str, event: object = None) -> dict[str, Any]:
    result = lambdas.invoke(name, json.dumps(event).encode())
    assert result.function_error == "Unhandled", result.payload
    payload: dict[str, Any] = json.loads(result.payload)
    return payload


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/status")
    return not (status.exists() and "State:\tZ" in status.read_text())


def eventually(condition: Any, timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_function_gets_its_event_and_answers(lambdas, make_function):
    make_function("def handler(event, context):\n    return {'doubled': event['n'] * 2}")

    assert ask(lambdas, "made", {"n": 21}) == {"doubled": 42}


def test_the_context_tells_function_request_and_remaining_time(lambdas, make_function):
    spec = make_function(
        "import os\n"
        "def handler(event, context):\n"
        "    return [context.function_name, context.invoked_function_arn,\n"
        "            context.memory_limit_in_mb, context.get_remaining_time_in_millis(),\n"
        "            context.aws_request_id, os.environ['_X_AMZN_TRACE_ID']]",
        timeout_s=4.0,
        memory_mb=512,
    )

    result = lambdas.invoke("made", b"{}")
    name, arn, memory, remaining_ms, request_id, trace = json.loads(result.payload)

    assert (name, arn, memory) == ("made", spec.arn, "512")
    assert 3000 < remaining_ms <= 4000
    assert request_id == result.request_id
    assert trace.startswith("Root=1-")


def test_one_process_serves_one_invocation_after_the_other(lambdas, make_function):
    make_function("import os\ndef handler(event, context):\n    return os.getpid()")

    assert ask(lambdas, "made") == ask(lambdas, "made")


def test_invocations_side_by_side_run_in_processes_of_their_own(lambdas, make_function):
    make_function(
        "import os, time\ndef handler(event, context):\n    time.sleep(0.5)\n    return os.getpid()"
    )
    pids: list[int] = []
    threads = [threading.Thread(target=lambda: pids.append(ask(lambdas, "made"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(set(pids)) == 3


def test_invocations_beyond_the_limit_wait_for_a_free_process(lambdas, make_function):
    make_function(
        "import os, time\ndef handler(event, context):\n    time.sleep(0.2)\n    return os.getpid()"
    )
    pids: list[int] = []
    threads = [threading.Thread(target=lambda: pids.append(ask(lambdas, "made"))) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(pids) == 5
    assert len(set(pids)) <= 3


def test_an_exception_is_reported_by_its_class_name(lambdas, make_function):
    make_function(
        "class NodeGoneError(Exception):\n    pass\n"
        "def handler(event, context):\n    raise NodeGoneError('it is gone')"
    )

    error = fail(lambdas, "made")

    assert error["errorType"] == "NodeGoneError"
    assert error["errorMessage"] == "it is gone"
    assert "raise NodeGoneError" in "".join(error["stackTrace"])


def test_a_time_out_ends_the_process_and_says_how_long_it_was_given(lambdas, make_function):
    make_function(
        "import os, time\n"
        "def handler(event, context):\n"
        "    print('pid', os.getpid())\n"
        "    time.sleep(event)\n"
        "    return 'done'",
        timeout_s=0.5,
    )
    started = time.monotonic()

    error = fail(lambdas, "made", 30)

    assert time.monotonic() - started < 5
    assert error["errorType"] == "Sandbox.Timedout"
    assert error["errorMessage"].endswith("Error: Task timed out after 0.50 seconds")
    pid = int(next(line for line in lambdas.logs("made") if line.startswith("pid")).split()[1])
    assert not is_running(pid)
    assert ask(lambdas, "made", 0) == "done"


def test_what_a_handler_started_ends_with_its_process(lambdas, make_function):
    make_function(
        "import subprocess, time\n"
        "def handler(event, context):\n"
        "    child = subprocess.Popen(['sleep', '60'])\n"
        "    print('child', child.pid)\n"
        "    time.sleep(60)",
        timeout_s=0.5,
    )

    fail(lambdas, "made")

    child = int(next(line for line in lambdas.logs("made") if line.startswith("child")).split()[1])
    eventually(lambda: not is_running(child))


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("os._exit(3)", "with error: exit status 3"),
        ("os._exit(0)", "without providing a reason"),
        ("os.kill(os.getpid(), 9)", "with error: signal: killed"),
    ],
)
def test_a_crash_is_an_exit_error_and_the_next_call_gets_a_new_process(
    lambdas, make_function, statement, reason
):
    make_function(
        f"import os\ndef handler(event, context):\n    if event:\n        {statement}\n    return 1"
    )

    error = fail(lambdas, "made", True)

    assert error["errorType"] == "Runtime.ExitError"
    assert error["errorMessage"].endswith(f"Error: Runtime exited {reason}")
    assert ask(lambdas, "made", False) == 1


def test_an_answer_beyond_six_megabytes_is_too_large(lambdas, make_function):
    make_function("def handler(event, context):\n    return 'x' * event")

    error = fail(lambdas, "made", 6_300_000)

    assert error["errorType"] == "Function.ResponseSizeTooLarge"
    assert len(ask(lambdas, "made", 6_000_000)) == 6_000_000


def test_a_module_that_is_missing_is_an_import_error(lambdas, make_function):
    make_function("import there_is_no_such_module")

    error = fail(lambdas, "made")

    assert error["errorType"] == "Runtime.ImportModuleError"
    assert "there_is_no_such_module" in error["errorMessage"]


def test_a_module_that_ends_the_process_at_import_is_an_exit_error(lambdas, make_function):
    make_function("import os\nos._exit(7)")

    assert fail(lambdas, "made")["errorType"] == "Runtime.ExitError"


@pytest.mark.skipif(not hasattr(os, "waitid"), reason="needs waitid")
def test_an_idle_process_that_died_is_replaced_unnoticed(lambdas, make_function):
    make_function("import os\ndef handler(event, context):\n    return os.getpid()")
    first = ask(lambdas, "made")
    os.kill(first, 9)
    # Dead with all its threads, and left for the service to find out.
    os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)

    assert ask(lambdas, "made") != first


def test_the_environment_is_lambda_s_and_the_template_s_and_not_the_caller_s(
    lambdas, front, make_function, monkeypatch
):
    monkeypatch.setenv("AWS_PROFILE", "production")
    monkeypatch.setenv("HOME_GROWN", "secret")
    make_function(
        "import os\ndef handler(event, context):\n    return dict(os.environ)",
        environment={"TABLE": "incidents", "OURS": "template"},
    )

    environment = ask(lambdas, "made")

    assert environment["TABLE"] == "incidents"
    assert environment["OURS"] == "template"
    assert environment["EXTRA"] == "given"
    assert environment["AWS_REGION"] == environment["AWS_DEFAULT_REGION"] == "eu-west-1"
    assert environment["AWS_ENDPOINT_URL"] == front.url
    assert environment["TZ"] == ":UTC"
    assert environment["AWS_LAMBDA_FUNCTION_NAME"] == "made"
    assert environment["_HANDLER"] == "app.handler"
    assert not {"AWS_PROFILE", "HOME_GROWN"} & set(environment)
    credential = front.identities.lookup(environment["AWS_ACCESS_KEY_ID"])
    assert credential is not None
    assert credential.caller == "made"


def test_layers_are_importable_after_the_function_s_own_code(lambdas, make_function, tmp_path):
    layer = tmp_path / "layer"
    layer.mkdir()
    (layer / "shared.py").write_text("WHERE = 'layer'")
    (layer / "app.py").write_text("raise RuntimeError('the wrong module')")
    make_function(
        "import shared\ndef handler(event, context):\n    return shared.WHERE", layers=(layer,)
    )

    assert ask(lambdas, "made") == "layer"


def test_embedded_metrics_are_read_from_the_output_before_the_answer_is_given(
    lambdas, make_function
):
    make_function(
        "import json, time\n"
        "def handler(event, context):\n"
        "    print(json.dumps({'_aws': {'Timestamp': int(time.time() * 1000),\n"
        "        'CloudWatchMetrics': [{'Namespace': 'nodemend', 'Dimensions': [['cluster']],\n"
        "        'Metrics': [{'Name': event, 'Unit': 'Count'}]}]}, 'cluster': 'blue', event: 2}))"
    )
    name = f"Cordoned{time.monotonic_ns()}"

    ask(lambdas, "made", name)

    (sample,) = [one for one in lambdas.metrics() if one.name == name]
    assert (sample.namespace, sample.value, sample.unit) == ("nodemend", 2.0, "Count")
    assert sample.dimensions == {"cluster": "blue"}
    assert abs(sample.at - time.time()) < 60


def test_each_invocation_is_reported_with_duration_memory_and_cold_start(lambdas, make_function):
    make_function("import time\ndef handler(event, context):\n    time.sleep(0.1)")
    known = len(lambdas.reports())

    ask(lambdas, "made")
    ask(lambdas, "made")

    cold, warm = lambdas.reports()[known:]
    assert cold.init_ms is not None
    assert cold.init_ms > 0
    assert warm.init_ms is None
    assert warm.duration_ms >= 100
    assert 5 < warm.peak_memory_mb < 500
    report_lines = [line for line in lambdas.logs("made") if line.startswith("REPORT")]
    assert "Init Duration" in report_lines[-2]
    assert "Init Duration" not in report_lines[-1]


def test_output_and_errors_go_to_the_function_s_log_file(lambdas, make_function):
    make_function(
        "import sys\n"
        "def handler(event, context):\n"
        "    print('to the output')\n"
        "    print('to the error stream', file=sys.stderr)",
        name="logger",
    )

    ask(lambdas, "logger")

    text = (lambdas._log_dir / "logger.log").read_text()
    assert "to the output\n" in text
    assert "to the error stream\n" in text
    assert "REPORT RequestId" in text


def test_reserved_concurrency_throttles(lambdas, make_function):
    make_function(
        "import time\ndef handler(event, context):\n    time.sleep(event)", reserved_concurrency=1
    )
    ask(lambdas, "made", 0)
    busy = threading.Thread(target=ask, args=(lambdas, "made", 1))
    busy.start()
    eventually(lambda: lambdas.in_flight > 0)

    with pytest.raises(ThrottledError):
        lambdas.invoke("made", b"0")
    busy.join()


def test_an_asynchronous_failure_is_tried_again_then_sent_on(lambdas, make_function, tmp_path):
    marks = tmp_path / "marks"
    make_function(
        "def handler(event, context):\n"
        f"    with open({str(marks)!r}, 'a') as file:\n"
        "        file.write('x')\n"
        "    raise ValueError('always')"
    )
    lambdas.configure_async("made", AsyncConfig(1, "arn:aws:sqs:eu-west-1:123456789012:failed"))
    sent: list[tuple[str, dict[str, Any]]] = []
    lambdas.on_async_failure = lambda arn, body: sent.append((arn, json.loads(body)))

    lambdas.invoke_async("made", b'{"n": 1}')

    eventually(lambda: sent)
    assert marks.read_text() == "xx"
    (arn, record) = sent[0]
    assert arn.endswith(":failed")
    assert record["requestContext"]["approximateInvokeCount"] == 2
    assert record["requestPayload"] == {"n": 1}
    assert record["responsePayload"]["errorType"] == "ValueError"


def test_an_unknown_function_is_told(lambdas):
    with pytest.raises(UnknownFunctionError):
        lambdas.invoke("arn:aws:lambda:eu-west-1:123456789012:function:nobody", b"{}")
