"""What doctor is told about counters."""

import functools
import os
from pathlib import Path

import pytest

from kdatune_tuner import doctor
from kdatune_tuner.ncu.preflight import counters_unavailable
from kdatune_tuner.settings import Settings


@pytest.fixture
def files(tmp_path: Path):
    def make(admin_only: int, capabilities: str) -> dict[str, Path]:
        parameters, status = tmp_path / "params", tmp_path / "status"
        parameters.write_text(f"RegisterForACPIEvents: 1\nRmProfilingAdminOnly: {admin_only}\nDmaRemapPeerMmio: 1\n")
        status.write_text(f"Name:\tpython\nCapInh:\t0000000000000000\nCapEff:\t{capabilities}\n")
        return {"driver_parameters": parameters, "own_status": status}

    return make


@pytest.mark.parametrize(
    ("admin_only", "capabilities", "code"),
    [
        (0, "0000000000000000", None),
        (1, "0000000000000000", "no_permission"),
        (1, "00000000a80425fb", "no_permission"),  # root in a container without the capability
        (1, "0000000000200000", None),
        (1, "0000004000000000", None),
        (1, "000001ffffffffff", None),
    ],
)
def test_the_driver_gives_counters_to_administrators_only(make_ncu, files, admin_only, capabilities, code) -> None:
    make_ncu()
    told = counters_unavailable(**files(admin_only, capabilities))
    assert (told and told.code) == code
    if told is not None:
        assert "NVreg_RestrictProfilingToAdminUsers=0" in told.text()


def test_doctor_says_what_to_do_about_a_permission(make_ncu, files, monkeypatch, tmp_path: Path) -> None:
    make_ncu()
    monkeypatch.setattr(doctor, "counters_unavailable", functools.partial(counters_unavailable, **files(1, "0")))
    told = doctor.examine(Settings(database_url=f"sqlite:///{tmp_path / 'kdatune.db'}"))
    (found,) = [one for one in told if one.check == "counters"]
    assert (found.state, found.detail.split(":")[0]) == ("problem", "no_permission")
    assert "NVreg_RestrictProfilingToAdminUsers=0" in found.remedy


def test_no_ncu(files) -> None:
    told = counters_unavailable("/no/such/ncu", **files(0, "0"))
    assert told is not None
    assert told.text().startswith("ncu_not_found: there is no Nsight Compute (ncu) on this machine. Install")


def test_no_driver(make_ncu, tmp_path: Path) -> None:
    make_ncu()
    assert counters_unavailable(driver_parameters=tmp_path / "none", own_status=tmp_path / "none") is None
    assert os.access("/proc/self/status", os.R_OK)
