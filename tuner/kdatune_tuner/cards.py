"""The cards that workers can be given: one a visible GPU or MIG instance, by what CUDA_VISIBLE_DEVICES calls it."""

import os
import re
import subprocess
from dataclasses import dataclass

from kdatune_kernels.errors import UsageError
from kdatune_tuner.worker import DeviceError

_GPU = re.compile(r"GPU (\d+): (.+) \(UUID: (GPU-[^)]+)\)")
_MIG = re.compile(r"\s+MIG (\S+)\s+Device\s+\d+: \(UUID: (MIG-[^)]+)\)")

MOST_REPLAYED = 64
"""Workers of a replay: `--workers 2000` brought a host of two cores to a stop."""


@dataclass(frozen=True)
class Card:
    """A card of this host.

    device: its entry in CUDA_VISIBLE_DEVICES, e.g. a UUID; None: no real card (a replay needs none).
    """

    name: str
    device: str | None = None

    def __str__(self) -> str:
        return self.name if self.device is None else f"{self.name} {self.device}"


def visible_cards() -> list[Card]:
    """Every card that CUDA would show to this process, in its order.

    Raises:
        DeviceError: nvidia-smi is missing, fails, or lists none, or CUDA_VISIBLE_DEVICES hides all.
    """
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise DeviceError(
            f"the cards cannot be listed: nvidia-smi: {error}; --backend replay needs no card, and without --workers "
            "one card is used as CUDA finds it"
        ) from error
    cards = cards_of(listed.stdout, os.environ.get("CUDA_VISIBLE_DEVICES"))
    if not cards:
        said = (listed.stderr or listed.stdout).strip().splitlines()
        raise DeviceError(
            f"no card is visible (CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')!r}, "
            f"nvidia-smi -L: {said[-1] if said else 'nothing'}); --backend replay needs none"
        )
    return cards


def cards_of(listing: str, visible: str | None) -> list[Card]:
    """The cards of what `nvidia-smi -L` prints, as far as CUDA_VISIBLE_DEVICES (None: not set) shows them.

    A GPU that is split counts as its MIG instances. As CUDA does, the list ends at the first entry that names nothing.
    """
    gpus: list[tuple[str, Card]] = []
    instances: dict[str, list[Card]] = {}
    for line in listing.splitlines():
        if found := _GPU.match(line):
            gpus.append((found[1], Card(found[2], found[3])))
        elif gpus and (found := _MIG.match(line)):
            instances.setdefault(gpus[-1][0], []).append(Card(f"{gpus[-1][1].name} MIG {found[1]}", found[2]))
    everything = [card for index, gpu in gpus for card in instances.get(index, [gpu])]
    if visible is None:
        return everything
    known = dict(gpus) | {str(c.device): c for c in everything} | {str(g.device): g for _, g in gpus}
    shown: list[Card] = []
    for entry in (part.strip() for part in visible.split(",")):
        # a UUID may be shortened as long as it names one
        named = (
            [known[entry]]
            if entry in known
            else [c for d, c in known.items() if len(entry) > 4 and d.startswith(entry)]
        )
        if len(named) != 1:
            break
        shown.append(Card(named[0].name, entry))
    return list(dict.fromkeys(shown))


def choose_cards(workers: str, *, replay: bool) -> list[Card]:
    """The cards of `--workers`: "all", or so many.

    Raises:
        UsageError: neither, or more than there are; of a replay, more than MOST_REPLAYED.
        DeviceError: no card is visible.
    """
    count = None if workers == "all" else int(workers) if re.fullmatch(r"[0-9]{1,4}", workers) else 0
    if count == 0:
        raise UsageError(f"--workers must be all or a number from 1 on, not {workers[:50]!r}")
    if replay and count is not None and count > MOST_REPLAYED:
        raise UsageError(f"--workers {count}: a replay takes at most {MOST_REPLAYED}, each is a process of this host")
    if replay:
        return [Card("replay") for _ in range(count or min(os.cpu_count() or 1, MOST_REPLAYED))]
    cards = visible_cards()
    if count is not None and count > len(cards):
        raise UsageError(f"--workers {count}: only {len(cards)} cards are visible here")
    return cards[:count]
