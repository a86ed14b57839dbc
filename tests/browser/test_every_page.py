"""Every page in both themes and at both widths: it fits, its charts are drawn, axe finds nothing serious."""

import os
from pathlib import Path

import axe_playwright_python
import pytest

KEY = "NVIDIA%20H200/N=1,H=96,T=8192"
PAGES = {
    "overview": "/",
    "overview-stale": "/?status=stale",
    "configs": "/configs",
    "config": f"/configs/{KEY}",
    "config-untuned": "/configs/NVIDIA%20H200/N=3,H=96,T=8192",
    "config-rolled-back": "/configs/NVIDIA%20H20/N=1,H=16,T=4096",
    "profiles": "/profiles",
    "profile": "/profiles/NVIDIA%20H200/N=1,H=96,T=1024",
    "profile-unavailable": "/profiles/NVIDIA%20H20/N=1,H=96,T=1024",
    "studies": "/studies",
    "study-k2": f"/studies/{KEY}?kernel=k2",
    "study-pairs": f"/studies/{KEY}?kernel=kda",
    "waves": "/waves?gpu=NVIDIA+H200",
    "trends": "/trends",
    "trend": f"/trends/{KEY}",
    "regressions": "/trends/regressions",
    "regression": "/trends/regressions/1",
    "nights": "/nights",
    "night": "/nights/1",
    "compare": "/compare",
    "compare-configs": "/compare?shape_a=N%3D1,H%3D96,T%3D8192&gpu_a=NVIDIA+H200&as_b=default",
    "compare-cards": "/compare?gpu_a=NVIDIA+H200&gpu_b=NVIDIA+H20",
}
ERRORS = {
    "no-such-page": ("/nothing", 404),
    "no-such-card": ("/configs/NVIDIA%20Z1/N=1,H=96,T=8192", 404),
    "no-such-parameter": ("/configs?colour=red", 422),
    "no-shape": ("/studies/NVIDIA%20H200/N=0", 422),
}
SERIOUS = ("serious", "critical")
AXE = (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text()


# a chart is drawn anew a moment after the theme or the width has changed
CHARTS_FOLLOW = """[...document.querySelectorAll("[data-drawn=yes]")].every((plot) => plot.layout.font.color ===
    getComputedStyle(document.documentElement).getPropertyValue("--text").trim())"""
CORNERS = (("light", 390), ("dark", 1280))
ALL = (("light", 1280), *CORNERS, ("dark", 390))


def check(watched, name, looks=ALL):
    """It fits the width, and axe finds nothing serious, in each theme and width."""
    watched.page.evaluate(AXE)
    for theme, width in looks:
        watched.page.emulate_media(color_scheme=theme)
        watched.page.set_viewport_size({"width": width, "height": 900})
        watched.until(CHARTS_FOLLOW)
        watched.until(f"document.documentElement.scrollWidth <= {width}")
        found = watched.page.evaluate("axe.run({resultTypes: ['violations']})")["violations"]
        bad = [(v["id"], v["nodes"][0]["html"][:200]) for v in found if v["impact"] in SERIOUS]
        assert bad == [], (name, theme, width)
        if "KDATUNE_SCREENSHOTS" in os.environ:
            folder = Path(os.environ["KDATUNE_SCREENSHOTS"])
            watched.page.screenshot(path=folder / f"{name}-{theme}-{width}.png", full_page=True)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_fits_is_drawn_and_accessible(open_page, site, name):
    watched = open_page(site)
    page = watched.open(PAGES[name])
    assert page.locator("h1").count() == 1
    drawn = page.eval_on_selector_all("[data-chart]", "plots => plots.map(plot => plot.dataset.drawn)")
    assert set(drawn) <= {"yes"}
    assert len(drawn) == {"study-k2": 3, "study-pairs": 3, "waves": 1, "trend": 1}.get(name, 0)
    check(watched, name)


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_is_a_page(open_page, site, name):
    path, status = ERRORS[name]
    watched = open_page(site)
    watched.expect_status(status)
    response = watched.page.goto(site.url + path)
    assert response.status == status
    assert str(status) in watched.page.locator("h1").inner_text()
    watched.page.get_by_role("link", name="Back to the overview").click()
    watched.page.wait_for_url(f"{site.url}/")
    watched.page.go_back()
    check(watched, name, CORNERS)


EMPTY = {
    "/": "kdatune tune --shape",
    "/configs": "kdatune tune --shape",
    "/profiles": "kdatune profile --shape",
    "/studies": "kdatune tune --shape",
    "/waves": "kdatune tune --shape",
    "/trends": "kdatune tune --shape",
    "/trends/regressions": "kdatune regressions",
    "/nights": "kdatune nightly",
    "/compare": "kdatune tune --shape",
}


@pytest.mark.parametrize("path", EMPTY)
def test_an_empty_page_says_what_to_run(open_page, empty_site, path):
    watched = open_page(empty_site)
    page = watched.open(path)
    assert EMPTY[path] in page.locator(".empty").first.inner_text()
    check(watched, f"empty-{path.strip('/').replace('/', '-') or 'overview'}", CORNERS)
