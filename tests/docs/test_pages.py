"""What the pages promise beside their code: links that resolve, limits, no page that nobody can reach."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(page for page in [*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"] if page.exists())
DECISIONS = sorted((DOCS / "decisions").glob("*.md"))
LINK = re.compile(r"!?\[[^\]]*\]\((?P<target>[^)\s]+)\)")
MOST_COLUMNS = 110
FENCE = re.compile(r"^(```+|~~~+).*?^\1\s*$", re.MULTILINE | re.DOTALL)
MENTION = re.compile(r"docs/[\w./-]+\.md(?:#(?P<anchor>[\w-]+))?")


def prose(page: Path) -> str:
    """The text of a page without its code blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


@cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return frozenset(re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings)


def name(page: Path) -> str:
    """The page as test ids show it."""
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_relative_link_and_anchor_resolves(page: Path) -> None:
    for match in LINK.finditer(re.sub(r"`[^`]*`", "", prose(page))):
        target, _, anchor = match["target"].partition("#")
        if "://" in target:
            continue
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), f"{match[0]} leads nowhere"
        assert not anchor or anchor in anchors(file), f"{match[0]}: its page has {sorted(anchors(file))}"


def test_every_page_that_a_message_or_docstring_names_exists_with_its_anchor() -> None:
    sources = [*ROOT.glob("tileops-*/src/**/*.py")]
    mentions = [match for source in sources for match in MENTION.finditer(source.read_text(encoding="utf-8"))]
    for match in mentions:
        page = ROOT / match[0].partition("#")[0]
        assert page.exists(), match[0]
        assert match["anchor"] is None or match["anchor"] in anchors(page), match[0]
    assert mentions


@pytest.mark.parametrize("page", [page for page in PAGES if DOCS in page.parents], ids=name)
def test_every_page_is_reachable_from_the_index(page: Path) -> None:
    reached, steps = set[Path](), [DOCS / "index.md"]
    while steps:
        step = steps.pop()
        if step in reached or DOCS not in step.parents:
            continue
        reached.add(step)
        for match in LINK.finditer(prose(step)):
            file = (step.parent / match["target"].partition("#")[0]).resolve()
            steps += sorted(file.glob("*.md")) if file.is_dir() else [file] if file.suffix == ".md" else []
    assert page in reached


@pytest.mark.parametrize("page", DECISIONS, ids=name)
def test_a_decision_has_its_four_parts_in_under_60_lines(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 60
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert headings == ["Question", "Decision", "Why not the others", "What would change our mind"]


def test_decisions_are_numbered_from_one_without_a_gap() -> None:
    assert [int(page.name[:4]) for page in DECISIONS] == list(range(1, len(DECISIONS) + 1))
    for page in DECISIONS:
        assert page.read_text(encoding="utf-8").startswith(f"# {int(page.name[:4])}. ")


def test_the_readme_has_at_most_80_lines() -> None:
    readme = ROOT / "README.md"
    if not readme.exists():
        pytest.skip("there is no README.md beside these tests")
    assert len(readme.read_text(encoding="utf-8").splitlines()) <= 80


@pytest.mark.parametrize("page", [page for page in PAGES if DOCS in page.parents], ids=name)
def test_lines_of_prose_are_short(page: Path) -> None:
    lines = prose(page).splitlines()
    assert [line for line in lines if len(line) > MOST_COLUMNS and not line.startswith("|")] == []


@pytest.mark.parametrize("figure", sorted(DOCS.rglob("*.svg")), ids=name)
def test_a_figure_is_valid_has_a_title_and_a_background_of_its_own(figure: Path) -> None:
    root = ET.parse(figure).getroot()  # noqa: S314 - a file of this repository
    svg = "{http://www.w3.org/2000/svg}"
    width, height = (float(size) for size in root.attrib["viewBox"].split()[2:])
    background = next(root.iter(f"{svg}rect"))
    assert float(background.attrib["width"]) >= width - 2
    assert float(background.attrib["height"]) >= height - 2
    assert root.findtext(f"{svg}title")
    assert any(page for page in PAGES if figure.name in page.read_text(encoding="utf-8"))
