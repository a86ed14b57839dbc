"""What follows when a served config is found wrong or slower: quarantine, what serves instead, and the findings.

Called inside `engine.writing`, in one transaction with the findings: a killed process leaves either all of it or nothing.
"""

from sqlalchemy.orm import Session

from kdatune_kernels.spec import digest
from kdatune_tuner.ledger import Ledger
from kdatune_tuner.night_check import Checked
from kdatune_tuner.night_check import Substitute
from kdatune_tuner.night_report import Finding
from kdatune_tuner.night_report import Kind
from kdatune_tuner.night_report import percent
from kdatune_tuner.outcome import Outcome
from kdatune_tuner.store import writes
from kdatune_tuner.store.intake import report_quarantine
from kdatune_tuner.store.records import Decision

_WRONG = (Outcome.INCORRECT, Outcome.NONDETERMINISTIC)


def after_failed(s: Session, ledger: Ledger, checked: Checked, instead: Substitute | None) -> list[Finding]:
    """A served config that does not run, or computes something wrong, is taken out."""
    kind = Kind.CONFIG_INCORRECT if checked.result.outcome in _WRONG else Kind.CONFIG_FAILED
    why = checked.text()
    if instead is None:
        told = f"{why}; nothing else that is known runs, so it is served still: take it out with kdatune rollback"
        _quarantine(s, ledger, checked, why)
        return [_finding(kind, ledger, checked, told)]
    return [_finding(kind, ledger, checked, why), _roll_back(s, ledger, checked, instead, why)]


def after_slower(s: Session, ledger: Ledger, checked: Checked) -> list[Finding]:
    """A served config that got slower gives way where something served before is faster now; else it stays."""
    why = f"the served config takes {checked.text()}"
    met = checked.met
    if met is not None and met.is_faster:
        return [
            _finding(Kind.CONFIG_SLOWER, ledger, checked, why),
            _roll_back(s, ledger, checked, met.substitute(), why),
        ]
    beside = (
        "there is nothing else to serve" if met is None else f"{digest(met.config)} beside it: {met.decision.reason}"
    )
    return [_finding(Kind.CONFIG_SLOWER, ledger, checked, f"{why}; it stays, {beside}")]


def _finding(kind: Kind, ledger: Ledger, checked: Checked, text: str) -> Finding:
    figures = {
        "config": digest(checked.champion.config),
        "outcome": str(checked.result.outcome),
        "measured_us": checked.result.median_us,
        "expected_us": checked.expected_us,
        "machine_ratio": checked.machine_ratio,
        "ratio": checked.ratio,
        "against_us": None if checked.met is None else checked.met.result.median_us,
    }
    return Finding(str(kind), text, regression=True, shape=ledger.shape.key(), figures=figures)


def _roll_back(s: Session, ledger: Ledger, checked: Checked, instead: Substitute, why: str) -> Finding:
    _quarantine(s, ledger, checked, why)
    promotion = checked.promotion
    reason = f"nightly: {why}; instead: {instead.reason}"
    generation = writes.promote(
        s,
        kernel="kda",
        gpu_id=ledger.gpu_id,
        problem_id=ledger.problem_ids["kda"],
        measurement_id=instead.measurement_id,
        baseline_measurement_id=promotion.measurement_id,
        default_us=promotion.default_us,
        gain=instead.gain,
        gain_low=instead.gain_low,
        gain_high=instead.gain_high,
        decision=Decision.ROLLBACK,
        reason=reason,
    )
    figures = {
        "generation": generation,
        "config": digest(instead.config),
        "measured_us": instead.median_us,
        "quarantined": digest(checked.champion.config),
    }
    gain = "" if instead.gain is None else f", {percent(instead.gain)} faster than it"
    text = f"{digest(instead.config)} is served instead of {digest(checked.champion.config)}{gain}"
    return Finding(str(Kind.ROLLED_BACK), text, shape=ledger.shape.key(), figures=figures)


def _quarantine(s: Session, ledger: Ledger, checked: Checked, why: str) -> None:
    config = checked.champion.config
    report_quarantine(s, ledger.backend.gpu.name, "kda", ledger.shape, config, f"nightly: {why}"[:1000])
