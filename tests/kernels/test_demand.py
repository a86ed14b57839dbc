"""What launchers ask for and do not get reaches the service: summed, bounded, once."""

import dataclasses
import json
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from loopback_service import CONFIGS
from loopback_service import FAR
from loopback_service import H200
from loopback_service import OTHER
from loopback_service import SHAPE
from loopback_service import ClientMaker
from loopback_service import Service
from loopback_service import answer
from loopback_service import closed_port
from loopback_service import wait_for

from kdatune_kernels import demand as demand_module
from kdatune_kernels.client import Client
from kdatune_kernels.demand import Demand
from kdatune_kernels.demand import Refusal
from kdatune_kernels.environment import Settings
from kdatune_kernels.spec import to_json


def test_demand_is_summed_a_key_and_sent_in_bounded_batches(service: Service, make_client: ClientMaker) -> None:
    client = make_client(service.url)
    client.outbox.add([Demand(H200.name, SHAPE, 3), Demand(H200.name, OTHER, 1), Demand(H200.name, SHAPE, 4)])
    client.report()
    assert service.demand() == [
        {"gpu": "NVIDIA H200", "kernel": "kda", "shape": to_json(SHAPE), "count": 7},
        {"gpu": "NVIDIA H200", "kernel": "kda", "shape": to_json(OTHER), "count": 1},
    ]
    assert client.counters["reported"] == 2
    client.report()
    assert service.asked("POST") == ["/v1/demand"]
    many = [Demand(H200.name, dataclasses.replace(SHAPE, T=t), 1) for t in range(1, 251)]
    client.outbox.add(many)
    client.report()
    assert len(service.asked("POST")) == 4
    assert len(service.demand()) == 252


def test_demand_that_cannot_be_delivered_waits(service: Service, make_client: ClientMaker) -> None:
    client = make_client(service.url)
    client.outbox.add([Demand(H200.name, SHAPE, 3)])
    service.demand_status = 503
    client.report()
    assert (len(client.outbox), client.counters["errors"]) == (1, 1)
    client.outbox.add([Demand(H200.name, SHAPE, 2)])
    service.demand_status = 202
    client.report()
    assert service.demand()[-1]["count"] == 5
    assert len(client.outbox) == 0


@pytest.mark.parametrize("status", [400, 401, 404, 413])
def test_demand_that_is_refused_is_dropped(status: int, service: Service, make_client: ClientMaker) -> None:
    client = make_client(service.url)
    client.outbox.add([Demand(H200.name, SHAPE, 3)])
    service.demand_status = status
    client.report()
    assert (len(client.outbox), client.counters["dropped"], len(service.requests)) == (0, 1, 1)


def test_a_service_that_knows_no_quarantine_still_gets_the_demand(service: Service, make_client: ClientMaker) -> None:
    def strict(handler: BaseHTTPRequestHandler) -> None:
        items = json.loads(service.requests[-1].body)["items"]
        answer(handler, 422 if any("quarantined" in item for item in items) else 202, b"{}")

    service.instead = strict
    client = make_client(service.url)
    client.outbox.add([Demand(H200.name, SHAPE, 1, Refusal(CONFIGS[0], "launch failed"))])
    client.report()
    assert [sorted(item) for item in service.demand()] == [
        ["count", "gpu", "kernel", "quarantined", "shape"],
        ["count", "gpu", "kernel", "shape"],
    ]
    assert client.counters["reported"] == 1


def test_pending_demand_is_bounded(make_client: ClientMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demand_module, "MAX_PENDING", 10)
    with closed_port() as url:
        client = make_client(url)
        client.outbox.add(Demand(H200.name, dataclasses.replace(SHAPE, T=t), 1) for t in range(1, 26))
        client.report()
    assert (len(client.outbox), client.counters["dropped"]) == (10, 15)


def test_who_finds_everything_sent_sends_nothing(service: Service, make_client: ClientMaker) -> None:
    outbox = make_client(service.url).outbox
    outbox.add([Demand(H200.name, SHAPE, 3)])

    class AnotherWasFirst:
        def __enter__(self) -> None:
            outbox._pending.clear()

        def __exit__(self, *_: object) -> None:
            pass

    outbox._lock = AnotherWasFirst()
    outbox.send(service.url, None)
    assert service.requests == []


def test_a_count_is_no_larger_than_a_service_takes(service: Service, make_client: ClientMaker) -> None:
    client = make_client(service.url)
    client.outbox.add([Demand(H200.name, SHAPE, 10**9)])
    client.report()
    assert service.demand()[0]["count"] == 1_000_000


def test_the_thread_reports_what_it_collects(service: Service, tmp_path: Path) -> None:
    waiting = [Demand(H200.name, FAR, 2)]

    def collect() -> list[Demand]:
        return [waiting.pop()] if waiting else []

    client = Client(Settings(service.url, tmp_path, poll_seconds=0.02), collect)
    client.watch(H200)
    wait_for(lambda: bool(service.demand()))
    client.close()
    assert service.demand() == [{"gpu": "NVIDIA H200", "kernel": "kda", "shape": to_json(FAR), "count": 2}]
