"""What a night finds apart from its checks: a slower machine, another environment, steps in the stored history."""

from collections.abc import Collection
from collections.abc import Sequence
from dataclasses import replace

from sqlalchemy import Engine

from kdatune_kernels.match import Champion
from kdatune_kernels.spec import Build
from kdatune_tuner import regressions
from kdatune_tuner.night_reference import Reference
from kdatune_tuner.night_report import Finding
from kdatune_tuner.night_report import Kind
from kdatune_tuner.night_report import percent
from kdatune_tuner.settings import Settings
from kdatune_tuner.store.regressions import RegressionRow
from kdatune_tuner.store.staleness import changed_fields
from kdatune_tuner.store.staleness import changes

_MOST_NAMED = 20  # rows; the log names every one


def machine(reference: Reference, limit: float) -> list[Finding]:
    """Points of the reference kernel that do not run, and a machine that is slower than the limit (x)."""
    found = []
    for point in reference.points:
        if not point.result.ok:
            detail = point.result.detail or "no detail"
            text = f"the reference kernel ended {point.result.outcome}: {detail}"
            found.append(Finding(str(Kind.REFERENCE_FAILED), text, regression=True, shape=point.shape.key()))
    ratio = reference.ratio
    if ratio is not None and ratio > limit:
        shown = "; ".join(
            f"{point.shape.key()} {point.result.median_us:,.1f} us, usually {point.usual_us:,.1f}"
            for point in reference.points
            if point.ratio is not None
        )
        text = f"the machine is at {percent(ratio)} of its usual time ({shown}); configs are judged relative to it"
        found.append(Finding(str(Kind.MACHINE_SLOWER), text, regression=True, figures={"machine_ratio": ratio}))
    return found


def environment(before: Build | None, now: Build, champions: Sequence[Champion], reference: Reference) -> list[Finding]:
    """What changed since the last night, how much of what is served is stale by it, and what the reference takes now."""
    if before is None or before == now:
        return []
    stale_count = sum(1 for champion in champions if champion.build != now)
    earlier = reference.usual_elsewhere()
    moved = [
        f"{point.shape.key()} {point.result.median_us:,.1f} us, before {earlier[point.shape.key()]:,.1f}"
        for point in reference.points
        if point.result.median_us is not None and point.shape.key() in earlier
    ]
    text = f"{changes(before, now)}: {stale_count} of {len(champions)} served configs are stale by it"
    text += f"; the reference kernel: {'; '.join(moved)}" if moved else ""
    figures = {
        "fields": changed_fields(before, now),
        "stale_count": stale_count,
        "served_count": len(champions),
    }
    return [Finding(str(Kind.ENVIRONMENT_CHANGED), text, figures=figures)]


def damaged(noted: Collection[str]) -> list[Finding]:
    """Rows that somebody or something broke and that the night passed over."""
    if not noted:
        return []
    shown = "; ".join(list(noted)[:_MOST_NAMED]) + ("; ..." if len(noted) > _MOST_NAMED else "")
    text = f"{len(noted)} row(s) were passed over: {shown}; mend or delete them, or take a backup back"
    return [Finding(str(Kind.DAMAGED_ROWS), text, figures={"row_count": len(noted)})]


def history(engine: Engine, settings: Settings, gpu_name: str, findings: Sequence[Finding]) -> list[Finding]:
    """Look at the stored history of the card: steps of served configs that nobody has acknowledged.

    Returns the findings so far, those of an acknowledged config no longer a regression, and the steps that they do not tell.
    """
    seen = regressions.look(engine, settings)
    rows = [row for row in (*seen.opened, *seen.still) if row.gpu_name == gpu_name]
    known = {(row.shape.key(), row.config_hash): row for row in rows if row.acknowledged_at is not None}
    found = [_acknowledged(finding, known) for finding in findings]
    told = {finding.shape for finding in findings if finding.kind == Kind.CONFIG_SLOWER}
    found += [_step(row) for row in seen.unacknowledged if row in rows and row.shape.key() not in told]
    return found


def _acknowledged(finding: Finding, known: dict[tuple[str, str], RegressionRow]) -> Finding:
    row = known.get((finding.shape or "", str(finding.figures.get("config"))))
    if finding.kind != Kind.CONFIG_SLOWER or row is None:
        return finding
    return replace(finding, regression=False, text=f"{finding.text} (acknowledged by {row.acknowledged_by})")


def _step(row: RegressionRow) -> Finding:
    began = row.began_at.date().isoformat()
    text = f"regression {row.id}: {row.before_us:,.1f} us became {row.after_us:,.1f} us on {began}; {row.cause}"
    figures = {
        "regression": row.id,
        "before_us": row.before_us,
        "after_us": row.after_us,
        "change_pct": row.change_pct,
        "began_at": row.began_at.isoformat(),
    }
    return Finding(str(Kind.STEP), text, regression=True, shape=row.shape.key(), figures=figures)
