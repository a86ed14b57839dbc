"""Profiling a shape into the store, and explaining what is stored."""

import dataclasses
import json
from pathlib import Path

import pytest
from sqlalchemy import Engine

from kdatune_kernels.errors import KdatuneError
from kdatune_kernels.errors import UsageError
from kdatune_kernels.space import FUSED
from kdatune_kernels.space import PAIRS
from kdatune_kernels.space import default_config
from kdatune_kernels.spec import K1Config
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import canonical
from kdatune_kernels.spec import digest
from kdatune_tuner import cli_profile
from kdatune_tuner.ledger import Ledger
from kdatune_tuner.ncu import profiling
from kdatune_tuner.ncu.collect import Stage
from kdatune_tuner.ncu.collect import stages_of
from kdatune_tuner.ncu.explain import Profiled
from kdatune_tuner.ncu.explain import compare
from kdatune_tuner.ncu.explain import compare_whole
from kdatune_tuner.ncu.explain import facts_of
from kdatune_tuner.ncu.profiling import How
from kdatune_tuner.ncu.profiling import keep_report
from kdatune_tuner.ncu.profiling import pick_configs
from kdatune_tuner.ncu.profiling import profile_json
from kdatune_tuner.ncu.profiling import profile_shape
from kdatune_tuner.ncu.unavailable import unavailable
from kdatune_tuner.ncu.why import explain_shape
from kdatune_tuner.objective import Result
from kdatune_tuner.outcome import Outcome
from kdatune_tuner.promote import Decision
from kdatune_tuner.settings import Settings
from kdatune_tuner.store import queries
from kdatune_tuner.store.engine import reading
from kdatune_tuner.store.profiles import champions_without_counters
from kdatune_tuner.store.profiles import find_profile
from kdatune_tuner.store.profiles import newest_profiles
from kdatune_tuner.store.profiles import profiled_gpus

TIMES = {"default": 620.2, "runner-up": 665.2, "two-warp": 961.2, "eight-warp": 1916.0}


@pytest.fixture
def backend(make_sweep):
    """The recorded card; everything these tests need of it is measured already."""
    return make_sweep([100.0] * 13, [200.0] * 13)


@pytest.fixture
def ledger(engine: Engine, backend, t8192) -> Ledger:
    """The recorded configs, measured; the default is served."""
    ledger = Ledger(engine, backend, t8192.shape)
    with ledger.run("kda", trigger="tune", sampler="tpe", trials=4, seconds=None, seed=0) as run:
        known = {
            label: ledger.add(run, "kda", config, Result(Outcome.OK, samples_us=(TIMES[label],) * 5))
            for label, config in t8192.configs.items()
        }
    serve(ledger, known["default"].measurement_id)
    return ledger


def serve(ledger: Ledger, measurement_id: int) -> None:
    ledger.decide(
        Decision(decision="promoted", reason="first", gain=None, gain_low=None, gain_high=None),
        measurement_id,
        None,
        None,
    )


@pytest.fixture
def play(make_ncu, answer, t8192) -> str:
    return make_ncu(report=t8192.content, answer=answer)


def test_counters_are_stored_with_units_and_the_config_they_are_of(engine, backend, ledger, play, t8192) -> None:
    done = profile_shape(engine, backend, t8192.shape, ["champion", "runner-up"], How(), [t8192.configs["eight-warp"]])
    assert [c.labels for c in done.configs] == [["champion"], ["runner-up"], ["also"]]
    assert [c.config for c in done.configs] == [t8192.configs[n] for n in ("default", "runner-up", "eight-warp")]
    assert done.failures() == []
    with reading(engine) as s:
        stored = newest_profiles(s, backend.gpu, t8192.shape)
        rows = queries.page_profiles(s, shape=t8192.shape)
    assert len(stored) == len(rows) == 6
    for one in stored:
        label = next(name for name, config in t8192.configs.items() if canonical(config) == one.row.config_json)
        counters = t8192.profiled(label, one.row.stage).counters
        assert {f: entry["value"] for f, entry in (one.row.counters or {}).items()} == counters
        assert one.row.counters["issue_active_pct"]["unit"] == "%"
        assert one.row.issue_active_pct == counters["issue_active_pct"]
        assert one.row.barrier_stall_per_issue == counters["barrier_stall_per_issue"]
        assert (one.row.ncu_version, one.row.driver, one.row.report_file) == ("2025.3.1.0", "580.159.04", None)
        assert one.measured_us == TIMES[label]
    document = profile_json(done)
    json.dumps(document, allow_nan=False)
    first = document["configs"][0]
    assert first["stages"]["k1"]["counters"]["registers"] == {"value": 121.0, "unit": "registers/thread"}
    assert first["stages"]["k1"]["absent"] == []
    assert first["measured_us"] == TIMES["default"]  # the benchmark's, not the replay's


def test_what_is_stored_is_explained(engine, backend, ledger, play, t8192) -> None:
    profile_shape(engine, backend, t8192.shape, ["champion", "runner-up"], How(), [t8192.configs["eight-warp"]])
    with reading(engine) as s:
        why = explain_shape(s, backend.gpu, t8192.shape)
        assert [gpu.name for gpu in profiled_gpus(s, t8192.shape)] == ["NVIDIA H200"]
    runner_up, eight = (f"config {digest(t8192.configs[name])[:8]}" for name in ("runner-up", "eight-warp"))
    assert [(one.label, one.measured_us) for one in why.subjects] == [
        ("champion", 620.2),
        (runner_up, 665.2),
        (eight, 1916.0),
    ]
    told = [s.text for s in why.sentences["k1"]]
    assert told[0] == "K1 is bound by device memory, at 82 % of its peak: more or fewer warps change little"
    assert any(text.startswith(f"K1: champion takes 4.30x fewer cycles than {eight} (variant tma") for text in told)
    assert not any(runner_up in text for text in told)  # it has the champion's K1
    assert any("needs a second one from N*HV = 133 on this card" in s.text for s in why.sentences["k2"])
    document = why.to_json()
    json.dumps(document, allow_nan=False)
    assert document["configs"][0]["label"] == "champion"
    assert document["explanation"]["k1"][0]["rule"] == "memory_bound"
    assert document["explanation"]["k1"][0]["numbers"]["dram_throughput_pct"] == pytest.approx(81.7, abs=0.2)


def test_without_permission_the_reason_is_stored_and_nothing_is_zero(engine, fake_device, no_permission, t8192) -> None:
    """shared case no-counter-permission: what is measured stands, the profile says why there is none and what to do."""
    backend = fake_device.backend()
    done = profile_shape(engine, backend, t8192.shape, ["champion", "default", "runner-up"], How())
    (failure,) = done.failures()
    assert failure.code == "no_permission"
    with reading(engine) as s:
        (measurement,) = queries.page_measurements(s, kernel="kda")
        rows = queries.page_profiles(s)
        why = explain_shape(s, backend.gpu, t8192.shape)
    assert measurement.median_us is not None
    assert measurement.median_us > 0
    assert [row.stage for row in rows] == ["k1", "k2"]
    for row in rows:
        assert row.unavailable_reason is not None
        assert row.unavailable_reason.startswith("no_permission: ERR_NVGPUCTRPERM - The user does not have permission")
        assert "NVreg_RestrictProfilingToAdminUsers=0" in row.unavailable_reason
        assert (row.counters, row.issue_active_pct, row.barrier_stall_per_issue) == (None, None, None)
    assert why.sentences == {"k1": [], "k2": []}
    assert why.subjects[0].unavailable["k1"].startswith("no_permission")
    stage = profile_json(done)["configs"][0]["stages"]["k1"]
    assert (stage["counters"], stage["unavailable"]["code"]) == (None, "no_permission")


def test_the_same_reason_is_not_stored_again_and_counters_replace_it(
    engine, backend, ledger, no_permission, make_ncu, answer, t8192
) -> None:
    for _ in range(2):
        profile_shape(engine, backend, t8192.shape, ["champion"], How())
    with reading(engine) as s:
        assert len(queries.page_profiles(s)) == 2
    make_ncu(report=t8192.content, answer=answer)
    profile_shape(engine, backend, t8192.shape, ["champion"], How())
    with reading(engine) as s:
        assert len(queries.page_profiles(s)) == 4
        assert {p.row.unavailable_reason for p in newest_profiles(s, backend.gpu, t8192.shape)} == {None}


def test_an_unmeasured_config_is_measured_first_and_a_failing_one_says_so(
    engine, fake_device, no_permission, t8192
) -> None:
    backend = fake_device.backend()
    bad = K1Config(num_warps=8)
    fake_device.fate(bad, check="incorrect")
    config = LaunchConfig(bad, default_config(t8192.shape, backend.gpu).k2)
    done = profile_shape(engine, backend, t8192.shape, ["default"], How(), [config])
    default, eight = done.configs
    assert default.measured_us is not None
    assert default.stages["k1"].code == "no_permission"
    assert eight.measured_us is None
    assert eight.stages["k1"].text().startswith("config_failed: measured incorrect: told to be incorrect")
    with reading(engine) as s:
        (run,) = queries.page_runs(s)
        assert (run.trigger, run.sampler, run.outcome_counts) == ("profile", "none", {"ok": 1, "incorrect": 1})
        assert len(queries.page_profiles(s)) == 4


def test_a_champion_wants_counters_until_it_has_those_of_both_stages(
    engine, backend, ledger, make_ncu, answer, t1024, t8192
) -> None:
    def wanting() -> list[str]:
        with reading(engine) as s:
            return [champion.shape.key() for champion in champions_without_counters(s, backend.gpu)]

    assert wanting() == [t8192.shape.key()]
    make_ncu(report=t1024.content, answer=answer)  # holds the champion's K2 only
    profile_shape(engine, backend, t8192.shape, ["champion"], How())
    assert wanting() == [t8192.shape.key()]
    make_ncu(report=t8192.content, answer=answer)
    profile_shape(engine, backend, t8192.shape, ["champion"], How())
    assert wanting() == []
    known = ledger.known("kda")
    serve(ledger, known[t8192.configs["two-warp"]].measurement_id)
    assert wanting() == [t8192.shape.key()]


def test_a_stage_that_the_report_lacks_is_unavailable(engine, backend, ledger, make_ncu, answer, t1024, t8192) -> None:
    """The other shape's report holds the plain K1 under the same label, but not this champion's."""
    make_ncu(report=t1024.content, answer=answer)
    done = profile_shape(engine, backend, t8192.shape, ["champion"], How())
    (config,) = done.configs
    assert config.stages["k1"].text().startswith("bad_report: the report holds no counters of k1/")
    assert config.stages["k2"].launches == 3


def test_a_stage_that_failed_in_the_profiled_process(engine, backend, ledger, make_ncu, answer, t8192) -> None:
    name = f"k2/{profiling.Stage('k2', t8192.configs['default'].k2).label}"
    answer["outcomes"] = {name: {"outcome": "resource", "detail": "too much shared memory"}}
    make_ncu(report=t8192.content, answer=answer)
    (config,) = profile_shape(engine, backend, t8192.shape, ["champion"], How()).configs
    assert config.stages["k2"].text().startswith("config_failed: resource: too much shared memory")
    assert config.stages["k1"].launches == 3


def test_a_kept_report_is_found_by_its_profile(engine, backend, ledger, play, t8192, tmp_path: Path) -> None:
    folder = tmp_path / "kept" / "here"
    done = profile_shape(engine, backend, t8192.shape, ["champion"], How(reports_dir=folder))
    assert done.report_file is not None
    assert (folder / done.report_file).read_bytes() == t8192.content
    assert [p.name for p in folder.iterdir()] == [done.report_file]
    with reading(engine) as s:
        found = find_profile(s, done.configs[0].profile_ids["k1"])
        assert found is not None
        assert found.row.report_file == done.report_file
        assert find_profile(s, 10_000) is None


def test_a_report_that_cannot_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(KdatuneError, match=r"cannot be kept in .*; set KDATUNE_REPORTS_DIR"):
        keep_report(tmp_path / "file" / "folder", b"report")
    monkeypatch.setattr(profiling, "MAX_REPORT_BYTES", 3)
    with pytest.raises(KdatuneError, match="the report has 6 bytes; more than 3 are not kept"):
        keep_report(tmp_path, b"report")


def test_which_configs_are_picked(ledger, backend, t8192) -> None:
    configs = t8192.configs
    picked = pick_configs(ledger, ["champion", "default", "runner-up"])
    by_label = {label: c.config for c in picked for label in c.labels}
    assert by_label["champion"] == configs["default"]
    assert by_label["default"] == default_config(t8192.shape, backend.gpu)
    assert by_label["runner-up"] == configs["runner-up"]
    both = pick_configs(ledger, ["champion"], [configs["default"]])
    assert [c.label for c in both] == ["champion, also"]
    with pytest.raises(UsageError, match="unknown config 'best'; use champion, default, runner-up"):
        pick_configs(ledger, ["best"])
    with pytest.raises(UsageError, match=r"cannot run for N=1,H=96,T=8192 on NVIDIA H200: k1\.num_warps=3"):
        pick_configs(ledger, [], [LaunchConfig(K1Config(num_warps=3), configs["default"].k2)])


def test_where_nothing_is_known_only_the_default_is_picked(engine, backend, t8192) -> None:
    ledger = Ledger(engine, backend, t8192.shape)
    assert [c.labels for c in pick_configs(ledger, ["champion", "default", "runner-up"])] == [["default"]]
    with pytest.raises(UsageError, match="nothing is known for N=1,H=96,T=8192 on NVIDIA H200"):
        pick_configs(ledger, ["champion"])


def test_without_a_champion_the_runner_up_is_the_second_fastest(engine, backend, t8192) -> None:
    ledger = Ledger(engine, backend, t8192.shape)
    with ledger.run("kda", trigger="tune", sampler="tpe", trials=4, seconds=None, seed=0) as run:
        for label, config in t8192.configs.items():
            ledger.add(run, "kda", config, Result(Outcome.OK, samples_us=(TIMES[label],) * 5))
    (picked,) = pick_configs(ledger, ["runner-up"])
    assert picked.config == t8192.configs["runner-up"]


def test_what_people_see(engine, backend, ledger, play, t8192, tmp_path: Path, capsys) -> None:
    settings = Settings(reports_dir=str(tmp_path / "kept"))
    also = [canonical(t8192.configs["eight-warp"])]
    done, why = cli_profile.take(engine, backend, t8192.shape, ["champion"], also, settings, keep=True)
    del done.configs[1].stages["k1"].counters["registers"]
    cli_profile._print_profile(done)
    told = capsys.readouterr().out
    row = {line.split()[0]: line.split()[1:] for line in told.splitlines()[1:21]}
    assert row["K1"] == ["unit", "champion", "also"]
    assert row["issue_active_pct"] == ["%", "35.24", "40.94"]
    assert row["registers"] == ["registers/thread", "121", "-"]
    assert row["executed_inst"] == ["inst", "104,349,918", "526,516,224"]
    assert "benchmark, K1 and K2 end to end: champion 620.2 us, also 1,916.0 us" in told
    assert why.subjects[0].label == "champion"
    assert Path(settings.reports_dir, done.report_file).exists()
    done.configs[0].stages["k1"] = unavailable("no_permission", "may not")
    cli_profile._print_profile(done)
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("issue_active_pct"))
    assert line.split() == ["issue_active_pct", "%", "-", "40.94"]


@pytest.fixture
def fused(engine, backend, ledger, make_ncu, answer, t8192, monkeypatch) -> Ledger:
    """The fused kernel is served, with the counters that the runner-up's K2 has in the report; the others are as ever."""
    own, lent = (Stage("k2", config.k2).label.encode() for config in (FUSED, t8192.configs["runner-up"]))
    make_ncu(report=t8192.content.replace(lent, own), answer=answer)
    with ledger.run("kda", trigger="tune", sampler="none", trials=1, seconds=None, seed=0) as run:
        known = ledger.add(run, "kda", FUSED, Result(Outcome.OK, samples_us=(600.0,) * 5))
    serve(ledger, known.measurement_id)
    return ledger


def test_of_a_fused_config_the_one_kernel_is_profiled(engine, backend, fused, t8192, capsys) -> None:
    split = t8192.configs["default"]
    assert [s.stage for s in stages_of([FUSED, split])] == ["k1", "k2", "k2"]
    with reading(engine) as s:
        assert [c.config for c in champions_without_counters(s, backend.gpu)] == [FUSED]
    done = profile_shape(engine, backend, t8192.shape, ["champion"], How(), [split])
    assert done.failures() == []
    assert [list(c.stages) for c in done.configs] == [["k2"], ["k1", "k2"]]
    cli_profile._print_profile(done)
    heads = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith(("K1", "K2"))]
    assert heads == [["K1", "unit", "also"], ["K2", "unit", "champion", "(with", "K1)", "also"]]
    with reading(engine) as s:
        assert champions_without_counters(s, backend.gpu) == []
        why = explain_shape(s, backend.gpu, t8192.shape)
    assert why.subjects[0].config == FUSED
    assert [sentence.text for sentence in why.sentences["k1"]] == [
        "champion has no K1 of its own: K1's work is profiled with K2's, as K2"
    ]
    said = why.sentences["k2"]
    assert not any(sentence.rule == "headline" or sentence.rule.startswith("cause") for sentence in said)
    assert not any("wave" in sentence.rule for sentence in said)
    assert all("K2 " not in sentence.text for sentence in said if sentence.rule != "whole")
    (whole,) = [sentence for sentence in said if sentence.rule == "whole"]
    assert whole.text.endswith(
        "cannot be compared by stages: the fused kernel has none; whole, they take 606,647 (champion, one kernel) "
        f"and 1,101,175 ({why.subjects[1].label}, K1 + K2) cycles under the profiler, one kernel after another"
    )
    assert whole.numbers["cycles_ratio"] == pytest.approx(606_647 / 1_101_175)
    assert cli_profile._words(why.subjects[0]) == "K1 and K2 as one kernel"


def test_two_kernels_are_explained_beside_a_fused_one(engine, backend, fused, t8192) -> None:
    split = t8192.configs["default"]
    profile_shape(engine, backend, t8192.shape, ["champion"], How(), [split])
    with fused.run("kda", trigger="tune", sampler="none", trials=1, seconds=None, seed=0) as run:
        again = fused.add(run, "kda", split, Result(Outcome.OK, samples_us=(590.0,) * 5))
    serve(fused, again.measurement_id)
    profile_shape(engine, backend, t8192.shape, ["champion"], How())
    with reading(engine) as s:
        why = explain_shape(s, backend.gpu, t8192.shape)
    assert why.subjects[0].config == split
    assert why.sentences["k1"][0].text.startswith("K1 is bound by device memory")
    (whole,) = [sentence for sentence in why.sentences["k2"] if sentence.rule == "whole"]
    assert "1,101,175 (champion, K1 + K2) and 606,647" in whole.text


def test_of_pairs_both_kernels_are_profiled_together_and_compared_whole(t8192) -> None:
    split = [t8192.profiled("default", stage) for stage in ("k1", "k2")]
    one = Profiled("champion", "k2", PAIRS.k2, split[1].counters)
    assert [s.stage for s in stages_of([PAIRS, t8192.configs["default"]])] == ["k1", "k2", "k2"]
    said = compare_whole([one], split)
    assert "cannot be compared by stages: K1 with K2 of pairs has none; whole, they take " in said.text
    assert "(champion, K1 + K2) and " in said.text
    assert "next_wave_chains" not in facts_of(one, t8192.shape, t8192.gpu)
    fused = Profiled("default", "k2", FUSED.k2, split[1].counters)
    assert compare(one, fused)[0].text.startswith(
        "K1 with K2 of pairs: no clear cause: champion and default (variant pairs instead of fused) take the same cycles"
    )


def test_without_all_cycles_the_whole_is_not_compared(t8192) -> None:
    split = [t8192.profiled("default", stage) for stage in ("k1", "k2")]
    one = Profiled("fused", "k2", FUSED.k2, split[1].counters)
    for ours, other in (([one], split[1:]), ([one], [split[0], but_cycles(split[1])]), (split[:1], [one])):
        said = compare_whole(ours, other)
        assert said.text.endswith("and cycles were not counted for all their kernels")
        assert said.numbers == {}


def but_cycles(one: Profiled) -> Profiled:
    return dataclasses.replace(one, counters={k: v for k, v in one.counters.items() if k != "replay_cycles"})


def test_a_fused_config_that_fails_has_one_reason(engine, backend, ledger, play, t8192) -> None:
    with ledger.run("kda", trigger="tune", sampler="none", trials=1, seconds=None, seed=0) as run:
        ledger.add(run, "kda", FUSED, Result(Outcome.RESOURCE, detail="too much shared memory"))
    done = profile_shape(engine, backend, t8192.shape, ["champion"], How(), [FUSED])
    assert list(done.configs[1].stages) == ["k2"]
    (failure,) = done.failures()
    assert "measured resource: too much shared memory" in failure.text()
