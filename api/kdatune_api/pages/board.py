"""The board: what is served for every key, with what is stale. Made once a generation, from one query."""

from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from urllib.parse import quote
from urllib.parse import urlencode

from sqlalchemy.orm import Session

from kdatune_api.pages.params import SearchQuery
from kdatune_api.pages.state import PagesState
from kdatune_api.problems import UNKNOWN_GPU
from kdatune_api.problems import ProblemError
from kdatune_kernels.match import Champion
from kdatune_kernels.space import default_config
from kdatune_kernels.spec import Gpu
from kdatune_kernels.spec import shape_of
from kdatune_tuner.store import queries
from kdatune_tuner.store.dashboard import Served
from kdatune_tuner.store.dashboard import served_keys
from kdatune_tuner.store.records import rfc3339
from kdatune_tuner.store.staleness import marked

_MAX_CARDS = 1000
_ANY_SHAPE = shape_of(1, 1, 1)
_SHAPE_DEFAULTS = {
    "K": "128",
    "V": "128",
    "dtype": "bf16",
    "varlen": "false",
    "initial_state": "true",
    "final_state": "true",
    "state_v_first": "false",
    "state_dtype": "fp32",
}


@dataclass(frozen=True)
class Card:
    """A GPU model of the store. ids: the rows of `gpu` that are this card, the newest last."""

    gpu: Gpu
    ids: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.gpu.name


@dataclass(frozen=True, slots=True)
class Entry:
    """What is served for one shape on one card."""

    card: Card
    row: Served
    stale_reason: str | None

    @property
    def speedup(self) -> float | None:
        """Default over champion (x, > 1 is faster); None where the default was not measured, or is served."""
        row = self.row
        return row.default_us / row.measured_us if row.default_us and row.measured_us else None

    @property
    def status(self) -> str:
        """ "default" (a rollback serves it), "stale" or "tuned"."""
        if self.row.config_hash is None:
            return "default"
        return "stale" if self.stale_reason else "tuned"

    @property
    def order(self) -> tuple[int, int, int, str]:
        row = self.row
        return row.n_sequences, row.n_heads, row.n_tokens, row.shape_key


class Board:
    """Every entry of one generation, the newest of each card and shape."""

    def __init__(
        self,
        cards: Iterable[Card],
        rows: Sequence[Served],
        reasons: dict[tuple[int, int], str | None],
        generation: int = 0,
    ) -> None:
        self.generation = generation
        self.rows = tuple(rows)
        self.cards = tuple(cards)
        by_id = {gpu_id: card for card in self.cards for gpu_id in card.ids}
        self._entries: dict[tuple[Card, str], Entry] = {}
        for row in rows:  # oldest first: the newest of a card that is stored twice stays
            if row.gpu_id in by_id:
                reason = None if row.build_id is None else reasons[row.gpu_id, row.build_id]
                card = by_id[row.gpu_id]
                self._entries[card, row.shape_key] = Entry(card, row, reason)
        self._names = {(e.card.name, e.row.shape_key) for e in self._entries.values() if e.row.config_hash is not None}
        self.entries = tuple(sorted(self._entries.values(), key=lambda entry: entry.order))

    def get(self, card: Card, shape_key: str) -> Entry | None:
        """What is served for the shape on the card."""
        return self._entries.get((card, shape_key))

    def serves(self, gpu_name: str, shape_key: str) -> bool:
        """Whether a card of that name has a champion for the shape."""
        return (gpu_name, shape_key) in self._names

    def find_card(self, name: str) -> Card | None:
        """The card of that name; of several the one that something is served for, else the newest."""
        found = [card for card in self.cards if card.name == name]
        used = {entry.card for entry in self.entries if entry.card.name == name}
        return next((card for card in reversed(found) if card in used), found[-1] if found else None)

    def card(self, name: str) -> Card:
        """`find_card` for a page about one card. Raises ProblemError (404) when nothing is stored about it."""
        card = self.find_card(name)
        if card is None:
            known = ", ".join(sorted({one.name for one in self.cards})) or "none yet"
            raise ProblemError(UNKNOWN_GPU, f"nothing is stored about a GPU model named {name!r}; stored: {known}")
        return card

    def chosen(self, query: SearchQuery) -> list[Entry]:
        """The entries that the filters let through, in the order of their shapes."""
        return [entry for entry in self.entries if _fits(entry, query)]


def read_board(s: Session, state: PagesState) -> Board:
    """The board of what is served now: the kept one while the generation and the cards are the same."""
    cards = _cards(s)
    generation = queries.generation(s)
    board: Board = state.boards.get((generation, tuple(cards)), lambda: _make(s, cards, generation, state.board))
    state.board = board
    return board


def geomean(entries: Iterable[Entry]) -> tuple[float | None, int]:
    """The geometric mean of the known speed-ups, and how many they are."""
    known = [speedup for entry in entries if (speedup := entry.speedup) is not None]
    return (geometric_mean(known) if known else None), len(known)


def path_of(page: str, gpu_name: str, shape_key: str) -> str:
    """The address of a page about one key, e.g. path_of("configs", "NVIDIA H200", "N=1,H=96,T=8192")."""
    return f"/{page}/{quote(gpu_name, safe='')}/{quote(shape_key, safe='=,')}"


def compare_path(gpu_name: str, shape_key: str, as_b: str) -> str:
    """The address that compares a config of a key with its champion, e.g. as_b="m17" or "default"."""
    return f"/compare?{urlencode({'gpu_a': gpu_name, 'shape_a': shape_key, 'as_b': as_b})}"


def words(query: str | None) -> list[str]:
    """The words of a search in shape keys."""
    return (query or "").replace(",", " ").split()


def matches(shape_key: str, wanted: list[str]) -> bool:
    """Whether a shape key has every word: `name=value` is that very field, anything else a part of the key."""
    if not wanted:
        return True
    parts = dict(part.split("=", 1) for part in shape_key.split(","))
    return all(_has(parts, shape_key, word) for word in wanted)


def _has(parts: dict[str, str], shape_key: str, word: str) -> bool:
    name, sep, value = word.partition("=")
    if not sep or not value:
        return word.lower() in shape_key.lower()
    found = parts.get(name, parts["H"] if name == "HV" else _SHAPE_DEFAULTS.get(name))
    return found is not None and found.lower() == value.lower()


def _fits(entry: Entry, query: SearchQuery) -> bool:
    row = entry.row
    return (
        query.gpu in (None, entry.card.name)
        and query.dtype in (None, row.dtype)
        and query.varlen in (None, "yes" if row.varlen else "no")
        and matches(row.shape_key, words(query.q))
    )


def _cards(s: Session) -> list[Card]:
    found: dict[tuple[str, int, str | None], Card] = {}
    for row in queries.page_gpus(s, limit=_MAX_CARDS):
        identity = (row.gpu.name, row.gpu.sm_count, row.gpu.mig_profile)
        before = found.get(identity)
        found[identity] = Card(row.gpu, (*(before.ids if before else ()), row.id))
    return sorted(found.values(), key=lambda card: card.name)


def _make(s: Session, cards: list[Card], generation: int, before: Board | None) -> Board:
    """The board of a generation. History is only ever added to, so that of an earlier one saves most of the reading."""
    if before is None or before.generation > generation:
        rows = served_keys(s)
    else:
        newest = {(row.gpu_id, row.problem_id): row for row in before.rows}
        for row in served_keys(s, before.generation):
            newest.pop((row.gpu_id, row.problem_id), None)  # what is newer goes to the end
            newest[row.gpu_id, row.problem_id] = row
        rows = list(newest.values())
    return Board(cards, rows, dict(_stale_reasons(s, cards, rows)), generation)


def _stale_reasons(s: Session, cards: list[Card], rows: list[Served]) -> Iterator[tuple[tuple[int, int], str | None]]:
    """Why champions of a card and build are stale, by the service's own rule, which needs one champion of each."""
    gpus = {gpu_id: card.gpu for card in cards for gpu_id in card.ids}
    newest: dict[tuple[int, int], Served] = {}
    for row in rows:
        if row.build_id is None or row.measured_at is None or row.gpu_id not in gpus:
            continue
        key = (row.gpu_id, row.build_id)
        before = newest.get(key)
        if before is None or before.measured_at is None or before.measured_at <= row.measured_at:
            newest[key] = row
    stand_ins = [
        Champion(
            gpu=gpus[gpu_id],
            shape=_ANY_SHAPE,
            config=default_config(_ANY_SHAPE, None),
            generation=row.generation,
            measured_us=row.measured_us,
            default_us=row.default_us,
            build=queries.find_build(s, build_id),
            measured_at=rfc3339(row.measured_at) if row.measured_at else None,
        )
        for (gpu_id, build_id), row in newest.items()
    ]
    return ((key, one.stale_reason) for key, one in zip(newest, marked(stand_ins), strict=True))
