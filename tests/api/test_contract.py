"""A fuzzer that reads the OpenAPI document: whatever it makes of each operation, valid or not, the answer is no 5xx.

KDATUNE_FUZZ_EXAMPLES: examples of each operation, 15 without it; 200 take a quarter of an hour.
"""

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck
from hypothesis import given
from hypothesis import settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance
from schemathesis.specs.openapi.checks import response_schema_conformance
from schemathesis.specs.openapi.checks import status_code_conformance
from sqlalchemy import text

from kdatune_tuner.store import access
from kdatune_tuner.store.engine import open_engine
from kdatune_tuner.store.engine import upgrade
from kdatune_tuner.store.engine import writing
from kdatune_tuner.store.models import Base

EXAMPLES = int(os.environ.get("KDATUNE_FUZZ_EXAMPLES", "15"))
DOCUMENT = json.loads((Path(__file__).parent / "openapi.json").read_text())
OPERATIONS = [(path, method.upper()) for path, methods in DOCUMENT["paths"].items() for method in methods]
CHECKS = (not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance)


@dataclass(frozen=True)
class Live:
    """The server's address, how to ask it with a token that may do everything, and its document."""

    url: str
    session: requests.Session
    schema: Any
    log: Path


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    """The real server, on one connection, over a database with a promotion to undo."""
    folder = tmp_path_factory.mktemp("fuzz")
    url = f"sqlite:///{folder / 'kdatune.db'}"
    upgrade(url)
    engine = open_engine(url)
    with writing(engine) as s:
        _, token = access.create_token(s, "fuzzer", list(access.Scope), access.Caller("a test"))
    log = folder / "server.log"
    with socket.socket() as bound, log.open("wb") as out, requests.Session() as session:
        bound.bind(("127.0.0.1", 0))
        bound.listen(64)
        command = [sys.executable, "-m", "uvicorn", "kdatune_api.app:create_app", "--factory", "--no-access-log"]
        server = subprocess.Popen(
            [*command, "--fd", str(bound.fileno())],
            env=os.environ | {"KDATUNE_DATABASE_URL": url},
            pass_fds=[bound.fileno()],
            stdout=out,
            stderr=out,
        )
        try:
            session.headers["Authorization"] = f"Bearer {token}"
            session.trust_env = False
            address = f"http://127.0.0.1:{bound.getsockname()[1]}"
            schema = schemathesis.openapi.from_dict(DOCUMENT)
            assert session.get(f"{address}/readyz", timeout=120).status_code == 200
            yield Live(address, session, schema, log)
        finally:
            server.terminate()
            server.wait(60)
    assert "Traceback" not in log.read_text()
    with engine.connect() as connection:  # all is still there and whole
        for table in Base.metadata.tables:
            connection.execute(text(f"SELECT count(*) FROM {table}"))
        assert connection.scalar(text("PRAGMA integrity_check")) == "ok"
    engine.dispose()


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_no_request_is_answered_with_a_5xx(live, mode, path, method):
    strategy = live.schema[path][method].as_strategy(generation_mode=mode)
    if not can_be_wrong(path, method) and mode is GenerationMode.NEGATIVE:
        pytest.skip("takes nothing that could be wrong")

    @given(strategy)
    @settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    def ask(case):
        response = case.call(base_url=live.url, session=live.session, timeout=60)
        case.validate_response(response, checks=CHECKS)

    ask()


def can_be_wrong(path, method):
    operation = DOCUMENT["paths"][path][method.lower()]
    return bool(operation.get("parameters")) or "requestBody" in operation


def test_every_operation_is_asked():
    assert len(OPERATIONS) == 17
