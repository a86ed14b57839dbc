"""The values on the pages: what is stored is what is shown, and what is downloaded, on both databases."""

import math
import re
from dataclasses import replace
from datetime import UTC
from datetime import datetime
from datetime import timedelta
from urllib.parse import quote

import pytest
from sqlalchemy import update

from kdatune_kernels.space import FUSED
from kdatune_kernels.space import PAIRS
from kdatune_kernels.space import default_config
from kdatune_kernels.space import k2_configs
from kdatune_kernels.space import legal_k2
from kdatune_kernels.space import split_default
from kdatune_kernels.spec import KNOWN_GPUS
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import digest
from kdatune_kernels.spec import shape_of
from kdatune_tuner.ncu.metrics import METRICS
from kdatune_tuner.ncu.metrics import stored_form
from kdatune_tuner.outcome import Outcome
from kdatune_tuner.regressions import look
from kdatune_tuner.settings import Settings
from kdatune_tuner.store import writes
from kdatune_tuner.store.access import Caller
from kdatune_tuner.store.engine import writing
from kdatune_tuner.store.models import PromotionModel
from kdatune_tuner.store.night import save_night
from kdatune_tuner.store.night import start_night
from kdatune_tuner.store.records import NewProfile
from kdatune_tuner.store.records import RunState
from kdatune_tuner.store.regressions import acknowledge

H20 = KNOWN_GPUS["NVIDIA H20"]
HTML = {"Accept": "text/html"}
SMALL = shape_of(1, 8, 1024)
RAGGED = shape_of(6, 64, 8192, varlen=True, longest_tokens=3063)


def key_path(page, shape, gpu="NVIDIA H200"):
    return f"/{page}/{quote(gpu)}/{shape.key()}"


def items(client, path, table, **params):
    """The rows of a table of a page, as it is downloaded."""
    response = client.get(path, params={**params, "download": f"{table}.json"})
    assert response.status_code == 200, response.text
    return response.json()["items"]


def text(client, path, **params):
    response = client.get(path, params=params, headers=HTML)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    return response.text


def at(engine, generation, moment):
    """Move a decision in time."""
    with writing(engine) as s:
        s.execute(update(PromotionModel).where(PromotionModel.generation == generation).values(decided_at=moment))


@pytest.fixture
def now():
    """One moment for a test and its fixtures: midnight may pass meanwhile."""
    return datetime.now(UTC)


@pytest.fixture
def six_nights(shelf, helpers, now):
    """A champion that takes 600 us for six nights, then, with a new driver, 630 for two."""
    config = helpers.configs_for(helpers.SHAPE, helpers.H200, 3)[2]
    old = replace(helpers.BUILD, driver="570.1")
    stored = shelf.promote(config=config, build=old, median_us=600.0, measured_at=now - timedelta(days=8))
    at(shelf.engine, stored.generation, now - timedelta(days=8))
    for night in range(8, 0, -1):
        slower = night <= 2
        median_us = (630.0 if slower else 600.0) + night % 2
        shelf.measure(
            config=config,
            build=helpers.BUILD if slower else old,
            median_us=median_us,
            p20_us=median_us - 3,
            p80_us=median_us + 3,
            measured_at=now - timedelta(days=night),
        )
    shelf.measure(median_us=100.0)  # another config: not what is served
    return config


@pytest.fixture
def a_night(shelf, helpers):
    """Stores a night that came to its end; gives its id."""

    def add(*, report=None, exit_code=3, findings=None, machine_ratio=1.08):
        told = [
            {
                "kind": "config_slower",
                "regression": True,
                "shape": "N=1,H=96,T=8192",
                "text": "takes 630.0 us, 600.0 before <i>",
                "figures": {},
                "night": 1,
            },
            {"kind": "promoted", "regression": False, "shape": "rms;rows=4", "text": "x", "figures": {}, "night": 1},
        ]
        whole = {
            "format": 1,
            "spent_seconds": 61.5,
            "reference": {
                "machine_ratio": machine_ratio,
                "reason": None,
                "points": [
                    {
                        "shape": "N=1,H=64,T=8192",
                        "config": "r",
                        "outcome": "ok",
                        "detail": None,
                        "median_us": 432.0,
                        "usual_us": 400.0,
                        "ratio": 1.08,
                    }
                ],
            },
            "plan": [
                {
                    "kind": "check",
                    "shape": "N=1,H=96,T=8192",
                    "why": "every night",
                    "value": 10.0,
                    "estimated_seconds": 3.0,
                    "state": "done",
                    "seconds": 2.5,
                    "result": "630.0 us",
                }
            ],
            "findings": told if findings is None else findings,
            "error": None,
        }
        with writing(shelf.engine) as s:
            night_id = start_night(
                s,
                gpu_id=writes.put_gpu(s, helpers.H200),
                build_id=writes.put_build(s, helpers.BUILD),
                backend="gpu",
                host="tuner-1",
                budget_seconds=7200.0,
                report={},
            )
            save_night(
                s,
                night_id,
                report=whole if report is None else report,
                state=RunState.DONE,
                machine_ratio=machine_ratio,
                exit_code=exit_code,
            )
        return night_id

    return add


def test_the_heat_map_has_a_row_a_shape_and_a_column_a_card(client, shelf, helpers):
    shelf.promote(median_us=500.4)
    shelf.promote(SMALL, median_us=695.0)
    shelf.promote(gpu=H20, median_us=625.5)
    rows = {row.pop("shape"): row for row in items(client, "/", "heatmap")}
    assert rows == {
        SMALL.key(): {"gpu_1_speedup": None, "gpu_2_speedup": 0.9},
        helpers.SHAPE.key(): {"gpu_1_speedup": 1.0, "gpu_2_speedup": 1.25},
    }
    page = text(client, "/")
    geomean = math.exp((math.log(1.25) + math.log(0.9)) / 3)
    assert f"{geomean:.3f}x" in page
    assert "▲" in page
    assert "▼" in page
    assert [row["shape"] for row in items(client, "/", "worst")] == [
        SMALL.key(),
        helpers.SHAPE.key(),
        helpers.SHAPE.key(),
    ]


def test_what_is_stale_is_what_the_service_says_is_stale(client, shelf, helpers):
    shelf.promote(SMALL, build=replace(helpers.BUILD, driver="535.1"), measured_at=datetime.now(UTC) - timedelta(1))
    shelf.promote()
    served = client.get("/v1/snapshots/NVIDIA H200").json()["champions"]
    stale = [one["stale_reason"] for one in served if one["stale_reason"]]
    (row,) = items(client, "/configs", "configs", status="stale")
    page = text(client, "/configs", status="stale")
    assert row["shape"] == SMALL.key()
    assert len(stale) == 1
    assert stale[0] in page
    assert items(client, "/", "heatmap", status="stale")[0]["shape"] == SMALL.key()


@pytest.mark.parametrize("estimated", [False, True])
def test_the_pages_say_that_a_time_is_a_sum(client, shelf, helpers, estimated):
    shelf.promote(estimated=estimated)
    shelf.promote(gpu=KNOWN_GPUS["NVIDIA H100 80GB HBM3"])
    cards = {"gpu_a": "NVIDIA H200", "gpu_b": "NVIDIA H100 80GB HBM3"}
    for path, params in (("/", {}), ("/configs", {}), ("/waves", {"gpu": "NVIDIA H200"}), ("/compare", cards)):
        assert ("estimated" in text(client, path, **params)) == estimated, path


def test_every_promotion_is_on_the_next_page(client, shelf, helpers):
    """The pages keep what they know of earlier generations; they must show what a fresh service would."""
    configs = helpers.configs_for(helpers.SHAPE, helpers.H200, 4)

    def shown():
        return [(r["shape"], r["measured_us"], r["generation"]) for r in items(client, "/configs", "configs")]

    assert shown() == []
    shelf.promote(SMALL, median_us=50.0)
    assert shown() == [(SMALL.key(), 50.0, 1)]
    shelf.promote(config=configs[0], median_us=700.0)
    shelf.promote(config=configs[1], median_us=600.0)
    assert shown() == [(SMALL.key(), 50.0, 1), (helpers.SHAPE.key(), 600.0, 3)]
    with writing(shelf.engine) as s:
        writes.rollback(s, 3, "numerics")
    assert shown() == [(SMALL.key(), 50.0, 1), (helpers.SHAPE.key(), 700.0, 4)]
    shelf.promote(config=configs[2], median_us=500.0, decision="tie")
    shelf.promote(gpu=H20, config=configs[3], median_us=900.0)
    assert (helpers.SHAPE.key(), 900.0, 6) in shown()
    assert len(shown()) == 3


def test_demand_is_shown_until_it_is_served(client, shelf, helpers):
    with writing(shelf.engine) as s:
        writes.report_demand(s, "NVIDIA H200", "kda", helpers.SHAPE, 7)
        writes.report_demand(s, "NVIDIA B200", "kda", SMALL, 70)
    shelf.promote(SMALL)
    found = [(row["gpu"], row["shape"], row["miss_count"]) for row in items(client, "/", "demand")]
    assert found == [("NVIDIA B200", SMALL.key(), 70), ("NVIDIA H200", helpers.SHAPE.key(), 7)]
    shelf.promote()
    assert [row["gpu"] for row in items(client, "/", "demand")] == ["NVIDIA B200"]


def test_the_last_night_and_open_regressions_are_told(client, shelf, a_night, six_nights):
    page = text(client, "/")
    assert 'never<small><a href="/nights">' in page
    assert re.search(r"<dt>Open regressions</dt><dd>0<", page)
    night_id = a_night()
    look(shelf.engine, Settings())
    page = text(client, "/")
    assert re.search(rf'(just now|\d+ min ago)<small><a href="/nights/{night_id}">done</a>', page)
    assert re.search(r"<dt>Open regressions</dt><dd>1<", page)


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({"q": "H=8"}, [SMALL]),
        ({"q": "T=8192 N=6"}, [RAGGED]),
        ({"q": "dtype=bf16 varlen=false H=8"}, [SMALL]),
        ({"q": "longest"}, [RAGGED]),
        ({"varlen": "yes"}, [RAGGED]),
        ({"gpu": "NVIDIA H20"}, [RAGGED]),
        ({"gpu": "NVIDIA H20", "varlen": "no"}, []),
        ({"dtype": "fp16"}, []),
        ({"q": "H=80"}, []),
    ],
)
def test_filters_are_all_applied(client, shelf, filters, expected):
    shelf.promote(SMALL)
    shelf.promote(RAGGED, gpu=H20)
    assert [row["shape"] for row in items(client, "/configs", "configs", **filters)] == [s.key() for s in expected]


def test_a_list_is_sorted_and_paged(client, shelf):
    shapes = [shape_of(1, heads, 1024) for heads in range(1, 53)]
    for number, shape in enumerate(shapes):
        shelf.promote(shape, median_us=1000.0 - number)
    by_time = [row["measured_us"] for row in items(client, "/configs", "configs", sort="configs:measured_us")]
    assert by_time == sorted(by_time)
    assert len(by_time) == 52, "a download holds every row"
    first = text(client, "/configs", sort="configs:-measured_us")
    second = text(client, "/configs", sort="configs:-measured_us", page="configs:2")
    assert first.count("<tr>") == 51
    assert second.count("<tr>") == 3
    assert 'aria-sort="descending"' in first
    assert "51 to 52 of 52" in second
    assert "51 to 52 of 52" in text(client, "/configs", page="configs:99"), "a page beyond the end is the last one"


def test_a_config_stands_beside_the_default_and_the_previous_one(client, shelf, helpers):
    first, second = helpers.configs_for(helpers.SHAPE, helpers.H200, 2)
    default = default_config(helpers.SHAPE, helpers.H200)
    shelf.measure(config=default, median_us=700.0, o_error_ratio=0.5)
    shelf.promote(config=first, median_us=650.0)
    shelf.promote(config=second, median_us=600.0, p20_us=590.0, p80_us=612.0, o_error_ratio=0.25, sm_clock_mhz=1980.0)
    path = key_path("configs", helpers.SHAPE)
    numbers = {row["number"]: row for row in items(client, path, "numbers")}
    assert [numbers["Median"][name] for name in ("default", "previous", "champion")] == [700.0, 650.0, 600.0]
    assert numbers["Median"]["ratio"] == pytest.approx(600 / 700)
    assert numbers["Error of o over its tolerance"]["ratio"] == 0.5
    fields = {row["field"]: row for row in items(client, path, "fields")}
    assert fields["k2.stages_in"]["champion"] == str(second.k2.stages_in)
    assert fields["k1.maxnreg"]["default"] == "none"
    differing = [f for f, row in fields.items() if len({row["default"], row["previous"], row["champion"]}) > 1]
    assert list(fields)[: len(differing)] == differing, "fields that differ come first"
    provenance = {row["what"]: row["champion"] for row in items(client, path, "provenance")}
    assert provenance["driver"] == helpers.BUILD.driver
    assert provenance["sm_clock_mhz"] == 1980.0
    decisions = items(client, path, "history")
    assert [(d["generation"], d["measured_us"], d["config_hash"]) for d in decisions] == [
        (2, 600.0, digest(second)),
        (1, 650.0, digest(first)),
    ]
    page = text(client, path)
    assert "590.0 to 612.0" in page
    assert "paired run" in page
    assert "/v1/promotions/2/rollback" in page
    assert f"kdatune rollback --gpu &#34;NVIDIA H200&#34; --shape {helpers.SHAPE.key()}" in page


def test_a_rollback_to_the_default_is_told(client, shelf, helpers):
    shelf.promote()
    with writing(shelf.engine) as s:
        writes.rollback(s, 1, "numerics <b>differ</b>")
    page = text(client, key_path("configs", helpers.SHAPE))
    assert "rolled back to the default" in page
    assert "numerics &lt;b&gt;differ&lt;/b&gt;" in page
    assert "data-rollback" not in page, "there is nothing to take back"
    (row,) = items(client, "/configs", "configs", status="default")
    assert (row["state"], row["measured_us"]) == ("default", None)


def test_a_key_that_is_not_tuned_shows_what_a_launcher_gets(client, shelf, helpers):
    stored = shelf.promote(config=helpers.configs_for(helpers.SHAPE, helpers.H200, 9)[8])
    near = shape_of(1, 96, 7000)
    resolved = client.get("/v1/configs/resolve", params=helpers.query(near, "NVIDIA H200")).json()
    page = text(client, key_path("configs", near))
    assert "Not tuned on this card" in page
    assert f"<b>{resolved['match']}</b>" in page
    assert resolved["match"] == "bucket"
    assert f"&#34;stages_in&#34;: {stored.config.k2.stages_in}" in page
    assert f"kdatune tune --shape {near.key()}" in page


def profile(shelf, measurement_id, stage, counters=None, reason=None):
    new = NewProfile(
        measurement_id=measurement_id,
        stage=stage,
        counters=None if counters is None else stored_form(counters),
        issue_active_pct=(counters or {}).get("issue_active_pct"),
        barrier_stall_per_issue=(counters or {}).get("barrier_stall_per_issue"),
        unavailable_reason=reason,
        ncu_version="2025.3.1.0",
    )
    with writing(shelf.engine) as s:
        writes.add_profile(s, new)


def test_a_profile_shows_both_stages_against_the_default(client, shelf, helpers):
    shape = shape_of(1, 68, 8192)  # two kernels by default
    default = default_config(shape, helpers.H200)
    champion = replace(default, k1=replace(default.k1, head_fast=True))
    slow = shelf.measure(shape, default, median_us=700.0)
    fast = shelf.promote(shape, champion, median_us=600.0)
    every = {metric.field: 1.0 for metric in METRICS}
    profile(shelf, fast.measurement_id, "k1", every | {"issue_active_pct": 63.69, "barrier_stall_per_issue": 0.89})
    profile(shelf, slow, "k1", every | {"issue_active_pct": 39.45, "barrier_stall_per_issue": 20.21})
    profile(shelf, slow, "k2", every | {"issue_active_pct": 33.0, "waves": 1.25})
    path = key_path("profiles", shape)
    stalls = items(client, path, "stalls")
    assert (stalls[0]["metric"], stalls[0]["k1_ours"], stalls[0]["k1_other"]) == (
        "barrier_stall_per_issue",
        0.89,
        20.21,
    )
    speed = {row["metric"]: row for row in items(client, path, "speed")}
    assert (speed["issue_active_pct"]["k1_ours"], speed["issue_active_pct"]["k2_ours"]) == (63.69, 33.0)
    occupancy = {row["metric"]: row for row in items(client, path, "occupancy")}
    assert occupancy["tail_fill_pct"]["k2_other"] == 25.0
    assert len(items(client, path, "counters")) == len(METRICS)
    page = text(client, path)
    assert "63.7 %" in page
    assert "champion; default 39.5" in page or "champion; default 39.4" in page
    listed = items(client, "/profiles", "profiles", sort="profiles:-issue_active_pct", stage="k1")
    assert [row["issue_active_pct"] for row in listed] == [63.69, 39.45]


def test_one_kernel_stands_beside_two_without_stages_of_its_own(client, shelf, helpers):
    """Plain Triton K1 was measured and profiled, too; it is not the fused kernel's, which launches none."""
    shape = helpers.SHAPE
    split = split_default(shape, helpers.H200)
    plain = LaunchConfig(FUSED.k1, split.k2)
    for config in (FUSED.k1, split.k1):
        shelf.measure(config=config, kernel="k1", median_us=123.0)
    first, second = (shelf.promote(config=c, median_us=us) for c, us in ((split, 650.0), (FUSED, 600.0)))
    other = shelf.measure(config=plain, median_us=900.0)
    every = {metric.field: 1.0 for metric in METRICS}
    for measurement_id, stages in (
        (first.measurement_id, ("k1", "k2")),
        (second.measurement_id, ("k2",)),
        (other, ("k1",)),
    ):
        for stage in stages:
            profile(shelf, measurement_id, stage, every | {"replay_cycles": 1000.0 if stage == "k1" else 1500.0})
    path = key_path("configs", shape)
    numbers = {row["number"]: row for row in items(client, path, "numbers")}
    assert (numbers["K1 alone, median"]["previous"], numbers["K1 alone, median"]["champion"]) == (123.0, None)
    fields = {row["field"]: row for row in items(client, path, "fields")}
    assert fields["k2.variant"]["champion"] == "fused"
    assert fields["k1.variant"]["champion"] != str(FUSED.k1.variant)
    path = key_path("profiles", shape)
    hashes = {"config": digest(FUSED), "against": digest(split)}
    (row, *_) = items(client, path, "stalls", **hashes)
    assert {"k2_ours", "k1_other", "k2_other"} <= set(row)
    assert "k1_ours" not in row
    page = text(client, path, **hashes)
    assert "champion has no K1 of its own: K1&#39;s work is profiled with K2&#39;s, as K2" in page
    assert "whole, they take 1,500 (champion, one kernel) and 2,500 (" in page
    assert "has no counters" not in page
    back = text(client, path, config=digest(split), against=digest(FUSED))
    assert "and 1,500 (champion, one kernel) cycles" in back


def test_an_sm_takes_the_fused_kernel_chain_after_chain(client, shelf, helpers):
    for heads in (96, 192):
        shelf.promote(shape_of(1, heads, 8192), FUSED)
    rows = {row["chains"]: row for row in items(client, "/waves", "waves")}
    assert {chains: (row["ctas"], row["waves"]) for chains, row in rows.items()} == {
        96: (96, pytest.approx(96 / 132)),
        192: (192, pytest.approx(192 / 132)),
    }
    (choice,) = items(client, "/waves", "choices")
    assert choice["choice"] == "K1 and K2 as one kernel, chain after chain"
    assert choice["second_wave_from_chains"] == 133


def test_pairs_take_an_sm_for_every_64_columns_of_a_chain(client, shelf, helpers):
    for heads in (64, 96):
        shelf.promote(shape_of(1, heads, 8192), PAIRS)
    rows = {row["chains"]: (row["ctas"], row["waves"]) for row in items(client, "/waves", "waves")}
    assert rows == {64: (128, pytest.approx(128 / 132)), 96: (192, pytest.approx(192 / 132))}
    (choice,) = items(client, "/waves", "choices")
    assert choice["choice"] == "K1 and K2 with 32 tokens a step, 64 columns"
    assert choice["second_wave_from_chains"] == 67


def test_an_unavailable_profile_shows_its_reason_and_no_zero(client, shelf, helpers):
    stored = shelf.promote()
    for stage in ("k1", "k2"):
        profile(shelf, stored.measurement_id, stage, reason="no_permission: ERR_NVGPUCTRPERM. Run as root")
    path = key_path("profiles", helpers.SHAPE)
    page = text(client, path)
    assert page.count("no_permission: ERR_NVGPUCTRPERM. Run as root") == 2
    assert "h-stalls" not in page
    assert {row["k1_ours"] for row in items(client, path, "stalls")} == {None}
    assert [row["issue_active_pct"] for row in items(client, "/profiles", "profiles")] == [None, None]


@pytest.fixture
def searched(shelf, helpers):
    """A K2 search of twelve configs, four of which failed, in two runs."""
    runs = [shelf.run(kernel="k2"), shelf.run(kernel="k2", trigger="nightly")]
    outcomes = [Outcome.OK] * 8 + [Outcome.RESOURCE, Outcome.RESOURCE, Outcome.TIMEOUT, Outcome.INCORRECT]
    k1 = default_config(helpers.SHAPE, helpers.H200).k1
    for number, (config, outcome) in enumerate(zip(legal_k2(helpers.SHAPE, helpers.H200)[::7], outcomes, strict=False)):
        median_us = 300.0 + number if outcome is Outcome.OK else None
        detail = None if median_us else f"ended {outcome}"
        shelf.measure(
            config=LaunchConfig(k1, config),
            kernel="k2",
            run_id=runs[number % 2],
            outcome=outcome,
            median_us=median_us,
            detail=detail,
        )
    with writing(shelf.engine) as s:
        for run in runs:
            writes.finish_run(s, run, outcome_counts={"ok": 4, "timeout": 2}, gpu_seconds=12.5, state="done")
    return runs


def test_a_study_shows_trials_failures_cost_and_coverage(client, searched, helpers):
    path = key_path("studies", helpers.SHAPE)
    trials = items(client, path, "trials")
    assert [row["median_us"] for row in trials] == [*(300.0 + n for n in range(8)), *[None] * 4]
    outcomes = {row["outcome"]: (row["trials"], row["detail"]) for row in items(client, path, "outcomes")}
    assert outcomes["resource"] == (2, "ended resource")
    assert outcomes["ok"] == (8, "")
    assert [row["gpu_seconds"] for row in items(client, path, "cost")] == [12.5, 12.5]
    covered = items(client, path, "coverage")
    legal = legal_k2(helpers.SHAPE, helpers.H200)
    variants = {row["value"]: (row["legal"], row["tried"]) for row in covered if row["field"] == "variant"}
    assert variants["ws"][0] == sum(1 for config in legal if config.variant == "ws")
    assert sum(tried for _, tried in variants.values()) == 12
    page = text(client, path)
    assert f"12 of {len(legal)} configs" in page
    assert "25.0 s" in page
    assert "300.0 µs" in page


def test_one_filter_is_for_every_table_of_a_study(client, searched, helpers):
    path = key_path("studies", helpers.SHAPE)
    assert len(items(client, path, "trials", run=searched[0])) == 6
    assert [r["outcome"] for r in items(client, path, "trials", outcome="timeout")] == ["timeout"]
    assert [r["outcome"] for r in items(client, path, "outcomes", outcome="timeout")] == ["timeout"]
    assert items(client, path, "trials", kernel="k1") == []
    listed = items(client, "/studies", "runs", trigger="nightly")
    assert [(row["id"], row["trials"], row["best_us"], row["failures"]) for row in listed] == [
        (searched[1], 6, 301.0, 2)
    ]


def test_waves_follow_from_chains_sms_and_what_an_sm_holds(client, shelf, helpers):
    ws = {c.block_v: c for c in k2_configs() if c.variant == "ws" and c.stages_in == 4 and c.load_warps == 1}
    taken = {"registers": 168, "smem_bytes": 94128, "effective_num_warps": 12}
    for shape, block_v in ((shape_of(1, 64, 8192), 64), (shape_of(2, 64, 8192), 128), (shape_of(2, 96, 8192), 128)):
        config = replace(default_config(shape, helpers.H200), k2=ws[block_v])
        shelf.promote(shape, config)
        shelf.measure(shape, config, kernel="k2", median_us=300.0, **taken)
    rows = {row["chains"]: row for row in items(client, "/waves", "waves")}
    assert {chains: (row["ctas"], row["waves"]) for chains, row in rows.items()} == {
        64: (128, pytest.approx(128 / 132)),
        128: (128, pytest.approx(128 / 132)),
        192: (192, pytest.approx(192 / 132)),
    }
    assert rows[192]["tail_fill_pct"] == pytest.approx(100 * 60 / 132)
    choices = {row["ctas_per_chain"]: row for row in items(client, "/waves", "choices")}
    assert choices[2]["second_wave_from_chains"] == 67
    assert choices[1]["second_wave_from_chains"] == 133, "one CTA a chain: the 133rd chain waits"
    assert (choices[1]["one_wave_count"], choices[1]["more_waves_count"]) == (1, 1)


def test_a_trend_shows_nights_regressions_and_what_changed(client, shelf, six_nights, helpers):
    look(shelf.engine, Settings())
    rows = items(client, key_path("trends", helpers.SHAPE), "nights", sort="nights:night")
    assert [row["median_us"] for row in rows] == [600.0, 601.0] * 3 + [630.0, 631.0]
    assert [row["regression"] for row in rows] == [None] * 6 + [1, None]
    assert rows[6]["changes"] == f"driver {helpers.BUILD.driver} instead of 570.1"
    assert {row["config_hash"] for row in rows} == {digest(six_nights)}
    (key,) = items(client, "/trends", "trends")
    assert (key["median_us"], key["nights"], key["regression"]) == (631.0, 8, 1)
    assert '<a href="/trends/regressions/1">+5.0 %</a>' in text(client, "/trends")


def test_a_regression_is_listed_until_it_is_gone(client, shelf, six_nights, helpers, now):
    assert items(client, "/trends/regressions", "regressions") == []
    assert "kdatune regressions" in text(client, "/trends/regressions")
    look(shelf.engine, Settings())
    (row,) = items(client, "/trends/regressions", "regressions")
    assert (row["id"], row["shape"], row["state"], row["served"]) == (1, helpers.SHAPE.key(), "open", True)
    assert (row["before_us"], row["now_us"]) == (600.5, 630.5)
    assert row["change_pct"] == pytest.approx(100 * 30 / 600.5)
    assert row["began_at"][:10] == (now - timedelta(days=2)).date().isoformat()
    assert row["cause"] == f"driver 570.1, now {helpers.BUILD.driver}"
    for _ in range(2):
        for night in (1, 0):
            shelf.measure(config=six_nights, median_us=602.0, measured_at=now - timedelta(days=night))
    look(shelf.engine, Settings())
    assert items(client, "/trends/regressions", "regressions") == [], "it came back"
    (row,) = items(client, "/trends/regressions", "regressions", state="resolved")
    assert row["state"] == "resolved"
    assert items(client, "/trends/regressions", "regressions", state="resolved", served="no") == []
    assert "No finding fits these filters" in text(client, "/trends/regressions", state="open")


def test_a_finding_has_a_page_that_says_how_to_acknowledge_it(client, shelf, six_nights, helpers):
    look(shelf.engine, Settings())
    page = text(client, "/trends/regressions/1")
    for told in ("regression 1", "600.5 µs", "630.5 µs", f"driver 570.1, now {helpers.BUILD.driver}"):
        assert told in page
    assert "kdatune regressions ack 1 --note" in page
    assert 'data-write hidden method="post" action="/v1/regressions/1/acknowledge"' in page
    before, after = items(client, "/trends/regressions/1", "sides")
    assert (before["median_us"], after["median_us"]) == (600.5, 630.5)
    assert before["build_id"] != after["build_id"]
    with writing(shelf.engine) as s:
        acknowledge(s, 1, Caller("a person"), "known <b>since</b> May")
    page = text(client, "/trends/regressions/1")
    assert "known &lt;b&gt;since&lt;/b&gt; May" in page
    assert "data-write" not in page
    assert "kdatune regressions ack" not in page
    (row,) = items(client, "/trends/regressions", "regressions", state="acknowledged")
    assert row["id"] == 1
    for missing in ("/trends/regressions/2", "/nights/1"):
        assert client.get(missing, headers=HTML).status_code == 404
    for wrong in ("/trends/regressions/0", "/trends/regressions/x", "/nights/0", "/nights/1e3"):
        assert client.get(wrong, headers=HTML).status_code == 422


def test_a_slower_config_that_was_promoted_is_no_regression(client, shelf, six_nights, helpers):
    other = helpers.configs_for(helpers.SHAPE, helpers.H200, 5)[4]
    shelf.promote(config=other, median_us=700.0)
    look(shelf.engine, Settings())
    assert items(client, "/trends/regressions", "regressions", served="yes") == []
    newest = items(client, key_path("trends", helpers.SHAPE), "nights")[0]
    assert newest["regression"] is None
    assert newest["changes"].startswith(f"config {digest(other)[:8]} instead of {digest(six_nights)[:8]}")


def test_a_search_that_retention_thinned_says_what_it_measured_and_what_is_kept(client, shelf):
    run = shelf.run()
    shelf.measure(run_id=run)
    with writing(shelf.engine) as s:
        writes.finish_run(s, run, outcome_counts={"ok": 4, "timeout": 1}, gpu_seconds=1.0, state="done")
    (row,) = items(client, "/studies", "runs")
    assert (row["trials"], row["failures"]) == (5, 1)
    assert "5 <small>1 kept</small>" in text(client, "/studies")


def test_nights_are_listed_and_each_has_its_report(client, a_night):
    assert "kdatune nightly" in text(client, "/nights")
    first, second = a_night(), a_night(exit_code=0, findings=[], machine_ratio=1.002)
    rows = items(client, "/nights", "nights")
    assert [(r["night"], r["result"], r["findings"], r["regressions"]) for r in rows] == [
        (second, "clean", 0, 0),
        (first, "regressions found", 2, 1),
    ]
    assert (rows[1]["state"], rows[1]["machine_ratio"], rows[1]["spent_seconds"]) == ("done", 1.08, 61.5)
    assert [r["night"] for r in items(client, "/nights", "nights", gpu="NVIDIA H200")] == [second, first]
    assert items(client, "/nights", "nights", gpu="NVIDIA H20") == []
    path = f"/nights/{first}"
    found = items(client, path, "findings")
    assert [(f["kind"], f["regression"], f["shape"]) for f in found] == [
        ("config slower", True, "N=1,H=96,T=8192"),
        ("promoted", False, "rms;rows=4"),
    ]
    (done,) = items(client, path, "plan")
    assert (done["kind"], done["state"], done["seconds"], done["result"]) == ("check", "done", 2.5, "630.0 us")
    (point,) = items(client, path, "reference")
    assert (point["median_us"], point["usual_us"], point["ratio"]) == (432.0, 400.0, 1.08)
    page = text(client, path)
    assert "takes 630.0 us, 600.0 before &lt;i&gt;" in page
    assert f'<a href="/nights/{second}">' in page
    assert "The report is of another form" not in page


@pytest.mark.parametrize(
    "report",
    [
        {},
        {"format": 2, "findings": "none", "plan": None, "reference": []},
        {
            "format": 1,
            "findings": [1, {"regression": "yes", "shape": 7}],
            "plan": [{"seconds": "long"}],
            "error": ["x"],
        },
        {"reference": {"points": [{"ratio": True, "shape": {}}]}, "spent_seconds": "?"},
    ],
)
def test_a_report_of_another_form_is_shown_as_far_as_it_can_be_read(client, a_night, report):
    night_id = a_night(report=report)
    page = text(client, f"/nights/{night_id}")
    assert ("The report is of another form" in page) == (report.get("format") != 1)
    assert [row["regressions"] for row in items(client, "/nights", "nights")] == [0]


def test_two_configs_two_cards_and_two_dates_are_compared(client, shelf, helpers):
    now = datetime.now(UTC)
    first, second = helpers.configs_for(helpers.SHAPE, helpers.H200, 2)
    early = shelf.promote(config=first, median_us=650.0, measured_at=now - timedelta(days=9))
    at(shelf.engine, early.generation, now - timedelta(days=9))
    shelf.promote(config=second, median_us=600.0)
    shelf.promote(gpu=H20, config=second, median_us=900.0)
    a = {"gpu_a": "NVIDIA H200", "shape_a": helpers.SHAPE.key()}

    def medians(**params):
        row = next(r for r in items(client, "/compare", "numbers", **a, **params) if r["number"] == "Median")
        return row["a"], row["b"], row["difference"], row["ratio"]

    assert medians(as_b="previous") == (600.0, 650.0, 50.0, pytest.approx(650 / 600))
    assert medians(gpu_b="NVIDIA H20") == (600.0, 900.0, 300.0, 1.5)
    assert medians(on_b=(now - timedelta(days=5)).date().isoformat())[:2] == (600.0, 650.0)
    assert medians(as_b=f"m{early.measurement_id}")[:2] == (600.0, 650.0)
    (row,) = items(client, "/compare", "shapes", gpu_a="NVIDIA H200", gpu_b="NVIDIA H20")
    assert (row["a_us"], row["b_us"], row["ratio"], row["same_config"]) == (600.0, 900.0, 1.5, True)
    assert "there is no measurement 999" in text(client, "/compare", **a, as_b="m999")


@pytest.mark.parametrize(
    "path",
    ["/", "/configs", "/profiles", "/studies", "/waves", "/trends", "/trends/regressions", "/nights", "/compare"],
)
def test_an_empty_store_has_pages_that_say_what_to_run(client, path):
    page = text(client, path)
    assert "kdatune" in page
    assert 'class="empty"' in page
