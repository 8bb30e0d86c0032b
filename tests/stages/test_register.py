"""Register: only what was approved, once, and proved to load back."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from stages.artifacts import Approval, Checkpoint, EvalReport, ModelVersion, TokenDataset
from stages.contract import Context, StageError
from stages.register import RegisterConfig, holds, register
from tests.stages.tiny_model import save_tiny_model

DIGEST = "c" * 64
REPORT = "r" * 64
DATA = "d" * 64


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def inputs(root: Path, directory: Path, *, approved: str = DIGEST) -> dict[str, object]:
    for name in ("approval", "report", "dataset"):
        (root / name).mkdir(parents=True, exist_ok=True)
    approval = Approval.write(root / "approval", {"checkpoint_digest": approved, "report_digest": REPORT, "rules": []})
    report = EvalReport.write(root / "report", {"metrics": {"bits_per_byte": 2.25, "verdict": "good"}})
    dataset = TokenDataset.write(root / "dataset", {})
    return {
        "approval": Approval(uri=approval.uri, digest="a" * 64),
        "checkpoint": Checkpoint(uri=directory.as_uri(), digest=DIGEST),
        "report": EvalReport(uri=report.uri, digest=REPORT),
        "dataset": TokenDataset(uri=dataset.uri, digest=DATA),
    }


@pytest.mark.slow
def test_a_version_is_made_once_with_its_tags_and_the_alias(
    make_context: Callable[..., Context], tmp_path: Path, model: Path
) -> None:
    cfg, given = RegisterConfig(name="quickstart"), inputs(tmp_path, model)
    receipts = []
    for _ in range(2):
        ctx = make_context("register")
        receipts.append(register(cfg, ctx, **given))  # type: ignore[arg-type]
        receipts[-1].check()
    registry = ctx.registry
    assert receipts[0].summary() == receipts[1].summary()
    assert receipts[0].summary() == {"name": "quickstart", "version": 1, "digest": DIGEST, "uri": model.as_uri()}
    assert registry.versions == {"quickstart": [(model.as_uri(), DIGEST)]}  # type: ignore[attr-defined]
    tags = registry.tags["quickstart", 1]  # type: ignore[attr-defined]
    assert (tags["digest"], tags["data_fingerprint"], tags["report_digest"]) == (DIGEST, DATA, REPORT)
    assert registry.alias("quickstart", "candidate") == 1
    assert holds(receipts[0], registry, tmp_path) is None


def test_what_was_not_approved_is_refused_before_anything_is_registered(
    make_context: Callable[..., Context], tmp_path: Path, model: Path
) -> None:
    ctx = make_context("register")
    with pytest.raises(StageError, match="the approval is for checkpoint eeeeeeeeeeee, got checkpoint cccccccccccc"):
        register(RegisterConfig(name="q"), ctx, **inputs(tmp_path, model, approved="e" * 64))  # type: ignore[arg-type]
    assert ctx.registry.versions == {}  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_model_whose_answers_changed_does_not_become_candidate(
    make_context: Callable[..., Context], tmp_path: Path, model: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    golden = json.loads((broken / "golden.json").read_text())
    golden["answers"][1]["greedy_ids"][3] = (golden["answers"][1]["greedy_ids"][3] + 1) % 257
    (broken / "golden.json").write_text(json.dumps(golden))
    ctx = make_context("register")
    with pytest.raises(StageError, match="golden question 1: the answer differs from token 3 on"):
        register(RegisterConfig(name="q"), ctx, **inputs(tmp_path, broken))  # type: ignore[arg-type]
    assert ctx.registry.alias("q", "candidate") is None


def test_a_lost_version_is_noticed(make_context: Callable[..., Context], tmp_path: Path) -> None:
    ctx = make_context("register")
    facts = {"name": "q", "version": 3, "digest": DIGEST, "uri": "file:///nowhere"}
    receipt = ModelVersion(uri=ModelVersion.write(ctx.output, facts).uri)
    assert holds(receipt, ctx.registry, tmp_path) == "the registry has no q@3 with digest cccccccccccc"
    assert holds(receipt, None, tmp_path) == "there is no registry to ask"


@pytest.mark.parametrize("name", ["", "a/b", "a b", "a@b"])
def test_a_name_that_no_registry_takes_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="name must be one word"):
        RegisterConfig(name=name)
