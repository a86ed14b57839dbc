"""The service over a database of each kind, and short ways to store what it serves."""

import dataclasses
from collections.abc import Callable
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from sqlalchemy import Engine
from starlette.testclient import TestClient

from kdatune_api import champions
from kdatune_api.app import create_app
from kdatune_kernels.identity import PROTOCOL
from kdatune_kernels.identity import kernel_hash
from kdatune_kernels.space import config_ok
from kdatune_kernels.space import k1_configs
from kdatune_kernels.space import k2_configs
from kdatune_kernels.space import space_hash
from kdatune_kernels.spec import KNOWN_GPUS
from kdatune_kernels.spec import Build
from kdatune_kernels.spec import Gpu
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import Shape
from kdatune_kernels.spec import canonical
from kdatune_kernels.spec import digest
from kdatune_kernels.spec import shape_of
from kdatune_tuner.settings import Settings
from kdatune_tuner.store import access
from kdatune_tuner.store import writes
from kdatune_tuner.store.engine import open_engine
from kdatune_tuner.store.engine import upgrade
from kdatune_tuner.store.engine import writing
from kdatune_tuner.store.records import NewMeasurement

H200 = KNOWN_GPUS["NVIDIA H200"]
SHAPE = shape_of(1, 96, 8192)
BUILD = Build(kernel_hash(), space_hash(), PROTOCOL, "3.6.0", "12.9.86", "2.13.0", "13.0", "580.95.05")


def configs_for(shape: Shape, gpu: Gpu, count: int) -> list[LaunchConfig]:
    """Different legal configs, some of which hold None and some a register cap."""
    k1s = [c for c in k1_configs() if config_ok(c, shape, gpu) is None]
    k2s = [c for c in k2_configs() if config_ok(c, shape, gpu) is None]
    return [LaunchConfig(k1s[i % len(k1s)], k2s[(7 * i) % len(k2s)]) for i in range(count)]


@dataclass(frozen=True)
class Stored:
    """Ids of what `Shelf.promote` stored."""

    measurement_id: int
    generation: int
    config: LaunchConfig


class Shelf:
    """Stores measurements and promotions in few words."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def measure(
        self,
        shape: Shape = SHAPE,
        config: LaunchConfig | None = None,
        *,
        gpu: Gpu = H200,
        build: Build = BUILD,
        kernel: str = "kda",
        **changes: Any,
    ) -> int:
        """The id of a new measurement."""
        chosen: Any = config or configs_for(shape, gpu, 1)[0]
        chosen = getattr(chosen, kernel, chosen)
        values: dict[str, Any] = {"run_id": None, "outcome": "ok", "median_us": 610.25}
        with writing(self.engine) as s:
            ids = {
                "gpu_id": writes.put_gpu(s, gpu),
                "problem_id": writes.put_problem(s, kernel, shape),
                "build_id": writes.put_build(s, build),
            }
            new = NewMeasurement(
                kernel=kernel, config_json=canonical(chosen), config_hash=digest(chosen), **ids, **values | changes
            )
            return writes.add_measurement(s, new)

    def promote(
        self,
        shape: Shape = SHAPE,
        config: LaunchConfig | None = None,
        *,
        gpu: Gpu = H200,
        build: Build = BUILD,
        decision: str = "promoted",
        nearest_regret: float | None = None,
        **changes: Any,
    ) -> Stored:
        """A new measurement and a decision about it."""
        config = config or configs_for(shape, gpu, 1)[0]
        measurement_id = self.measure(shape, config, gpu=gpu, build=build, **changes)
        with writing(self.engine) as s:
            generation = writes.promote(
                s,
                kernel="kda",
                gpu_id=writes.put_gpu(s, gpu),
                problem_id=writes.put_problem(s, "kda", shape),
                measurement_id=measurement_id,
                baseline_measurement_id=None,
                default_us=625.5,
                gain=1.025,
                gain_low=1.011,
                gain_high=1.032,
                decision=decision,
                reason="paired run",
                nearest_regret=nearest_regret,
            )
        return Stored(measurement_id, generation, config)

    def run(self, shape: Shape = SHAPE, *, gpu: Gpu = H200, **changes: Any) -> int:
        """The id of a new run, which is running."""
        values: dict[str, Any] = {"trigger": "cli", "kernel": "kda", "backend": "replay", "sampler": "exhaustive"}
        with writing(self.engine) as s:
            ids = {"gpu_id": writes.put_gpu(s, gpu), "problem_id": writes.put_problem(s, "kda", shape)}
            return writes.start_run(s, **ids, **values | changes)


@pytest.fixture(scope="session", autouse=True)
def patience() -> Iterator[None]:
    """Wait for the database as long as it takes: on a busy machine an answer from memory would be the one before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(champions, "PATIENCE_SECONDS", 60.0)
        yield


@pytest.fixture
def shelf(engine: Engine) -> Shelf:
    return Shelf(engine)


@pytest.fixture
def app(database_url: str, engine: Engine) -> FastAPI:
    """The service over the migrated database; every request sees what was stored before it."""
    return create_app(Settings(database_url=database_url), check_every_seconds=0.0)


@pytest.fixture
def client(app: FastAPI) -> Iterator[TestClient]:
    with TestClient(app) as client:
        client.get("/v1/snapshots/NVIDIA%20H200")  # waits for the look at the database that starting has begun
        yield client


@pytest.fixture(scope="module")
def local_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A migrated SQLite database for a whole module, for tests of HTTP itself."""
    url = f"sqlite:///{tmp_path_factory.mktemp('local') / 'kdatune.db'}"
    upgrade(url)
    return url


@pytest.fixture(scope="module")
def local_shelf(local_url: str) -> Iterator[Shelf]:
    engine = open_engine(local_url)
    yield Shelf(engine)
    engine.dispose()


@pytest.fixture(scope="module")
def local(local_url: str) -> Iterator[TestClient]:
    with TestClient(create_app(Settings(database_url=local_url), check_every_seconds=0.0)) as client:
        client.get("/v1/snapshots/NVIDIA%20H200")  # as in `client`
        yield client


@pytest.fixture
def homeless(tmp_path: Path) -> Iterator[TestClient]:
    """The service without a database."""
    settings = Settings(database_url=f"sqlite:///{tmp_path / 'nowhere' / 'kdatune.db'}")
    with TestClient(create_app(settings, check_every_seconds=0.0)) as client:
        yield client


@pytest.fixture
def is_problem() -> Callable[..., dict[str, Any]]:
    """Checks that an answer is a whole problem document, and gives it."""

    def check(response: Any, status: int, slug: str | None = None) -> dict[str, Any]:
        assert response.status_code == status, response.text
        assert response.headers["content-type"] == "application/problem+json"
        assert response.headers["cache-control"] == "no-store"
        body: dict[str, Any] = response.json()
        extra = set(body) - {"type", "title", "status", "detail", "instance", "request_id"}
        assert extra <= {"errors", "errors_left_out_count"}
        assert body["status"] == status
        assert body["type"] == (f"urn:kdatune:problem:{slug}" if slug else "about:blank")
        assert body["title"]
        assert body["detail"]
        assert body["request_id"] == response.headers["x-request-id"]
        for error in body.get("errors", []):
            assert error["detail"]
            assert len({"parameter", "header", "pointer"} & set(error)) <= 1
        return body

    return check


@pytest.fixture(scope="session")
def helpers() -> Any:
    """What test modules share (test folders are no packages, so they cannot import it)."""

    @dataclass(frozen=True)
    class Helpers:
        H200: Gpu = H200
        SHAPE: Shape = SHAPE
        BUILD: Build = BUILD
        configs_for: Callable[[Shape, Gpu, int], list[LaunchConfig]] = dataclasses.field(default=configs_for)

        @staticmethod
        def query(shape: Shape, gpu: str, **more: Any) -> dict[str, Any]:
            """The query of a resolve for the shape, every field given."""
            fields = {k: str(v).lower() for k, v in dataclasses.asdict(shape).items() if v is not None}
            return {"gpu": gpu, **fields, **more}

    return Helpers()


@pytest.fixture
def make_token(engine: Engine) -> Callable[..., str]:
    """Makes a token with these scopes (all, when none are named) in the migrated database, and gives it."""

    def make(*scopes: str, **changes: Any) -> str:
        with writing(engine) as s:
            return access.create_token(s, "tester", scopes or list(access.Scope), access.Caller("a test"), **changes)[1]

    return make
