"""examples/quickstart_t5.sh: a short training fills in more than the commonest byte would."""

import re
from pathlib import Path

import pytest

from tests.example_scripts import run_script

SAID = re.compile(
    r"512 validation samples: (?P<right>[\d.]+)% of (?P<masked>[\d,]+) masked tokens are right; "
    r"the commonest one \(.*\) everywhere: (?P<commonest>[\d.]+)%"
)


@pytest.mark.slow
def test_it_fills_in_more_than_the_commonest_byte_would(tmp_path: Path) -> None:
    run = tmp_path / "run"
    ran = run_script(
        "quickstart_t5.sh", "--device", "cpu", timeout=900, RUN=str(run), ITERATIONS="200"
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    said = SAID.search(ran.stdout)
    assert said is not None, ran.stdout[-2000:]
    assert int(said["masked"].replace(",", "")) == 512 * 4
    assert float(said["right"]) > 1.2 * float(said["commonest"])
    assert (run / "metrics.jsonl").exists()
