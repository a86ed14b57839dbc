"""What `kdatune evaluate` measures, on sweeps whose figures can be worked out, and on the shipped one."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kdatune_kernels.space import default_config
from kdatune_kernels.spec import KNOWN_GPUS
from kdatune_kernels.spec import K2Config
from kdatune_kernels.spec import shape_of
from kdatune_tuner import evaluate as evaluate_module
from kdatune_tuner.backend_replay import ReplayBackend
from kdatune_tuner.cli import app
from kdatune_tuner.evaluate import Case
from kdatune_tuner.evaluate import evaluate
from kdatune_tuner.evaluate import recorded_cases

H200 = KNOWN_GPUS["NVIDIA H200"]
NAMES = {
    "shapes",
    "seeds",
    "cold_median",
    "cold_p90",
    "neighbours_median",
    "neighbours_p90",
    "random_median",
    "tpe_median",
    "tpe_p90",
    "regret_geomean",
    "regret_worst",
}


def made_up(best_of: dict[int, int]) -> list[Case]:
    """K2 on shapes of these T: the depth that is named takes 100, each step away from it a tenth more; tile and splits 200."""
    cases = []
    for T, best in best_of.items():
        shape = shape_of(1, 68, T)
        default = default_config(shape, H200).k2
        times = {replace(default, stages_in=depth): 100.0 * (1.0 + abs(depth - best) / 10.0) for depth in range(2, 7)}
        rest = [replace(default, stages_in=d, decay_position=0, stages_out=o) for d in range(2, 7) for o in (1, 2, 4)]
        cases.append(Case("k2", shape, times | dict.fromkeys(rest, 200.0), default))
    return cases


def test_the_figures_of_a_made_up_sweep() -> None:
    # the default has five stages in: right for the first two shapes, two steps off for the third
    assert default_config(shape_of(1, 68, 8192), H200).k2.stages_in == 5
    (report,) = evaluate({"k2": made_up({8192: 5, 8000: 5, 7000: 3})}, H200, 4)
    assert (report.kernel, report.shapes, report.seeds) == ("k2", 3, 4)
    assert report.cold_median == 1.0
    # hidden, the third shape is answered with the default of the others: 1.2; the others with the nearest: 1.0
    assert report.regret_worst == pytest.approx(1.2)
    assert report.regret_geomean == pytest.approx(1.2 ** (1 / 3))
    assert 1.0 < report.random_median < 21.0


def test_the_results_of_a_shape_are_hidden_from_its_own_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own times reach a search by measuring alone: neither guess nor first configs hold them."""
    seen = []
    real = evaluate_module.guess_from

    def spy(space, sweeps):
        seen.append([sweep.times_us for sweep in sweeps])
        return real(space, sweeps)

    monkeypatch.setattr(evaluate_module, "guess_from", spy)
    cases = made_up({8192: 5, 8000: 5, 7000: 3})
    evaluate({"k2": cases}, H200, 1)
    assert seen == [[other.ran for other in cases if other is not case] for case in cases]


def test_a_config_that_does_not_run_costs_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    case = made_up({8192: 5})[0]
    broken = Case("k2", case.shape, {**case.times_us, case.default: None}, case.default)
    (other,) = made_up({8000: 5})
    (report,) = evaluate({"k2": [broken, other]}, H200, 3)
    assert broken.best == replace(case.default, stages_in=4) or broken.best == replace(case.default, stages_in=6)
    assert broken.over_best(case.default) is None
    assert report.cold_p90 > 1.0
    monkeypatch.setattr(evaluate_module, "MOST_TRIALS", 1)
    (report,) = evaluate({"k2": [broken, other]}, H200, 3)
    assert report.cold_p90 == 2.0  # one more than allowed


def test_the_goals_hold_on_k2_of_the_shipped_sweep() -> None:
    backend = ReplayBackend.open()
    cases = recorded_cases(backend)
    assert [len(stage) for stage in cases.values()] == [19, 19]
    assert all(isinstance(config, K2Config) for config in cases["k2"][0].times_us)
    reports = {r.kernel: r for r in evaluate(cases, backend.gpu, 1)}
    k2 = reports["k2"]
    assert k2.cold_median <= 0.75 * k2.tpe_median
    assert k2.cold_p90 <= 0.65 * k2.tpe_p90
    assert k2.neighbours_median <= 4
    assert k2.neighbours_p90 <= 10
    assert k2.regret_geomean <= 1.010
    assert k2.regret_worst <= 1.04


def test_the_command(real_sweep_path: Path) -> None:
    asked = ["evaluate", "--recording", str(real_sweep_path), "--seeds", "1"]
    result = CliRunner().invoke(app, [*asked, "--json"])
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert set(document) == {"k1", "k2"}
    assert set(document["k2"]) == NAMES
    assert (document["k2"]["shapes"], document["k2"]["seeds"]) == (3, 1)
    shown = CliRunner().invoke(app, asked)
    assert shown.exit_code == 0
    assert "ours, with neighbours" in shown.stdout
    regrets = [document[kernel]["regret_worst"] for kernel in ("k1", "k2")]
    for regret in regrets:
        cost = "what nearest answers cost is not known" if regret is None else f"{regret:.4f}x at worst"
        assert cost in shown.stdout
    assert regrets[0] is None  # neither the default K1 nor a near K1 is in this excerpt
    assert CliRunner().invoke(app, ["evaluate", "--seeds", "0"]).exit_code == 2
