"""What promotions have changed since a service last looked, so that it need not read 10,000 champions to learn of one.

Every function is called inside `engine.reading`.
"""

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import func
from sqlalchemy import select
from sqlalchemy.orm import Session

from kdatune_kernels.errors import KdatuneError
from kdatune_kernels.match import Champion
from kdatune_kernels.spec import Shape
from kdatune_tuner.store.convert import shape_of_row
from kdatune_tuner.store.models import ProblemModel
from kdatune_tuner.store.models import PromotionModel
from kdatune_tuner.store.queries import champions
from kdatune_tuner.store.records import SERVING_DECISIONS

MAX_CHANGES = 200
"""Changed problems that are read one by one; more are read with all others, which takes no longer then."""

_SERVING_VALUES = [decision.value for decision in SERVING_DECISIONS]


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
    """

    shapes: frozenset[Shape]
    champions: tuple[Champion, ...]


def newest_mark(s: Session) -> Mark:
    """The mark of what is served now: `queries.generation`, and which promotion that was."""
    # see queries.generation for what coalesce is there for
    serving = func.coalesce(PromotionModel.decision, "").in_(_SERVING_VALUES)
    columns = (PromotionModel.generation, PromotionModel.id, PromotionModel.decided_at)
    row = s.execute(select(*columns).where(serving).order_by(PromotionModel.generation.desc()).limit(1)).first()
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
                    PromotionModel.kernel == "kda",
                    PromotionModel.decision.in_(_SERVING_VALUES),
                )
            )
        )
        .limit(MAX_CHANGES + 1)
    ).all()
    if len(rows) > MAX_CHANGES:
        return None
    try:
        shapes = frozenset(shape_of_row(row) for row in rows)
    except KdatuneError:
        return None
    return Changes(shapes, tuple(champions(s, problem_ids=[row.id for row in rows])))


def _holds(s: Session, mark: Mark) -> bool:
    if mark.generation == 0:
        return True
    columns = (PromotionModel.id, PromotionModel.decided_at)
    row = s.execute(select(*columns).where(PromotionModel.generation == mark.generation)).first()
    return row is not None and (row[0], row[1]) == (mark.promotion_id, mark.decided_at)
