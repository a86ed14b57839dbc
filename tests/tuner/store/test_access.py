"""Tokens and the audit in the store: what is kept, what is checked, what eight processes at once do."""

from datetime import timedelta

import pytest
from sqlalchemy import Engine

from kdatune_kernels.errors import StoreError
from kdatune_tuner.store import access
from kdatune_tuner.store.access import Caller
from kdatune_tuner.store.access import Scope
from kdatune_tuner.store.engine import reading
from kdatune_tuner.store.engine import writing
from kdatune_tuner.store.records import utc_now

BY = Caller("a test")


def test_a_token_is_found_by_itself_only(engine: Engine) -> None:
    with writing(engine) as s:
        row, token = access.create_token(s, "nightly", ["results:write", Scope.PROMOTIONS, "results:write"], BY)
        other, another = access.create_token(s, "other", [Scope.DEMAND], BY)
    assert row.scopes == {"results:write", "promotions:write"}
    assert token != another
    with reading(engine) as s:
        assert access.find_token(s, token) == row
        assert access.find_token(s, another) == other
        mixed = token[:17] + another[17:]
        for wrong in (
            mixed,
            token + " ",
            f" {token}",
            token[:-1],
            "",
            "kdt_",
            row.prefix,
            token.lower(),
            "\ud800",
            "é",
        ):
            assert access.find_token(s, wrong) is None or wrong == token
        assert access.tokens(s) == [row, other]


def test_a_token_ends(engine: Engine) -> None:
    with writing(engine) as s:
        assert not access.has_token(s)
        row, token = access.create_token(s, "a", [Scope.RESULTS], BY, utc_now() + timedelta(seconds=60))
        assert access.has_token(s)
        assert row.is_active(utc_now())
        assert not row.is_active(utc_now() + timedelta(seconds=61))
        access.revoke_token(s, row.prefix, BY)
        assert access.find_token(s, token) is None
        assert not access.has_token(s)
        with pytest.raises(StoreError, match="is revoked already"):
            access.revoke_token(s, row.prefix, BY)


@pytest.mark.parametrize("prefix", ["", "0" * 12, "x", "0123456789ab' OR 1=1", "\x00"])
def test_a_token_that_is_not_there_cannot_be_revoked(engine: Engine, prefix: str) -> None:
    with writing(engine) as s, pytest.raises(StoreError, match="kdatune token list"):
        access.revoke_token(s, prefix, BY)


@pytest.mark.parametrize("name", ["", "  ", "x" * 81, "a\nb", "a\x00b"])
def test_a_name_can_be_printed(engine: Engine, name: str) -> None:
    with writing(engine) as s, pytest.raises(StoreError, match="printable"):
        access.create_token(s, name, [Scope.RESULTS], BY)


@pytest.mark.parametrize("scopes", [[], ["admin"], ["results:write", "results:read"]])
def test_a_scope_is_known(engine: Engine, scopes: list[str]) -> None:
    with writing(engine) as s, pytest.raises(StoreError, match="unknown scope"):
        access.create_token(s, "a", scopes, BY)


def test_an_end_lies_ahead(engine: Engine) -> None:
    with writing(engine) as s, pytest.raises(StoreError, match="would have ended"):
        access.create_token(s, "a", [Scope.RESULTS], BY, utc_now())


def test_the_audit_is_written_with_the_write_or_not_at_all(engine: Engine) -> None:
    def fail() -> None:
        with writing(engine) as s:
            access.create_token(s, "a", [Scope.RESULTS], BY)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    with reading(engine) as s:
        assert (access.tokens(s), access.page_audit(s)) == ([], [])


def test_the_audit_comes_in_pages(engine: Engine) -> None:
    with writing(engine) as s:
        for i in range(5):
            access.add_audit(s, Caller("x", None, f"r{i}"), "test", f"row {i}", {"i": i})
    with reading(engine) as s:
        assert [row.detail for row in access.page_audit(s, limit=2)] == [{"i": 4}, {"i": 3}]
        assert [row.id for row in access.page_audit(s, after_id=4, limit=2)] == [3, 2]
        assert [row.id for row in access.page_audit(s, after_id=3, newest_first=False)] == [4, 5]
