"""The Lambda API: Invoke, and what describes functions."""

import base64
import json

from werkzeug.wrappers import Response

from local.aws.front import Front
from local.aws.lambdas import LambdaService, ThrottledError, UnknownFunctionError
from local.aws.wire import AwsRequest, error_response, json_response

MAX_SYNC_PAYLOAD_BYTES = 6_291_456
MAX_ASYNC_PAYLOAD_BYTES = 1_048_576


class LambdaApi:
    """Serves the API of one Lambda service."""

    def __init__(self, front: Front, lambdas: LambdaService) -> None:
        self._lambdas = lambdas
        front.route("lambda", self.handle)

    def handle(self, request: AwsRequest) -> Response:
        """Serve the Lambda API: Invoke, and what describes functions."""
        try:
            match request.action:
                case "Invoke":
                    return self._handle_invoke(request)
                case "GetFunction":
                    return json_response({"Configuration": self._describe(request.target)})
                case "GetFunctionConfiguration":
                    return json_response(self._describe(request.target))
                case "ListFunctions":
                    functions = [self._describe(spec.name) for spec in self._lambdas.specs()]
                    return json_response({"Functions": functions})
        except UnknownFunctionError as error:
            message = f"Function not found: {error}"
            return error_response(request, 404, "ResourceNotFoundException", message)
        except ThrottledError as error:
            return error_response(
                request,
                429,
                "TooManyRequestsException",
                str(error),
                Reason="ReservedFunctionConcurrentInvocationLimitExceeded",
            )
        message = f"the laptop's Lambda does not serve {request.action}"
        return error_response(request, 501, "NotImplemented", message)

    def _handle_invoke(self, request: AwsRequest) -> Response:
        is_async = request.headers.get("x-amz-invocation-type") == "Event"
        limit = MAX_ASYNC_PAYLOAD_BYTES if is_async else MAX_SYNC_PAYLOAD_BYTES
        payload = request.body or b"{}"
        if len(payload) > limit:
            message = f"{len(payload)} byte payload is too large (limit {limit} bytes)"
            return error_response(request, 413, "RequestTooLargeException", message)
        try:
            json.loads(payload)
        except ValueError as error:
            message = f"Could not parse request body into json: {error}"
            return error_response(request, 400, "InvalidRequestContentException", message)
        if is_async:
            request_id = self._lambdas.invoke_async(request.target, payload)
            return Response(status=202, headers={"x-amzn-RequestId": request_id})
        if request.headers.get("x-amz-invocation-type") == "DryRun":
            self._lambdas.spec(request.target)
            return Response(status=204)
        result = self._lambdas.invoke(
            request.target,
            payload,
            client_context=base64.b64decode(
                request.headers.get("x-amz-client-context", "")
            ).decode(),
        )
        headers = {
            "x-amzn-RequestId": result.request_id,
            "X-Amz-Executed-Version": "$LATEST",
        }
        if result.function_error is not None:
            headers["X-Amz-Function-Error"] = result.function_error
        if request.headers.get("x-amz-log-type") == "Tail":
            headers["X-Amz-Log-Result"] = base64.b64encode(result.log_tail.encode()).decode()
        return Response(result.payload, headers=headers, content_type="application/json")

    def _describe(self, name: str) -> dict[str, object]:
        spec = self._lambdas.spec(name)
        return {
            "FunctionName": spec.name,
            "FunctionArn": spec.arn,
            "Runtime": spec.runtime,
            "Role": spec.role_arn,
            "Handler": spec.handler,
            "Timeout": int(spec.timeout_s),
            "MemorySize": spec.memory_mb,
            "Version": "$LATEST",
            "State": "Active",
            "LastUpdateStatus": "Successful",
            "Environment": {"Variables": spec.environment},
        }
