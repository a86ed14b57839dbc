"""GET /v1/snapshots/{gpu}: the document, its ETag, 304, and its compressed form."""

import gzip
import json
from dataclasses import replace

import pytest
from pydantic import TypeAdapter

from kdatune_api.schemas import SnapshotDocument
from kdatune_kernels.match import find
from kdatune_kernels.snapshot import parse_snapshot
from kdatune_kernels.spec import KNOWN_GPUS
from kdatune_kernels.spec import canonical
from kdatune_kernels.spec import shape_of
from kdatune_tuner.store.engine import reading
from kdatune_tuner.store.queries import champions

URL = "/v1/snapshots/NVIDIA%20H200"


def test_the_document_is_what_a_launcher_reads(client, shelf, helpers):
    shapes = [helpers.SHAPE, shape_of(4, 8, 4096), shape_of(6, 64, 8192, varlen=True, longest_tokens=3063)]
    for shape, config in zip(shapes, helpers.configs_for(helpers.SHAPE, helpers.H200, 3), strict=True):
        shelf.promote(shape, config)
    shelf.promote(gpu=KNOWN_GPUS["NVIDIA H100 80GB HBM3"])  # same silicon
    shelf.promote(shape_of(1, 8, 64), estimated=True)
    last = shelf.promote(gpu=KNOWN_GPUS["NVIDIA H20"])  # other silicon
    response = client.get(URL)
    TypeAdapter(SnapshotDocument).validate_json(response.content, strict=True)
    snapshot = parse_snapshot(response.content)
    assert snapshot.skipped == ()
    assert (snapshot.schema, snapshot.generation, snapshot.gpu.name) == (1, last.generation, "NVIDIA H200")
    with reading(shelf.engine) as s:
        stored = [c for c in champions(s) if c.gpu.name != "NVIDIA H20"]
    assert set(snapshot.champions) == set(stored)
    assert len(snapshot.champions) == 5
    assert [c.shape for c in snapshot.champions if c.estimated] == [shape_of(1, 8, 64)]
    # what a launcher finds in it is what resolve answers
    for shape in (*shapes, shape_of(1, 96, 8000)):
        answer = client.get("/v1/configs/resolve", params=helpers.query(shape, "NVIDIA H200")).json()
        own = find(snapshot.champions, shape, snapshot.gpu)
        assert canonical(own.config) == canonical(answer["config"])
        assert (own.match, own.reason) == (answer["match"], answer["reason"])


def test_a_known_card_without_champions_has_an_empty_document(client, shelf):
    generation = shelf.promote().generation
    body = client.get("/v1/snapshots/NVIDIA B200").json()
    assert (body["schema"], body["generation"], body["champions"]) == (1, generation, [])
    assert body["gpu"]["name"] == "NVIDIA B200"


@pytest.mark.parametrize(
    "path", [URL, "/v1/configs/resolve?gpu=NVIDIA+H200&N=1&H=96&T=8192"], ids=["snapshot", "resolve"]
)
def test_etag_and_304(client, shelf, path):
    shelf.promote()
    first = client.get(path)
    etag = first.headers["etag"]
    assert etag.startswith('"g1-')
    assert first.headers["cache-control"] == "private, max-age=30, stale-while-revalidate=30, stale-if-error=86400"
    assert first.headers["vary"] == "Accept-Encoding"
    again = client.get(path, headers={"If-None-Match": etag})
    assert (again.status_code, again.content) == (304, b"")
    assert "content-length" not in again.headers
    assert [again.headers[h] for h in ("etag", "cache-control", "vary")] == [
        first.headers[h] for h in ("etag", "cache-control", "vary")
    ]
    shelf.promote(median_us=600.0)
    changed = client.get(path, headers={"If-None-Match": etag})
    assert changed.status_code == 200
    assert changed.headers["etag"] != etag
    assert changed.headers["etag"].startswith('"g2-')
    assert client.get(path, headers={"If-None-Match": changed.headers["etag"]}).status_code == 304


def test_if_none_match_forms(client, shelf):
    shelf.promote()
    etag = client.get(URL, headers={"Accept-Encoding": "identity"}).headers["etag"]
    for header, status in {
        "*": 304,
        etag: 304,
        f"W/{etag}": 304,
        f'"other", {etag}': 304,
        f'"a,b",{etag}': 304,
        '"other"': 200,
        etag.strip('"'): 200,
        "": 200,
        '"': 200,
        f"{etag[:-1]}": 200,
    }.items():
        response = client.get(URL, headers={"If-None-Match": header, "Accept-Encoding": "identity"})
        assert response.status_code == status, header
    lines = [("If-None-Match", '"other"'), ("If-None-Match", etag), ("Accept-Encoding", "identity")]
    assert client.get(URL, headers=lines).status_code == 304


def test_documents_of_two_cards_and_shapes_differ_in_etag(client, shelf):
    shelf.promote()
    paths = [
        URL,
        "/v1/snapshots/NVIDIA%20H800",
        "/v1/configs/resolve?gpu=NVIDIA+H200&N=1&H=96&T=8192",
        "/v1/configs/resolve?gpu=NVIDIA+H200&N=1&H=96&T=8191",
        "/v1/configs/resolve?gpu=NVIDIA+H800&N=1&H=96&T=8192",
    ]
    assert len({client.get(path).headers["etag"] for path in paths}) == len(paths)


def test_the_compressed_form_has_its_own_etag(client, shelf, helpers):
    for tokens, config in enumerate(helpers.configs_for(helpers.SHAPE, helpers.H200, 8)):
        shelf.promote(replace(helpers.SHAPE, T=8192 - tokens), config)
    plain = client.get(URL, headers={"Accept-Encoding": "identity"})
    assert "content-encoding" not in plain.headers
    with client.stream("GET", URL, headers={"Accept-Encoding": "gzip"}) as zipped:
        raw = b"".join(zipped.iter_raw())
    assert zipped.headers["content-encoding"] == "gzip"
    assert int(zipped.headers["content-length"]) == len(raw) < len(plain.content) / 4
    assert gzip.decompress(raw) == plain.content
    etags = plain.headers["etag"], zipped.headers["etag"]
    assert etags[1] == f'{etags[0][:-1]}-gzip"'
    for coding, etag, status in (
        ("gzip", etags[1], 304),
        ("gzip", etags[0], 200),
        ("identity", etags[0], 304),
        ("identity", etags[1], 200),
    ):
        response = client.get(URL, headers={"Accept-Encoding": coding, "If-None-Match": etag})
        assert response.status_code == status


def test_head_gives_the_same_headers(client, shelf):
    shelf.promote()
    got, head = client.get(URL), client.head(URL)
    assert (head.status_code, head.content) == (200, b"")
    changing = {"x-request-id", "server-timing"}
    assert {k: v for k, v in head.headers.items() if k not in changing} == {
        k: v for k, v in got.headers.items() if k not in changing
    }


@pytest.mark.parametrize("query", ["?foo=1", "?sm_count=1&sm_count=1", "?sm_count=x", "?sm_count=", "?gpu=NVIDIA"])
def test_a_query_that_is_not_understood_is_refused(local, is_problem, query):
    is_problem(local.get(URL + query), 422, "invalid-request")


def test_json_holds_no_spaces_and_no_nan(client, shelf):
    shelf.promote()
    text = client.get(URL).text
    assert json.dumps(json.loads(text), separators=(",", ":"), allow_nan=False) == text
