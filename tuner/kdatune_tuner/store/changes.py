"""What promotions have changed since a service last looked, so that it need not read 10,000 champions to learn of one.

Every function is called inside `engine.reading`.
"""

import json
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection
from sqlalchemy import select
from sqlalchemy.orm import Session

from kdatune_kernels.errors import KdatuneError
from kdatune_kernels.match import Champion
from kdatune_kernels.others import OtherChampion
from kdatune_kernels.spec import Shape
from kdatune_kernels.values import OtherShape
from kdatune_tuner.store.convert import kda_shape_of_row
from kdatune_tuner.store.models import SERVING
from kdatune_tuner.store.models import ProblemModel
from kdatune_tuner.store.models import PromotionModel
from kdatune_tuner.store.other_champions import other_champions
from kdatune_tuner.store.queries import NEWEST_SERVED
from kdatune_tuner.store.queries import champions

MAX_CHANGES = 200
"""Changed problems that are read one by one; more are read with all others, which takes no longer then."""


@dataclass(frozen=True)
class Mark:
    """A generation of one very database: one that took its place may have the same number, but not of the same moment."""

    generation: int
    promotion_id: int = 0
    decided_at: datetime | None = None


@dataclass(frozen=True)
class Changes:
    """What has changed since a mark.

    shapes: of every problem that was touched. champions: all that are served for these shapes now, on every card.
    other_keys, others: the same of other kernels, by kernel and shape.
    """

    shapes: frozenset[Shape]
    champions: tuple[Champion, ...]
    other_keys: frozenset[tuple[str, OtherShape]] = frozenset()
    others: tuple[OtherChampion, ...] = ()


def newest_mark(s: Session | Connection) -> Mark:
    """The mark of what is served now: `queries.generation`, and which promotion that was."""
    row = s.execute(NEWEST_SERVED).first()
    return Mark(0) if row is None else Mark(*row)


def changes(s: Session, since: Mark) -> Changes | None:
    """What has changed since a mark; None when that cannot be said, and everything must be read anew.

    That is so when the promotion of the mark is not there (the database was replaced), when more than MAX_CHANGES
    problems have changed, or when one of them cannot be read.
    """
    if not _holds(s, since):
        return None
    rows = s.scalars(
        select(ProblemModel)
        .where(
            ProblemModel.id.in_(
                select(PromotionModel.problem_id).where(
                    PromotionModel.generation > since.generation,
                    PromotionModel.kernel.not_in(("k1", "k2")),
                    SERVING,
                )
            )
        )
        .limit(MAX_CHANGES + 1)
    ).all()
    if len(rows) > MAX_CHANGES:
        return None
    ours = [row for row in rows if row.shape_json is None]
    others = [row for row in rows if row.shape_json is not None]
    try:
        shapes = frozenset(kda_shape_of_row(row) for row in ours)
        other_keys = frozenset((row.kernel, OtherShape(json.loads(row.shape_json or ""))) for row in others)
    except KdatuneError:
        return None
    return Changes(
        shapes,
        tuple(champions(s, problem_ids=[row.id for row in ours])) if ours else (),
        other_keys,
        tuple(other_champions(s, problem_ids=[row.id for row in others])) if others else (),
    )


def _holds(s: Session, mark: Mark) -> bool:
    if mark.generation == 0:
        return True
    columns = (PromotionModel.id, PromotionModel.decided_at)
    row = s.execute(select(*columns).where(PromotionModel.generation == mark.generation)).first()
    return row is not None and (row[0], row[1]) == (mark.promotion_id, mark.decided_at)
