import pytest

from weightsync_core.endpoints import Endpoint, parse_endpoint
from weightsync_core.errors import EndpointError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http://10.0.0.7:30000", Endpoint("10.0.0.7", 30000)),
        ("http://10.0.0.7:30000/", Endpoint("10.0.0.7", 30000)),
        ("https://engine.example", Endpoint("engine.example", 30000, "https")),
        ("engine-0.engines:8000", Endpoint("engine-0.engines", 8000)),
        ("localhost", Endpoint("localhost", 30000)),
        ("[fd00::7]:30001", Endpoint("fd00::7", 30001)),
        ("[fd00::7]", Endpoint("fd00::7", 30000)),
        ("fd00::7", Endpoint("fd00::7", 30000)),
        ("::1", Endpoint("::1", 30000)),
        ("http://[::1]:9", Endpoint("::1", 9)),
    ],
)
def test_reads_every_usual_form(text: str, expected: Endpoint) -> None:
    assert parse_endpoint(text) == expected
    assert parse_endpoint(expected.url) == expected


@pytest.mark.parametrize(
    "text",
    ["", "http://", "ftp://host:1", "host:0", "host:65536", "host:port", "http://host/path", "http://u:p@host", "http://host?x=1",
     "[fd00::7", "fd00::zz", "-bad-", "ho st", ":30000", "[host]:1"],
)  # fmt: skip
def test_refuses_what_is_no_engine_address_and_says_what_was_seen(text: str) -> None:
    with pytest.raises(EndpointError, match=r"expected e\.g\. http://10\.0\.0\.7:30000") as caught:
        parse_endpoint(text)
    assert repr(text) in str(caught.value)
