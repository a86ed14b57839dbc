"""What a compressed answer may be, and what it may not do."""

import gzip
import json
import zlib
from dataclasses import replace
from http.server import BaseHTTPRequestHandler

import pytest
from loopback_service import H200
from loopback_service import SHAPE
from loopback_service import ClientMaker
from loopback_service import Service
from loopback_service import answer
from loopback_service import document
from loopback_service import lines
from loopback_service import wait_for
from loopback_service import watch

from kdatune_kernels import transport
from kdatune_kernels.spec import shape_of
from kdatune_kernels.transport import MAX_BODY_BYTES
from kdatune_kernels.transport import ServiceError
from kdatune_kernels.transport import request


def serve(service: Service, body: bytes, coding: str | None = "gzip", etag: str = '"z"') -> None:
    headers = {"ETag": etag} | ({} if coding is None else {"Content-Encoding": coding})
    service.instead = lambda handler: answer(handler, 200, body, **headers)


def test_a_snapshot_larger_than_the_wire_allows_comes_compressed(
    service: Service, make_client: ClientMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As 10,000 champions are: 12 MB, of which 8 MB may come. Smaller here, so that reading them takes no minute."""
    monkeypatch.setattr(transport, "MAX_BODY_BYTES", 64 << 10)
    whole = document(9, {shape_of(1, 96, tokens): 3 for tokens in range(1, 200)})
    plain = json.dumps(whole).encode()
    assert len(plain) > 64 << 10
    serve(service, gzip.compress(plain))
    client = make_client(service.url)
    feed = watch(client)
    assert feed.service is not None
    assert len(feed.service.champions) == 199
    assert feed.etag == '"z"'
    assert service.requests[0].headers["Accept-Encoding"] == "gzip"
    # the next process starts with what this one has kept
    again = make_client("http://127.0.0.1:9", offline=True)
    kept = again.watch(H200).disk
    assert kept is not None
    assert kept.champions == feed.service.champions


def test_a_bomb_does_not_go_off(service: Service, make_client: ClientMaker, caplog) -> None:
    """7 MB that would be 7 GB: refused after 64 MiB, and what is known stays known."""
    packer = zlib.compressobj(9, wbits=zlib.MAX_WBITS | 16)
    block = b"\0" * (1 << 20)
    bomb = b"".join(packer.compress(block) for _ in range(100)) + packer.flush()
    service.documents[H200.name] = document(7, {SHAPE: 3})
    client = make_client(service.url)
    feed = watch(client)
    known = feed.service
    serve(service, bomb)
    client.refresh(60)
    wait_for(lambda: client.reachable is False)
    assert feed.service is known
    assert "larger than 67108864 bytes when decompressed" in lines(caplog)[-1]


GOOD = gzip.compress(b'{"a": 1}')
BAD = {
    "no gzip": (b'{"a": 1}', "gzip", "incorrect header check"),
    "cut off": (GOOD[:-9], "gzip", "cut off"),
    "a wrong checksum": (GOOD[:-8] + b"\0" * 8, "gzip", "incorrect data check"),
    "two members": (GOOD + GOOD, "gzip", "more than one"),
    "rubbish behind": (GOOD + b"x", "gzip", "more than one"),
    "nothing": (b"", "gzip", "cut off"),
    "another coding": (GOOD, "br", "not asked for"),
    "twice": (gzip.compress(GOOD), "gzip, gzip", "not asked for"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_compressed_answer_that_is_none_is_an_error(service: Service, name: str) -> None:
    body, coding, says = BAD[name]
    serve(service, body, coding)
    with pytest.raises(ServiceError, match=says):
        request("GET", service.url)


@pytest.mark.parametrize("coding", ["gzip", "GZIP", "x-gzip"])
def test_a_compressed_answer_is_read(service: Service, coding: str) -> None:
    serve(service, GOOD, coding)
    assert request("GET", service.url).body == b'{"a": 1}'


@pytest.mark.parametrize("coding", [None, "identity"])
def test_an_uncompressed_answer_is_still_read(service: Service, coding: str | None) -> None:
    serve(service, b'{"a": 1}', coding)
    assert request("GET", service.url).body == b'{"a": 1}'


def test_the_wire_is_bounded_also_where_it_is_compressed(service: Service) -> None:
    serve(service, b"\x1f\x8b" + b"\0" * MAX_BODY_BYTES)
    with pytest.raises(ServiceError, match="larger than 8388608 bytes"):
        request("GET", service.url)


def test_a_failed_answer_is_not_decompressed(service: Service) -> None:
    service.instead = lambda handler: answer(handler, 500, b"not gzip", **{"Content-Encoding": "gzip"})
    assert request("GET", service.url) == replace(request("GET", service.url), status=500, body=b"")


def test_an_answer_that_drips_is_given_up(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte comes in time, the whole never would."""
    monkeypatch.setattr(transport, "WHOLE_SECONDS", 0.3)

    def drip(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        while not service.released.wait(0.02):
            handler.wfile.write(b" ")

    service.instead = drip
    with pytest.raises(ServiceError, match=r"the answer took longer than 0\.3 s"):
        request("GET", service.url)


def test_an_etag_that_no_service_of_ours_gives_is_not_sent_back(service: Service, make_client: ClientMaker) -> None:
    for etag, kept in (('"' + "z" * 198 + '"', True), ('"' + "z" * 199 + '"', False)):
        serve(service, json.dumps(document(9, {SHAPE: 3})).encode(), None, etag)
        client = make_client(service.url)
        watch(client)
        client.refresh(60)
        assert ("If-None-Match" in service.requests[-1].headers) is kept
        client.close()
