"""Who may import whom: the tables of docs/architecture.md, checked on every import statement."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CORE = ROOT / "megatron" / "core"
TRAINING = ROOT / "megatron" / "training"

ALLOWED = {
    "utils": "",
    "config": "utils",
    "grid": "utils config",
    "progress": "utils",
    "datasets": "utils config progress",
    "tokenizers": "utils config",
    "kernels": "utils",
    "mesh": "grid",
    "sharding": "",
    "parallel_state": "mesh",
    "rng": "sharding",
    "held": "",
    "comm": "mesh held",
    "saved_tensors": "",
    "turns": "",
    "recompute": "mesh comm saved_tensors",
    "offload": "saved_tensors",
    "precision": "utils config",
    "tensor_parallel": "utils kernels mesh comm held saved_tensors sharding",
    "context_parallel": "utils config kernels mesh comm held rng",
    "pipeline_parallel": "utils config mesh comm saved_tensors turns",
    "dist_checkpointing": "utils config progress mesh comm sharding",
    "distributed": "utils config mesh comm held sharding",
    "optimizer": "utils config kernels mesh comm sharding precision distributed",
    "transformer": "utils config grid kernels mesh comm rng sharding recompute offload turns "
    "tensor_parallel context_parallel",
    "models": "utils kernels mesh comm rng sharding recompute tensor_parallel context_parallel "
    "transformer pipeline_parallel",
    "inference": "utils mesh comm rng transformer models",
}


LINES = (
    "batch_size devices external failing flags memory own_loaders process_config recovery_config "
    "shell signals state timers",
    "checkpoint_config log_config loop_config",
    "batches config expert_loads replica_check",
    "data garbage health objective processes profiling startup stopping wording",
    "agreement checkpoints data_trace idle_data idle_experts idle_layout layout_rules passes "
    + "records",
    "batch_rules build device_choices evaluation generation idle memory_rules model_rules step "
    + "nearest_layout overlap_rules stored_settings upcycling_rules",
    "planner program program_defaults rules",
    "arguments trainer",
    "explain plan",
    "memory_use",
    "loop_parts",
    "job",
    "pretrain",
    "verification",
)
LINE_OF = {unit: number for number, line in enumerate(LINES) for unit in line.split()}


def unit_of(module: str, half: str = "core") -> str | None:
    """Return the row of a table that a dotted module belongs to, or None outside of its half."""
    parts = module.split(".")
    return parts[2] if len(parts) > 2 and parts[:2] == ["megatron", half] else None


def imports_of(path: Path, source: str | None = None) -> list[tuple[int, str]]:
    """Return (line, dotted module) of every import in a file, inside functions too."""
    tree = ast.parse(source if source is not None else path.read_text(encoding="utf-8"))
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = path.relative_to(ROOT).with_suffix("").parts[: -node.level]
                base = ".".join([*package, *([base] if base else [])])
            # `from megatron.core import comm` names a module in its list.
            found += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
    return found


def violations(path: Path, source: str | None = None) -> list[str]:
    """Return what a file imports against the table."""
    unit = unit_of(dotted(path))
    wrong = []
    for line, module in imports_of(path, source):
        if not module.startswith("megatron."):
            continue
        target = unit_of(module)
        if target is None:
            allowed = unit is None
        else:
            allowed = target == unit or target in ALLOWED.get(unit or "", "").split()
        if unit is not None and not allowed:
            wrong.append(f"{path.relative_to(ROOT)}:{line} imports {module}")
    return wrong


def upward(path: Path, source: str | None = None) -> list[str]:
    """Return what a file of the application imports from its own line, or one below."""
    unit = unit_of(dotted(path), "training")
    wrong = []
    for line, module in imports_of(path, source):
        target = unit_of(module, "training")
        if target in LINE_OF and target != unit and LINE_OF[target] >= LINE_OF[unit or ""]:
            wrong.append(f"{path.relative_to(ROOT)}:{line} imports {module}")
    return wrong


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def files_of(half: Path) -> list[Path]:
    return [path for path in sorted(half.rglob("*.py")) if path != half / "__init__.py"]


@pytest.mark.parametrize("path", files_of(CORE), ids=lambda p: str(p.relative_to(CORE)))
def test_imports_follow_the_table(path: Path) -> None:
    assert violations(path) == []


def test_the_bridge_imports_the_library_alone() -> None:
    halves = {
        module.split(".")[1]
        for path in files_of(ROOT / "megatron" / "bridge")
        for _, module in imports_of(path)
        if module.startswith("megatron.")
    }
    assert halves == {"bridge", "core"}


def test_every_unit_has_a_row() -> None:
    assert {unit_of(dotted(path)) for path in files_of(CORE)} <= set(ALLOWED)
    assert {unit_of(dotted(path), "training") for path in files_of(TRAINING)} == set(LINE_OF)


def test_the_application_imports_lines_above() -> None:
    assert [wrong for path in files_of(TRAINING) for wrong in upward(path)] == []


def test_the_tables_are_those_of_the_docs() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = {line for line in text.splitlines() if line.startswith("| `")}
    for unit, allowed in ALLOWED.items():
        listed = ", ".join(f"`{name}`" for name in allowed.split()) or "nothing"
        assert f"| `{unit}` | {listed} |" in rows
    for number, line in enumerate(LINES, 1):
        assert f"| {number} | {' '.join(f'`{unit}`' for unit in line.split())} |" in text


def test_a_violation_inside_a_function_is_seen() -> None:
    path = CORE / "kernels" / "planted.py"
    source = "def f():\n    from megatron.core import mesh\n    import megatron.training.step\n"
    assert len(violations(path, source)) == 2
    path = TRAINING / "failing" / "planted.py"
    source = "def f():\n    from megatron.training import rules\n    import megatron.core.mesh\n"
    assert len(upward(path, source)) == 1


def test_package_inits_are_empty() -> None:
    inits = [path for path in (ROOT / "megatron").rglob("__init__.py") if path.stat().st_size]
    assert inits == []
