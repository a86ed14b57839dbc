"""The README and docs/: links lead somewhere, every page is in the index, and what is quoted is what the code says."""

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!!)\[(?:[^\]\[]|\[[^\]]*\])*\]\(([^)\s]+)\)")


def name_of(page):
    return str(page.relative_to(ROOT))


def links(page):
    return _LINK.findall(_FENCED.sub("", page.read_text()))


def anchors(page):
    """The anchors of a page's headings, as GitHub makes them."""
    seen = Counter()
    found = set()
    for heading in re.findall(r"^#{1,6} (.+)$", _FENCED.sub("", page.read_text()), re.MULTILINE):
        text = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    dead = []
    for link in links(page):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)
    assert dead == []


def test_a_dead_link_is_seen(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# One `two` (three)\n\n[a](#one-two-three) [b](gone.md) [c](#gone)\n```\n[d](no-link.md)\n```\n")
    assert anchors(page) == {"one-two-three"}
    assert links(page) == ["#one-two-three", "gone.md", "#gone"]


def test_every_page_is_in_the_index():
    index = {link.partition("#")[0] for link in links(DOCS / "README.md")}
    pages = {page.name for page in DOCS.glob("*.md")} - {"README.md"}
    assert pages <= index
    assert "docs/README.md" in links(ROOT / "README.md")


def source():
    """All that the code says: its literals joined where a message runs over several lines."""
    files = [*(path for part in ("kernels", "tuner", "api") for path in (ROOT / part).rglob("*.py")), ROOT / "Makefile"]
    text = "\n".join(path.read_text() for path in [*files, *(ROOT / "docker").glob("*.yaml")])
    return re.sub(r"\"\s*\n\s*f?\"", "", text)


def quoted():
    """The messages that the troubleshooting page quotes: every span of a first column that is more than one word."""
    for line in (DOCS / "troubleshooting.md").read_text().splitlines():
        if line.startswith("|") and not line.startswith(("| you see", "|---")):
            for span in re.findall(r"`([^`]+)`", line.split("|")[1]):
                if " " in span:
                    yield span


NOT_OURS = {
    "password authentication failed",  # PostgreSQL's
    "failed to map segment from shared object",  # the dynamic loader's
    "cap_add: [SYS_ADMIN]",
    "stale: true",
    "lies on nfs, where SQLite's locks cannot be trusted",  # checked below: the kind of file system is a value
}


def test_the_troubleshooting_page_quotes_what_is_said():
    said = source()
    assert [span for span in quoted() if span not in NOT_OURS and span not in said] == []
    assert "where SQLite's locks cannot be trusted" in said
    assert len(list(quoted())) > 20


def test_the_codes_of_profiles_are_those_of_the_code():
    from kdatune_tuner.ncu.unavailable import REMEDIES

    page = (DOCS / "troubleshooting.md").read_text()
    named = set(re.findall(r"^\| `([a-z_]+)`", page.split("## Profiles")[1].split("\n## ")[0], re.MULTILINE))
    assert named <= set(REMEDIES)
    assert {"no_permission", "ncu_not_found"} <= named


def test_the_outcomes_are_those_of_the_code():
    from kdatune_tuner.outcome import Outcome

    listed = re.search(r"The end is typed: (.+?)\. A bad", (DOCS / "method.md").read_text(), re.DOTALL)
    assert set(re.findall(r"`(\w+)`", listed[1])) == {str(one) for one in Outcome}


def test_the_metrics_that_are_named_exist():
    source = (ROOT / "api" / "kdatune_api" / "metrics.py").read_text()
    named = set(re.findall(r"kdatune_[a-z_]+_(?:total|seconds)|`kdatune_generation", (DOCS / "operate.md").read_text()))
    assert len(named) == 5
    assert all(f'"{name.strip("`")}"' in source for name in named)


def test_the_findings_of_a_night_are_those_of_the_code():
    from kdatune_tuner.night_report import Kind

    table = (DOCS / "operate.md").read_text().split("| finding | is | exit code 3 |")[1].split("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == {str(one) for one in Kind}


def test_the_scopes_and_settings_that_are_named_exist():
    from kdatune_tuner.store.access import Scope

    operate = (DOCS / "operate.md").read_text()
    assert set(re.findall(r"^\| `(\w+:write)`", operate, re.MULTILINE)) == {str(one) for one in Scope}
    known = (DOCS / "settings.md").read_text() + (ROOT / "docker" / "env.example").read_text()
    of_the_tests = {
        name for path in (ROOT / "tests").rglob("*.py") for name in re.findall(r"KDATUNE_\w*[A-Z]", path.read_text())
    }
    for page in PAGES:
        for name in re.findall(r"KDATUNE_[A-Z_]*[A-Z]", page.read_text()):
            assert name in known or name in of_the_tests or name == "KDATUNE_NAME", f"{page.name}: {name}"
