"""What is published is what was trained, asked in a fresh process: every way in which a folder can be another model."""

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from stages.contract import StageError
from stages.training import expected, reloaded
from stages.training.loop import run
from tests.stages import tiny_dataset as tiny
from tests.stages.training_jobs import config, job


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    root = tmp_path_factory.mktemp("trained")
    data = tiny.dataset(root / "data")[0]
    run(job(config(max_steps=2), data, root / "work"))
    return root / "work"


def test_an_export_is_the_trained_model_in_a_process_that_never_saw_it(trained):
    reloaded.require_equal(trained / "export", trained / "expected")
    golden = json.loads((trained / "export" / "golden.json").read_text())["answers"]
    assert all(answer["prompt"] and answer["greedy_ids"] and len(answer["top_logprobs"]) == 5 for answer in golden)


def test_the_loss_on_validation_rows_is_the_sum_that_the_model_in_memory_had(trained):
    known = json.loads((trained / "expected" / "expected.json").read_text())
    last = [line for line in tiny.lines(trained / "metrics.jsonl") if "validation_loss" in line][-1]["validation_loss"]
    labels = expected.PackedSplit.read(Path(known["dataset"]), "validation").labels
    assert len(labels) < expected.ROWS, "all rows: so it is the whole validation loss"
    assert known["nats"] / (labels[:, 1:] != -100).sum() == pytest.approx(last, rel=1e-6)


def weights(folder: Path) -> None:
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][0] += 0.5
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def terminators(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": 5}')


def template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages }}")


def tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text(
        (folder / "tokenizer.json").read_text().replace('"ByteLevel"', '"ByteLevel" ')
    )


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (weights, r"logits differ by .*, wanted exactly 0"),
        (terminators, r"it does not stop at \[0\], with which its texts end"),
        (template, "its chat template is not the data set's"),
        (tokenizer, r"tokenizer\.json: not the data set's"),
        (lambda folder: (folder / "model.safetensors").unlink(), "OSError"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"torn"), r"SafetensorError|OSError"),
    ],
    ids=["weights", "terminators", "template", "tokenizer", "no weights", "torn"],
)
def test_a_folder_that_is_another_model_is_never_published(trained, tmp_path, spoil, message):
    folder = Path(shutil.copytree(trained / "export", tmp_path / "export"))
    spoil(folder)
    with pytest.raises(StageError, match=f"the exported model is not the trained one: .*{message}"):
        reloaded.require_equal(folder, trained / "expected")


def test_another_loss_is_told(trained, tmp_path):
    record = Path(shutil.copytree(trained / "expected", tmp_path / "expected"))
    known = json.loads((record / "expected.json").read_text())
    (record / "expected.json").write_text(json.dumps(known | {"nats": known["nats"] * 1.001}))
    assert "its loss on validation rows is" in reloaded.fault(trained / "export", record)


def test_a_model_that_does_not_answer_in_time_is_not_waited_for(trained):
    with pytest.raises(StageError, match="did not load and answer in 0 s"):
        reloaded.require_equal(trained / "export", trained / "expected", timeout_s=0.0)


def test_the_process_is_a_fresh_one_and_gone_afterwards(trained):
    torch.set_default_dtype(torch.float64)  # a state of this process that the other must not have
    try:
        reloaded.require_equal(trained / "export", trained / "expected")
    finally:
        torch.set_default_dtype(torch.float32)
    assert not multiprocessing.active_children()


SCRIPT = """
import sys
from pathlib import Path
from benchmarks import bare
from stages.artifacts import TokenDataset
from stages.train import train
from tests.stages.training_jobs import config

data, output, work = sys.argv[1:]
train(config(max_steps=2), bare.context(Path(output), Path(work)), TokenDataset(uri=data))
"""


@pytest.mark.slow
def test_a_script_that_trains_when_it_is_imported_is_told_so_and_trains_once(tmp_path):
    for name in ("work", "output"):
        (tmp_path / name).mkdir()
    (tmp_path / "script.py").write_text(SCRIPT)
    given = [tiny.dataset(tmp_path / "data")[0].uri, str(tmp_path / "output"), str(tmp_path / "work")]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, str(tmp_path / "script.py"), *given]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert 'call train under `if __name__ == "__main__":`' in done.stderr
    assert [line["step"] for line in tiny.lines(tmp_path / "work" / "metrics.jsonl") if "step" in line] == [1, 2]
    assert not list((tmp_path / "output").iterdir()), "nothing is published that was not checked"
