"""What launchers ask for and do not get: kept a key, sent to the service in batches. Stdlib only."""

import json
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from dataclasses import replace

from kdatune_kernels.spec import Json
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import Shape
from kdatune_kernels.spec import to_json
from kdatune_kernels.transport import ServiceError
from kdatune_kernels.transport import request
from kdatune_kernels.values import OtherConfig
from kdatune_kernels.values import OtherShape

MAX_PENDING = 4096
BATCH_ITEMS = 100
MAX_COUNT = 1_000_000
"""The largest count of one item that a service takes."""


@dataclass(frozen=True)
class Refusal:
    """A config that must not be launched (again), and why."""

    config: LaunchConfig | OtherConfig
    reason: str


@dataclass(frozen=True)
class Demand:
    """A key that has no champion of its own (count: its launches), or whose champion was refused."""

    gpu_name: str
    shape: Shape | OtherShape
    count: int
    refusal: Refusal | None = None
    kernel: str = "kda"

    def item(self, *, plain: bool = False) -> Json:
        """As an item of POST /v1/demand. Plain leaves out what a service of today may not read."""
        count = min(self.count, MAX_COUNT)
        item: Json = {"gpu": self.gpu_name, "kernel": self.kernel, "shape": to_json(self.shape), "count": count}
        if self.refusal is not None and not plain:
            item["quarantined"] = {"config": to_json(self.refusal.config), "reason": self.refusal.reason}
        return item


class Outbox:
    """Demand that waits to be sent. At most MAX_PENDING keys; what does not fit is counted as dropped."""

    def __init__(self, counters: Counter[str]) -> None:
        self.counters = counters
        self.renew()

    def renew(self) -> None:
        """Start empty and unlocked: in a child process, since the parent reports its own."""
        self._lock = threading.Lock()
        self._pending: dict[tuple[str, str, Shape | OtherShape, Refusal | None], Demand] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, demands: Iterable[Demand]) -> None:
        """Keep demand for the next `send`; equal keys are summed."""
        with self._lock:
            for demand in demands:
                key = (demand.gpu_name, demand.kernel, demand.shape, demand.refusal)
                if key in self._pending:
                    self._pending[key] = replace(demand, count=demand.count + self._pending[key].count)
                elif len(self._pending) < MAX_PENDING:
                    self._pending[key] = demand
                else:
                    self.counters["dropped"] += 1

    def send(self, url: str, token: str | None) -> None:
        """Post everything, a batch at a time. What the service could not take now stays for the next time."""
        while self._pending:
            with self._lock:
                keys = list(self._pending)[:BATCH_ITEMS]
                batch = [self._pending.pop(key) for key in keys]
            if not batch:  # another thread has sent it
                return
            try:
                _post(url, token, batch, self.counters)
            except ServiceError:
                self.counters["errors"] += 1
                self.add(batch)
                return


def _post(url: str, token: str | None, batch: list[Demand], counters: Counter[str]) -> None:
    def ask(plain: bool) -> int:
        body = json.dumps({"items": [demand.item(plain=plain) for demand in batch]}).encode()
        return request("POST", f"{url}/v1/demand", body=body, token=token).status

    status = ask(plain=False)
    if status in (400, 422) and any(demand.refusal for demand in batch):
        status = ask(plain=True)
    if status in (408, 425, 429) or status >= 500:
        raise ServiceError(f"status {status}")
    # any other refusal would be the same the next time
    counters["reported" if 200 <= status < 300 else "dropped"] += len(batch)
