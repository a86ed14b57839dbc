"""Times ahead of the clock and doubled keys are refused in files of others."""

from datetime import UTC
from datetime import datetime
from datetime import timedelta

import pytest

from kdatune_kernels.errors import ExchangeError
from kdatune_tuner.exchange import moment_of
from kdatune_tuner.exchange import read_document


def test_a_time_ahead_of_the_clock_is_refused() -> None:
    now = datetime.now(UTC)
    near = now + timedelta(minutes=1)
    assert moment_of(near.isoformat(), "timestamp") == near
    with pytest.raises(ExchangeError, match=r"timestamp .* is ahead of this machine's clock"):
        moment_of((now + timedelta(hours=1)).isoformat(), "timestamp")


def test_a_doubled_key_is_refused_by_name(tmp_path) -> None:
    path = tmp_path / "doubled.json"
    path.write_text('{"results": [{"a": 1, "value": 2, "value": 3}]}')
    with pytest.raises(ExchangeError, match="the key 'value' is there twice"):
        read_document(path)
