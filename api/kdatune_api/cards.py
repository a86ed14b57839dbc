"""Which card is meant: tuned ones first, then the known ones, then what the query says of it."""

import difflib
from dataclasses import dataclass
from typing import Literal

from fastapi.concurrency import run_in_threadpool

from kdatune_api.champions import ChampionIndex
from kdatune_api.deps import Service
from kdatune_api.problems import INVALID_REQUEST
from kdatune_api.problems import UNKNOWN_GPU
from kdatune_api.problems import FieldError
from kdatune_api.problems import ProblemError
from kdatune_api.schemas import GpuFacts
from kdatune_kernels.spec import KNOWN_GPUS
from kdatune_kernels.spec import Gpu
from kdatune_kernels.spec import gpu_of
from kdatune_tuner.store.queries import find_gpu

Source = Literal["tuned", "known", "given"]


@dataclass(frozen=True)
class Card:
    """A GPU model and where it is known from."""

    gpu: Gpu
    source: Source


async def find_card(service: Service, index: ChampionIndex, name: str, facts: GpuFacts) -> Card:
    """The card of that name.

    What the query says of a card must agree with what is known of it: a wrong SM count would fetch the configs of
    another silicon.

    Raises:
        ProblemError: unknown-gpu when neither name nor facts are enough; invalid-request when they contradict.
    """
    known = _known(index, name)
    if not known:
        # The index is as old as the last promotion; a card that was added since is in the store only.
        stored = await run_in_threadpool(_stored, service, name)
        known = [Card(stored, "tuned")] if stored else []
    for card in known:
        if _agrees(card.gpu, facts):
            return card
    if known:
        raise _contradiction(name, known[0].gpu, facts)
    if facts.sm_count is None or facts.compute_capability is None:
        raise ProblemError(UNKNOWN_GPU, _unknown(name, [*index.gpus, *KNOWN_GPUS]))
    return Card(gpu_of(name, facts.compute_capability, facts.sm_count), "given")


def known_card(index: ChampionIndex, name: str, facts: GpuFacts) -> Card | None:
    """The card of that name, where `find_card` finds it without the database."""
    return next((card for card in _known(index, name) if _agrees(card.gpu, facts)), None)


def _known(index: ChampionIndex, name: str) -> list[Card]:
    known = [Card(gpu, "tuned") for gpu in reversed(index.gpus.get(name, ()))]
    if name in KNOWN_GPUS:
        known.append(Card(KNOWN_GPUS[name], "known"))
    return known


def _stored(service: Service, name: str) -> Gpu | None:
    with service.reading() as session:
        return find_gpu(session, name)


def _agrees(gpu: Gpu, facts: GpuFacts) -> bool:
    return facts.sm_count in (None, gpu.sm_count) and facts.compute_capability in (None, gpu.compute_capability)


def _contradiction(name: str, gpu: Gpu, facts: GpuFacts) -> ProblemError:
    errors = [
        FieldError(
            parameter=field, detail=f"{name} has {getattr(gpu, field)}, the request says {getattr(facts, field)}"
        )
        for field in ("sm_count", "compute_capability")
        if getattr(facts, field) not in (None, getattr(gpu, field))
    ]
    detail = f"{errors[0].parameter}: {errors[0].detail}; leave it out, or give the name that the driver reports"
    return ProblemError(INVALID_REQUEST, detail, errors)


def _unknown(name: str, names: list[str]) -> str:
    by_lower = {known.lower(): known for known in names}
    near = difflib.get_close_matches(name.lower(), by_lower, n=3, cutoff=0.6)
    hint = f" (did you mean {' or '.join(by_lower[lower] for lower in near)}?)" if near else ""
    return (
        f"no GPU model named {name!r} is tuned or known{hint}; "
        "give its sm_count and compute_capability as well, e.g. &sm_count=132&compute_capability=9.0"
    )
