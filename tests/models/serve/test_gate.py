"""Who is let in: connections that keep silent are closed, other hosts' pages refused."""

import json
import time

import httpx
import pytest

from models.serve import HttpLimits
from tests.models.serve.running import Slow, connect, read_until, running


def answer(connection):
    """All until the server closes: its status, and what it says."""
    data = b""
    while part := connection.recv(4096):
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["message"]


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nx-half:"])
def test_headers_must_arrive_in_time(sent):
    with running(Slow(), limits=HttpLimits(header_seconds=0.05)) as (url, _, _), connect(url) as connection:
        connection.sendall(sent)
        assert answer(connection) == (408, "the headers did not arrive within 0.05 s")


def test_a_connection_that_is_kept_begins_anew():
    """The second request on it has a time of its own, which begins with it."""
    limits = HttpLimits(header_seconds=60)
    with running(Slow(), limits=limits) as (url, _, _), connect(url) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        assert read_until(connection, b'"ok"').startswith(b"HTTP/1.1 200")
        object.__setattr__(limits, "header_seconds", 0.05)
        connection.sendall(b"GET /health HTTP/1.1\r\nhost:")
        assert answer(connection)[0] == 408


UNKEYED = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"


def test_what_is_no_http_is_told_in_the_form_of_other_errors():
    with running(Slow()) as (url, _, _), connect(url) as connection:
        connection.sendall(b"nonsense\r\n\r\n")
        assert answer(connection) == (400, "Invalid HTTP request received.")


def test_the_body_of_a_refused_request_does_not_hold_its_connection():
    """The client would have all the time between two bytes, and Uvicorn's timer is off after the first."""
    limits = HttpLimits(upload_seconds=0.2)
    with running(Slow(), limits=limits, keys=("key",)) as (url, _, _), connect(url) as connection:
        connection.sendall(UNKEYED + b"content-length: 1000\r\n\r\n")
        assert read_until(connection, b"no key").startswith(b"HTTP/1.1 401")
        connection.sendall(b"x")
        connection.settimeout(30)
        while connection.recv(4096):
            pass


def test_the_body_of_a_refused_request_may_come_and_the_next_one_follow():
    limits = HttpLimits(upload_seconds=0.2)
    with running(Slow(), limits=limits, keys=("key",)) as (url, _, _), connect(url) as connection:
        for _ in range(2):
            connection.sendall(UNKEYED + b"content-length: 2\r\n\r\n")
            assert read_until(connection, b"invalid_api_key").startswith(b"HTTP/1.1 401")
            connection.sendall(b"{}")
        time.sleep(0.4)
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        assert read_until(connection, b'"ok"').startswith(b"HTTP/1.1 200")


def test_a_refused_request_whose_body_goes_wrong_is_closed_without_a_traceback(caplog):
    with running(Slow(), keys=("key",)) as (url, _, _), connect(url) as connection:
        connection.sendall(UNKEYED + b"transfer-encoding: chunked\r\n\r\n")
        assert read_until(connection, b"no key").startswith(b"HTTP/1.1 401")
        connection.sendall(b"no length\r\n")
        while connection.recv(4096):
            pass
    assert not [record for record in caplog.records if record.exc_info]


def test_one_address_may_not_hold_all_connections():
    with running(Slow(), limits=HttpLimits(connections_per_address=3)) as (url, _, _):
        held = [connect(url) for _ in range(3)]
        for connection in held:  # they are accepted in order: an answer says that it is known
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
            assert read_until(connection, b'"ok"').startswith(b"HTTP/1.1 200")
        with connect(url) as more:
            assert answer(more) == (429, "this address holds 3 connections: close some of them")
        for connection in held:
            connection.close()


def test_of_more_connections_than_there_may_be_the_further_ones_are_refused():
    request = b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
    with running(Slow(), max_connections=2) as (url, _, _), connect(url) as first, connect(url) as second:
        for connection in (first, second):
            connection.sendall(request)
            assert read_until(connection, b'"ok"').startswith(b"HTTP/1.1 200")
        with connect(url) as third:
            third.sendall(request)
            assert answer(third) == (503, "the server holds 2 connections: ask again later")
        first.sendall(request)
        assert read_until(first, b'"ok"').startswith(b"HTTP/1.1 200"), "who was there before is answered"


HERE = ("127.0.0.1", "::1", "localhost")


@pytest.mark.parametrize(
    ("hosts", "headers", "status"),
    [
        (HERE, {}, 200),
        (HERE, {"host": "localhost:8000", "origin": "http://localhost:3000"}, 200),
        (HERE, {"host": "[::1]:8000"}, 200),
        (HERE, {"host": "evil.example", "origin": "http://evil.example"}, 403),
        (HERE, {"host": "evil.example:8000"}, 403),
        (HERE, {"origin": "http://evil.example"}, 403),
        (HERE, {"origin": "null"}, 403),
        (HERE, {"host": "[::1"}, 403),
        ((*HERE, "Models.Example"), {"host": "models.example", "origin": "https://models.EXAMPLE:1"}, 200),
        (None, {"host": "anything.example"}, 200),
        (None, {"host": "anything.example", "origin": "http://evil.example"}, 403),
    ],
)
def test_hosts_and_origins(gates, hosts, headers, status):
    found = httpx.get(f"{gates[hosts]}/health", headers=headers)
    assert found.status_code == status
    assert not [name for name in found.headers if name.startswith("access-control")], (
        "nothing of CORS, see docs"
    )
    if status == 403:
        assert found.json()["error"]["message"].endswith(
            ("--allow-host lets others in", "--allow-host lets them")
        )


@pytest.fixture(scope="module")
def gates():
    """A server for each set of hosts."""
    with (
        running(Slow(), hosts=HERE) as (here, _, _),
        running(Slow(), hosts=(*HERE, "Models.Example")) as (more, _, _),
        running(Slow()) as (any_host, _, _),
    ):
        yield {HERE: here, (*HERE, "Models.Example"): more, None: any_host}
