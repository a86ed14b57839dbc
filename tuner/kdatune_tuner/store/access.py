"""Who may write, and who wrote: bearer tokens and the audit. Called inside `engine.reading` or `engine.writing`.

A token reads kdt_<prefix>_<secret>. The prefix finds its row and may be shown; of the whole only the sha256 is kept. The
secret is 256 random bits, so there is nothing to guess and a slow hash would protect nothing.
"""

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import ColumnElement
from sqlalchemy import func
from sqlalchemy import or_
from sqlalchemy import select
from sqlalchemy.orm import Session

from kdatune_kernels.errors import StoreError
from kdatune_tuner.store.convert import is_id
from kdatune_tuner.store.models import AuditModel
from kdatune_tuner.store.models import TokenModel
from kdatune_tuner.store.records import AuditRow
from kdatune_tuner.store.records import TokenRow
from kdatune_tuner.store.records import utc_now

MAX_NAME_CHARS = 80
_TOKEN = re.compile(r"kdt_([0-9a-f]{12})_[A-Za-z0-9_-]{43}")
_NOBODY = hashlib.sha256(b"").hexdigest()


class Scope(StrEnum):
    """What a token may do. Any token may read."""

    RESULTS = "results:write"
    PROMOTIONS = "promotions:write"
    DEMAND = "demand:write"
    REGRESSIONS = "regressions:write"


@dataclass(frozen=True)
class Caller:
    """Who writes: a token, or a person at the command line (token_id None)."""

    name: str
    token_id: int | None = None
    request_id: str | None = None


def create_token(
    s: Session, name: str, scopes: Iterable[str], by: Caller, expires_at: datetime | None = None
) -> tuple[TokenRow, str]:
    """Make a token and return its row and itself: the only time it can be seen.

    Raises:
        StoreError: no scope or an unknown one, a name that is empty, long or not printable, or an end in the past.
    """
    wanted = sorted({str(scope) for scope in scopes})
    unknown = [scope for scope in wanted if scope not in set(Scope)]
    if unknown or not wanted:
        raise StoreError(f"unknown scope(s) {', '.join(unknown) or 'none'}; use one or more of {', '.join(Scope)}")
    if not (name.strip() and name.isprintable() and len(name) <= MAX_NAME_CHARS):
        raise StoreError(f"a token's name must be 1 to {MAX_NAME_CHARS} printable characters, not {name[:200]!r}")
    now = utc_now()
    if expires_at is not None and expires_at <= now:
        raise StoreError(f"token {name!r} would have ended at {expires_at.isoformat()} already")
    prefix = secrets.token_hex(6)
    token = f"kdt_{prefix}_{secrets.token_urlsafe(32)}"
    row = TokenModel(
        name=name,
        prefix=prefix,
        token_hash=_hashed(token),
        scopes=" ".join(wanted),
        created_at=now,
        expires_at=expires_at,
    )
    s.add(row)
    s.flush()
    add_audit(s, by, "token.create", f"token {prefix}", {"name": name, "scopes": wanted})
    return _token_row(row), token


def revoke_token(s: Session, prefix: str, by: Caller) -> TokenRow:
    """End a token, for good and at once. Raises StoreError when there is none of that prefix, or it is revoked already."""
    row = s.scalars(select(TokenModel).where(TokenModel.prefix == prefix)).first() if _is_prefix(prefix) else None
    if row is None:
        raise StoreError(f"there is no token {prefix[:40]!r}; see `kdatune token list`")
    if row.revoked_at is not None:
        raise StoreError(f"token {prefix} is revoked already, since {row.revoked_at.isoformat(timespec='seconds')}")
    row.revoked_at = utc_now()
    s.flush()
    add_audit(s, by, "token.revoke", f"token {prefix}", {"name": row.name})
    return _token_row(row)


def tokens(s: Session) -> list[TokenRow]:
    """Every token, revoked ones included, oldest first."""
    return [_token_row(row) for row in s.scalars(select(TokenModel).order_by(TokenModel.id))]


def has_token(s: Session) -> bool:
    """Whether any token may be used now."""
    return bool(s.scalar(select(func.count()).select_from(TokenModel).where(*_active(utc_now()))))


def find_token(s: Session, token: str) -> TokenRow | None:
    """The row of a token that may be used now; None for any other text. Compares in constant time."""
    found = _TOKEN.fullmatch(token)
    row = s.scalars(select(TokenModel).where(TokenModel.prefix == found[1])).first() if found else None
    same = hmac.compare_digest(_hashed(token), row.token_hash if row is not None else _NOBODY)
    if row is None or not same:
        return None
    known = _token_row(row)
    return known if known.is_active(utc_now()) else None


def add_audit(s: Session, by: Caller, action: str, target: str, detail: dict[str, Any] | None = None) -> None:
    """Say in the same transaction who writes what.

    Args:
        action: what is done, e.g. "promotion.rollback".
        target: to which row, e.g. "promotion 12".
    """
    s.add(
        AuditModel(
            happened_at=utc_now(),
            actor=by.name,
            token_id=by.token_id,
            action=action,
            target=target,
            detail=detail,
            request_id=by.request_id,
        )
    )
    s.flush()


def page_audit(
    s: Session, *, after_id: int | None = None, limit: int = 100, newest_first: bool = True
) -> list[AuditRow]:
    """Who wrote what, a page at a time."""
    query = select(AuditModel)
    if after_id and is_id(after_id):
        query = query.where(AuditModel.id < after_id if newest_first else AuditModel.id > after_id)
    order = AuditModel.id.desc() if newest_first else AuditModel.id
    rows = s.scalars(query.order_by(order).limit(max(1, min(limit, 1000))))
    return [AuditRow(**{name: getattr(row, name) for name in AuditRow.__dataclass_fields__}) for row in rows]


def _active(now: datetime) -> tuple[ColumnElement[bool], ...]:
    return TokenModel.revoked_at.is_(None), or_(TokenModel.expires_at.is_(None), TokenModel.expires_at > now)


def _hashed(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "replace")).hexdigest()


def _is_prefix(text: str) -> bool:
    return re.fullmatch(r"[0-9a-f]{12}", text) is not None


def _token_row(row: TokenModel) -> TokenRow:
    return TokenRow(
        id=row.id,
        name=row.name,
        prefix=row.prefix,
        scopes=frozenset(row.scopes.split()),
        created_at=row.created_at,
        expires_at=row.expires_at,
        revoked_at=row.revoked_at,
    )
