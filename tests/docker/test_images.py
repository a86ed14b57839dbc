"""Every step that the containers run, run here: builds, migrations, the first token, the service, its health, its end."""

import json
import os
import re
import signal
import socket
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest
import yaml
from dockerfile_steps import DOCKER
from dockerfile_steps import ROOT
from dockerfile_steps import steps_of
from sqlalchemy import text

from kdatune_kernels import __version__
from kdatune_tuner.ncu.unavailable import REMEDIES
from kdatune_tuner.store.engine import open_engine
from kdatune_tuner.store.engine import schema_state

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # the first test of each image builds it
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
DEADLINE_SECONDS = 120


@pytest.fixture
def port():
    """A port that only who is told it gets: bound here, as servers bind theirs, and not listened on."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield str(held.getsockname()[1])


@pytest.fixture
def home(api_image):
    """The volume of a service: empty, the image user's own."""
    place = Path(api_image.env["HOME"])
    for entry in place.iterdir():
        if entry.is_file():
            entry.unlink()
    return place


def open_to_all(database_url, home):
    """The database where the image's user can write it: a SQLite file in the volume, a PostgreSQL as it is."""
    return f"sqlite:///{home / 'kdatune.db'}" if database_url.startswith("sqlite") else database_url


def arguments_of(service, home):
    return [argument.replace("/var/lib/kdatune", str(home)) for argument in COMPOSE[service]["command"]]


def until_healthy(image, process, **environment):
    end = time.monotonic() + DEADLINE_SECONDS
    while not image.healthy(**environment):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "the service does not get healthy"
        time.sleep(0.2)


@contextmanager
def written_by_another(url):
    """The database as a service finds it that is of another release."""
    engine = open_engine(url)
    move = text("UPDATE kdatune_alembic_version SET version_num = :to")
    try:
        _, ours = schema_state(engine)
        with engine.begin() as connection:
            connection.execute(move, {"to": "0001"})
        yield
        with engine.begin() as connection:
            connection.execute(move, {"to": ours})
    finally:
        engine.dispose()


def test_the_service_has_no_torch_and_is_the_wheel_of_this_code(api_image):
    python = f"{api_image.env['VIRTUAL_ENV']}/bin/python"
    asked = (
        "import importlib.util as u, kdatune_api, kdatune_tuner; "
        "print(u.find_spec('torch'), u.find_spec('triton'), kdatune_api.__file__, kdatune_tuner.__file__)"
    )
    said = subprocess.run(
        [python, "-c", asked], env=api_image.environment(), check=True, capture_output=True, text=True, cwd="/"
    ).stdout.split()
    assert said[:2] == ["None", "None"]
    assert all(path.startswith(str(api_image.folder)) for path in said[2:])
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
    installed = json.loads(
        subprocess.run(
            [python, "-m", "pip", "list", "--format", "json", "--disable-pip-version-check"],
            env=api_image.environment(),
            check=True,
            capture_output=True,
            text=True,
        ).stdout
    )
    ours = {p["name"].lower(): p["version"] for p in installed if p["name"] not in ("pip", "setuptools")}
    assert ours.pop("kdatune") == __version__
    # whatever is installed is at the version that the tests of this code ran with
    wanted = {name.lower(): version for name, version in pinned.items()}
    assert {name: version for name, version in ours.items() if wanted.get(name) != version} == {}


def test_the_steps_of_compose_from_an_empty_database_to_the_end(api_image, database_url, home, port):
    environment = {"KDATUNE_DATABASE_URL": open_to_all(database_url, home), "KDATUNE_PORT": port}
    refused = api_image.call(["serve"], **environment)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "kdatune db upgrade" in refused.stderr

    upgraded = api_image.call(arguments_of("migrate", home), **environment)
    assert upgraded.returncode == 0, upgraded.stderr
    open_host = api_image.call(["serve"], **environment)
    assert (open_host.returncode, "no token is configured" in open_host.stderr) == (1, True)
    assert not api_image.healthy(**environment)

    assert api_image.call(arguments_of("migrate", home), **environment).returncode == 0  # each `up` runs it again
    for _ in range(2):
        made = api_image.call(arguments_of("token", home), **environment)
        assert made.returncode == 0, made.stderr
        assert "kdt_" not in made.stdout + made.stderr  # a log is no place for it
    token = home / "launchers.token"
    assert token.stat().st_mode & 0o777 == 0o600

    process = api_image.start(env=environment)  # CMD
    try:
        until_healthy(api_image, process, **environment)
        reply = httpx2.post(
            f"http://127.0.0.1:{environment['KDATUNE_PORT']}/v1/demand",
            json={"items": [{"gpu": "NVIDIA H200", "shape": {"N": 1, "H": 8, "T": 64}, "count": 1}]},
            headers={"Authorization": f"Bearer {token.read_text().strip()}"},
            timeout=60,
        )
        assert reply.status_code == 200, reply.text
        with written_by_another(environment["KDATUNE_DATABASE_URL"]):  # health is the schema's, not the port's
            assert not api_image.healthy(**environment)
        until_healthy(api_image, process, **environment)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode in (0, -signal.SIGTERM)  # uvicorn ends in order, then passes the signal on
    assert "Traceback" not in out + err
    assert not api_image.healthy(**environment)


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_replicas_that_start_at_once_migrate_once(api_image, database_url, home):
    """Kubernetes runs the init containers of every replica at the same time, on an empty database."""
    environment = {"KDATUNE_DATABASE_URL": open_to_all(database_url, home)}
    migrating = [api_image.start(["db", "upgrade"], env=environment) for _ in range(3)]
    said = [process.communicate(timeout=120) for process in migrating]
    assert [process.returncode for process in migrating] == [0, 0, 0], said
    first = ["token", "create", "first", "--scope", "demand:write", "--keep"]
    making = [api_image.start([*first, "--out", str(home / f"{n}.token")], env=environment) for n in range(2)]
    said = [process.communicate(timeout=120) for process in making]
    assert [process.returncode for process in making] == [0, 0], said
    listed = api_image.call(["token", "list", "--json"], **environment)
    assert len(json.loads(listed.stdout)["tokens"]) == 1
    assert len(list(home.glob("*.token"))) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become the image's user")
def test_the_user_of_the_image_writes_nowhere_but_at_home(api_image, tuner_image, home):
    for image in (api_image, tuner_image):
        assert image.user == 10001
        probe = image.env["VIRTUAL_ENV"] + "/probe"
        python = f"{image.env['VIRTUAL_ENV']}/bin/python"
        tried = subprocess.run(
            [*image.as_user(), python, "-c", f"open({probe!r}, 'w')"], capture_output=True, text=True, check=False
        )
        assert "PermissionError" in tried.stderr


def test_the_tuner_is_the_wheel_of_this_code_and_a_night_runs(tuner_image, api_image):
    home = Path(tuner_image.env["HOME"])
    environment = {"KDATUNE_DATABASE_URL": f"sqlite:///{home / 'kdatune.db'}"}
    version = tuner_image.call(["--version"])
    assert (version.returncode, version.stdout.strip()) == (0, f"kdatune {__version__}"), version.stderr
    python = f"{tuner_image.env['VIRTUAL_ENV']}/bin/python"
    where = subprocess.run(
        [python, "-c", "import kdatune_tuner, torch, triton; print(kdatune_tuner.__file__)"],
        env=tuner_image.environment(),
        check=True,
        capture_output=True,
        text=True,
        cwd="/",
    ).stdout
    assert where.startswith(str(tuner_image.folder))
    assert tuner_image.call(["db", "upgrade"], **environment).returncode == 0
    night = tuner_image.call([*COMPOSE["nightly"]["command"], "--backend", "replay"], **environment)
    assert night.returncode == 0, night.stderr
    assert tuner_image.health == ()


def test_the_doctor_says_what_a_container_without_permission_lacks(tuner_image):
    """Dockerfile.tuner and docs/operate.md explain the permission in the doctor's words."""
    said = tuner_image.call(["doctor", "--json"])
    checks = {check["check"]: check for check in json.loads(said.stdout)["checks"]}
    assert checks["counters"]["detail"].split(":")[0] in ("ncu_not_found", "no_permission", "nothing speaks against")
    remedy = REMEDIES["no_permission"]
    for word in ("NVreg_RestrictProfilingToAdminUsers=0", "SYS_ADMIN"):
        assert word in remedy
        assert word in (DOCKER / "Dockerfile.tuner").read_text()


def test_the_versions_are_those_of_the_project():
    makefile = re.search(r"torch==(\S+)", (ROOT / "Makefile").read_text())
    arguments = [s.value for s in steps_of("Dockerfile.tuner") if s.instruction == "ARG"]
    assert arguments == [f"TORCH_VERSION={makefile[1]}"]
    images = {service["image"] for service in COMPOSE.values()}
    for file in (DOCKER / "kubernetes").iterdir():
        images |= set(re.findall(r"image: (\S+)", file.read_text()))
    assert {i for i in images if i.startswith("kdatune")} == {
        f"kdatune-api:{__version__}",
        f"kdatune-tuner:{__version__}",
    }
