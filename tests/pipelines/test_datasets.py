"""What MLflow shows of data: for what each data stage made and for what training took, its digest, its columns and its numbers."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlflow
import pyarrow
import pyarrow.parquet
import pytest

from pipelines import datasets, worker
from pipelines.config import ROOT
from pipelines.tracking import Tracking
from stages.artifacts import Checkpoint, Corpus, EvalReport, Rows, TokenDataset
from tests.pipelines.stubs import published


def packed(directory: Path) -> TokenDataset:
    lists = pyarrow.list_(pyarrow.int32())
    schema = pyarrow.schema([("input_ids", lists), ("labels", lists), ("source", pyarrow.string())])
    for split in ("train", "validation"):
        (directory / split).mkdir(parents=True)
        table = pyarrow.table([[[1, 2]], [[-100, 2]], ["chat"]], schema=schema)
        pyarrow.parquet.write_table(table, directory / split / "part-00000.parquet")
    splits = {"train": {"rows": 1, "tokens": 2, "shares": {"chat": 1}}, "validation": {"rows": 1}}
    TokenDataset.write(directory, {"sequence_length": 2, "pad_token_id": 0, "sources": [{"rows": 1}], **splits})
    return TokenDataset(directory.as_uri(), "ab" * 32)


def test_a_data_set_is_told_to_mlflow_with_digest_columns_and_numbers(state: Path, tmp_path: Path) -> None:
    said: list[tuple[Any, ...]] = []
    worker._Tracker(lambda *message: said.append(message)).log_dataset("train", packed(tmp_path / "d"), "training", {})
    uri = f"sqlite:///{state / 'mlflow' / 'mlflow.db'}"
    run = Tracking(uri, state, "e", 10.0).start_parent("p", {})
    run.log_dataset(*said[0][1:])
    run.close("FINISHED")
    (found,) = mlflow.MlflowClient(uri).get_run(str(run.run_id)).inputs.dataset_inputs
    assert [(tag.key, tag.value) for tag in found.tags] == [("mlflow.data.context", "training")]
    shown = found.dataset
    assert (shown.name, shown.digest, shown.source_type) == ("train", ("ab" * 32)[:36], "local")
    assert json.loads(shown.source) == {"uri": (tmp_path / "d").as_uri()}
    assert json.loads(shown.profile) == {"sequence_length": 2, "train_rows": 1, "train_tokens": 2, "validation_rows": 1}
    # What MLflow itself makes of it; the UI reads the same JSON.
    schema = mlflow.types.Schema.from_json(json.dumps(json.loads(shown.schema)["mlflow_colspec"]))
    assert [(column.name, str(column.type)) for column in schema] == [
        ("input_ids", "Array(integer)"),
        ("labels", "Array(integer)"),
        ("source", "DataType.string"),
    ]


@pytest.mark.parametrize(
    "kind, name",
    [
        (pyarrow.string(), "string"),
        (pyarrow.int64(), "long"),
        (pyarrow.int8(), "integer"),
        (pyarrow.float64(), "double"),
        (pyarrow.float32(), "float"),
        (pyarrow.bool_(), "boolean"),
        (pyarrow.large_binary(), "binary"),
        (pyarrow.timestamp("us"), "datetime"),
        (pyarrow.large_string(), "string"),
    ],
)
def test_each_arrow_type_has_a_name_that_mlflow_knows(tmp_path: Path, kind: pyarrow.DataType, name: str) -> None:
    (tmp_path / "rows").mkdir()
    nested = pyarrow.struct([pyarrow.field("in", pyarrow.list_(kind), nullable=False)])
    schema = pyarrow.schema([pyarrow.field("a", kind, nullable=False), pyarrow.field("b", nested)])
    pyarrow.parquet.write_table(schema.empty_table(), tmp_path / "rows" / "part-00000.parquet")
    first, second = datasets.columns(Rows(tmp_path.as_uri()))
    assert first == {"name": "a", "type": name, "required": True}
    assert second["type"] == "object" and second["properties"]["in"]["items"] == {"type": name}
    mlflow.types.Schema.from_json(json.dumps([first, second]))


def test_what_cannot_be_read_has_no_columns_and_stops_nothing(tmp_path: Path) -> None:
    assert datasets.columns(Rows((tmp_path / "gone").as_uri())) == []
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "part-00000.parquet").write_text("no parquet")
    assert datasets.columns(Corpus(tmp_path.as_uri())) == []
    kinds = {kind: datasets.is_dataset(kind) for kind in (Rows, Corpus, TokenDataset, Checkpoint, EvalReport)}
    assert [kind for kind, rows in kinds.items() if rows] == [Rows, Corpus, TokenDataset]


@pytest.mark.slow
def test_data_stages_tell_what_they_made_and_training_and_evaluation_what_they_took(tmp_path: Path) -> None:
    arguments = ["run.until=evaluate", "run.limit=300", "stages.tokenize.vocab_size=300", f"state={tmp_path}"]
    arguments += ["stages.tokenize.sequence_length=32", "stages.train.max_steps=3", "stages.train.tokens_per_step=512"]
    arguments += [f"stages.{stage}.resources.executor=inline" for stage in ("ingest", "clean", "tokenize", "evaluate")]
    arguments += ["stages.train.resources.launcher=inline", "stages.evaluate.samples=1"]
    command = [sys.executable, "-m", "pipelines", "run", *arguments]
    subprocess.run(command, cwd=ROOT, check=True, timeout=200, capture_output=True)
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mlflow' / 'mlflow.db'}")
    made, taken = {}, {}
    for run in client.search_runs([e.experiment_id for e in client.search_experiments()]):
        for one in run.inputs.dataset_inputs:
            columns = [column["name"] for column in json.loads(one.dataset.schema)["mlflow_colspec"]]
            told = (one.dataset.digest, columns, json.loads(one.dataset.profile))
            if one.tags[0].value == "output":
                made[one.dataset.name] = told
            else:
                taken[run.data.tags["raykeel.stage"], one.tags[0].value] = told
    digests = {name: digest[:36] for name, digest in published(tmp_path).items()}
    assert {name: digest for name, (digest, *_) in made.items()} == {
        name: digests[name] for name in ("ingest", "clean", "tokenize")
    }
    assert made["ingest"][1][:2] == ["id", "source"] and "split" in made["clean"][1] and "labels" in made["tokenize"][1]
    numbers = {name: profile for name, (*_, profile) in made.items()}
    assert numbers["ingest"]["rows"] == 300
    assert numbers["clean"]["train_rows"] + numbers["clean"]["validation_rows"] == numbers["clean"]["rows"] <= 300
    assert numbers["tokenize"]["train_tokens"] > numbers["tokenize"]["train_supervised_tokens"] > 0
    assert sorted(taken) == [("evaluate", "validation"), ("train", "training"), ("train", "validation")]
    for digest, columns, profile in taken.values():
        assert (digest, columns) == (digests["tokenize"], made["tokenize"][1]) and profile
    assert taken["train", "training"][2]["tokens"] == numbers["tokenize"]["train_tokens"]
