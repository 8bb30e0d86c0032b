"""Preference optimisation: the loss against known values, a plain loop and another library's curve; the reference that never
moves; ranks, accumulation and resume."""

import copy
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from stages.artifacts import Checkpoint, EvalReport, PairDataset
from stages.clean import CleanConfig, CleanResources, clean
from stages.contract import Executor, GateRefused, StageError
from stages.dpo import DpoConfig, dpo
from stages.evaluate import EvaluateConfig, EvaluateResources, evaluate
from stages.gate import GateConfig, Rules, gate
from stages.ingest import IngestConfig, SourceConfig, ingest
from stages.pair import PairConfig, PairResources, pair
from stages.register import RegisterConfig, register
from stages.text.choices import Documentation
from stages.training import model as models
from stages.training.config import Adapter, Job, Schedule, Shape
from stages.training.dpo_loss import SHOWN, log_probabilities, padded, sigmoid_loss
from stages.training.loop import Training, run
from stages.training.pair_recipe import PairRecipe, ReferenceFrom
from stages.training.probes import unlike
from stages.training.resources import Launcher, TrainResources
from stages.training.world import World
from tests.stages import tiny_dataset as tiny
from tests.stages import tiny_pairs
from tests.stages.test_pair import base as chat_base
from tests.stages.test_training_loop import curve, run_until
from tests.stages.tiny_pairs import BASE_DIGEST
from tests.stages.training_jobs import losses, two_processes

STEPS = 12


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tiny sums; more threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Checkpoint:
    return tiny_pairs.base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def data(tmp_path_factory, base) -> PairDataset:
    return tiny_pairs.dataset(tmp_path_factory.mktemp("plain"), base)


@pytest.fixture(scope="module")
def stored(tmp_path_factory, base) -> PairDataset:
    return tiny_pairs.dataset(tmp_path_factory.mktemp("stored"), base, stored=True)


def config(*, resources: dict[str, Any] | None = None, **values: Any) -> DpoConfig:
    """Twelve steps of six pairs, four to an epoch."""
    given = {"micro_batch_rows": 4, "checkpoint_every": 4} | (resources or {})
    values = {"max_steps": STEPS, "pairs_per_step": 6, "learning_rate": 1e-3, "validate_every": 5} | values
    return DpoConfig(resources=TrainResources(launcher=Launcher.inline, **given), **values)


def job(cfg: DpoConfig, data: PairDataset, base: Checkpoint, work: Path, seed: int = 0) -> Job:
    return Job(
        recipe=PairRecipe(**{name: getattr(cfg, name) for name in PairRecipe.__dataclass_fields__}),
        verb="dpo", model=None, base=base.local(), base_digest=base.digest, dataset=data.local(), work=work, seed=seed,
        golden_prompts=tuple(cfg.golden_prompts), **cfg.resources.of_job(),
    )  # fmt: skip


def started(cfg: DpoConfig, data: PairDataset, base: Checkpoint, work: Path) -> Training:
    training = Training(job(cfg, data, base, work), World(0, 1), lambda: None)
    training.resume()
    return training


def steps(work: Path) -> list[dict[str, Any]]:
    return [line for line in tiny.lines(work / "metrics.jsonl") if "step" in line]


@pytest.mark.parametrize(
    ("policy", "reference", "beta", "smoothing", "wanted"),
    [
        ([[-7.0], [-9.0]], [[-7.0], [-9.0]], 0.1, 0.0, 0.693147),
        ([[-7.0], [-9.0]], [[-10.0], [-2.0]], 0.1, 0.0, 0.313262),  # log ratios 3 and -7: h = 10
        ([[-7.0], [-9.0]], [[-10.0], [-2.0]], 0.1, 0.1, 0.9 * 0.313262 + 0.1 * 1.313262),
        ([[-7.0], [-9.0]], [[-10.0], [-2.0]], 0.5, 0.0, 0.006715),
    ],
)
def test_the_loss_has_its_known_values(policy, reference, beta, smoothing, wanted):
    given = torch.tensor(policy), torch.tensor(reference), torch.ones(1)
    loss, shown = sigmoid_loss(*given, beta=beta, label_smoothing=smoothing)
    assert float(loss) == pytest.approx(wanted, abs=1e-6)
    ratio = given[0] - given[1]
    assert float(shown["reward_margin"]) == pytest.approx(float(beta * (ratio[0] - ratio[1])[0]))
    assert float(shown["drift"]) == pytest.approx(float((ratio**2).mean() / 2))
    assert float(shown["reward_accuracy"]) == float(ratio[0, 0] > ratio[1, 0])
    assert tuple(shown) == SHOWN


def test_log_probabilities_are_sums_over_the_answer_alone_whatever_stands_beside_it(base):
    model = transformers.LlamaForCausalLM.from_pretrained(base.local()).eval()
    rows = tiny_pairs.rows(5, seed=9)
    prompts, answers = [row[0] for row in rows], [row[1] for row in rows]
    given = padded([np.array(p, np.int32) for p in prompts], [np.array(a, np.int32) for a in answers])
    with torch.no_grad():
        found = log_probabilities(model, **given)
    wanted = [tiny_pairs.alone(model, prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
    assert found.tolist() == pytest.approx(wanted, abs=1e-4)
    assert [int((row != -100).sum()) for row in given["labels"]] == list(map(len, answers))


@pytest.mark.parametrize("source", [None, ReferenceFrom.copy, ReferenceFrom.columns, ReferenceFrom.adapter_off])
def test_training_begins_at_ln_2_with_no_reward_and_the_reference_never_moves(data, stored, base, tmp_path, source):
    adapter = Adapter(modules_to_save=["lm_head"]) if source is ReferenceFrom.adapter_off else None
    cfg = config(reference=source, adapter=adapter, learning_rate=3e-3, max_steps=8)
    training = started(cfg, stored if source is ReferenceFrom.columns else data, base, tmp_path)
    plain = transformers.LlamaForCausalLM.from_pretrained(base.local()).eval()
    for step in range(8):
        training.step(step)
    training.writer.close()
    first, *_, last = steps(tmp_path)
    assert first["loss"] == pytest.approx(math.log(2), abs=2e-6)
    for name in ("reward_chosen", "reward_rejected", "reward_margin", "drift"):
        assert first[name] == pytest.approx(0.0, abs=2e-5)
    assert abs(last["reward_margin"]) > 0.05 and last["drift"] > 0.1  # the policy has moved
    pairs = training.objective.pairs
    given = pairs.batch(np.arange(3), stored=False)
    wanted = [
        tiny_pairs.alone(plain, pairs.prompts[row].tolist(), answers[row].tolist())
        for answers in (pairs.chosen, pairs.rejected)
        for row in range(3)
    ]
    if source is ReferenceFrom.columns:
        found = pairs.reference[:, :3].flatten()
    else:
        with torch.no_grad():
            found = training.objective.module.reference(given["input_ids"], given["labels"])
    assert found.tolist() == pytest.approx(wanted, abs=1e-4)


def plain_curve(base: Checkpoint, pairs, sampler, cfg: DpoConfig) -> list[float]:
    """Preference optimisation in its fewest words: one pair at a time, one mean a step, torch's AdamW at a constant rate."""
    policy = transformers.LlamaForCausalLM.from_pretrained(base.local()).eval()
    reference = copy.deepcopy(policy)
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=cfg.learning_rate, weight_decay=0.0, betas=(cfg.optimizer.beta1, cfg.optimizer.beta2)
    )
    curve = []
    for step in range(sampler.steps):
        each = []
        for row in sampler.step(step):
            ratios = []
            for answers in (pairs.chosen, pairs.rejected):
                ids = torch.tensor(np.concatenate([pairs.prompts[row], answers[row]]), dtype=torch.long)[None]
                first = len(pairs.prompts[row])
                of_policy, of_reference = (
                    model(input_ids=ids).logits[0, first - 1 : -1].log_softmax(-1).gather(1, ids[0, first:, None]).sum()
                    for model in (policy, reference)
                )
                ratios.append(of_policy - of_reference.detach())
            each.append(-torch.nn.functional.logsigmoid(cfg.beta * (ratios[0] - ratios[1])))
        loss = torch.stack(each).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), cfg.max_grad_norm)
        optimizer.step()
        curve.append(loss.item())
    return curve


CONSTANT = Schedule(shape=Shape.constant, warmup_ratio=0.0)
OF_TRL = (
    0.693147, 0.673311, 0.675825, 0.685479, 0.686496, 0.684664, 0.610110, 0.505333, 0.502322, 0.437486,
    0.543422, 0.521091, 0.387534, 0.407722, 0.451109, 0.481713, 0.414339, 0.323972, 0.355417, 0.282079,
)  # fmt: skip
"""What TRL 1.16's DPOTrainer gives for the same pairs in the same order (AdamW at a constant 1e-3, betas 0.9 and 0.95)."""


def test_the_first_twenty_losses_are_those_of_a_plain_loop_and_of_another_library(data, base, tmp_path):
    cfg = config(max_steps=20, pairs_per_step=4, schedule=CONSTANT)
    given = job(cfg, data, base, tmp_path)
    training = started(cfg, data, base, tmp_path / "unused")
    training.writer.close()
    run(given)
    wanted = plain_curve(base, training.objective.pairs, training.sampler, cfg)
    found = list(losses(tmp_path).values())
    assert len(found) == 20 and wanted[-1] < 0.5
    for other in (wanted, OF_TRL):
        assert max(abs(a - b) for a, b in zip(found, other, strict=True)) < 1e-4


@pytest.mark.parametrize("micro_batch_rows", [1, 5])
def test_gradients_do_not_depend_on_how_a_step_is_cut(data, base, tmp_path, micro_batch_rows):
    def gradients(size: int, name: str) -> tuple[float, list[torch.Tensor]]:
        training = started(config(resources={"micro_batch_rows": size}, max_steps=4), data, base, tmp_path / name)
        with torch.no_grad():  # away from the reference, where pairs weigh differently
            for number, parameter in enumerate(training.model.parameters()):
                parameter.add_(
                    torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)), alpha=0.02
                )
        total = training._backward(np.arange(7), 7)["loss"]
        training.writer.close()
        return total, [parameter.grad.clone() for parameter in training.model.parameters()]

    (whole, wanted), (parts, found) = gradients(7, "whole"), gradients(micro_batch_rows, "parts")
    assert parts == pytest.approx(whole, abs=1e-5)
    assert max(float((a - b).abs().max()) for a, b in zip(wanted, found, strict=True)) < 1e-6


@pytest.mark.parametrize("step", [3, 6])
def test_a_run_that_was_cut_off_goes_on_bitwise(data, base, tmp_path, step):
    whole, cut = (job(config(), data, base, tmp_path / name) for name in ("whole", "cut"))
    run(whole)
    run_until(cut, step)
    run(cut)
    assert curve(cut.work) == curve(whole.work) and len(curve(whole.work)) == STEPS
    assert tiny.tree(cut.work / "export") == tiny.tree(whole.work / "export")


def test_dropout_is_off_in_policy_and_reference(tmp_path):
    model = tiny_pairs.base(tmp_path, dropout=0.5)
    data = tiny_pairs.dataset(tmp_path, model)
    run(job(config(max_steps=1, validate_every=0), data, model, tmp_path / "work"))
    assert steps(tmp_path / "work")[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    exported = transformers.AutoConfig.from_pretrained(tmp_path / "work" / "export")
    assert exported.attention_dropout == 0.5  # later training finds its setting


def test_validation_is_a_mean_over_all_pairs_whatever_the_batches(data, base, tmp_path):
    found = []
    for size in (1, 3, 7):
        training = started(config(resources={"micro_batch_rows": size}), data, base, tmp_path / str(size))
        training.step(0)
        training.writer.close()
        found.append(training.objective.validate(training.world))
    assert {f"validation_{name}" for name in ("loss", *SHOWN)} == set(found[0])
    for other in found[1:]:
        assert other == pytest.approx(found[0], abs=1e-4)


def test_the_stage_learns_what_is_preferred_and_exports_it(data, base, tmp_path, make_context):
    ctx = make_context("dpo")
    made = dpo(config(max_steps=30, learning_rate=3e-3), ctx, data, base)
    summary = made.summary()
    assert summary["steps"] == 30 and summary["reference_digest"] == base.digest and summary["beta"] == 0.1
    last = steps(ctx.work)[-1]
    assert last["validation_loss"] < 0.5 and last["validation_reward_accuracy"] > 0.8
    assert last["validation_reward_margin"] > 0.5
    logged = {(name, step): value for name, value, step in ctx.tracker.metrics}
    assert {step for name, step in logged if name == "reward_margin"} == set(range(1, 31))
    assert logged["validation_reward_accuracy", 30] == last["validation_reward_accuracy"]
    assert ("validation", data.digest, "validation") in ctx.tracker.datasets


@pytest.fixture(scope="module")
def preferring(data, base, tmp_path_factory) -> Checkpoint:
    """A checkpoint that dpo trained."""
    work = tmp_path_factory.mktemp("preferring")
    run(job(config(max_steps=30, learning_rate=3e-3, validate_every=0), data, base, work))
    return Checkpoint(uri=(work / "export").as_uri(), digest="aa" * 32)


def judged(checkpoint: Checkpoint, data: PairDataset, base: Checkpoint, ctx, **values: Any) -> EvalReport:
    resources = EvaluateResources(executor=Executor.inline, **values)
    return evaluate(
        EvaluateConfig(samples=2, sample_tokens=4, resources=resources), ctx, checkpoint, base=base, pairs=data
    )


def test_evaluation_says_what_training_said_and_what_the_reference_would(data, base, preferring, make_context):
    ctx = make_context("evaluate")
    report = judged(preferring, data, base, ctx).summary()
    trained, reference = (models.load(where.local()) for where in (preferring, base))
    ratios, likelier = [], {"metrics": [], "before": []}
    for prompt, chosen, rejected in tiny_pairs.rows(7, seed=2):
        of = {
            name: [tiny_pairs.alone(model, prompt, answer) for answer in (chosen, rejected)]
            for name, model in (("metrics", trained), ("before", reference))
        }
        ratios.append([a - b for a, b in zip(of["metrics"], of["before"], strict=True)])
        for name, values in of.items():
            likelier[name].append(values[0] > values[1])
    margins = [chosen - rejected for chosen, rejected in ratios]
    metrics, before = report["metrics"], report["baselines"]["before"]
    assert metrics["reward_margin"] == pytest.approx(0.1 * sum(margins) / 7, abs=1e-4)
    assert metrics["reward_accuracy"] == pytest.approx(sum(margin > 0 for margin in margins) / 7)
    assert metrics["validation_loss"] == pytest.approx(
        sum(math.log1p(math.exp(-0.1 * m)) for m in margins) / 7, abs=1e-4
    )
    assert metrics["ranking_accuracy"] == pytest.approx(sum(likelier["metrics"]) / 7)
    assert before["ranking_accuracy"] == pytest.approx(sum(likelier["before"]) / 7)
    assert before["validation_loss"] == pytest.approx(math.log(2), abs=1e-6)
    last = steps(preferring.local().parent)[-1]
    assert metrics["validation_loss"] == pytest.approx(last["validation_loss"], abs=1e-5)
    assert report["checkpoint_digest"] == preferring.digest and report["pairs_digest"] == data.digest
    assert len(report["samples"]) == 2 and all("before" in sample for sample in report["samples"])
    lines = ctx.tracker.texts["evaluation.md"].splitlines()
    assert lines[0] == "| | prefers the chosen answer more than before | margin | chosen answer likelier | loss |"
    assert lines[2].startswith("| this model |") and lines[3].endswith("| 0.693 |")
    other = judged(preferring, data, base, make_context("evaluate"), batch_rows=2).summary()
    assert other["metrics"] == pytest.approx(metrics, abs=1e-4)


def test_a_model_that_learned_nothing_is_refused_by_the_gate(data, base, preferring, make_context):
    rules = Rules(max_validation_loss=0.69, min_reward_accuracy=0.55, min_reward_margin=0.1)
    report = judged(preferring, data, base, make_context("evaluate"))
    assert len(gate(GateConfig(rules=rules), make_context("gate"), preferring, report).summary()["rules"]) == 3
    idle = judged(base, data, base, make_context("evaluate"))
    with pytest.raises(GateRefused, match=r"3 of 3 rules do not hold"):
        gate(GateConfig(rules=rules), make_context("gate"), base, idle)


@pytest.mark.parametrize(
    ("connected", "message"),
    [
        ({"checkpoint", "dataset", "corpus", "pairs", "base"}, "dataset and corpus, or pairs"),
        ({"checkpoint", "dataset"}, "dataset and corpus, or pairs, to evaluate; got dataset"),
        ({"checkpoint", "pairs"}, "connect base to evaluate too"),
    ],
)
def test_edges_that_make_no_evaluation_are_refused(connected, message):
    with pytest.raises(ValueError, match=message):
        EvaluateConfig().check(frozenset(connected))


@pytest.mark.slow
def test_two_ranks_train_what_one_process_trains_and_go_on_bitwise(data, base, tmp_path):
    cases = {
        "uneven": config(pairs_per_step=7),  # one rank has 4 pairs, the other 3
        "starved": config(max_steps=None, epochs=7 / 24),  # one pair in the last step: one rank has none
        "adapted": config(adapter=Adapter(r=4)),
    }
    of_two = {name: job(cfg, data, base, tmp_path / f"{name}-2") for name, cfg in cases.items()}
    two_processes(*of_two.values())
    for name, cfg in cases.items():
        run(job(cfg, data, base, tmp_path / f"{name}-1"))
        two, one = (steps(tmp_path / f"{name}-{size}") for size in (2, 1))
        assert len(two) == len(one)
        for ours, theirs in zip(two, one, strict=True):
            for value in ("loss", "grad_norm", "reward_margin", "reward_accuracy", "drift", "tokens"):
                assert ours[value] == pytest.approx(theirs[value], abs=1e-4), value
        assert two[-1]["validation_loss"] == pytest.approx(one[-1]["validation_loss"], abs=1e-5)
    cut = of_two["adapted"]
    first = curve(cut.work)
    shutil.rmtree(sorted((cut.work / "checkpoints").iterdir())[-1])  # killed before its newest checkpoint
    two_processes(cut)
    assert curve(cut.work) == first and len(first) == STEPS
    assert any("resumed from step 8" in line.get("event", "") for line in tiny.lines(cut.work / "metrics.jsonl"))


def test_an_adapter_with_which_the_base_came_belongs_to_the_reference(data, base, tmp_path):
    """Tuned by an adapter alone, then preferred: the reference is the tuned model, not what lies beneath it."""
    tuned_on = config(adapter=Adapter(r=4, merge=False), learning_rate=3e-2, max_steps=6)
    run(job(tuned_on, data, base, tmp_path / "tuned"))
    folder = tmp_path / BASE_DIGEST
    folder.symlink_to(base.local())  # beside the adapter, where a store keeps it
    shutil.copytree(tmp_path / "tuned" / "export", tmp_path / "adapter")
    tuned = Checkpoint(uri=(tmp_path / "adapter").as_uri(), digest="ad" * 32)
    training = started(config(adapter=Adapter(r=2), max_steps=1), data, tuned, tmp_path / "on top")
    training.step(0)
    training.writer.close()
    assert steps(tmp_path / "on top")[0]["loss"] == pytest.approx(math.log(2), abs=2e-6)
    pairs = training.objective.pairs
    given = pairs.batch(np.arange(2), stored=False)
    with torch.no_grad():
        found = training.objective.module.reference(given["input_ids"], given["labels"])[:2].tolist()
    ids = [(pairs.prompts[row].tolist(), pairs.chosen[row].tolist()) for row in range(2)]
    beneath, whole = (models.load(where) for where in (base.local(), tmp_path / "adapter"))
    assert found == pytest.approx([tiny_pairs.alone(whole, *one) for one in ids], abs=1e-4)
    assert abs(found[0] - tiny_pairs.alone(beneath, *ids[0])) > 0.1


def test_what_does_not_fit_is_refused_with_its_remedy(data, stored, base, tmp_path, make_context):
    other = tiny_pairs.base(tmp_path, seed=4)
    with pytest.raises(
        StageError, match=r"stored log-probabilities are of model babababababa.*connect one base to pair and dpo"
    ):
        dpo(config(), make_context("dpo"), stored, replace(other, digest="cc" * 32))
    with pytest.raises(StageError, match=r"stores no log-probabilities of a reference; choose pair=reference"):
        dpo(config(reference=ReferenceFrom.columns), make_context("dpo"), data, base)
    (other.local() / "tokenizer.json").write_text("{}")
    with pytest.raises(
        StageError, match=r"another tokenizer than the base model's; connect the base to the pair stage too"
    ):
        dpo(config(), make_context("dpo"), data, other)
    lonely = tiny_pairs.dataset(tmp_path / "lonely", base)
    shutil.rmtree(lonely.local() / "validation")
    with pytest.raises(
        StageError, match=r"no pairs in its validation split; give more rows or a larger validation share"
    ):
        dpo(config(), make_context("dpo"), lonely, base)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"beta": 0.0}, "beta must be above 0, got 0"),
        ({"label_smoothing": 0.5}, "label_smoothing must be from 0 to below 0.5, got 0.5"),
        ({"pairs_per_step": 0}, "pairs_per_step must be at least 1, got 0"),
        ({"reference": ReferenceFrom.adapter_off}, "reference must not be adapter_off without an adapter"),
        ({"golden_prompts": [""]}, "golden_prompts must be texts"),
        ({"epochs": 1.0}, "set exactly one of max_steps, epochs, got"),
    ],
)
def test_impossible_values_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        config(**values)


@pytest.mark.slow
def test_the_pipelines_stages_make_a_registered_model_of_the_documentation(tmp_path, make_context):
    """Rows, clean rows, pairs, a tuned adapter, its judgement, a version: each stage reads what the one before it wrote."""
    model = replace(chat_base(tmp_path / "tiny", "qwen25"), digest="ab" * 32)

    def published(made: Any, digest: str) -> Any:
        return replace(made, digest=digest * 32)

    source = SourceConfig(documentation=Documentation.preference)
    rows = ingest(IngestConfig(source=source, limit=150), make_context("ingest"))
    inline = Executor.inline
    corpus = clean(CleanConfig(resources=CleanResources(executor=inline)), make_context("clean"), rows)
    resources = PairResources(executor=inline)
    pairs = published(
        pair(PairConfig(sequence_length=256, resources=resources), make_context("pair"), corpus, model), "cd"
    )
    assert pairs.summary()["train"]["pairs"] > 8 and pairs.summary()["validation"]["pairs"] > 0
    cfg = config(adapter=Adapter(), max_steps=4, pairs_per_step=4, learning_rate=1e-2)
    made = published(dpo(cfg, make_context("dpo"), pairs, model), "de")
    report = published(judged(made, pairs, model, make_context("evaluate")), "ef")
    assert report.summary()["metrics"]["drift"] > 0
    approval = gate(GateConfig(rules=Rules(max_validation_loss=5.0)), make_context("gate"), made, report)
    ctx = make_context("register")
    version = register(RegisterConfig(name="dpo"), ctx, approval, made, report, pairs=pairs)
    assert version.summary()["version"] == 1 and ctx.registry.tags["dpo", 1]["data_fingerprint"] == pairs.digest


def test_dropout_of_an_adapter_is_refused_where_it_would_be_switched_off():
    with pytest.raises(ValueError, match=r"adapter\.dropout must be 0 in preference optimisation, got 0\.3"):
        DpoConfig(adapter=Adapter(dropout=0.3), max_steps=1)


def test_a_first_loss_that_is_not_ln_2_is_warned_of():
    assert unlike(math.log(2) + 0.01, math.log(2)) is None and unlike(3.0, None) is None
    assert "other weights or another precision" in unlike(0.9, math.log(2))
