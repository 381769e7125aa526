"""The drawing of schedules holds every action once, and tells what the closed forms tell."""

import importlib.util
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

PATH = Path(__file__).parent.parent.parent / "tools" / "show_schedule.py"
SPEC = importlib.util.spec_from_file_location("show_schedule", PATH)
assert SPEC is not None and SPEC.loader is not None
tool = importlib.util.module_from_spec(SPEC)
sys.modules["show_schedule"] = tool
SPEC.loader.exec_module(tool)


def test_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "drawn" / "all.svg"
    assert tool.main(["--stages", "3", "--microbatches", "6", "--output", str(path)]) == 0
    root = ElementTree.parse(path).getroot()
    titles = [element.text for element in root.iter("{http://www.w3.org/2000/svg}title")]
    # Per rank and microbatch: 2 actions, 2, 4 in two chunks, 3, 6.
    assert len(titles) == 3 * 6 * (2 + 2 + 4 + 3 + 6)
    assert titles.count("backward_weight(microbatch 5, chunk 1)") == 3
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    # (p-1)/m, (p-1)/(vm), and for zb-h1 a third of the first: 2/6, 1/6, 1/9; time is 18 + that.
    assert ["gpipe", "33.3%", "24", "6"] in lines and ["1f1b", "33.3%", "24", "3"] in lines
    assert ["interleaved", "16.7%", "21", "4"] in lines and ["zb-h1", "11.1%", "20", "3"] in lines


def test_pairs_are_boxes_in_two_halves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "pairs.svg"
    words = "--stages 2 --microbatches 5 --schedules 1f1b,combined-1f1b"
    assert tool.main([*words.split(), "--output", str(path)]) == 0
    space = "{http://www.w3.org/2000/svg}"
    boxes = [box for box in ElementTree.parse(path).getroot().iter(f"{space}rect") if len(box)]
    titles = [box[0].text for box in boxes]
    assert len(titles) == 2 * 2 * 2 * 5 and titles.count("backward(microbatch 1, chunk 0)") == 4
    heights = [float(box.attrib["height"]) for box in boxes]
    # Two pairs on the first rank, four on the last.
    assert heights.count(max(heights) / 2) == 2 * (2 + 4)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["1f1b", "20.0%", "18", "2"] in lines and ["combined-1f1b", "20.0%", "18", "4"] in lines


def test_a_table_alone_leaves_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert tool.main(["--schedules", "1f1b"]) == 0
    assert "1f1b" in capsys.readouterr().out and not list(tmp_path.iterdir())


def test_page_and_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One microbatch over two ranks: F F B B, with a message on the way there and back."""
    path = tmp_path / "page.html"
    words = "--schedules 1f1b --stages 2 --microbatches 1 --forward 2 --backward 3 --transfer 0.5"
    assert tool.main([*words.split(), "--output", str(path)]) == 0
    assert "120.0%       11" in capsys.readouterr().out
    text = path.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>") and "bubble 120.0%" in text and "11 = 5 + 6" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--schedules 1f1b,zigzag", "'zigzag' is none of gpipe"),
        ("--microbatches 0", "error: --microbatches (0) must be at least 1\n"),
        ("--stages 0", "error: --stages (0) must be at least 1\n"),
        ("--chunks 0", "error: --chunks (0) must be at least 1\n"),
        ("--transfer -1", "error: --transfer (-1) must be a time"),
        ("--forward nan", "error: --forward (nan) must be a time"),
        ("--forward 0 --backward 0", "--forward and --backward are both 0"),
        ("--backward 1 --backward-weight 2", "--backward-weight (2) is a part of --backward (1)"),
        ("--transfer inf", "error: --transfer (inf) must be a time"),
        ("--backward inf", "error: --backward (inf) must be a time"),
        ("--chunks 99999999", "error: --chunks (99999999) must be at most 64\n"),
        ("--stages 500 --microbatches 1", "error: --stages (500) must be at most 128\n"),
        ("--microbatches 99999999", "error: --microbatches (99999999) must be at most 4096\n"),
        ("--stages 128 --microbatches 4096", "--stages (128) x --microbatches (4096)"),
        ("--group-size 99999999", "--group-size (99999999) must be at most 4096\n"),
        ("--chunks 1", "2 or more"),
        ("--group-size 3", "--microbatch-group-size-per-virtual-pipeline-stage (3)"),
    ],
)
def test_refused(words: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main([*words.split(), "--output", str(tmp_path / "x.svg")]) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_picture_is_written_as_what_its_name_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("x.png", "x", "x.pdf"):
        assert tool.main(["--output", str(tmp_path / name)]) == 2
        assert "the name must end in .svg, .html or .htm" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    assert tool.main(["--output", str(tmp_path / "x.SVG")]) == 0
    assert (tmp_path / "x.SVG").read_text(encoding="utf-8").startswith("<svg")


def test_a_schedule_named_twice_is_drawn_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--schedules", "zb-v,1f1b, zb-v", "--output", str(tmp_path / "x.svg")]
    assert tool.main(words) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:-1]]
    assert names == ["zb-v", "1f1b"]
