"""Statuses into failures, details included, whoever made the trailers."""

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2

from contracts.errors import DeadlineExceeded, InvalidRequest, Overloaded
from diptych_client.errors import InvalidArgument, RpcFailed, Unavailable, Violation, as_failure, read_details
from rpc.errors import to_status


class Ended:
    """A call that has ended, as gRPC shows it."""

    def __init__(self, code, details, trailers=()):
        self._code, self._details, self._trailers = code, details, trailers

    def code(self):
        return self._code

    def details(self):
        return self._details

    def trailing_metadata(self):
        return self._trailers


def ended(status: status_pb2.Status) -> Ended:
    code = next(c for c in grpc.StatusCode if c.value[0] == status.code)
    return Ended(code, status.message, (("grpc-status-details-bin", status.SerializeToString()), ("x", "y")))


def test_a_refused_field_is_a_violation():
    failure = as_failure(ended(to_status(InvalidRequest("sampling.top_p", 2, "must be above 0, to 1"))))
    assert isinstance(failure, InvalidArgument)
    assert failure.violations == (Violation("sampling.top_p", "sampling.top_p: got 2, must be above 0, to 1"),)
    assert failure.facts == {"field": "sampling.top_p", "value": "2", "limit": "must be above 0, to 1"}
    assert failure.reason == "InvalidRequest"
    assert ("x", "y") in failure.metadata
    assert failure.retry_after_s is None


def test_overload_says_when_to_come_back():
    assert as_failure(ended(to_status(Overloaded("full", 2.5)))).retry_after_s == 2.5


@pytest.mark.parametrize("trailers", [(), None, (("grpc-status-details-bin", b"\xff\xff"),)])
def test_a_stranger_s_trailers_leave_the_code(trailers):
    failure = as_failure(Ended(grpc.StatusCode.UNAVAILABLE, None, trailers))
    assert type(failure) is Unavailable
    assert (failure.message, failure.violations, failure.reason) == ("", (), "")


def test_a_deadline_is_said_in_our_words_unless_the_server_has_said_it():
    for said in ("Deadline Exceeded", "Stream removed (Deadline Exceeded)", None):
        failure = as_failure(Ended(grpc.StatusCode.DEADLINE_EXCEEDED, said))
        assert str(failure) == "DEADLINE_EXCEEDED: the time given for the call (`timeout_s`) is up"
    assert as_failure(ended(to_status(DeadlineExceeded("no worker within 3 s")))).message == "no worker within 3 s"


def test_a_code_without_a_class_of_its_own():
    assert type(as_failure(Ended(grpc.StatusCode.DATA_LOSS, "gone"))) is RpcFailed


def test_unknown_details_are_left_alone():
    known, strange = any_pb2.Any(), any_pb2.Any(type_url="type.googleapis.com/no.such.Message", value=b"\x08\x01")
    known.Pack(error_details_pb2.BadRequest(field_violations=[{"field": "f", "description": "d"}]))
    status = status_pb2.Status(code=code_pb2.INVALID_ARGUMENT, details=[strange, known])
    assert read_details(status).violations == (Violation("f", "d"),)
