"""Resolution: which layer answers, what stays frozen, what a capture may do, and that a launch never waits."""

import dataclasses
import itertools
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Callable
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from loopback_service import CONFIGS
from loopback_service import FAR
from loopback_service import H200
from loopback_service import OTHER
from loopback_service import SHAPE
from loopback_service import Service
from loopback_service import answer
from loopback_service import closed_port
from loopback_service import document
from loopback_service import listening_but_deaf
from loopback_service import snapshot
from loopback_service import wait_for

from kdatune_kernels import resolve as resolve_module
from kdatune_kernels import transport
from kdatune_kernels.disk import DiskCopy
from kdatune_kernels.environment import Settings
from kdatune_kernels.match import Champion
from kdatune_kernels.match import Match
from kdatune_kernels.resolve import Resolver
from kdatune_kernels.resolve import launcher
from kdatune_kernels.snapshot import dump_snapshot
from kdatune_kernels.snapshot import parse_snapshot
from kdatune_kernels.space import config_ok
from kdatune_kernels.space import default_config
from kdatune_kernels.space import split_default
from kdatune_kernels.spec import KNOWN_GPUS
from kdatune_kernels.spec import Shape
from kdatune_kernels.spec import canonical
from kdatune_kernels.spec import gpu_of
from kdatune_kernels.spec import shape_of
from kdatune_kernels.spec import to_json

KEY = (0, 1, 96, 8192)
ResolverMaker = Callable[..., Resolver]


@pytest.fixture
def make_resolver(tmp_path: Path, patience: None, caplog: pytest.LogCaptureFixture) -> Iterator[ResolverMaker]:
    """Resolvers with the cache directory and the bundled snapshot of the test, closed at its end."""
    caplog.set_level(logging.INFO, "kdatune")
    bundled = tmp_path / "bundled.json"
    bundled.write_text(json.dumps(document(0, {})))
    made: list[Resolver] = []

    def make(url: str | None = None, **rest: object) -> Resolver:
        settings = dataclasses.replace(Settings(url, tmp_path / "cache"), **rest)
        made.append(Resolver(settings, bundled))
        return made[-1]

    yield make
    for resolver in made:
        resolver.close()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "kdatune" and r.levelno >= logging.WARNING]


def keep(tmp_path: Path, data: dict[str, object]) -> None:
    DiskCopy(tmp_path / "cache").write(H200.name, data, None)


def bundle(tmp_path: Path, data: dict[str, object]) -> None:
    (tmp_path / "bundled.json").write_text(json.dumps(data))


def test_with_nothing_known_the_default_answers(make_resolver: ResolverMaker) -> None:
    resolver = make_resolver()
    found = resolver.resolve(SHAPE, H200)
    assert isinstance(found, Match)
    assert (found.layer, found.match, found.generation) == ("default", "default", None)
    assert found.config == default_config(SHAPE, H200)
    assert found.reason == "nothing is tuned for this card"


def test_the_interpreter_gets_plain_triton(make_resolver: ResolverMaker) -> None:
    resolver = make_resolver()
    found = resolver.resolve(SHAPE, None)
    assert (found.layer, found.config) == ("default", default_config(SHAPE, None))
    assert resolver.resolve_slow(KEY, SHAPE, None) == resolver.lookup(KEY) == found.config
    assert resolver.demand() == []


def test_each_layer_goes_before_the_next(service: Service, make_resolver: ResolverMaker, tmp_path: Path) -> None:
    bundle(tmp_path, document(1, {SHAPE: 1}))
    found = make_resolver().resolve(SHAPE, H200)
    assert (found.layer, found.match, found.generation, found.config) == ("bundled", "exact", 1, CONFIGS[1])
    keep(tmp_path, document(5, {SHAPE: 2}))
    found = make_resolver().resolve(SHAPE, H200)
    assert (found.layer, found.generation, found.config) == ("disk", 5, CONFIGS[2])
    service.documents[H200.name] = document(7, {SHAPE: 3})
    resolver = make_resolver(service.url)
    resolver.refresh(H200, timeout_seconds=60)
    found = resolver.resolve(SHAPE, H200)
    assert (found.layer, found.generation, found.config) == ("service", 7, CONFIGS[3])
    assert found.champion == snapshot(7, {SHAPE: 3}).champions[0]


def test_a_closer_match_of_a_later_layer_goes_before_a_farther_one(
    make_resolver: ResolverMaker, tmp_path: Path
) -> None:
    bundle(tmp_path, document(1, {SHAPE: 1}))
    keep(tmp_path, document(5, {OTHER: 2}))
    resolver = make_resolver()
    exact, near = resolver.resolve(SHAPE, H200), resolver.resolve(dataclasses.replace(OTHER, T=8000), H200)
    assert (exact.layer, exact.match, exact.config) == ("bundled", "exact", CONFIGS[1])
    assert (near.layer, near.match, near.config) == ("disk", "bucket", CONFIGS[2])


def test_what_the_service_has_taken_back_is_not_taken_from_the_older_copy(
    service: Service, make_resolver: ResolverMaker, tmp_path: Path
) -> None:
    keep(tmp_path, document(5, {SHAPE: 2}))
    assert make_resolver().resolve(SHAPE, H200).layer == "disk"
    service.documents[H200.name] = document(6, {})
    resolver = make_resolver(service.url)
    resolver.refresh(H200, timeout_seconds=60)
    assert resolver.resolve(SHAPE, H200).layer == "default"


def test_the_config_is_what_was_stored(service: Service, make_resolver: ResolverMaker) -> None:
    service.documents[H200.name] = document(7, {SHAPE: 3})
    resolver = make_resolver(service.url)
    resolver.refresh(H200, timeout_seconds=60)
    assert canonical(resolver.resolve_slow(KEY, SHAPE, H200)) == canonical(CONFIGS[3])
    assert '"maxnreg":null' in canonical(CONFIGS[3])


def test_a_resolved_key_is_one_look_up_away(make_resolver: ResolverMaker) -> None:
    resolver = make_resolver()
    assert resolver.lookup(KEY) is None
    config = resolver.resolve_slow(KEY, SHAPE, H200)
    assert resolver.lookup(KEY) is config
    assert resolver.resolve_slow(KEY, SHAPE, H200) is config


def test_what_is_resolved_stays_and_what_is_not_takes_the_newest(
    service: Service, make_resolver: ResolverMaker
) -> None:
    service.documents[H200.name] = document(7, {SHAPE: 3, OTHER: 3})
    resolver = make_resolver(service.url, poll_seconds=0.02)
    resolver.refresh(H200, timeout_seconds=60)
    assert resolver.resolve_slow("a", SHAPE, H200) == CONFIGS[3]
    service.documents[H200.name] = document(8, {SHAPE: 4, OTHER: 4})
    feed = resolver.client.feed(H200.name)
    wait_for(lambda: feed.service.generation == 8)
    assert resolver.lookup("a") == CONFIGS[3]
    assert resolver.resolve_slow("a", SHAPE, H200) == CONFIGS[3]
    assert resolver.resolve_slow("b", OTHER, H200) == CONFIGS[4]
    assert resolver.refresh(timeout_seconds=60)
    assert resolver.lookup("a") is None
    assert resolver.resolve_slow("a", SHAPE, H200) == CONFIGS[4]


def test_many_champions_are_indexed_anew_when_they_change(
    service: Service, make_resolver: ResolverMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolve_module, "FEW", 1)
    resolver = make_resolver(service.url)
    resolver.client.watch(H200)
    for generation, config in ((7, 3), (8, 5)):
        service.documents[H200.name] = document(generation, {SHAPE: config, OTHER: 4})
        assert resolver.refresh(timeout_seconds=60)
        assert resolver.resolve_slow("a", SHAPE, H200) == CONFIGS[config]


def test_the_first_launch_waits_for_nothing(
    service: Service, make_resolver: ResolverMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither for the service, which answers in a minute, nor for the thread that asks it."""
    service.documents[H200.name] = document(7, {SHAPE: 3})
    service.instead = lambda handler: service.released.wait(60) and answer(handler, 500, b"")
    resolver = make_resolver(service.url)
    monkeypatch.setattr(resolver.client._polled, "wait_for", lambda *_: pytest.fail("a launch waits for a poll"))
    try:
        assert resolver.resolve_slow(KEY, SHAPE, H200) == default_config(SHAPE, H200)
        assert resolver.lookup(KEY) == default_config(SHAPE, H200)
        assert (service.answered, resolver.client.reachable) == (0, None)
    finally:
        service.released.set()


@pytest.mark.parametrize("kind", ["closed port", "black hole", "500", "malformed JSON", "illegal config"])
def test_whatever_the_service_does_a_launch_has_a_config_and_one_line_is_logged(
    kind: str, service: Service, make_resolver: ResolverMaker, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    if kind == "black hole":
        monkeypatch.setattr(transport, "TIMEOUT_SECONDS", 0.2)
    illegal = document(7, {SHAPE: 3})
    illegal["champions"][0]["config"]["k2"].update(stages_in=1)
    bodies = {"500": (500, b""), "malformed JSON": (200, b"{"), "illegal config": (200, json.dumps(illegal).encode())}
    with listening_but_deaf() as deaf, closed_port() as closed:
        url = {"closed port": closed, "black hole": deaf}.get(kind, service.url)
        service.instead = lambda handler: answer(handler, *bodies[kind])
        resolver = make_resolver(url)
        first = resolver.resolve_slow(KEY, SHAPE, H200)
        for _ in range(2):
            assert resolver.refresh(timeout_seconds=60)
            assert resolver.resolve_slow(KEY, SHAPE, H200) == first == default_config(SHAPE, H200)
            assert resolver.lookup(KEY) == first
    (line,) = warnings(caplog)
    assert line.startswith("kdatune snapshot of" if kind == "illegal config" else f"kdatune service {url}: ")


def test_a_poisoned_champion_is_passed_over_and_reported(service: Service, make_resolver: ResolverMaker) -> None:
    small = gpu_of("NVIDIA Small", "9.0", 132)
    small = dataclasses.replace(small, smem_per_block_bytes=65536)
    poison = dataclasses.replace(CONFIGS[3].k2, stages_in=6)
    champion = Champion(H200, SHAPE, dataclasses.replace(CONFIGS[3], k2=poison), 7, 1.0, 2.0)
    assert config_ok(champion.config, SHAPE, H200) is None
    service.documents[small.name] = json.loads(
        json.dumps(dump_snapshot(dataclasses.replace(snapshot(7, {}, small), champions=(champion,))))
    )
    resolver = make_resolver(service.url)
    resolver.refresh(small, timeout_seconds=60)
    found = resolver.resolve(SHAPE, small)
    assert (found.layer, found.config) == ("default", default_config(SHAPE, small))
    assert "champion of N=1,H=96,T=8192 refused: k2 needs " in found.reason
    resolver.resolve_slow(KEY, SHAPE, small)
    resolver.client.report()
    assert [(item["gpu"], item["shape"]) for item in service.demand()] == [(small.name, to_json(SHAPE))]


@pytest.mark.parametrize(
    ("name", "layer", "level"),
    [
        ("NVIDIA H200", "bundled", "exact"),
        ("NVIDIA H200 NVL", "bundled", "silicon"),
        ("NVIDIA H100 80GB HBM3", "bundled", "silicon"),
        ("NVIDIA H800", "bundled", "silicon"),
        ("NVIDIA H100 PCIe", "default", "family"),
        ("NVIDIA H20", "default", "family"),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", "default", "family"),
        ("NVIDIA A100-SXM4-80GB", "default", "none"),
    ],
)
def test_every_answer_says_its_level(
    name: str, layer: str, level: str, make_resolver: ResolverMaker, tmp_path: Path
) -> None:
    bundle(tmp_path, document(1, {SHAPE: 1}))
    found = make_resolver().resolve(SHAPE, KNOWN_GPUS[name])
    assert (found.layer, found.gpu_level) == (layer, level)


@pytest.mark.parametrize("name", ["A/B", "", "x" * 500, "..", "\x00"])
def test_a_strange_name_gets_the_default(name: str, service: Service, make_resolver: ResolverMaker) -> None:
    strange = gpu_of(name, "8.6", 84)
    resolver = make_resolver(service.url)
    assert resolver.refresh(strange, timeout_seconds=60)
    found = resolver.resolve(SHAPE, strange)
    assert (found.layer, found.gpu_level, found.config) == ("default", "none", default_config(SHAPE, strange))


def test_a_capture_starts_nothing_and_takes_no_lock(
    service: Service, make_resolver: ResolverMaker, tmp_path: Path
) -> None:
    service.documents[H200.name] = document(7, {SHAPE: 3})
    keep(tmp_path, document(5, {SHAPE: 2}))
    resolver = make_resolver(service.url)
    threads = set(threading.enumerate())
    with resolver._lock, resolver.client._lock, resolver.client.outbox._lock, resolver.client._polled:
        config = resolver.resolve_slow(KEY, SHAPE, H200, capturing=True)
    assert config == default_config(SHAPE, H200)
    assert (service.requests, resolver.client.feed(H200.name)) == ([], None)
    assert set(threading.enumerate()) <= threads  # those of tests before may still end
    assert resolver.lookup(KEY) is None
    service.instead = lambda handler: service.released.wait(60) and answer(handler, 500, b"")
    try:
        assert resolver.resolve_slow(KEY, SHAPE, H200) == CONFIGS[2]
    finally:
        service.released.set()


def test_a_capture_keeps_no_answer_from_before_the_copy_was_read(
    make_resolver: ResolverMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even when another thread reads it at that moment."""
    keep(tmp_path, document(5, {SHAPE: 2}))
    resolver = make_resolver()
    bundled = resolver.bundled
    monkeypatch.setattr(resolver, "bundled", lambda: (resolver.client.watch(H200), bundled())[1])
    assert resolver.resolve_slow(KEY, SHAPE, H200, capturing=True) == default_config(SHAPE, H200)
    assert resolver.lookup(KEY) is None
    assert resolver.resolve_slow(KEY, SHAPE, H200) == CONFIGS[2]


def test_a_capture_uses_what_is_loaded_and_keeps_it(make_resolver: ResolverMaker, tmp_path: Path) -> None:
    keep(tmp_path, document(5, {SHAPE: 2, OTHER: 3}))
    resolver = make_resolver()
    resolver.resolve_slow("warm-up", OTHER, H200)
    with resolver._lock, resolver.client._lock:
        assert resolver.resolve_slow(KEY, SHAPE, H200, capturing=True) == CONFIGS[2]
        assert resolver.lookup(KEY) == CONFIGS[2]


def test_a_capture_uses_the_bundled_snapshot(make_resolver: ResolverMaker, tmp_path: Path) -> None:
    bundle(tmp_path, document(1, {SHAPE: 1}))
    assert make_resolver().resolve_slow(KEY, SHAPE, H200, capturing=True) == CONFIGS[1]


def test_a_capture_never_forgets_keys(make_resolver: ResolverMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve_module, "MAX_KEYS", 4)
    resolver = make_resolver()
    resolver.resolve_slow(0, SHAPE, H200)
    with resolver._lock:
        for key in range(1, 10):
            resolver.resolve_slow(key, SHAPE, H200, capturing=True)
    assert all(resolver.lookup(key) is not None for key in range(10))


def test_a_config_that_failed_is_never_given_again(
    service: Service, make_resolver: ResolverMaker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    service.documents[H200.name] = document(7, {SHAPE: 3, OTHER: 3})
    resolver = make_resolver(service.url)
    resolver.refresh(H200, timeout_seconds=60)
    failed = resolver.resolve_slow("a", SHAPE, H200)
    assert resolver.resolve_slow("b", OTHER, H200) == failed == CONFIGS[3]
    instead = resolver.quarantine(failed, SHAPE, H200, "out of resource: shared memory")
    assert instead == default_config(SHAPE, H200)
    assert resolver.lookup("a") == default_config(SHAPE, H200)
    assert resolver.lookup("b") == default_config(OTHER, H200)
    found = resolver.resolve(SHAPE, H200)
    assert (found.layer, found.match) == ("default", "default")
    assert found.reason == "config of N=1,H=96,T=8192 is in quarantine: out of resource: shared memory"
    resolver.refresh(timeout_seconds=60)
    assert resolver.resolve_slow("a", SHAPE, H200) == default_config(SHAPE, H200)
    assert resolver.quarantine(failed, SHAPE, H200, "again") == instead
    assert resolver.counters()["quarantined"] == 1
    (line,) = warnings(caplog)
    assert line.startswith("kdatune config of N=1,H=96,T=8192 failed on NVIDIA H200 and is in quarantine")
    assert line.endswith("another is used: out of resource: shared memory")
    resolver.client.report()
    (told,) = [item["quarantined"] for item in service.demand() if "quarantined" in item]
    assert told == {"config": to_json(CONFIGS[3]), "reason": "out of resource: shared memory"}


@pytest.mark.parametrize("shape", [SHAPE, OTHER, shape_of(1, 68, 8192)], ids=["fused", "pairs", "two stages"])
def test_a_failed_default_gives_way_to_two_stages_then_plain_triton_then_nothing(
    shape: Shape, make_resolver: ResolverMaker
) -> None:
    resolver = make_resolver()
    default = resolver.resolve_slow(KEY, shape, H200)
    # a whole one goes first, then Gluon in two stages
    steps = list(dict.fromkeys([default, split_default(shape, H200), default_config(shape, None)]))
    assert len(steps) == (3 if default.k2.whole else 2)
    for failed, instead in itertools.pairwise(steps):
        assert resolver.quarantine(failed, shape, H200, "no Gluon here") == instead
        assert resolver.lookup(KEY) == instead
        assert config_ok(instead, shape, H200) is None
    assert resolver.resolve(FAR, H200).config == default_config(FAR, H200)
    assert resolver.quarantine(steps[-1], shape, H200, "no card here") is None
    assert config_ok(resolver.resolve(shape, H200).config, shape, H200) is None


def test_precision_does_not_save_a_config_from_quarantine(make_resolver: ResolverMaker, tmp_path: Path) -> None:
    bundle(tmp_path, document(1, {SHAPE: 1}))
    resolver = make_resolver()
    resolver.quarantine(dataclasses.replace(CONFIGS[1], precision="bf16"), SHAPE, H200, "failed")
    assert resolver.resolve(SHAPE, H200).layer == "default"


def test_launches_are_counted(make_resolver: ResolverMaker, tmp_path: Path) -> None:
    bundle(tmp_path, document(1, {SHAPE: 1}, stale_reason="driver 570 -> 580"))
    resolver = make_resolver()
    assert resolver.counters() == {"hits": 0, "misses": 0, "stale": 0, "keys": 0, "quarantined": 0, "errors": 0}
    for _ in range(5):
        resolver.lookup("a") or resolver.resolve_slow("a", SHAPE, H200)
    for _ in range(3):
        resolver.lookup("b") or resolver.resolve_slow("b", FAR, H200)
    resolver.lookup("never resolved")
    counted = {"hits": 5, "misses": 3, "stale": 5, "keys": 2, "quarantined": 0, "errors": 0}
    assert resolver.counters() == counted
    resolver.refresh()
    assert resolver.counters() == {**counted, "keys": 0}


def test_misses_are_reported_with_their_launches_once(service: Service, make_resolver: ResolverMaker) -> None:
    service.documents[H200.name] = document(7, {SHAPE: 3})
    resolver = make_resolver(service.url)
    resolver.refresh(H200, timeout_seconds=60)
    near = dataclasses.replace(SHAPE, T=7000)
    for key, shape in (("exact", SHAPE), ("near", near), ("far", FAR), ("far too", FAR)):
        for _ in range(3):
            resolver.lookup(key) or resolver.resolve_slow(key, shape, H200)
    resolver.client.report()
    assert [(item["shape"], item["count"]) for item in service.demand()] == [(to_json(near), 3), (to_json(FAR), 6)]
    resolver.client.report()
    assert len(service.asked("POST")) == 1
    resolver.lookup("far")
    resolver.refresh(timeout_seconds=60)
    resolver.client.report()
    assert [(item["shape"], item["count"]) for item in service.demand()[2:]] == [(to_json(FAR), 1)]


def test_the_oldest_keys_are_forgotten_and_stay_counted(
    service: Service, make_resolver: ResolverMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolve_module, "MAX_KEYS", 8)
    resolver = make_resolver(service.url)
    shapes = [dataclasses.replace(FAR, T=t) for t in range(1, 31)]
    for shape in shapes:
        resolver.resolve_slow(shape.T, shape, H200)
        assert len(resolver._entries) <= 8
    assert resolver.lookup(1) is None
    assert resolver.lookup(30) is not None
    assert resolver.counters()["misses"] == 31
    resolver.client.report()
    assert {item["shape"]["T"]: item["count"] for item in service.demand()} == {**dict.fromkeys(range(1, 30), 1), 30: 2}


def test_a_pinned_generation_is_kept_to(service: Service, make_resolver: ResolverMaker, tmp_path: Path) -> None:
    keep(tmp_path, document(5, {SHAPE: 2}))
    service.documents[H200.name] = document(7, {SHAPE: 3})
    pinned = make_resolver(service.url, generation=5)
    pinned.refresh(H200, timeout_seconds=60)
    assert pinned.resolve(SHAPE, H200).config == CONFIGS[2]
    nowhere = make_resolver(service.url, generation=6)
    nowhere.refresh(H200, timeout_seconds=60)
    found = nowhere.resolve(SHAPE, H200)
    assert found.layer == "default"
    assert found.reason.endswith("the service's snapshot is of generation 7, KDATUNE_GENERATION pins 6: not used")


def test_explain_tells_what_every_layer_has(service: Service, make_resolver: ResolverMaker, tmp_path: Path) -> None:
    near = shape_of(1, 80, 8192)
    bundle(tmp_path, document(1, {SHAPE: 1}))
    keep(tmp_path, document(5, {near: 2}))
    service.documents[H200.name] = document(7, {near: 3})
    resolver = make_resolver(service.url)
    resolver.refresh(H200, timeout_seconds=60)
    told = resolver.explain(SHAPE, H200)
    assert [layer.layer for layer in told] == ["service", "disk", "bundled", "default"]
    assert [layer.used for layer in told] == [False, False, True, False]
    assert [layer.match.match for layer in told] == ["nearest", "nearest", "exact", "default"]
    assert [layer.state for layer in told] == [
        f"{service.url} reachable, generation 7, 1 champions",
        f"generation 5, 1 champions in {tmp_path / 'cache'}",
        "generation 1, 1 champions",
        "not needed",
    ]
    assert told[2].match.config == resolver.resolve(SHAPE, H200).config


def test_explain_when_nothing_is_known(make_resolver: ResolverMaker, tmp_path: Path) -> None:
    told = make_resolver().explain(FAR, H200)
    assert [layer.used for layer in told] == [False, False, False, True]
    assert [layer.state for layer in told] == [
        "KDATUNE_URL is not set",
        f"no copy found in {tmp_path / 'cache'}",
        "generation 0, 0 champions",
        "nothing is tuned for this card",
    ]
    assert told[3].match.config == default_config(FAR, H200)
    assert make_resolver("http://127.0.0.1:1", offline=True).explain(FAR, H200)[0].state == "KDATUNE_OFFLINE is set"


@pytest.mark.parametrize("content", [None, "", "{}", '{"schema": 9}'])
def test_a_bundled_snapshot_that_cannot_be_read_costs_one_warning(
    content: str | None, make_resolver: ResolverMaker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "bundled.json").unlink()
    if content is not None:
        (tmp_path / "bundled.json").write_text(content)
    resolver = make_resolver()
    assert resolver.resolve_slow("a", SHAPE, H200) == default_config(SHAPE, H200)
    assert resolver.resolve_slow("b", OTHER, H200) == default_config(OTHER, H200)
    assert len(warnings(caplog)) == 1
    assert "bundled.json cannot be read" in warnings(caplog)[0]
    assert resolver.counters()["errors"] == 1


@pytest.mark.parametrize("place", ["/proc/kdatune", "file/cache"])
def test_without_a_writable_home_everything_else_works(
    place: str, service: Service, make_resolver: ResolverMaker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    service.documents[H200.name] = document(7, {SHAPE: 3})
    resolver = make_resolver(service.url, cache_dir=tmp_path / place)
    assert resolver.resolve_slow("a", FAR, H200) == default_config(FAR, H200)
    for _ in range(2):
        resolver.refresh(timeout_seconds=60)
    assert resolver.resolve_slow("b", SHAPE, H200) == CONFIGS[3]
    assert len(warnings(caplog)) == 1


def test_threads_agree_on_one_config_a_key(service: Service, make_resolver: ResolverMaker) -> None:
    service.documents[H200.name] = document(1, {SHAPE: 1})
    resolver = make_resolver(service.url, poll_seconds=0.001)
    start = threading.Barrier(8)

    def launch(_: int) -> list[str]:
        start.wait()
        given = []
        for turn in range(2000):
            config = resolver.lookup(turn % 20) or resolver.resolve_slow(turn % 20, SHAPE, H200)
            given.append(canonical(config))
            if turn == 1000:
                service.documents[H200.name] = document(2, {SHAPE: 2})
        return given

    with ThreadPoolExecutor(8) as pool:
        given = list(pool.map(launch, range(8)))
    for key in range(20):
        assert len({config for one in given for config in one[key::20]}) == 1
    assert resolver.counters()["hits"] + resolver.counters()["misses"] <= 8 * 2000


def test_the_process_has_one_launcher_that_has_done_nothing_yet() -> None:
    script = (
        "import threading; from kdatune_kernels.resolve import launcher\n"
        "assert launcher.lookup((0, 1)) is None\n"
        "assert threading.active_count() == 1 and not launcher._made and launcher._bundled is None\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    assert isinstance(launcher, Resolver)


def test_the_launcher_reads_the_bundled_snapshot_of_the_package() -> None:
    shipped = parse_snapshot(resolve_module.BUNDLED.read_bytes())
    assert launcher.bundled() == shipped
