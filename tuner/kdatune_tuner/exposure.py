"""Whether others can reach the address that the service listens on, and whether it may start there."""

import ipaddress
from collections.abc import Callable

from sqlalchemy import Engine

from kdatune_kernels.errors import StoreError
from kdatune_tuner.store.access import has_token
from kdatune_tuner.store.engine import reading

_REMEDY = "make one with `kdatune token create NAME --scope results:write`, or listen on 127.0.0.1"


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to the address. Of names, only localhost is taken for this machine."""
    try:
        address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return host == "localhost"
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def refuse_strangers(engine: Callable[[], Engine], host: str) -> None:
    """Raise StoreError when others can reach the address and no token is there that a write could ask for.

    Without one, whoever sets up the service has not thought of who may write; with one, they have.
    """
    if is_loopback(host):
        return
    try:
        with reading(engine()) as session:
            has_one = has_token(session)
    except StoreError as error:
        raise StoreError(f"not started on {host}: whether a token exists cannot be told ({error})") from error
    if not has_one:
        raise StoreError(f"not started on {host}: others can reach it and no token is configured; {_REMEDY}")
