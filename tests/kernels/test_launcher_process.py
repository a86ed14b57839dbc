"""The launcher and its process: forks, exits, imports."""

import os
import subprocess
import sys
from pathlib import Path

from loopback_service import H200
from loopback_service import SHAPE
from loopback_service import Service
from loopback_service import document

FORK = """
import os, sys, threading
from kdatune_kernels import transport
from kdatune_kernels.resolve import Resolver
from kdatune_kernels.spec import KNOWN_GPUS, shape_of

transport.TIMEOUT_SECONDS = 60.0  # a service that is slow is not gone
gpu = KNOWN_GPUS["NVIDIA H200"]
resolver = Resolver()
parent = resolver.resolve_slow("a", shape_of(1, 96, 8192), gpu)
resolver.refresh(timeout_seconds=60)
parent = resolver.resolve_slow("a", shape_of(1, 96, 8192), gpu)
polls = resolver.client.feed(gpu.name).polls
resolver.resolve_slow("m", shape_of(1, 49, 8192), gpu)  # the parent's miss
resolver._lock.acquire()            # a fork while another thread is inside
resolver.client._lock.acquire()
resolver.client.outbox._lock.acquire()
child = os.fork()
if child == 0:
    threads = [t.name for t in threading.enumerate()]
    assert threads == ["MainThread"], threads
    assert resolver.lookup("a") == parent
    resolver.resolve_slow("b", shape_of(1, 50, 8192), gpu)  # nothing tuned is that near, so a miss
    assert "kdatune" in [t.name for t in threading.enumerate()]
    assert resolver.refresh(timeout_seconds=60)
    assert resolver.client.feed(gpu.name).polls > polls
    resolver.client.report()
    os._exit(0)
_, status = os.waitpid(child, 0)
sys.exit(os.waitstatus_to_exitcode(status))
"""


def test_a_child_process_has_a_thread_of_its_own(service: Service, tmp_path: Path) -> None:
    service.documents[H200.name] = document(7, {SHAPE: 3})
    ours = {k: v for k, v in os.environ.items() if not k.startswith("KDATUNE_")}
    environment = {**ours, "KDATUNE_URL": service.url, "KDATUNE_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", FORK], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    # the parent's launches are the parent's to report
    assert [(item["shape"]["H"], item["count"]) for item in service.demand()] == [(50, 1)]


def test_a_process_ends_while_its_thread_waits_for_the_service(service: Service, tmp_path: Path) -> None:
    service.instead = lambda handler: service.released.wait(120) and None
    script = (
        "import time\n"
        "from kdatune_kernels import transport\n"
        "from kdatune_kernels.resolve import launcher\n"
        "from kdatune_kernels.spec import KNOWN_GPUS, shape_of\n"
        "transport.TIMEOUT_SECONDS = 120.0\n"
        "config = launcher.resolve_slow(1, shape_of(1, 96, 8192), KNOWN_GPUS['NVIDIA H200'])\n"
        "while not launcher.client.counters['fetches']:\n"
        "    time.sleep(0.01)\n"
        "print(config.k2.variant)\n"
    )
    environment = {**os.environ, "KDATUNE_URL": service.url, "KDATUNE_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "fused\n", "")
    assert service.answered == 0


def test_the_launcher_imports_neither_torch_nor_anything_else() -> None:
    script = (
        "import sys; before = set(sys.modules); import kdatune_kernels.resolve; import threading\n"
        "outside = {m.split('.')[0] for m in set(sys.modules) - before} - set(sys.stdlib_module_names)\n"
        "assert outside == {'kdatune_kernels'}, outside; assert threading.active_count() == 1\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
