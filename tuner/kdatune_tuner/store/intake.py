"""What comes in over the network: posted results, once each, and configs that launchers refused."""

from collections.abc import Sequence

from sqlalchemy import func
from sqlalchemy import select
from sqlalchemy.orm import Session

from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import Shape
from kdatune_kernels.spec import canonical
from kdatune_kernels.spec import digest
from kdatune_kernels.values import OtherConfig
from kdatune_kernels.values import OtherShape
from kdatune_tuner.store import writes
from kdatune_tuner.store.checks import check_shape
from kdatune_tuner.store.checks import check_texts
from kdatune_tuner.store.checks import plain
from kdatune_tuner.store.convert import is_id
from kdatune_tuner.store.convert import is_text
from kdatune_tuner.store.convert import read_shape_key
from kdatune_tuner.store.damaged import check_object
from kdatune_tuner.store.damaged import checked
from kdatune_tuner.store.damaged import whole_page
from kdatune_tuner.store.models import DemandModel
from kdatune_tuner.store.models import QuarantineModel
from kdatune_tuner.store.models import ReceiptModel
from kdatune_tuner.store.records import NewMeasurement
from kdatune_tuner.store.records import QuarantineRow
from kdatune_tuner.store.records import utc_now
from kdatune_tuner.store.rows import id_of

MAX_DEMAND_KEYS = 100_000
"""Keys of `demand`. Launchers report without being known, so what they may fill is bounded."""

MAX_QUARANTINED = 10_000
"""Rows of `quarantine`; as MAX_DEMAND_KEYS."""


def receive(s: Session, new: NewMeasurement, posted_digest: str, token_id: int) -> tuple[int, bool]:
    """Store a posted measurement, unless it was posted before: its id, and whether it is new.

    Args:
        posted_digest: of all that was posted about it; equal texts are one measurement, whoever posts them.

    Raises:
        StoreError: as `writes.add_measurement`.
    """
    known = s.scalar(select(ReceiptModel.measurement_id).where(ReceiptModel.digest == posted_digest))
    if known is not None:
        return known, False
    measurement_id = writes.add_measurement(s, new)
    s.add(ReceiptModel(digest=posted_digest, measurement_id=measurement_id, token_id=token_id, received_at=utc_now()))
    s.flush()
    return measurement_id, True


def demand_room(s: Session) -> int:
    """How many new keys `demand` still takes."""
    return max(0, MAX_DEMAND_KEYS - (s.scalar(select(func.count()).select_from(DemandModel)) or 0))


def has_demand(s: Session, gpu_name: str, kernel: str, shape: Shape | OtherShape) -> bool:
    """Whether the key was reported before."""
    key = {"gpu_name": gpu_name, "kernel": kernel, "shape_key": shape.key()}
    return s.scalar(select(DemandModel.id).filter_by(**key)) is not None


def report_quarantine(
    s: Session,
    gpu_name: str,
    kernel: str,
    shape: Shape | OtherShape,
    config: LaunchConfig | OtherConfig,
    reason: str,
) -> bool:
    """Keep that a launcher could not use a served config; False when the table is full and the config new.

    Raises:
        StoreError: an unknown kernel, or a name that no database can hold.
    """
    check_shape(kernel, shape)
    check_texts("quarantine", {"gpu_name": gpu_name})
    key = {"gpu_name": gpu_name, "kernel": kernel, "shape_key": shape.key(), "config_hash": digest(config)}
    now = utc_now()
    row = s.scalars(select(QuarantineModel).filter_by(**key)).first()
    if row is not None:
        row.count, row.reason, row.last_seen_at = row.count + 1, str(plain(reason)), now
        s.flush()
        return True
    if (s.scalar(select(func.count()).select_from(QuarantineModel)) or 0) >= MAX_QUARANTINED:
        return False
    s.add(
        QuarantineModel(
            **key, config_json=canonical(config), reason=plain(reason), count=1, first_seen_at=now, last_seen_at=now
        )
    )
    s.flush()
    return True


def page_quarantined(
    s: Session,
    *,
    gpu_name: str | None = None,
    kernel: str | None = None,
    shape: Shape | OtherShape | None = None,
    after_id: int | None = None,
    limit: int = 100,
    newest_first: bool = False,
) -> list[QuarantineRow]:
    """Configs that launchers refused and that fit all filters given. A row that cannot be read is passed over."""
    query = select(QuarantineModel)
    filters = {
        QuarantineModel.gpu_name: gpu_name,
        QuarantineModel.kernel: kernel,
        QuarantineModel.shape_key: None if shape is None else shape.key(),
    }
    for column, value in filters.items():
        if value is not None and not is_text(value):
            return []
        if value is not None:
            query = query.where(column == value)
    query = query.order_by(QuarantineModel.id.desc() if newest_first else QuarantineModel.id)

    def fetch(after: int | None, count: int) -> Sequence[QuarantineModel]:
        if not (after and is_id(after)):
            return s.scalars(query.limit(count)).all()
        beyond = QuarantineModel.id < after if newest_first else QuarantineModel.id > after
        return s.scalars(query.where(beyond).limit(count)).all()

    return whole_page(fetch, _row, id_of, after_id, max(1, min(limit, 1000)))


def _row(row: QuarantineModel) -> QuarantineRow:
    check_object(f"config_json of quarantine {row.id}", row.config_json)
    own = {name: getattr(row, name) for name in QuarantineRow.__dataclass_fields__ if name != "shape"}
    return checked(QuarantineRow(shape=read_shape_key(row.kernel, row.shape_key), **own))
