"""The law of the house, proved from the source: who may import whom, and what importing must not load."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NOUNS = {"contract", "artifacts"}
STAGES = sorted((ROOT / "stages").rglob("*.py"))
PIPELINES = sorted((ROOT / "pipelines").glob("*.py"))
VERBS = {p.stem for p in (ROOT / "stages").glob("*.py")} - NOUNS - {"__init__"}
HEAVY = ("ray", "torch", "transformers", "mlflow", "pandas")


def imports(path: Path) -> set[str]:
    """Full names of all modules imported anywhere in a file."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def roots(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imports(path)}


def files_importing(package: str) -> set[str]:
    return {p.relative_to(ROOT).as_posix() for p in STAGES + PIPELINES if package in roots(p)}


@pytest.mark.parametrize("path", STAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_stages_never_import_the_orchestrator_hydra_or_mlflow(path: Path) -> None:
    assert not roots(path) & {"pipelines", "hydra", "omegaconf", "mlflow"}


@pytest.mark.parametrize("path", STAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_a_verb_never_imports_a_verb_and_a_noun_never_imports_one(path: Path) -> None:
    verbs = {name for name in imports(path) if name.startswith("stages.") and name.split(".")[1] in VERBS}
    assert not verbs, f"{path} imports {verbs}"


def test_each_library_has_one_owner() -> None:
    assert files_importing("mlflow") == {"pipelines/tracking.py"}
    hydra = {f"pipelines/{name}.py" for name in ("config", "axes", "groups", "mistakes", "commands")}
    assert files_importing("hydra") <= hydra and files_importing("omegaconf") <= hydra


def test_only_the_cluster_module_starts_or_joins_ray() -> None:
    callers = set()
    for path in STAGES + PIPELINES:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("ray.init", "ray.shutdown"):
                callers.add(path.relative_to(ROOT).as_posix())
    assert callers == {"pipelines/cluster.py"}


def test_the_training_loop_and_the_serving_engine_import_no_launcher() -> None:
    for path in [*(ROOT / "stages" / "training").glob("*.py"), *(ROOT / "stages" / "serving").glob("*.py")]:
        if path.name != "deployment.py":  # Serve's wrapping of the app
            assert "ray" not in roots(path), path


def test_there_is_no_room_for_homeless_lines() -> None:
    for path in STAGES + PIPELINES:
        assert path.stem not in {"utils", "common", "helpers", "core", "manager", "misc"}, path


def test_every_file_opens_with_what_it_is() -> None:
    for path in STAGES + PIPELINES:
        assert ast.get_docstring(ast.parse(path.read_text("utf-8"))), f"{path} has no docstring"


def test_no_pickle_and_no_remote_code() -> None:
    for path in STAGES + PIPELINES:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            name, arguments = ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}
            assert not name.startswith("pickle."), f"{path}:{node.lineno}"
            if name == "torch.load":
                assert arguments.get("weights_only") == "True", f"{path}:{node.lineno}"
            assert arguments.get("trust_remote_code", "False") == "False", f"{path}:{node.lineno}"


def loaded_by(code: str) -> set[str]:
    script = f"{code}\nimport sys; print('LOADED', *[m for m in {HEAVY!r} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    marker, *modules = run.stdout.splitlines()[-1].split()
    assert marker == "LOADED"
    return set(modules)


def test_importing_every_verb_loads_nothing_heavy() -> None:
    assert loaded_by("import stages; stages.import_verbs()") == set()


def test_composing_and_planning_load_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "from pipelines.__main__ import main\n"
        f"assert main(['plan', 'state={tmp_path}']) == 0\n"
        f"assert main(['config', 'state={tmp_path}']) == 0\n"
        f"assert main(['status', 'state={tmp_path}']) == 0"
    )
    assert loaded_by(code) == set()
