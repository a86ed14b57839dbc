"""ETags, If-None-Match, Accept-Encoding: the rules of RFC 9110, one by one."""

import gzip

import pytest

from kdatune_api.caching import MIN_GZIP_BYTES
from kdatune_api.caching import accepts_gzip
from kdatune_api.caching import cache_control
from kdatune_api.caching import document
from kdatune_api.caching import matches


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (None, False),
        ("*", True),
        (" * ", True),
        ('"g1-abc"', True),
        ('W/"g1-abc"', True),
        ('"x", "g1-abc"', True),
        ('"x","g1-abc" , W/"y"', True),
        ('"a,g1-abc"', False),
        ('"x"', False),
        ("g1-abc", False),
        ('"g1-abc', False),
        ('"G1-abc"', False),
        ('"g1-abc-gzip"', False),
        ("", False),
        ('"x", *', False),
    ],
)
def test_if_none_match(header, expected):
    assert matches(header, '"g1-abc"') is expected


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (None, False),
        ("", False),
        ("gzip", True),
        ("GZIP", True),
        ("br, gzip", True),
        ("gzip;q=0", False),
        ("gzip;q=0.000", False),
        ("gzip; q=0.5", True),
        ("gzip ; q=1.000", True),
        ("*", True),
        ("*;q=0", False),
        ("identity, *;q=0.1", True),
        ("gzip;q=0, *", False),
        ("identity", False),
        ("xgzip", False),
        ("gzip;q=2", False),
        ("gzip;level=9", False),
    ],
)
def test_accept_encoding(header, expected):
    assert accepts_gzip(header) is expected


def test_an_etag_is_of_the_generation_and_the_bytes():
    one = document(7, b"{}")
    assert one.etag.startswith('"g7-')
    assert one.etag == document(7, b"{}").etag
    assert one.etag != document(8, b"{}").etag
    assert one.etag != document(7, b"[]").etag
    assert one.gzip_etag == one.etag[:-1] + '-gzip"'


def test_only_what_pays_is_compressed_and_always_to_the_same_bytes():
    large = b"x" * MIN_GZIP_BYTES
    assert document(1, large[:-1], compress=True).gzipped is None
    assert document(1, large).gzipped is None
    zipped = document(1, large, compress=True).gzipped
    assert gzip.decompress(zipped) == large
    assert zipped == document(1, large, compress=True).gzipped
    assert zipped[4:8] == b"\0\0\0\0"  # no time of day in it


def test_cache_control():
    assert cache_control(30) == "private, max-age=30, stale-while-revalidate=30, stale-if-error=86400"
