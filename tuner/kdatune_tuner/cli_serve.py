"""`kdatune up` and `kdatune serve`. The only place that knows uvicorn; the app is started by its import string."""

import errno
import http.client
import json
import os
import socket
import threading
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Annotated

import typer
import uvicorn

from kdatune_kernels.errors import KdatuneError
from kdatune_kernels.match import Champion
from kdatune_kernels.spec import is_whole
from kdatune_kernels.spec import shape_of
from kdatune_tuner.cli_support import database
from kdatune_tuner.cli_support import err
from kdatune_tuner.cli_support import out
from kdatune_tuner.cli_support import parse_seconds
from kdatune_tuner.cli_support import read_settings
from kdatune_tuner.cli_tune import INTERRUPTED
from kdatune_tuner.cli_tune import Row
from kdatune_tuner.cli_tune import make_options
from kdatune_tuner.cli_tune import open_backend
from kdatune_tuner.cli_tune import print_table
from kdatune_tuner.cli_tune import row_of
from kdatune_tuner.cli_tune import tune_all
from kdatune_tuner.exposure import refuse_strangers
from kdatune_tuner.progress import Watch
from kdatune_tuner.settings import Settings
from kdatune_tuner.store import queries
from kdatune_tuner.store.engine import reading
from kdatune_tuner.store.engine import upgrade
from kdatune_tuner.tune import Tuner

APP = "kdatune_api.app:create_app"
SHUTDOWN_SECONDS = 10
"""How long requests that are under way are waited for when the service is told to end."""
_EXAMPLE = shape_of(1, 96, 8192)
_REPLAY_TRIALS = 100_000  # a replayed trial costs a millisecond: every recorded config is looked at

HostOption = Annotated[str | None, typer.Option(help="address to listen on")]
PortOption = Annotated[int | None, typer.Option(min=0, max=65535, help="port to listen on; 0 takes a free one")]


def up(
    host: HostOption = None,
    port: PortOption = None,
    budget: Annotated[str, typer.Option(help="time for tuning on a card, e.g. 10m")] = "10m",
    recording: Annotated[Path | None, typer.Option(help="replay this sweep file, also where a card is visible")] = None,
) -> None:
    """Upgrade the database, tune the default shapes that are not tuned yet, and serve."""
    settings = read_settings()
    seconds = parse_seconds(budget, "--budget")
    with bind(host or settings.host, settings.port if port is None else port) as bound:
        upgrade(settings.database_url)
        _refuse_strangers(settings, bound)
        gpu_name = _tune_defaults(settings, seconds, recording)
        _run(settings, bound, gpu_name)


def serve(host: HostOption = None, port: PortOption = None) -> None:
    """Serve what the database holds."""
    settings = read_settings()
    with bind(host or settings.host, settings.port if port is None else port) as bound:
        with database(settings.database_url) as engine, reading(engine) as s:
            gpus = queries.gpus(s)
        _refuse_strangers(settings, bound)
        _run(settings, bound, gpus[0].name if gpus else None)


def bind(host: str, port: int) -> socket.socket:
    """The socket that will be served on, taken before any work is done. Nobody can connect to it before `listen`.

    Raises:
        KdatuneError: the port is in use or not allowed, or the host is no address of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise KdatuneError(f"--host {host!r} is no address of this machine: {error}") from error
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise _unavailable(error, host, port) from error
    return bound


def listen(bound: socket.socket) -> None:
    """Let clients connect. Raises KdatuneError when another process has taken the port since `bind`."""
    try:
        bound.listen(socket.SOMAXCONN)
    except OSError as error:
        raise _unavailable(error, *bound.getsockname()[:2]) from error


def _refuse_strangers(settings: Settings, bound: socket.socket) -> None:
    with database(settings.database_url) as engine:
        refuse_strangers(lambda: engine, bound.getsockname()[0])


def _unavailable(error: OSError, host: str, port: int) -> KdatuneError:
    if error.errno == errno.EADDRINUSE:
        return KdatuneError(f"port {port} of {host} is in use; stop what uses it or choose another --port")
    if error.errno == errno.EACCES:
        return KdatuneError(f"port {port} may not be opened by this user; choose a --port above 1023")
    return KdatuneError(f"cannot listen on {host}, port {port}: {error.strerror}; see --host and --port")


def _tune_defaults(settings: Settings, seconds: float, recording: Path | None) -> str:
    """Tune what is not tuned yet, print a row a shape, and return the GPU model's name."""
    with database(settings.database_url) as engine:
        backend = open_backend(None, recording, settings)
        replays = backend.name == "replay"
        wanted = backend.default_shapes()
        with reading(engine) as s:
            # measured with another build, a champion is due again
            champions = [c for c in queries.champions(s, backend.gpu) if c.build == backend.build]
        before = {c.shape: Row(c.shape, None, c.default_us, c.measured_us, _tuned_before(c)) for c in champions}
        missing = [shape for shape in wanted if shape not in before]
        options = make_options(settings, "kda", _REPLAY_TRIALS if replays else None, 0, "up")
        with Watch() as watch:
            tuner = Tuner(engine, backend, options, watch)
            done, interrupted = tune_all(tuner, missing, None if replays else seconds)
    rows = before | {tuned.shape: row_of(tuned) for tuned in done}
    print_table([rows[shape] for shape in wanted if shape in rows])
    if interrupted:
        err().print("kdatune: interrupted; what is finished is stored, the same command goes on from there")
        raise typer.Exit(INTERRUPTED)
    return backend.gpu.name


def _tuned_before(champion: Champion) -> str:
    return "tuned before; estimated as the sum of its parts" if champion.estimated else "tuned before"


def _run(settings: Settings, bound: socket.socket, gpu_name: str | None) -> None:
    """Serve until Ctrl-C or SIGTERM."""
    os.environ["KDATUNE_DATABASE_URL"] = settings.database_url  # what the app reads, also where it was a default
    listen(bound)
    host, port = bound.getsockname()[:2]
    os.environ["KDATUNE_HOST"] = host  # what the app looks at when it decides who may do what
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared, not bound
    url = f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"
    config = uvicorn.Config(
        APP,
        factory=True,
        log_config=None,  # the app writes uvicorn's lines as its own: one JSON object each
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
    )
    try:
        _Server(config, url, gpu_name).run(sockets=[bound])
    except KeyboardInterrupt:
        return  # uvicorn has shut down in order and passes the signal on


class _Server(uvicorn.Server):
    """A server that says where it is once it answers."""

    def __init__(self, config: uvicorn.Config, url: str, gpu_name: str | None) -> None:
        super().__init__(config)
        self._url = url
        self._gpu_name = gpu_name

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            # asks this very server, so not on its own thread
            threading.Thread(target=announce, args=(self._url, self._gpu_name), daemon=True).start()


def announce(url: str, gpu_name: str | None) -> None:
    """Say where the service is, and show what matters of one resolved config as it is served."""
    console = out()
    console.print(f"kdatune serves on {url} (API at {url}/docs, Ctrl-C stops it)", soft_wrap=True)
    if gpu_name is None:
        return
    query = {"gpu": gpu_name, "kernel": "kda", "N": _EXAMPLE.N, "H": _EXAMPLE.H, "T": _EXAMPLE.T}
    asked = f"{url}/v1/configs/resolve?{urllib.parse.urlencode(query, quote_via=urllib.parse.quote)}"
    try:
        with urllib.request.urlopen(asked, timeout=10) as reply:  # noqa: S310 - http, this machine
            document = json.load(reply)
    except (OSError, ValueError, http.client.HTTPException) as error:
        err().print(f"kdatune: {asked} does not answer: {error}")
        return
    console.print(f"curl '{asked}'", soft_wrap=True, markup=False)
    for stage in ("k1", "k2"):
        inside = stage == "k1" and is_whole(document["config"]["k2"])
        shown = "done by k2" if inside else json.dumps(document["config"][stage])
        console.print(f"  {stage}: {shown}", soft_wrap=True, markup=False)
    facts = {
        name: document[name] for name in ("match", "measured_us", "estimated", "default_us", "generation", "stale")
    }
    console.print(f"  {json.dumps(facts)}", soft_wrap=True, markup=False)
