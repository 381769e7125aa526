"""docs/parallelism and the examples' pages: the flags and files they name exist, figures hold."""

import re
from pathlib import Path

import pytest

from megatron.core.config import specs, spellings
from megatron.core.pipeline_parallel.schedules import ScheduleName, make_schedule
from megatron.core.pipeline_parallel.simulator import simulate
from megatron.training.arguments import Invocation
from megatron.training.config import RunConfig
from megatron.training.flags import flag_status
from megatron.training.plan import traffic
from megatron.training.plan.memory import MemoryPlan
from tests.unit.test_rules import plan
from tools import preprocess_data, show_schedule

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "parallelism"
EXAMPLES = sorted(ROOT.glob("examples/*/README.md"))
PAGES = [*sorted(FOLDER.glob("*.md")), *EXAMPLES]
# Flags of programs that are not ours.
OTHERS = {"--nproc-per-node", "--nodes", "--requeue", "--max-restarts", "--ntasks-per-node"}
OTHERS |= {"--container-image", "--container-mounts"}


def known() -> set[str]:
    configs = (RunConfig, Invocation)
    ours = {name for cls in configs for spec in specs(cls).values() for name in spellings(spec)}
    # Of Megatron-LM's flags a page may say what became of them.
    return ours | {words.split()[0] for words in flag_status.load()}


def name(page: Path) -> str:
    return f"{page.parent.name}/{page.name}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_flag_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    ours = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]+", text))
    # What follows a tool's name is the tool's.
    for tool in re.findall(r"`python tools/[^`]*`", text):
        ours -= set(re.findall(r"--[a-z-]+", tool))
    assert sorted(ours - known() - OTHERS) == []


def test_the_tools_are_called_with_flags_that_they_have() -> None:
    for page in EXAMPLES:
        for command in re.findall(r"`python tools/preprocess_data.py ([^`]*)`", page.read_text()):
            flags = set(re.findall(r"--[a-z-]+", command))
            assert flags <= {
                spelling
                for spec in specs(preprocess_data.ToolConfig).values()
                for spelling in spellings(spec)
            }


@pytest.mark.parametrize("page", sorted(FOLDER.glob("*.md")), ids=name)
def test_every_file_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    # A table's heading may name the folder of its rows.
    folders = [Path(f) for f in re.findall(r"file in `([\w/]+)/`", text)]
    places = [Path("."), Path("megatron"), Path("megatron/core")]
    places += [Path("megatron") / folder for folder in folders]
    found = re.findall(r"`([\w/]+\.(?:py|svg))`", text)
    if page.name == "data.md":
        places.append(Path("megatron/core/distributed"))
    assert [f for f in found if not any((ROOT / place / f).is_file() for place in places)] == []
    assert found or page.name == "README.md"


def test_each_parallelism_has_a_page_and_every_page_a_picture() -> None:
    overview = (FOLDER / "README.md").read_text(encoding="utf-8")
    for page in FOLDER.glob("*.md"):
        pictures = re.findall(r"!\[[^\]]+\]\((\w+\.svg)\)", page.read_text(encoding="utf-8"))
        assert len(pictures) == 1 and (FOLDER / pictures[0]).is_file()
        assert page.name == "README.md" or f"({page.name})" in overview


def test_pictures_are_readable_on_dark_and_on_light_pages() -> None:
    """An image does not see the page's colours: it brings a background of its own."""
    for picture in FOLDER.glob("*.svg"):
        text = picture.read_text(encoding="utf-8")
        size = re.search(r'viewBox="0 0 (\d+) (\d+)"', text)
        assert size and re.search(
            rf'<rect width="{size[1]}" height="{size[2]}"[^>]* fill="#fff"/>', text
        )
        assert picture.stat().st_size < 150_000


def test_the_pipelines_picture_is_what_the_tool_draws(tmp_path: Path) -> None:
    page = (FOLDER / "pipeline.md").read_text(encoding="utf-8")
    command = re.search(r"`python tools/show_schedule.py ([^`]*) --output (\S+)`", page)
    assert command
    drawn = tmp_path / "drawn.svg"
    show_schedule.main([*command[1].split(), "--output", str(drawn)])
    assert drawn.read_text() == (ROOT / command[2]).read_text(), f"run: {command[0]}"


def rows() -> dict[str, list[str]]:
    """Return the cells of the table of schedules, by schedule."""
    page = (FOLDER / "pipeline.md").read_text(encoding="utf-8")
    table = page.partition("| `--pipeline-schedule` | idea |")[2].partition("\n\n")[0]
    cells = [[c.strip() for c in row.strip("|").split("|")] for row in table.split("\n")[2:]]
    return {row[0].strip("`"): row[1:] for row in cells}


def value(formula: str, **numbers: int) -> float:
    """Return what a formula such as ``(p-1)/(3 m)`` amounts to."""
    code = re.sub(r"(?<=\w) (?=\w)", "*", formula)
    return float(eval(code, {"__builtins__": {}}, dict(numbers)))


@pytest.mark.parametrize(("p", "m", "v"), [(4, 8, 2), (4, 16, 4), (8, 32, 2)])
def test_the_table_of_schedules_is_what_the_simulator_finds(p: int, m: int, v: int) -> None:
    table = rows()
    names: list[ScheduleName] = ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"]
    assert list(table) == names
    for schedule in names:
        _, stages, bubble, held = table[schedule]
        chunks = v if stages == "v" else int(stages)
        timeline = simulate(make_schedule(schedule, p, m, chunks))
        assert timeline.bubble == pytest.approx(value(bubble, p=p, m=m, v=v))
        first, _, rest = held.partition(" on ")
        peaks = [timeline.peak(rank) for rank in range(p)]
        assert peaks[0] == value(first, p=p, m=m, v=v)
        less = {"1f1b": 1.0, "interleaved": 2 / v}.get(schedule, 0.0)
        assert ("less on each next" in rest) == (less > 0)
        assert peaks == pytest.approx([peaks[0] - rank * less for rank in range(p)])


def shared_out() -> dict[str, list[str]]:
    """Return the cells of the table of what replicas share out, by flags."""
    page = (FOLDER / "data.md").read_text(encoding="utf-8")
    table = page.partition("| flags | shared out |")[2].partition("\n\n")[0]
    cells = [[c.strip() for c in row.strip("|").split("|")] for row in table.split("\n")[2:]]
    return {row[0].strip("`").replace("none", ""): row[2:] for row in cells}


def test_the_table_of_what_is_shared_out_is_what_plans_say() -> None:
    """A model whose rows divide, and that is hardly padded."""
    table, ranks, count = shared_out(), 4, 3
    assert len(table) == 6
    for flags, (half, full, moved) in table.items():
        for precision, formula, w in (("--bf16", half, 2), ("", full, 4)):
            config = plan(
                "--num-layers 4 --hidden-size 256 --num-attention-heads 8 --vocab-size 1023 "
                "--untie-embeddings-and-output-weights --global-batch-size 24 "
                f"--dry-run-world-size {ranks} {precision} {flags}"
            ).config
            (rank,) = MemoryPlan(config, 1024).ranks()
            held = sum(rank.fixed.values()) / rank.parameters
            assert held == pytest.approx(value(formula, R=ranks), rel=1e-3)
            costs = traffic.expected(config, 1024, count, {"pp": 0})
            sent = sum(
                traffic.wire_bytes(op, cost.bytes, ranks)
                for (axis, op), cost in costs.items()
                if axis == "dp_cp"
            )
            per_parameter = sent / rank.parameters * ranks / (ranks - 1)
            expected = value(moved, g=4, w=w, m=count)
            assert per_parameter == pytest.approx(expected, rel=1e-3), flags
