"""The documents name what there is: every module, links that lead somewhere, the import table."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_layering import ALLOWED

ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]


def rows(title: str) -> list[list[str]]:
    """Return the cells of the table whose first heading is ``title``."""
    _, found, after = ARCHITECTURE.partition(f"\n| {title} |")
    assert found, f"docs/architecture.md has no table of {title}"
    lines = after.split("\n")[2:]
    table = [
        line for line in lines[: next(i for i, x in enumerate(lines) if not x.startswith("|"))]
    ]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table]


def named(package: str) -> set[str]:
    """Return the files that the table of a package lists, relative to it."""
    files, folder = set(), ""
    for where, _ in rows(f"`{package}/`"):
        heading = re.match(r"\*\*`([\w/]+/)`\*\*", where)
        if heading:
            folder = heading[1]
        files |= {folder + name for name in re.findall(r"`(\w+\.\w+)`", where)}
    return files


@pytest.mark.parametrize("package", ["megatron/core", "megatron/training", "megatron/bridge"])
def test_every_module_has_its_place_in_the_file_table(package: str) -> None:
    folder = ROOT / package
    there = {
        str(path.relative_to(folder)) for path in folder.rglob("*.py") if path.name != "__init__.py"
    }
    listed = {name for name in named(package) if name.endswith(".py")}
    assert sorted(there - listed) == [], "missing in docs/architecture.md"
    assert sorted(listed - there) == [], "gone, but named in docs/architecture.md"


def test_the_import_table_is_the_tested_one() -> None:
    table = {
        re.sub("`", "", package): set(re.findall(r"`(\w+)`", allowed))
        for package, allowed in rows("package")
    }
    assert table == {package: set(allowed.split()) for package, allowed in ALLOWED.items()}


def anchors(page: Path) -> set[str]:
    """Return the names of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    titles = re.findall(r"^#+ +(.+?) *$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken(page: Path) -> Iterator[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        goal = (page.parent / path).resolve() if path else page
        if not goal.exists():
            yield target
        elif anchor and goal.suffix == ".md" and anchor not in anchors(goal):
            yield target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page: Path) -> None:
    assert list(broken(page)) == []


def test_a_link_to_nowhere_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A title\n[a](#a-title) [b](page.md#none) [c](none.md) [d](https://x.y)\n")
    assert list(broken(page)) == ["page.md#none", "none.md"]


def test_the_table_of_reported_faults_lists_the_tests_that_carry_each_number() -> None:
    carried = {
        (f"{name[1].upper()}-{name[2]}", str(path.relative_to(ROOT / "tests")))
        for path in (ROOT / "tests").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
        and (name := re.match(r"test_([a-z]+)_([0-9]{2})_", node.name))
    }
    page = (ROOT / "docs" / "bug_cases.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\| (\w+-\d+) \| \[.+\]\(https://\S+\) \| (.*) \|$", page, re.MULTILINE)
    listed = [(number, file) for number, files in lines for file in re.findall("`(.+?)`", files)]
    assert sorted(listed) == sorted(carried), "run python tools/generate_bug_docs.py"
