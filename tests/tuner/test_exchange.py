"""Measurements to and from the files of other tuners: what is written is what is read, and nothing of it is served."""

import copy
import json
from dataclasses import replace
from datetime import UTC
from datetime import datetime
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from sqlalchemy import func
from sqlalchemy import select

from kdatune_kernels.errors import ExchangeError
from kdatune_kernels.errors import StoreError
from kdatune_kernels.match import Champion
from kdatune_kernels.space import default_config
from kdatune_kernels.space import k2_configs
from kdatune_kernels.space import legal_k1
from kdatune_kernels.space import legal_k2
from kdatune_kernels.spec import KNOWN_GPUS
from kdatune_kernels.spec import Build
from kdatune_kernels.spec import K2Config
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import shape_of
from kdatune_tuner import exchange_fla
from kdatune_tuner import exchange_t4
from kdatune_tuner.exchange import UNKNOWN_BUILD
from kdatune_tuner.exchange import Told
from kdatune_tuner.exchange import Traded
from kdatune_tuner.exchange import read_document
from kdatune_tuner.outcome import Outcome
from kdatune_tuner.store.engine import reading
from kdatune_tuner.store.engine import writing
from kdatune_tuner.store.imports import put_imported
from kdatune_tuner.store.imports import traded
from kdatune_tuner.store.models import MeasurementModel
from kdatune_tuner.store.models import PromotionModel
from kdatune_tuner.store.models import RunModel

DATA = Path(__file__).parent.parent / "data" / "exchange"
H200 = KNOWN_GPUS["NVIDIA H200"]
H20 = KNOWN_GPUS["NVIDIA H20"]
SHAPE = shape_of(1, 96, 8192)
RAGGED = shape_of(6, 64, 8192, varlen=True, longest_tokens=3063, state_dtype="bf16")
BUILDS = [Build("k" * 16, "s" * 16, "1", "3.6.0", "12.9", "2.13.0", "13.0", driver) for driver in ("580.1", "590.2")]
AT = datetime(2026, 11, 29, 21, 14, 3, 112345, UTC)


def rows(kernel: str) -> list[Traded]:
    """A row of every outcome and two shapes, values of every kind among them; times that no decimal unit holds exactly."""
    configs: list[Any] = {
        "k1": legal_k1(SHAPE, H200),
        "k2": legal_k2(SHAPE, H200),
        "kda": [
            LaunchConfig(k1, k2, "bf16") for k1, k2 in zip(legal_k1(SHAPE, H200), legal_k2(SHAPE, H200), strict=False)
        ],
    }[kernel]
    empty = dict.fromkeys((*exchange_t4._UNITS, "measured_at"))
    found = [
        Traded(kernel, H200, SHAPE if i % 2 else RAGGED, BUILDS[i % 2], configs[i], outcome, empty | values)
        for i, (outcome, values) in enumerate(
            [
                (Outcome.OK, {"median_us": 1000 / 3, "p20_us": 333.1, "p80_us": 340.7, "sample_count": 41}),
                (
                    Outcome.OK,
                    {"median_us": 610.25, "estimated": True, "regime": "l2-cold graph", "occupancy_pct": 12.5},
                ),
                (Outcome.OK, {"median_us": 0.1 + 0.2, "registers": 168, "spills": 0, "smem_bytes": 180_224}),
                (
                    Outcome.OK,
                    {"median_us": 7.0, "o_error_ratio": 0.58, "state_error_ratio": 1e-7, "sm_clock_mhz": 1980.0},
                ),
                *((outcome, {"detail": f"{outcome}: it said so"}) for outcome in Outcome if not outcome.ok),
                (Outcome.OK, {"median_us": 5.5, "throttle_reasons": "power cap", "requested_num_warps": 4}),
            ]
        )
    ]
    return [replace(row, values={"estimated": False} | row.values | {"measured_at": AT}) for row in found]


def known(found: list[Traded]) -> list[Traded]:
    """The same without the values that are not there."""
    return [replace(one, values={k: v for k, v in one.values.items() if v is not None}) for one in found]


@pytest.mark.parametrize("kernel", ["k1", "k2", "kda"])
def test_a_t4_document_holds_all_that_was_measured(kernel, engine, tmp_path):
    with writing(engine) as s:
        assert put_imported(s, rows(kernel), "t4") == (13, 0)
    with reading(engine) as s:
        stored = traded(s, H200, kernel)
    assert stored == rows(kernel)
    path = tmp_path / "t4.json"
    path.write_text(json.dumps(exchange_t4.dump(stored, kernel, H200)))
    found, never_run = exchange_t4.load(read_document(path), Told())
    assert (known(found), never_run) == (known(stored), 0)


def test_a_t4_document_is_one_by_the_published_schema():
    document = exchange_t4.dump(rows("kda"), "kda", H200)
    schema = json.loads(exchange_t4._SCHEMA.read_text())
    assert schema["$id"] == "https://github.com/odgaard/TuningSchema/blob/T4/results-schema.json"
    jsonschema_rs.validate(schema, document)
    one = document["results"][0]
    assert one["configuration"]["k2_maxnreg"] is None
    assert {"name": "median_us", "value": 1000 / 3, "unit": "us"} in one["measurements"]
    said = [(r["invalidity"], r["correctness"]) for r in document["results"]]
    assert said[:6] == [*[("correct", 1)] * 4, ("compile", 0), ("compile", 0)]


def test_only_the_shapes_asked_for_are_written(engine):
    with writing(engine) as s:
        put_imported(s, rows("k2"), "t4")
    with reading(engine) as s:
        assert {row.shape for row in traded(s, H200, "k2", [RAGGED])} == {RAGGED}
        assert traded(s, H20, "k2") == []


def test_what_is_imported_is_stored_once_and_never_served(engine):
    with writing(engine) as s:
        assert put_imported(s, rows("kda"), "t4") == (13, 0)
    with writing(engine) as s:
        assert put_imported(s, [*rows("kda"), *rows("kda")], "t4") == (0, 26)
    with reading(engine) as s:
        assert s.scalar(select(func.count()).select_from(MeasurementModel)) == 13
        assert s.scalar(select(func.count()).select_from(PromotionModel)) == 0
        runs = s.scalars(select(RunModel)).all()
        assert {(run.trigger, run.backend, run.state) for run in runs} == {("import", "t4", "done")}
        assert sum(sum(run.outcome_counts.values()) for run in runs) == 13
        assert s.scalar(select(func.count()).where(MeasurementModel.run_id.is_(None))) == 0


def test_a_file_of_kernel_tuner_is_read():
    """Written by Kernel Tuner 1.5.0 (store_output_file), of four K2 configs: units of ms, errors without times."""
    document = read_document(DATA / "kernel-tuner-1.5.0.json")
    found, never_run = exchange_t4.load(document, Told(H200, "k2", SHAPE))
    assert never_run == 0
    assert [one.outcome for one in found] == [Outcome.OK, Outcome.OK, Outcome.COMPILE_ERROR, Outcome.LAUNCH_ERROR]
    assert [one.values.get("median_us") for one in found] == [pytest.approx(302.1), pytest.approx(318.4), None, None]
    assert {one.build for one in found} == {UNKNOWN_BUILD}
    assert found[0].config == K2Config(
        "ws", 64, 4, 4, 1, consumers=1, load_warps=1, store_warps=1, load_regs=24, store_regs=24
    )
    assert found[0].values["measured_at"] == datetime(2026, 11, 29, 21, 14, 3, 112000, UTC)


def test_a_file_without_times_of_day_is_stored_once(engine):
    document = read_document(DATA / "kernel-tuner-1.5.0.json")
    for result in document["results"]:
        del result["timestamp"]
    for expected in ((4, 0), (0, 4)):
        found, _ = exchange_t4.load(document, Told(H200, "k2", SHAPE))
        with writing(engine) as s:
            assert put_imported(s, found, "t4") == expected


def test_a_text_that_no_database_keeps_is_stored_once(engine):
    odd = [replace(rows("k2")[4], values=rows("k2")[4].values | {"detail": "a\x00b\ud800"})]
    for expected in ((1, 0), (0, 1)):
        with writing(engine) as s:
            assert put_imported(s, odd, "t4") == expected


def test_a_time_beyond_all_numbers_is_refused(tmp_path):
    text = json.dumps(exchange_t4.dump(rows("k2"), "k2", H200)).replace("7.0", "1e400")
    (tmp_path / "file.json").write_text(text)
    with pytest.raises(ExchangeError, match="results/3/measurements/0/value"):
        exchange_t4.load(read_document(tmp_path / "file.json"), Told())


def changed(change: dict[str, Any]) -> Any:
    document = read_document(DATA / "kernel-tuner-1.5.0.json")
    document["results"][0] |= change
    return document


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"invalidity": "fine"}, "no T4 document: results/0/invalidity"),
        ({"times": 3}, "no T4 document: results/0/times"),
        ({"configuration": {"block_size_x": 32}}, "result 0: K2Config has unknown field"),
        ({"configuration": {"num_warps": "4"}}, "result 0: K2Config.num_warps cannot be '4'"),
        ({"configuration": {"variant": "ws", "stages_in": 9}}, "result 0: refused: k2.stages_in=9 is not one of"),
        ({"measurements": []}, "result 0: it is correct but has no time: no number named 'time'"),
        ({"measurements": [{"name": "time", "value": "InvalidConfig"}]}, "result 0: it is correct but has no time"),
        ({"measurements": [{"name": "time", "value": -1.0, "unit": "ms"}]}, "result 0: time=-1.0 is not a time"),
        ({"measurements": [{"name": "time", "value": 10**400, "unit": "ms"}]}, "result 0: time="),
        ({"measurements": [{"name": "time", "value": 0.3, "unit": "GFLOP/s"}]}, "unit 'GFLOP/s' is no unit of time"),
        (
            {"measurements": [{"name": "median_us", "value": 10**400, "unit": "us"}]},
            "result 0: median_us cannot be '1000",
        ),
        ({"measurements": [{"name": "smem_bytes", "value": 3, "unit": "KiB"}]}, "smem_bytes is in 'KiB', not in 'B'"),
        ({"measurements": [{"name": "registers", "value": 3.5, "unit": ""}]}, "registers cannot be '3.5'"),
        ({"measurements": [{"name": "p20_us", "value": [1.0], "unit": "us"}]}, "p20_us cannot be '[1.0]'"),
        ({"measurements": [{"name": "regime", "value": 3, "unit": ""}]}, "regime cannot be '3'"),
        ({"correctness": 0}, "its invalidity says correct, its correctness is 0"),
        ({"timestamp": "yesterday"}, "timestamp 'yesterday' is none of ISO 8601"),
        ({"timestamp": "2026-11-29 21:14:03"}, "has no time zone"),
        ({"timestamp": "0001-01-01T00:00:00+14:00"}, "timestamp '0001-01-01T00:00:00+14:00' is none of ISO 8601"),
        ({"timestamp": "9999-12-31T23:59:59-14:00"}, "timestamp '9999-12-31T23:59:59-14:00' is none of ISO 8601"),
        ({"kdatune": {"outcome": "resource"}}, "outcome 'resource' is not what invalidity 'correct' says"),
        ({"kdatune": {"build": 0}}, "build 0 is none of metadata.kdatune.builds"),
        ({"kdatune": {"shape": "N=1,H=96,T=1024"}}, "the file is of shape N=1,H=96,T=1024, --shape says"),
    ],
)
def test_a_t4_document_that_cannot_be_is_refused(change, says):
    with pytest.raises(ExchangeError) as refused:
        exchange_t4.load(changed(change), Told(H200, "k2", SHAPE))
    assert says in str(refused.value)


@pytest.mark.parametrize("document", [None, [], {}, {"results": 3}, {"schema_version": "2.0.0", "results": []}])
def test_what_is_no_t4_document_is_refused(document):
    with pytest.raises(ExchangeError, match="T4"):
        exchange_t4.load(document, Told(H200, "k2", SHAPE))


def test_what_neither_file_nor_caller_says_is_asked_for():
    document = read_document(DATA / "kernel-tuner-1.5.0.json")
    with pytest.raises(ExchangeError, match="does not say its gpu; give --gpu"):
        exchange_t4.load(document, Told(None, "k2", SHAPE))
    with pytest.raises(ExchangeError, match="does not say its kernel; give --kernel"):
        exchange_t4.load(document, Told(H200, None, SHAPE))
    with pytest.raises(ExchangeError, match="does not say its shape; give --shape"):
        exchange_t4.load(document, Told(H200, "k2", None))
    with pytest.raises(ExchangeError, match="the file is of gpu NVIDIA H200, --gpu says NVIDIA H20"):
        exchange_t4.load(exchange_t4.dump(rows("k2"), "k2", H200), Told(H20))


def test_configurations_that_were_never_run_are_counted():
    document = changed({"invalidity": "constraints", "measurements": []})
    found, never_run = exchange_t4.load(document, Told(H200, "k2", SHAPE))
    assert (len(found), never_run) == (3, 1)


def test_a_card_is_not_changed_by_a_file(engine):
    with writing(engine) as s:
        put_imported(s, rows("k2")[:1], "t4")
    boasting = [replace(rows("k2")[1], gpu=replace(H200, smem_per_block_bytes=1 << 30))]
    with writing(engine) as s:
        put_imported(s, boasting, "t4")
    with reading(engine) as s:
        assert len(traded(s, H200, "k2")) == 2
    with (
        pytest.raises(StoreError, match=r"NVIDIA H200 is stored with 132 SMs of 9\.0; the file says 78"),
        writing(engine) as s,
    ):
        put_imported(s, [replace(rows("k2")[2], gpu=replace(H20, name="NVIDIA H200"))], "t4")


def champions() -> list[Champion]:
    found = []
    for i, shape in enumerate((SHAPE, RAGGED, shape_of(8, 8, 4096, HV=16, state_v_first=True))):
        config = default_config(shape, H200)
        found.append(Champion(H200, shape, config, i + 1, 1000 / (3 + i), 700.0, BUILDS[i % 2], "2026-11-29T21:14:03Z"))
    return found


def test_a_file_of_fla_holds_what_is_served():
    document = json.loads(json.dumps(exchange_fla.dump(champions())))
    found = exchange_fla.load(document, Told())
    told = {(one.gpu, one.shape, one.build, one.config, one.values["median_us"]) for one in found}
    assert told == {(c.gpu, c.shape, c.build, c.config, c.measured_us) for c in champions()}
    assert {one.values["measured_at"] for one in found} == {datetime(2026, 11, 29, 21, 14, 3, tzinfo=UTC)}


def test_a_file_of_fla_is_laid_out_as_fla_reads_it():
    """fla/ops/utils/cache.py: entries under the MD5 of the compact JSON of their key; config of a Triton Config's parts."""
    document = exchange_fla.dump(champions()[:1])
    (digest,) = document["autotune_entries"]
    assert digest == "c4af56049a9a071654c7bc399da79fa3"
    entry = document["autotune_entries"][digest]
    assert entry["autotune_key"] == [1, 96, 8192, 96, 128, 128, "bf16", False, None, True, True, False, "fp32"]
    assert set(entry["config"]) == {"kwargs", "num_warps", "num_ctas", "num_stages"}
    assert entry["best_timing"] == pytest.approx(1 / 3)
    assert document["default_config"] == entry["config"]
    assert (document["kernel_name"], document["triton_version"]) == ("kdatune_chunk_kda", "3.6.0")


def test_a_file_that_flas_own_tool_has_rewritten_is_read():
    found = exchange_fla.load(read_document(DATA / "fla-rewritten.json"), Told())
    assert {one.shape for one in found} == {c.shape for c in champions()}
    assert {one.values["median_us"] for one in found} == {c.measured_us for c in champions()}


def test_a_file_of_fla_without_our_member_is_of_the_card_that_its_folder_names():
    document = exchange_fla.dump(champions())
    for entry in document["autotune_entries"].values():
        del entry["kdatune"]
        entry["best_timing"] = [entry["best_timing"], 0.1, 0.9]
    with pytest.raises(ExchangeError, match="does not say its gpu"):
        exchange_fla.load(document, Told())
    found = exchange_fla.load(document, Told(), "NVIDIA_H200")
    assert {(one.gpu, one.build) for one in found} == {(H200, UNKNOWN_BUILD)}
    assert sorted(one.values["median_us"] for one in found) == pytest.approx(sorted(c.measured_us for c in champions()))
    assert exchange_fla.folder_of("NVIDIA H100 80GB HBM3 MIG 3g.40gb") == "NVIDIA_H100_80GB_HBM3_MIG_3g_40gb"


def fla_changed(**change: Any) -> Any:
    document = exchange_fla.dump(champions()[:1])
    (entry,) = document["autotune_entries"].values()
    entry |= change
    return document


def test_a_measured_time_that_no_float_holds_is_refused():
    document = exchange_fla.dump(champions()[:1])
    (entry,) = document["autotune_entries"].values()
    entry["kdatune"]["measured_us"] = 10**400
    with pytest.raises(ExchangeError, match="is not its best_timing"):
        exchange_fla.load(document, Told())


@pytest.mark.parametrize("moment", ["yesterday", "2026-11-29 21:14:03", "0001-01-01T00:00:00+14:00"])
def test_a_moment_that_cannot_be_in_a_file_of_fla_is_refused(moment):
    document = exchange_fla.dump(champions()[:1])
    (entry,) = document["autotune_entries"].values()
    entry["kdatune"]["measured_at"] = moment
    with pytest.raises(ExchangeError, match="its measured_at '"):
        exchange_fla.load(document, Told())


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ([], "no config file of flash-linear-attention"),
        ({"kernel_name": "chunk_fwd_kernel_o", "autotune_entries": {}}, "configs of the kernel 'chunk_fwd_kernel_o'"),
        (fla_changed(config=None), "it has no config"),
        (fla_changed(config={"kwargs": {}, "num_warps": 4}), "its config has no kwargs"),
        (fla_changed(config={"kwargs": {"BK": 64}, "num_warps": 4}), "LaunchConfig has unknown field(s): BK"),
        (fla_changed(config={"kwargs": {"k2_block_v": 96}}), "refused: k2.block_v=96 is not one of"),
        (
            fla_changed(config={"kwargs": {"k2_block_v": 64}, "num_warps": 8}),
            "its num_warps 8 is not that of its kwargs",
        ),
        (fla_changed(autotune_key=[1, 2]), "its autotune_key is not the list of N, H, T"),
        (fla_changed(autotune_key=[2, 96, 8192, 96, 128, 128, "bf16", False, None, True, True, False, "fp32"]), "hash"),
        (fla_changed(best_timing=None), "its best_timing is no time in ms: None"),
        (fla_changed(best_timing=10**400), "its best_timing is no time in ms: 1000"),
        (fla_changed(best_timing=0.5), "is not its best_timing 0.5 ms"),
        (fla_changed(kdatune={"gpu": 1}), "its member kdatune lacks one of"),
    ],
)
def test_a_file_of_fla_that_cannot_be_is_refused(document, says):
    with pytest.raises(ExchangeError) as refused:
        exchange_fla.load(copy.deepcopy(document), Told())
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is not JSON"),
        (b"\xff{}", "is not JSON"),
        (b'{"results": [NaN]}', "NaN is no JSON number"),
        (b"[" * 200_000 + b"]" * 200_000, "is nested too deeply"),
    ],
)
def test_a_file_that_is_no_json_is_refused(content, says, tmp_path):
    path = tmp_path / "file.json"
    path.write_bytes(content)
    with pytest.raises(ExchangeError, match=says):
        read_document(path)
    with pytest.raises(ExchangeError, match="cannot be read: No such file"):
        read_document(tmp_path / "nowhere.json")


def test_k2_configs_are_flat_and_come_back():
    for config in k2_configs():
        assert exchange_t4.config_of("k2", exchange_t4.flat(config)) == config
