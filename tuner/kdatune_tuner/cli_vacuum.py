"""`kdatune db vacuum`: thin old measurements by the policy of the settings, and give the space back."""

from datetime import timedelta
from typing import Annotated

import typer

from kdatune_kernels.spec import Json
from kdatune_tuner.cli_support import JsonOption
from kdatune_tuner.cli_support import database
from kdatune_tuner.cli_support import out
from kdatune_tuner.cli_support import print_json
from kdatune_tuner.cli_support import read_settings
from kdatune_tuner.store import retention
from kdatune_tuner.store.records import utc_now

_WORDS = {
    retention.REFERRED: "that something refers to",
    retention.RESUMED: "that a search would resume from",
    retention.EXTREME: "best or worst of their week",
    retention.SAMPLE: "of the weekly sample",
}


def vacuum(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="say what would be removed, and remove nothing")] = False,
    as_json: JsonOption = False,
) -> None:
    """Thin old measurements and give the space back. Champions and all evidence stay; a server may go on serving.

    Interrupted, it has removed a part; run again, it goes on.
    """
    settings = read_settings()
    older_than = utc_now() - timedelta(days=settings.keep_days)
    with database(settings.database_url) as engine:
        before_bytes = retention.size_bytes(engine)
        plan = retention.plan(engine, older_than, settings.keep_per_week)
        removed_count = 0
        if not dry_run:
            removed_count = sum(retention.remove(engine, plan.remove))
            retention.tidy(engine)
        after_bytes = retention.size_bytes(engine)
    if as_json:
        print_json(
            {
                "dry_run": dry_run,
                "keep_days": settings.keep_days,
                "keep_per_week": settings.keep_per_week,
                "old_count": plan.old_count,
                "kept_counts": {why: plan.kept[why] for why in _WORDS},
                "to_remove_count": len(plan.remove),
                "removed_count": removed_count,
                "before_bytes": before_bytes,
                "after_bytes": after_bytes,
            }
        )
        return
    kept: Json = {why: count for why in _WORDS if (count := plan.kept[why])}
    told = [f"{plan.old_count:,} measurements are older than {settings.keep_days:g} days"]
    told += [f"{count:,} stay {_WORDS[why]}" for why, count in kept.items()]
    told.append(f"{len(plan.remove):,} would be removed" if dry_run else f"{removed_count:,} are removed")
    out().print("; ".join(told), soft_wrap=True, markup=False)
    if not dry_run:
        mebi = 1 << 20
        out().print(f"{before_bytes / mebi:,.1f} MiB before, {after_bytes / mebi:,.1f} MiB now", markup=False)
