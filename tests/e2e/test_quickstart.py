"""The whole life at reduced size through the command line that people type: real Ray, real MLflow, real HTTP."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import psutil
import pyarrow.parquet
import pytest

from tests.e2e.conftest import Quickstart
from tests.e2e.project import SMALL, Project

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def project(first_run: Quickstart) -> Iterator[Project]:
    """The only ones that change it; its Ray ends with them."""
    yield first_run.project
    first_run.project.cli("down", check=None)


@pytest.fixture(scope="module")
def quickstart(first_run: Quickstart) -> str:
    """What the first run printed."""
    return first_run.printed


def test_the_endpoint_serves_the_registered_model(project: Project, quickstart: str) -> None:
    version = project.client.get_model_version_by_alias("quickstart", "champion")
    assert int(version.version) == 1
    ready = project.ready()
    assert ready["digest"] == version.tags["digest"] and str(ready["version"]) == "1"
    assert project.endpoint["base_url"] in quickstart and "make ask" in quickstart


def test_a_real_client_gets_the_same_text_streamed_and_whole(project: Project, quickstart: str) -> None:
    client = openai.OpenAI(base_url=project.v1, api_key="none", max_retries=0)
    model = client.models.list().data[0].id
    whole = client.completions.create(model=model, prompt="os.path.join(", max_tokens=12, temperature=0)
    pieces = client.completions.create(model=model, prompt="os.path.join(", max_tokens=12, temperature=0, stream=True)
    assert "".join(p.choices[0].text for p in pieces if p.choices) == whole.choices[0].text
    with pytest.raises(openai.BadRequestError, match="no chat template"):
        client.chat.completions.create(model=model, messages=[{"role": "user", "content": "hi"}])


def test_ask_prints_the_answer(project: Project, quickstart: str) -> None:
    answer = project.cli("ask", env={"TEXT": "os.path.join("})
    assert answer.startswith("os.path.join(") and len(answer) > len("os.path.join(\n")


def test_nothing_of_this_project_listens_outside_this_machine(project: Project, quickstart: str) -> None:
    family = [psutil.Process(project.head), *psutil.Process(project.head).children(recursive=True)]
    listening = {
        connection.laddr.ip.removeprefix("::ffff:")
        for process in family
        for connection in process.net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {"127.0.0.1"}


def test_no_process_connects_to_anything_outside_this_machine(project: Project, quickstart: str) -> None:
    asked = set(project.connections.read_text().split())
    assert asked, "the control: connections inside this machine were seen"
    assert {host for host in asked if not host.startswith("127.") and host not in ("localhost", "::1")} == set()


def test_a_second_run_reuses_everything_starts_no_ray_and_writes_no_mlflow_run(
    project: Project, quickstart: str
) -> None:
    head, before = project.head, len(project.runs("quickstart"))
    printed = project.cli("run", *SMALL, env={"PYTHONPROFILEIMPORTTIME": "1"})
    assert "0 of 9 stages to run" in printed
    imported = {line.rpartition("|")[2].strip().split(".")[0] for line in printed.splitlines() if "|" in line}
    assert "obstore" in imported  # the control: imports were listed
    assert not imported & {"hydra", "ray", "torch", "transformers", "mlflow", "pandas", "pyarrow", "numpy"}
    assert project.head == head and len(project.runs("quickstart")) == before


def test_a_changed_learning_rate_reruns_train_and_what_depends_on_it_and_nothing_else(
    project: Project, quickstart: str
) -> None:
    planned = project.cli("plan", *SMALL, "stages.train.learning_rate=0.001")
    words = [line.split() for line in planned.splitlines()]
    actions = {w[0]: w[1] for w in words if len(w) > 2 and w[1] in ("run", "reuse", "unknown")}
    assert [actions[s] for s in ("ingest", "clean", "tokenize", "train")] == ["reuse", "reuse", "reuse", "run"]
    assert {actions[s] for s in ("evaluate", "gate", "register", "deploy", "probe")} == {"unknown"}
    assert "config.learning_rate" in project.cli("why", *SMALL, "stages.train.learning_rate=0.001")


def test_the_reviewer_finds_verdict_metrics_samples_data_and_endpoint(project: Project, quickstart: str) -> None:
    parent = next(r for r in project.runs("quickstart") if "mlflow.parentRunId" not in r.data.tags)
    note = parent.data.tags["mlflow.note.content"]
    for wanted in (
        "PASSED",
        "bits per byte",
        "unigram",
        "lzma",
        "Samples",
        "Data",
        project.endpoint["base_url"],
        "make run",
    ):
        assert wanted in note, wanted
    children = {
        r.data.tags["mlflow.runName"]: r for r in project.runs("quickstart") if "mlflow.parentRunId" in r.data.tags
    }
    assert set(children) == {"ingest", "clean", "tokenize", "train", "evaluate", "gate", "register", "deploy", "probe"}
    assert {r.info.status for r in children.values()} == {"FINISHED"}
    history = project.client.get_metric_history(children["train"].info.run_id, "loss")
    assert sorted(m.step for m in history) == list(range(1, 31))
    assert children["train"].inputs.dataset_inputs


def test_the_registered_version_loads_in_a_clean_process_with_equal_logits(project: Project, quickstart: str) -> None:
    script = (
        "import sys, json, mlflow, torch; from pathlib import Path\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "mlflow.set_tracking_uri(sys.argv[1]); mlflow.set_registry_uri(sys.argv[1])\n"
        "d = mlflow.artifacts.download_artifacts('models:/quickstart@champion')\n"
        "m = AutoModelForCausalLM.from_pretrained(d, dtype=torch.float32); t = AutoTokenizer.from_pretrained(d)\n"
        "ids = torch.tensor([t('os.path')['input_ids']])\n"
        "print(json.dumps(m(ids).logits[0, -1].tolist()))"
    )
    uri = f"sqlite:///{project.state / 'mlflow' / 'mlflow.db'}"
    clean = subprocess.run([sys.executable, "-c", script, uri], capture_output=True, text=True, check=True, timeout=120)
    from_registry = json.loads(clean.stdout.strip().splitlines()[-1])
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    digest = project.client.get_model_version_by_alias("quickstart", "champion").tags["digest"]
    directory = project.state / "store" / "objects" / digest
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ids = torch.tensor([AutoTokenizer.from_pretrained(directory)("os.path")["input_ids"]])
    assert from_registry == model(ids).logits[0, -1].tolist()


def test_a_refused_gate_registers_and_deploys_nothing_and_what_served_still_serves(
    project: Project, quickstart: str
) -> None:
    before = project.ready()
    printed = project.cli("run", *SMALL, "stages.gate.rules.max_bits_per_byte=0.1", check=3)
    assert "raykeel exited with code 3" in printed and "0.1" in printed
    assert project.ready() == before
    assert len(project.client.search_model_versions("name='quickstart'")) == 1


@pytest.mark.slow
def test_finetune_tunes_the_champion_and_is_deployed_over_it(project: Project, quickstart: str, tmp_path: Path) -> None:
    rows = tmp_path / "my.jsonl"
    rows.write_text(
        "".join(
            json.dumps({"text": f"fruit.peel_{i}(x)\n\nPeel fruit number {i} with care."}) + "\n" for i in range(200)
        )
    )
    printed = project.cli(
        "run",
        "pipeline=finetune",
        "model=models:/quickstart@champion",
        f"stages.ingest.source.path={rows}",
        "stages.train.epochs=null",
        "stages.train.max_steps=20",
        "stages.deploy.port=18411",
    )
    assert "replaces quickstart@1" in printed
    ready = project.ready()
    assert ready["model"] == "finetune"
    note = next(r for r in project.runs("finetune") if "mlflow.parentRunId" not in r.data.tags).data.tags[
        "mlflow.note.content"
    ]
    assert "before" in note


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_version_before_is_served_again_by_one_command(project: Project, quickstart: str) -> None:
    """Version 2 replaces version 1, is rolled back, and is served again by its number; aliases tell which is which."""

    def served() -> tuple[str, int | None, int | None]:
        ready = project.ready()
        versions = {a: project.client.get_model_version_by_alias("quickstart", a) for a in ("champion", "previous")}
        return f"{ready['model']}@{ready['version']}", *(int(version.version) for version in versions.values())

    project.cli("run", *SMALL, "stages.train.max_steps=20", "stages.deploy.max_tokens=40")
    assert served() == ("quickstart@2", 2, 1)
    printed = project.cli("rollback")
    assert "replaces quickstart@2" in printed and served() == ("quickstart@1", 1, 2)
    client = openai.OpenAI(base_url=project.v1, api_key="none", max_retries=0)
    with pytest.raises(openai.BadRequestError, match="at most 40"):  # the options stay
        client.completions.create(model="quickstart", prompt="a", max_tokens=41)
    project.cli("serve", env={"MODEL": "models:/quickstart/2"})
    assert served() == ("quickstart@2", 2, 1)
    assert "the registry has no version 99 of quickstart" in project.cli("rollback", check=1, env={"TO": "99"})
    assert served() == ("quickstart@2", 2, 1)


@pytest.mark.slow
def test_an_answer_is_traced_to_its_model_and_to_the_rows_that_say_the_same(project: Project, quickstart: str) -> None:
    client = openai.OpenAI(base_url=project.v1, api_key="none", max_retries=0)
    answer = client.completions.create(model="quickstart", prompt="os.path.join(", max_tokens=8, temperature=0)
    version = project.client.get_model_version("quickstart", str(project.ready()["version"]))
    printed = project.cli("trace", env={"ID": answer.id})
    assert f"quickstart@{version.version}" in printed and version.tags["digest"] in printed
    assert "MLflow run" in printed and "(clean)" in printed and "(tokenize)" in printed
    assert "words in a row" in printed or "longest runs" in printed  # it was remembered, and looked for
    row, text = next(
        (row, text)
        for place in sorted(project.state.glob("store/objects/*/rows/part-00000.parquet"))
        if "split" in (table := pyarrow.parquet.read_table(place)).column_names
        for row, text, split in zip(*(table[name].to_pylist() for name in ("id", "text", "split")), strict=True)
        if split == "train" and len(text.split()) > 30
    )
    quoted = " ".join(text.split()[10:28])
    found = project.cli("trace", env={"ID": answer.id, "TEXT": f"So it says: {quoted}."})
    assert row in found.split("longest runs", 1)[1]
    assert "no model whose files" in project.cli("trace", check=5, env={"ID": f"cmpl-{'0' * 32}"})


def test_down_stops_the_endpoint_and_leaves_no_process(project: Project, quickstart: str) -> None:
    head = project.head
    family = [psutil.Process(head), *psutil.Process(head).children(recursive=True)]
    assert len(family) > 3  # the control: there really was a Ray
    assert "stopped" in project.cli("down")
    _, alive = psutil.wait_procs(family, timeout=10)
    assert alive == []
    assert not (project.state / "endpoint.json").exists()
    assert "nothing is deployed from here" in project.cli("plan", *SMALL)
