"""What a person does on the pages: filter, sort, page, share, download, compare, roll back; by keyboard; without scripts."""

import csv
import io
import json
import subprocess
import sys
from urllib.parse import parse_qs
from urllib.parse import urlsplit

import pytest

from kdatune_kernels.spec import parse_shape
from kdatune_tuner.store import queries
from kdatune_tuner.store.dashboard import served_keys
from kdatune_tuner.store.engine import open_engine
from kdatune_tuner.store.engine import reading

KEY = "NVIDIA%20H200/N=1,H=96,T=8192"
FROM_ELSEWHERE = "<script>alert('x')</script>"


def speedups(stored, gpu):
    """Shape key -> speed-up, as the heat-map should show it."""
    with reading(stored.engine) as s:
        ids = [row.id for row in queries.page_gpus(s) if row.gpu.name == gpu]
        rows = [row for row in served_keys(s) if row.gpu_id in ids]
    return {r.shape_key: r.default_us / r.measured_us for r in rows if r.default_us and r.measured_us}


def test_the_heat_map_shows_what_is_stored(open_page, site, stored):
    watched = open_page(site)
    watched.open("/")
    shown = {row[0].replace(" ", ""): row[1] for row in watched.rows("heatmap")}
    expected = speedups(stored, "NVIDIA H20")
    assert len(expected) == 5
    for key, ratio in expected.items():
        assert f"{ratio:.3f}x" in shown[key]
        assert ("▲" in shown[key]) == (ratio >= 1.005)
        assert ("▼" in shown[key]) == (ratio <= 0.995)
    assert "default" in shown["N=1,H=16,T=4096"]


def test_a_filter_changes_the_view_the_address_and_what_is_said(open_page, site, stored):
    watched = open_page(site)
    page = watched.open("/")
    before = len(watched.rows("heatmap"))
    page.get_by_label("GPU model").select_option("NVIDIA H20")
    page.wait_for_url("**/?gpu=NVIDIA+H20")
    watched.settle()
    assert len(watched.rows("heatmap")) == 6 < before
    assert page.locator("#said").inner_text() == "6 keys"
    page.get_by_label("Shape").fill("varlen")
    page.get_by_label("Shape").press("Enter")
    page.wait_for_url("**q=varlen**")
    watched.settle()
    assert [row[0] for row in watched.rows("heatmap")] == ["N=6,H=64,T=8192,varlen=true,longest_tokens=3063"]
    shared = watched.rows("heatmap")
    page.reload()
    watched.settle()
    assert watched.rows("heatmap") == shared, "the address alone gives the same view"
    page.go_back()
    watched.until("document.querySelectorAll('section[aria-labelledby=h-heatmap] tbody tr').length === 6")
    watched.settle()
    page.get_by_role("link", name="Reset").click()
    page.wait_for_url(f"{site.url}/")
    watched.settle()
    assert len(watched.rows("heatmap")) == before


def test_sorting_goes_both_ways_and_unknown_values_stay_last(open_page, site):
    watched = open_page(site)
    page = watched.open("/configs?gpu=NVIDIA+H20")
    for direction, sign in (("ascending", 1), ("descending", -1)):
        page.locator("#sort-configs-speedup").click()
        page.wait_for_selector(f"th[aria-sort={direction}] #sort-configs-speedup")
        watched.settle()
        shown = [row[7] for row in watched.rows("configs")]
        known = [float(text.lstrip("▲▼= ").rstrip("x")) for text in shown if text != "-"]
        assert known == sorted(known, key=lambda value: sign * value)
        assert len(known) == 5
        assert shown[-1] == "-"
    assert parse_qs(urlsplit(page.url).query)["sort"] == ["configs:-speedup"]


def test_a_long_list_has_pages(open_page, site):
    watched = open_page(site)
    page = watched.open(f"/studies/{KEY}?kernel=k2")
    first = watched.rows("trials")
    assert len(first) == 25
    page.get_by_role("link", name="Next").first.click()
    page.wait_for_url("**page=trials%3A2**")
    watched.settle()
    second = watched.rows("trials")
    assert not {row[0] for row in first} & {row[0] for row in second}
    assert page.locator(".pager").first.inner_text().split("\n")[:2] == ["First", "Previous"]


def test_one_filter_drives_every_table_and_chart_of_a_study(open_page, site):
    watched = open_page(site)
    page = watched.open(f"/studies/{KEY}?kernel=k2")
    points = "document.querySelector('[data-chart*=history]').data[0].y"
    everything = page.evaluate(f"({points}.bdata ? 40 : {points}.length)")
    assert everything >= 25  # trials of k2; how many it takes depends on the recording
    page.locator("#f-outcome").select_option("incorrect")
    page.wait_for_url("**outcome=incorrect**")
    watched.settle()
    assert [row[4] for row in watched.rows("trials")] == ["incorrect"]
    assert [row[0] for row in watched.rows("outcomes")] == ["incorrect"]
    drawn = page.eval_on_selector_all("[data-chart]", "plots => plots.map(plot => plot.dataset.drawn)")
    assert drawn == ["empty"] * 3
    assert "No trial ended ok" in page.locator("[data-chart*=history]").inner_text()


def test_a_chart_follows_the_theme(open_page, site):
    watched = open_page(site, color_scheme="light")
    page = watched.open(f"/trends/{KEY}")
    colour = "document.querySelector('[data-chart]').layout.font.color"
    light = page.evaluate(colour)
    page.emulate_media(color_scheme="dark")
    watched.until(f"{colour} !== '{light}'")
    assert page.evaluate(colour) == page.evaluate(
        "getComputedStyle(document.documentElement).getPropertyValue('--text').trim()"
    )


def test_everything_is_reached_by_keyboard(open_page, site):
    watched = open_page(site)
    page = watched.open("/")
    press = page.keyboard.press
    press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    reached = []
    for _ in range(60):
        press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.textContent.trim()"))
    assert [f"f-{name}" for name in ("gpu", "q", "dtype", "varlen", "status")] == reached[:5]
    assert "Apply" in reached
    assert "sort-heatmap-gpu_1_speedup" in reached
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid", "the focus is seen"


def test_a_sort_by_keyboard_keeps_the_focus(open_page, site):
    watched = open_page(site)
    page = watched.open("/configs")
    page.locator("#sort-configs-measured_us").focus()
    for direction in ("ascending", "descending"):
        page.keyboard.press("Enter")
        page.wait_for_selector(f"th[aria-sort={direction}] #sort-configs-measured_us")
        watched.until("document.activeElement.id === 'sort-configs-measured_us'")
        watched.settle()


def test_a_filter_by_keyboard_keeps_the_focus(open_page, site):
    watched = open_page(site)
    page = watched.open("/configs")
    page.get_by_label("Status").focus()
    page.keyboard.press("s")  # the first choice that begins so
    page.wait_for_url("**status=stale**")
    watched.settle()
    watched.until("document.activeElement.id === 'f-status'")


def test_pages_work_without_scripts(open_page, site):
    watched = open_page(site, java_script_enabled=False)
    page = watched.page
    page.goto(f"{site.url}/configs")
    page.get_by_label("GPU model").select_option("NVIDIA H20")
    page.get_by_role("button", name="Apply").click()
    assert parse_qs(urlsplit(page.url).query) == {"gpu": ["NVIDIA H20"]}
    assert page.locator("tbody tr").count() == 6
    page.locator("#sort-configs-measured_us").click()
    assert page.locator("th[aria-sort=ascending]").inner_text().startswith("Champion")
    page.goto(f"{site.url}/studies/{KEY}")
    assert "its numbers are in the tables" in page.locator(".plot").first.inner_text()


@pytest.mark.parametrize(
    "path", ["/", "/configs/NVIDIA%20H20/N=1,H=16,T=4096"], ids=["a card's name", "a reason in the history"]
)
def test_stored_text_is_shown_as_text(open_page, site, path):
    watched = open_page(site)
    page = watched.open(path)
    assert FROM_ELSEWHERE in page.locator("#view").inner_text()


def test_a_table_is_downloaded_as_it_is_filtered(open_page, site, stored):
    watched = open_page(site, accept_downloads=True)
    page = watched.open("/configs?gpu=NVIDIA+H20&sort=configs%3Aspeedup")
    with page.expect_download() as started:
        page.get_by_role("link", name="CSV of Champions").click()
    assert started.value.suggested_filename == "kdatune-configs.csv"
    rows = list(csv.DictReader(io.StringIO(started.value.path().read_text())))
    expected = speedups(stored, "NVIDIA H20")
    assert {r["shape"]: float(r["speedup"]) for r in rows if r["speedup"]} == pytest.approx(expected)
    assert [r["speedup"] for r in rows][-1] == ""
    with page.expect_download() as started:
        page.get_by_role("link", name="JSON of Champions").click()
    items = json.loads(started.value.path().read_text())["items"]
    assert [item["shape"] for item in items] == [r["shape"] for r in rows]


def test_a_profile_can_be_held_against_another(open_page, site):
    watched = open_page(site)
    page = watched.open("/profiles/NVIDIA%20H200/N=1,H=96,T=1024")
    before = watched.rows("stalls")
    assert before[0][0].startswith("barrier")
    other = page.get_by_label("Against").locator("option").last.get_attribute("value")
    page.get_by_label("Against").select_option(other)
    page.wait_for_url(f"**against={other}**")
    watched.settle()
    after = watched.rows("stalls")
    assert [row[0] for row in before] != []
    assert [row[3] for row in before] != [row[3] for row in after]
    assert "cycles" in page.locator("section[aria-labelledby=h-why]").inner_text()


def test_two_dates_of_a_key_are_compared(open_page, site, stored):
    with reading(stored.engine) as s:
        shape = parse_shape("N=1,H=96,T=8192")
        rows = [r for r in queries.page_promotions(s, gpu_name="NVIDIA H200", shape=shape) if r.decision == "promoted"]
    first = min(rows, key=lambda r: r.decided_at)
    watched = open_page(site)
    page = watched.open("/compare?gpu_a=NVIDIA+H200&shape_a=N%3D1%2CH%3D96%2CT%3D8192")
    page.get_by_label("A: as of").fill(first.decided_at.date().isoformat())
    page.get_by_role("button", name="Apply").click()
    page.wait_for_url("**on_a=**")
    watched.settle()
    numbers = {row[0]: row[2:] for row in watched.rows("numbers")}
    before, now, delta, ratio = numbers["Median"]
    assert float(before) == pytest.approx(first.measured_us)
    assert float(delta) == pytest.approx(float(now) - float(before), abs=0.11)
    assert f"{float(now) / float(before):.3f}"[:4] in ratio
    assert next(row for row in watched.rows("fields") if row[0] == "k2.stages_in")[1].startswith("≠")


def test_regressions_are_brought_into_the_trends_page(open_page, site):
    watched = open_page(site)
    page = watched.open("/trends")
    (row,) = watched.rows("regressions")
    assert row[1:3] == ["N=1,H=96,T=8192", "NVIDIA H200"]
    assert "driver 575.57.08, now 580.95.05" in row[-1]
    page.get_by_role("link", name="N=1,H=96,T=8192").first.click()
    page.wait_for_url(f"**/trends/{KEY}")
    began = [r for r in watched.rows("nights") if "%" in r[5]]
    assert len(began) == 1
    page.get_by_role("link", name=began[0][5].strip("▼ ")).click()
    page.wait_for_url("**/trends/regressions/1")
    assert "driver 575.57.08, now 580.95.05" in page.locator("section[aria-labelledby=h-cause]").inner_text()


def test_a_night_leads_to_its_report_and_that_to_the_config(open_page, site):
    watched = open_page(site)
    page = watched.open("/")
    page.locator("nav[aria-label=Pages]").get_by_role("link", name="Nights").click()
    page.wait_for_url("**/nights")
    (row,) = watched.rows("nights")
    assert "regressions found" in row[5]
    page.get_by_role("link", name="1", exact=True).click()
    page.wait_for_url("**/nights/1")
    assert "4.0 % slower" in watched.rows("plan")[0][4]
    page.locator("section[aria-labelledby=h-findings]").get_by_role("link", name="N=1,H=96,T=8192").click()
    page.wait_for_url(f"**/configs/{KEY}")


def new_token(site, scope):
    return subprocess.run(
        [sys.executable, "-m", "kdatune_tuner.cli", "token", "create", "browser", "--scope", scope],
        env={"KDATUNE_DATABASE_URL": site.database_url},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()[0]


def test_a_regression_is_acknowledged_with_a_token_and_only_with_one(open_page, own_site):
    watched = open_page(own_site)
    watched.expect_status(401)
    page = watched.open("/trends/regressions/1")
    page.get_by_label("Note").fill("the new driver")
    page.get_by_label("Token").fill("kdt_wrong")
    page.get_by_role("button", name="Acknowledge").click()
    page.get_by_role("alert").filter(has_text="401").wait_for()
    token = new_token(own_site, "regressions:write")
    page.get_by_label("Token").fill(token)
    page.get_by_role("button", name="Acknowledge").click()
    page.locator("section[aria-labelledby=h-acknowledge]").get_by_text("the new driver").wait_for()
    assert token not in page.content()
    assert page.locator("form[data-write]").count() == 0
    page.goto(f"{own_site.url}/trends/regressions?state=acknowledged")
    (row,) = watched.rows("regressions")
    assert "acknowledged" in row[3]


def test_a_command_is_copied(open_page, site):
    watched = open_page(site, permissions=["clipboard-read", "clipboard-write"])
    page = watched.open("/configs/NVIDIA%20H200/N=3,H=96,T=8192")
    # the button says so for 2 s only
    page.evaluate("""() => {
        window.shown = [];
        const note = () => window.shown.push(document.querySelector("[data-copy] button").textContent);
        new MutationObserver(note).observe(document.querySelector("[data-copy]"), { childList: true, subtree: true });
    }""")
    page.get_by_role("button", name="Copy").first.click()
    watched.until("window.shown.includes('Copied')")
    assert page.evaluate("navigator.clipboard.readText()") == "kdatune tune --shape N=3,H=96,T=8192"


def served(site, shape_key):
    engine = open_engine(site.database_url)
    with reading(engine) as s:
        found = next(row for row in served_keys(s) if row.shape_key == shape_key and row.gpu_id == 1)
    engine.dispose()
    return found


def test_a_config_is_rolled_back_with_a_token_and_only_with_one(open_page, own_site):
    watched = open_page(own_site)
    watched.expect_status(401)
    page = watched.open(f"/configs/{KEY}")
    before = served(own_site, "N=1,H=96,T=8192")
    page.get_by_label("Reason").fill("numerics differ")
    page.get_by_label("Token").fill("kdt_wrong")
    page.get_by_role("button", name="Roll back").click()
    page.get_by_role("alert").filter(has_text="401").wait_for()
    assert served(own_site, "N=1,H=96,T=8192") == before
    token = new_token(own_site, "promotions:write")
    page.get_by_label("Token").fill(token)
    page.get_by_role("button", name="Roll back").click()
    page.locator("section[aria-labelledby=h-history]").get_by_text("numerics differ").wait_for()
    after = served(own_site, "N=1,H=96,T=8192")
    assert after.generation > before.generation
    assert after.config_hash != before.config_hash
    assert token not in page.content()
