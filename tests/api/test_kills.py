"""kill -9 of the server, of a writer and of the database under load: what was acknowledged is there, and all start again."""

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx2
import pytest
from sqlalchemy import text

from kdatune_tuner.store import queries
from kdatune_tuner.store.engine import open_engine
from kdatune_tuner.store.engine import reading
from kdatune_tuner.store.engine import upgrade

RESOLVE = "/v1/configs/resolve?gpu=NVIDIA+H200&N=1&H=96&T="

# Promotes without end, and says a generation once it is committed.
WRITER = """
import sys, time
from kdatune_kernels.errors import StoreError
from kdatune_kernels.space import default_config
from kdatune_kernels.spec import KNOWN_GPUS, Build, canonical, digest, shape_of
from kdatune_tuner.store import writes
from kdatune_tuner.store.engine import open_engine, writing
from kdatune_tuner.store.records import NewMeasurement

gpu = KNOWN_GPUS["NVIDIA H200"]
engine = open_engine(sys.argv[1])
number = 0
while True:
    number += 1
    shape = shape_of(1, 96, number % 50 + 1)
    config = default_config(shape, gpu)
    try:
        with writing(engine) as s:
            key = {"kernel": "kda", "gpu_id": writes.put_gpu(s, gpu), "problem_id": writes.put_problem(s, "kda", shape)}
            new = NewMeasurement(
                run_id=None, build_id=writes.put_build(s, Build(*"abcdefgh")), config_json=canonical(config),
                config_hash=digest(config), outcome="ok", median_us=600.0 + number, **key,
            )
            generation = writes.promote(
                s, measurement_id=writes.add_measurement(s, new), baseline_measurement_id=None, default_us=700.0,
                gain=1.1, gain_low=1.0, gain_high=1.2, decision="promoted", reason=f"number {number}", **key,
            )
    except StoreError as error:
        print("failed", str(error)[:100], flush=True)
        time.sleep(0.05)
    else:
        print(generation, flush=True)
"""


class Writer:
    """A process that promotes. `acknowledged` holds every generation that it has told us is stored."""

    def __init__(self, url, script):
        script.write_text(WRITER)
        self.command = [sys.executable, str(script), url]
        self.acknowledged = []
        self.start()

    def start(self):
        self.process = subprocess.Popen(self.command, stdout=subprocess.PIPE, text=True)
        self.reader = threading.Thread(target=self._read, args=(self.process,), daemon=True)
        self.reader.start()

    def _read(self, process):
        for line in process.stdout:
            if line.strip().isdigit() and line.endswith("\n"):
                self.acknowledged.append(int(line))

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.reader.join(60)
        self.process.stdout.close()


def until_acknowledged(writer, more):
    """Wait for so many more promotions."""
    wanted = len(writer.acknowledged) + more
    until(lambda: len(writer.acknowledged) >= wanted)


@contextlib.contextmanager
def kept_port():
    """A port that is nobody's but of whoever is told it, also while they are down.

    It is bound here and not listened on: the kernel gives it to nobody who asks for any, and refuses who connects.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers set it: then both may be bound
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


class Server:
    """The service in a process of its own, on a port that stays the same when it is started again."""

    def __init__(self, url, log, port):
        self.port = port
        self.environment = os.environ | {"KDATUNE_DATABASE_URL": url}
        self.log = log
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self):
        command = [sys.executable, "-m", "uvicorn", "kdatune_api.app:create_app", "--factory", "--no-access-log"]
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                [*command, "--port", str(self.port)], env=self.environment, stdout=out, stderr=out
            )

    def kill(self):
        self.process.kill()
        self.process.wait()

    def stop(self):
        """In good order, as an operator does it."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(60) in (0, -signal.SIGTERM)


def until(true, seconds=60.0):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "never came true"
        time.sleep(0.02)


def ready(server, status=200):
    with contextlib.suppress(httpx2.TransportError):
        return httpx2.get(server.url + "/readyz", timeout=30).status_code == status
    return False


@contextlib.contextmanager
def load(server):
    """Requests without end; gives what was answered. A connection that breaks is what a kill looks like."""
    done = threading.Event()
    statuses = []

    def ask(tokens):
        item = {"gpu": "NVIDIA H200", "shape": {"N": 1, "H": 96, "T": tokens}}
        while not done.is_set():
            with contextlib.suppress(httpx2.TransportError), httpx2.Client(base_url=server.url, timeout=30) as client:
                while not done.is_set():
                    statuses.append(client.get(RESOLVE + str(tokens)).status_code)
                    statuses.append(client.post("/v1/demand", json={"items": [item]}).status_code)
                    statuses.append(client.get("/v1/snapshots/NVIDIA%20H200").status_code)
            done.wait(0.05)

    threads = [threading.Thread(target=ask, args=(n + 1,)) for n in range(3)]
    for thread in threads:
        thread.start()
    try:
        yield statuses
    finally:
        done.set()
        for thread in threads:
            thread.join(60)


def check(url, acknowledged):
    """All that was acknowledged is there, nothing is torn, and the generations have no holes."""
    engine = open_engine(url)
    with reading(engine) as s:
        newest = queries.generation(s)
        stored = {row.generation for row in pages(s)}
        assert set(acknowledged) <= stored
        assert stored == set(range(1, newest + 1))
        assert len(queries.champions(s)) == min(50, len({row.shape for row in pages(s)}))
    if engine.dialect.name == "sqlite":
        with engine.connect() as connection:
            assert connection.scalar(text("PRAGMA integrity_check")) == "ok"
            assert connection.execute(text("PRAGMA foreign_key_check")).fetchall() == []
    engine.dispose()
    assert len(acknowledged) == len(set(acknowledged))
    return newest


def pages(s):
    rows, after = [], None
    while page := queries.page_promotions(s, after_id=after, limit=1000):
        rows += page
        after = page[-1].id
    return rows


def served_by(server, generation):
    """Whether resolve answers from this generation or a later one: up to a second after /readyz knows it.

    Later: a COMMIT that was on its way to a database server when its client was killed is carried out all the same.
    """
    return lambda: httpx2.get(server.url + RESOLVE + "1", timeout=30).json()["generation"] >= generation


@pytest.fixture
def port():
    with kept_port() as number:
        yield number


def test_the_server_is_killed(database_url, tmp_path, port):
    upgrade(database_url)
    dice = random.Random(1)
    writer, server = Writer(database_url, tmp_path / "writer.py"), Server(database_url, tmp_path / "server.log", port)
    try:
        with load(server) as statuses:
            for _ in range(3):
                until(lambda: ready(server))
                time.sleep(dice.uniform(0.1, 0.6))
                server.kill()
                server.start()
            until(lambda: ready(server))
            answered = len(statuses)
            until(lambda: len(statuses) > answered + 10)
        until(lambda: len(writer.acknowledged) > 50)  # then each of its 50 shapes has a champion, also that of T=1
        writer.kill()
        newest = check(database_url, writer.acknowledged)
        until(served_by(server, newest))
        assert httpx2.get(server.url + RESOLVE + "1", timeout=30).json()["match"] == "exact"
        server.stop()
    finally:
        server.kill()
        writer.kill()
    assert set(statuses) <= {200, 503}
    assert statuses.count(200) > 10


def test_the_writer_is_killed(database_url, tmp_path, port):
    upgrade(database_url)
    dice = random.Random(2)
    writer, server = Writer(database_url, tmp_path / "writer.py"), Server(database_url, tmp_path / "server.log", port)
    try:
        until(lambda: ready(server))
        with load(server) as statuses:
            for _ in range(4):
                until_acknowledged(writer, 1)
                time.sleep(dice.uniform(0.0, 0.3))
                writer.kill()
                writer.start()
            until_acknowledged(writer, 1)
        writer.kill()
        until(served_by(server, check(database_url, writer.acknowledged)))
        server.stop()
    finally:
        server.kill()
        writer.kill()
    assert set(statuses) == {200}


@pytest.fixture
def own_postgres():
    """A PostgreSQL server that the test may kill, with its usual care for what is committed."""
    programs = next(iter(sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)), None)
    found = shutil.which("initdb")
    programs = programs or (Path(found).resolve().parent if found else None)
    if programs is None:
        pytest.skip("NO POSTGRESQL PROGRAMS: the kill of a database server is not tested")
    with tempfile.TemporaryDirectory(prefix="kdatune-kill-") as folder, kept_port() as port:
        user = {}
        if os.geteuid() == 0:  # PostgreSQL refuses to run as root; its package makes a user for it
            user = {"user": "postgres", "cwd": "/"}
            shutil.chown(folder, "postgres")
        data = f"{folder}/data"
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}

        def call(program, *arguments):
            return subprocess.run(
                [programs / program, "-D", data, *arguments], check=True, timeout=120, **quiet, **user
            )

        def try_to_start():
            options = f"-h 127.0.0.1 -p {port} -c unix_socket_directories=''"
            with contextlib.suppress(subprocess.CalledProcessError):
                call("pg_ctl", "-w", "-l", f"{data}/log", "-o", options, "start")
                return True
            return False

        def start():
            # refused until the children of the one that was killed have noticed that it is gone
            until(try_to_start)

        def kill():
            postmaster = int(Path(data, "postmaster.pid").read_text().split()[0])
            os.kill(postmaster, signal.SIGKILL)

        call("initdb", "-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-sync")
        start()
        try:
            yield f"postgresql+psycopg://postgres@127.0.0.1:{port}/postgres", kill, start
        finally:
            with contextlib.suppress(subprocess.SubprocessError):
                call("pg_ctl", "-w", "-m", "immediate", "stop")


def test_the_database_server_is_killed(own_postgres, tmp_path, port):
    url, kill, start = own_postgres
    upgrade(url)
    dice = random.Random(3)
    writer, server = Writer(url, tmp_path / "writer.py"), Server(url, tmp_path / "server.log", port)

    def said(what):
        whole = server.log.read_text().rpartition("\n")[0]
        return sum(what in json.loads(line)["message"] for line in whole.splitlines() if line.startswith("{"))

    try:
        until(lambda: ready(server))
        with load(server) as statuses:
            until(lambda: 200 in statuses)  # a resolve is the first that is asked: the champions are known
            for outage in (1, 2):
                until_acknowledged(writer, 4)
                time.sleep(dice.uniform(0.0, 0.3))
                kill()
                until(lambda: ready(server, 503))
                # what is known is served on
                assert httpx2.get(server.url + RESOLVE + "1", timeout=30).status_code == 200
                until(lambda n=outage: said("the database fails") >= n)
                start()
                until(lambda: ready(server))
                until(lambda n=outage: said("the database answers again") >= n)
            until_acknowledged(writer, 4)
        writer.kill()
        until(served_by(server, check(url, writer.acknowledged)))
        server.stop()
    finally:
        server.kill()
        writer.kill()
    assert set(statuses) <= {200, 503}
    assert "Traceback" not in server.log.read_text()
