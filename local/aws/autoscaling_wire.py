"""AWS's `query` and `ec2` protocols from the server's side, driven by botocore's service models.

The client parses with the same models, so that a field that AWS does not have cannot slip into an
answer, nor a list come in the wrong wrapper. Both protocols send a form and take back XML; they
differ in how lists are numbered and wrapped, in the error body, and in where the request id stands.
"""

import bisect
import functools
import itertools
import threading
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from io import BytesIO
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast
from urllib.parse import parse_qsl

import botocore.session
from botocore.model import ListShape, OperationModel, ServiceModel, Shape, StructureShape
from werkzeug.wrappers import Request, Response

from local.aws.autoscaling_core import Effect
from local.aws.autoscaling_model import CapacityModel
from local.aws.autoscaling_types import AwsAnswerError

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment

T = TypeVar("T")
Fields = dict[str, Any]
"""A request's or an answer's members by name, nested as the service model has them."""


@functools.cache
def service_model(service: str) -> ServiceModel:
    """Return botocore's model of a service (EC2's takes a third of a second to load)."""
    return botocore.session.get_session().get_service_model(service)


class QueryProtocol:
    """The `query` protocol (Auto Scaling): lists as `Name.member.1`, `<member>` in answers."""

    def __init__(self, service: str) -> None:
        self.model = service_model(service)

    def operation(self, action: str) -> OperationModel | None:
        """Return the model of an action, None if the service has no such action."""
        if action not in self.model.operation_names:
            return None
        return self.model.operation_model(action)

    # --- requests -----------------------------------------------------------------------------

    def parse(self, operation: OperationModel, form: Mapping[str, str]) -> Fields:
        """Return the typed parameters of a request; what the model does not know is ignored."""
        shape = operation.input_shape
        return {} if shape is None else cast("Fields", self._value(shape, _tree(form)))

    def check_required(self, operation: OperationModel, params: Fields) -> None:
        """Refuse a request that lacks a member which the model requires at its top level."""
        shape = operation.input_shape
        for name in [] if shape is None else shape.required_members:
            if name not in params:
                raise self.missing(name)

    def missing(self, member: str) -> AwsAnswerError:
        """Return the refusal for a required member that is not there."""
        return AwsAnswerError(
            "ValidationError",
            f"1 validation error detected: Value null at '{member[0].lower()}{member[1:]}' failed "
            "to satisfy constraint: Member must not be null",
        )

    def _value(self, shape: Shape, node: Any) -> Any:  # noqa: ANN401
        if isinstance(shape, StructureShape):
            return {
                name: self._value(member, node[key])
                for name, member in shape.members.items()
                if (key := self._key(name, member)) in node
            }
        if isinstance(shape, ListShape):
            items = self._items(node) if isinstance(node, dict) else {}
            return [self._value(shape.member, items[key]) for key in sorted(items, key=_number)]
        return _scalar(shape, node)

    def _key(self, name: str, member: Shape) -> str:
        return str(member.serialization.get("name", name))

    def _items(self, node: Fields) -> Fields:
        items: Fields = node.get("member", {})
        return items

    # --- answers ------------------------------------------------------------------------------

    def answer(self, operation: OperationModel, result: Fields, request_id: str) -> bytes:
        """Return the XML of a successful answer."""
        root = ET.Element(f"{operation.name}Response", xmlns=self._namespace())
        shape = operation.output_shape
        if shape is not None:
            wrapper = shape.serialization.get("resultWrapper")
            node = root if wrapper is None else ET.SubElement(root, wrapper)
            self._fill(node, shape, result)
        metadata = ET.SubElement(root, "ResponseMetadata")
        ET.SubElement(metadata, "RequestId").text = request_id
        return _xml(root)

    def error(self, error: AwsAnswerError, request_id: str) -> bytes:
        """Return the XML of an error answer."""
        root = ET.Element("ErrorResponse", xmlns=self._namespace())
        node = ET.SubElement(root, "Error")
        ET.SubElement(node, "Type").text = "Sender" if error.status < 500 else "Receiver"
        ET.SubElement(node, "Code").text = error.code
        ET.SubElement(node, "Message").text = error.message
        ET.SubElement(root, "RequestId").text = request_id
        return _xml(root)

    def _namespace(self) -> str:
        return str(self.model.metadata["xmlNamespace"])

    def _fill(self, node: ET.Element, shape: Shape, values: Fields) -> None:
        members = cast("StructureShape", shape).members
        unknown = set(values) - set(members)
        if unknown:
            raise KeyError(f"{shape.name} has no member {', '.join(sorted(unknown))}")
        for name, value in values.items():
            member = members[name]
            if value is None:
                continue
            child = ET.SubElement(node, str(member.serialization.get("name", name)))
            self._write(child, member, value)

    def _write(self, node: ET.Element, shape: Shape, value: Any) -> None:  # noqa: ANN401
        if isinstance(shape, StructureShape):
            self._fill(node, shape, value)
        elif isinstance(shape, ListShape):
            tag = self._list_tag(shape)
            for item in value:
                self._write(ET.SubElement(node, tag), shape.member, item)
        else:
            node.text = _text(shape, value)

    def _list_tag(self, shape: ListShape) -> str:
        return str(shape.member.serialization.get("name", "member"))


class Ec2Protocol(QueryProtocol):
    """The `ec2` protocol: lists as `Name.1`, `<item>` in answers, no result wrapper."""

    def missing(self, member: str) -> AwsAnswerError:
        """Return the refusal for a required member that is not there."""
        return AwsAnswerError(
            "MissingParameter",
            f"The request must contain the parameter {member.removesuffix('s')}",
        )

    def _key(self, name: str, member: Shape) -> str:
        serialization = member.serialization
        if "queryName" in serialization:
            return str(serialization["queryName"])
        key = str(serialization.get("name", name))
        return key[0].upper() + key[1:]

    def _items(self, node: Fields) -> Fields:
        return node

    def answer(self, operation: OperationModel, result: Fields, request_id: str) -> bytes:
        """Return the XML of a successful answer; `<return>` says true where there is no result."""
        root = ET.Element(f"{operation.name}Response", xmlns=self._namespace())
        ET.SubElement(root, "requestId").text = request_id
        if operation.output_shape is None:
            ET.SubElement(root, "return").text = "true"
        else:
            self._fill(root, operation.output_shape, result)
        return _xml(root)

    def error(self, error: AwsAnswerError, request_id: str) -> bytes:
        """Return the XML of an error answer, in EC2's own form."""
        root = ET.Element("Response")
        node = ET.SubElement(ET.SubElement(root, "Errors"), "Error")
        ET.SubElement(node, "Code").text = error.code
        ET.SubElement(node, "Message").text = error.message
        ET.SubElement(root, "RequestID").text = request_id
        return _xml(root)


def _tree(form: Mapping[str, str]) -> Fields:
    """Turn `A.member.1.B` keys into nested dictionaries."""
    root: Fields = {}
    for key, value in form.items():
        node = root
        *path, last = key.split(".")
        for part in path:
            child = node.setdefault(part, {})
            if not isinstance(child, dict):
                raise AwsAnswerError("MalformedQueryString", f"{key} is both a value and a list")
            node = child
        node[last] = value
    return root


def _number(key: str) -> int:
    if not key.isdigit():
        raise AwsAnswerError("MalformedQueryString", f"{key} is no list index")
    return int(key)


def _scalar(shape: Shape, text: Any) -> Any:  # noqa: ANN401
    if not isinstance(text, str):
        raise AwsAnswerError("MalformedQueryString", f"{shape.name} is a single value")
    try:
        match shape.type_name:
            case "boolean":
                return {"true": True, "false": False}[text.lower()]
            case "integer" | "long":
                return int(text)
            case _:
                return text
    except (KeyError, ValueError) as error:
        raise AwsAnswerError("ValidationError", f"{text!r} is no {shape.type_name}") from error


def _text(shape: Shape, value: Any) -> str:  # noqa: ANN401
    match shape.type_name:
        case "boolean":
            return "true" if value else "false"
        case "timestamp":
            moment = datetime.fromtimestamp(value, UTC)
            return f"{moment:%Y-%m-%dT%H:%M:%S}.{moment.microsecond // 1000:03d}Z"
        case "string" | "integer" | "long":
            return str(value)
        case _:
            raise TypeError(f"{shape.name}: no rule to write a {shape.type_name}")


def _xml(root: ET.Element) -> bytes:
    return cast("bytes", ET.tostring(root, encoding="utf-8", xml_declaration=True))


@dataclass(slots=True)
class Behaviour:
    """How the answers of one action go wrong in ways that no status code shows."""

    effect: Effect = Effect.ONCE
    delay_s: float = 0.0
    """Wait after the deed and before the answer. Longer than the client's read time-out: the deed
    is done, and the client sees a time-out."""
    error: AwsAnswerError | None = None
    """Answer this after the deed: the lost success."""
    times: int | None = None
    """For how many calls; None: all."""
    target: str = ""
    """Substring of the call's target."""


Handler = Callable[[Fields], Fields]


class QueryFront:
    """A WSGI application for one service: dispatches actions to handlers over one model.

    Subclasses fill `handlers` and name their mutations and what a call is about.
    """

    service: ClassVar[str]
    mutations: ClassVar[frozenset[str]]

    def __init__(
        self,
        model: CapacityModel,
        protocol: QueryProtocol,
        behaviours: Mapping[str, Behaviour] | None = None,
    ) -> None:
        self.model = model
        self.behaviours: dict[str, Behaviour] = dict(behaviours or {})
        """By action; change it at any time."""
        self.denied: set[str] = set()
        """Actions that IAM does not allow."""
        self.handlers: dict[str, Handler] = {}
        self.protocol = protocol
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._serial = itertools.count(1)

    def close(self) -> None:
        """End all waiting answers at once."""
        self._closing.set()

    def __call__(
        self, environ: "WSGIEnvironment", start_response: "StartResponse"
    ) -> Iterable[bytes]:
        """Answer as a WSGI application."""
        return self.handle(Request(environ))(environ, start_response)

    def handle(self, request: Request) -> Response:
        """Answer one request."""
        request_id = f"00000000-0000-4000-8000-{next(self._serial):012x}"
        try:
            status, body = 200, self._answer(_form(request), request_id)
        except AwsAnswerError as error:
            status, body = error.status, self.protocol.error(error, request_id)
        return Response(
            body,
            status=status,
            content_type="text/xml;charset=UTF-8",
            headers={"x-amzn-RequestId": request_id},
        )

    def describe_call(
        self, environ_or_request: "WSGIEnvironment | Request"
    ) -> tuple[str, str, bool]:
        """Return verb, target and whether it is a mutation; the request stays readable.

        It tells what was asked: a mutation that is refused (status 400 and above) is none, which
        only the caller can know.
        """
        request = (
            environ_or_request
            if isinstance(environ_or_request, Request)
            else Request(environ_or_request)
        )
        form = _form(request)
        action = form.get("Action", "")
        operation = self.protocol.operation(action)
        target = "*"
        is_dry_run = False
        if operation is not None:
            try:
                params = self.protocol.parse(operation, form)
            except AwsAnswerError:
                params = {}
            target = self.target(action, params) or "*"
            is_dry_run = bool(params.get("DryRun"))
        return action, target, action in self.mutations and not is_dry_run

    def target(self, action: str, params: Fields) -> str:
        """Return what a call is about: instance ids, else the group."""
        raise NotImplementedError

    def _answer(self, form: Mapping[str, str], request_id: str) -> bytes:
        action = form.get("Action", "")
        operation = self.protocol.operation(action)
        handler = self.handlers.get(action)
        if operation is None or handler is None:
            raise AwsAnswerError(
                "InvalidAction", f"The action {action} is not valid for this web service."
            )
        params = self.protocol.parse(operation, form)
        self.protocol.check_required(operation, params)
        self.authorize(action, params)
        behaviour = self._behaviour(action, self.target(action, params))
        if behaviour is None:
            return self.protocol.answer(operation, handler(params), request_id)
        with self.model.applying(behaviour.effect):
            result = handler(params)
        if behaviour.delay_s > 0:
            self._closing.wait(behaviour.delay_s)
        if behaviour.error is not None:
            raise behaviour.error
        return self.protocol.answer(operation, result, request_id)

    def authorize(self, action: str, params: Fields) -> None:
        """Refuse what IAM does not allow."""
        raise NotImplementedError

    def _behaviour(self, action: str, target: str) -> Behaviour | None:
        with self._lock:
            behaviour = self.behaviours.get(action)
            if behaviour is None or behaviour.times == 0 or behaviour.target not in target:
                return None
            if behaviour.times is not None:
                behaviour.times -= 1
            return behaviour


def _form(request: Request) -> dict[str, str]:
    """Return the form fields and leave the body readable for whoever comes next."""
    data = request.get_data(cache=True, parse_form_data=False)
    if not data and request.form:
        return dict(request.form.items())
    request.environ["wsgi.input"] = BytesIO(data)
    return dict(parse_qsl(data.decode(), keep_blank_values=True)) | dict(request.args.items())


def page_of(
    items: Sequence[T],
    keys: Sequence[str],
    size: int,
    token: str | None,
    *,
    is_sorted: bool = True,
) -> tuple[list[T], str | None]:
    """Return one page of a list that may change between two calls, and the token of the next.

    The token names the last item given, so that what joins or leaves in between shifts nothing.

    Args:
        items: All items in their order.
        keys: A unique key of each.
        size: Items a page.
        token: The client's token, None or empty for the first page.
        is_sorted: The keys ascend; then the item that the token names may be gone.
    """
    start = 0
    if token:
        last = _decode(token)
        if not last or (not is_sorted and last not in keys):
            raise AwsAnswerError("InvalidNextToken", f"The token '{token}' is invalid.")
        start = bisect.bisect_right(keys, last) if is_sorted else keys.index(last) + 1
    end = start + size
    return list(items[start:end]), None if end >= len(items) else _encode(keys[end - 1])


def _encode(key: str) -> str:
    return key.encode().hex()


def _decode(token: str) -> str:
    try:
        return bytes.fromhex(token).decode()
    except ValueError:
        return ""
