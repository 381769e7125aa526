"""The documents name what there is: every module, links that lead somewhere, the import table."""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.training.arguments import parse
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


OF_DEVELOPERS = {
    "generate_bug_docs",
    "generate_flag_docs",
    "install_requirements",
    "launch_coverage",
}
"""Tools that change this repository, or prepare it."""


def test_the_readme_lists_every_tool() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    tools = {
        path.stem
        for path in (ROOT / "tools").glob("*.py")
        if 'if __name__ == "__main__":\n    run_main' in path.read_text(encoding="utf-8")
    }
    listed = set(re.findall(r"`tools/(\w+)\.py`", readme))
    assert sorted(tools - OF_DEVELOPERS - listed) == []


def test_the_commands_for_a_t5_and_a_bert_of_ones_own_text_are_runs() -> None:
    page = (ROOT / "docs" / "data_tools.md").read_text(encoding="utf-8")
    section = page.partition("## A T5 or a BERT of your own text")[2]
    script = section.partition("```bash\n")[2].partition("```")[0].replace("\\\n", " ")
    variables = dict(re.findall(r'^(\w+)="(.*?)"$', script, re.MULTILINE))
    commands = re.findall(r"^python (pretrain_\w+)\.py (.*)$", script, re.MULTILINE)
    assert [program for program, _ in commands] == ["pretrain_t5", "pretrain_bert"]
    for program, flags in commands:
        given = re.sub(r"\$(\w+)", lambda name: variables[name[1]], flags)
        run = parse([*shlex.split(given), "--dry-run"], program)
        assert run.no_effect == () and run.config.training.train_iters == 1000


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
