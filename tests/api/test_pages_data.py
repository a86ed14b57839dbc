"""What the pages reckon: steps, waves, words of a search, numbers as people read them."""

from datetime import UTC
from datetime import datetime
from datetime import timedelta

import pytest

from kdatune_api.pages import text
from kdatune_api.pages.board import matches
from kdatune_api.pages.board import path_of
from kdatune_api.pages.board import words
from kdatune_api.pages.profiles import tail_fill_pct
from kdatune_api.pages.state import Kept
from kdatune_api.pages.trend_data import build_changes
from kdatune_api.pages.waves import ctas_per_sm
from kdatune_kernels.spec import KNOWN_GPUS
from kdatune_tuner.store.dashboard_lists import Resources

NOW = datetime(2026, 11, 29, 22, 31, tzinfo=UTC)
H200 = KNOWN_GPUS["NVIDIA H200"]


def test_what_changed_in_a_build_is_named(helpers):
    from dataclasses import replace

    now = replace(helpers.BUILD, driver="590.1", triton="3.7.0", space_hash="x")
    told = build_changes(helpers.BUILD, now)
    assert told == ["triton 3.7.0 instead of 3.6.0", "driver 590.1 instead of 580.95.05"]
    assert build_changes(None, now) == []


@pytest.mark.parametrize(
    ("registers", "smem_bytes", "warps", "expected"),
    [
        (168, 94128, 12, 1),  # 12 warps x 168 registers fill an SM: what Nsight Compute says of the default K2
        (255, 66924, 8, 1),
        (168, 13312, 2, 6),
        (114, 17920, 1, 12),  # held by shared memory
        (32, 0, 1, 64),
        (None, 94128, 12, None),
        (168, None, 12, None),
        (168, 94128, None, None),
    ],
)
def test_ctas_an_sm_holds(registers, smem_bytes, warps, expected):
    assert ctas_per_sm(Resources("s", "c", 1.0, registers, smem_bytes, warps), H200) == expected


@pytest.mark.parametrize(
    ("waves", "fill"), [(None, None), (0.5, 50.0), (1.0, 100.0), (1.25, 25.0), (3.0, 100.0), (0.0, None)]
)
def test_how_full_the_last_wave_is(waves, fill):
    assert tail_fill_pct(waves) == fill


@pytest.mark.parametrize(
    ("search", "found"),
    [
        (None, True),
        ("", True),
        ("H=96", True),
        ("H=9", False),
        ("h=96", False),  # fields are spelled as in a key
        ("N=1,T=8192", True),
        ("N=1 T=1024", False),
        ("8192", True),
        ("VARLEN", False),
        ("varlen=false", True),
        ("dtype=BF16", True),
        ("HV=96", True),
        ("K=64", False),
        ("colour=red", False),
    ],
)
def test_a_search_in_shape_keys(search, found):
    assert matches("N=1,H=96,T=8192", words(search)) is found


def test_addresses_hold_any_name():
    assert path_of("configs", "A/B #1?", "N=1,H=96,T=8192") == "/configs/A%2FB%20%231%3F/N=1,H=96,T=8192"


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (text.us(None), "-"),
        (text.us(612.04), "612.0"),
        (text.us(123456.7), "123,457"),
        (text.speedup(1.1274), "1.127x"),
        (text.signed_pct(0.987), "-1.3 %"),
        (text.short(0.0042), "0.0042"),
        (text.short(94128.0), "94,128"),
        (text.short(0.00001), "1e-05"),
        (text.short(1980.5), "1,980.5"),
        (text.word(None), "none"),
        (text.word(True), "true"),
        (text.word("ws"), "ws"),
        (text.trend_of(1.004), "same"),
        (text.trend_of(0.99), "worse"),
        (text.ago(NOW - timedelta(hours=3), NOW), "3 h ago"),
        (text.ago(NOW - timedelta(days=9), NOW), "9 d ago"),
        (text.ago(NOW - timedelta(seconds=5), NOW), "just now"),
        (text.plural(1, "key"), "1 key"),
        (text.plural(1234, "key"), "1,234 keys"),
        (text.breakable("<b>,x"), "&lt;b&gt;,<wbr>x"),
        (text.moment(NOW), '<time datetime="2026-11-29T22:31:00Z">2026-11-29 22:31</time>'),
    ],
)
def test_values_as_people_read_them(shown, expected):
    assert shown == expected


def test_what_is_kept_is_made_once_and_forgotten_in_order():
    kept, made = Kept(2), []
    for key in ("a", "b", "a", "c", "b"):
        kept.get(key, lambda key=key: made.append(key))
    assert made == ["a", "b", "c", "b"]
