"""Makes data with a model: rows go through a checkpoint or an endpoint and come out as new rows, or with a score. Apart from
ingest, because here a machine writes what others will learn from, and its name must stay with the rows.

Each row is a question; what is finished is kept row by row in the stage's work directory, so that a killed run goes on.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from stages.artifacts import Checkpoint, Corpus, Rows
from stages.contract import Context, StageConfig, StageError, TaskResources, stage
from stages.text.synthesis import Ask, AskAs, Decoding, Endpoint, Output, Score, ScoreBy
from stages.training.preflight import require

if TYPE_CHECKING:
    from stages.text.generating import Origins, Tally
    from stages.text.journal import Journal
    from stages.text.questions import Form

DROPPED = {
    "unfinished": "the answer was cut off by stages.generate.decoding.max_tokens",
    "empty_answer": "the model answered nothing",
    "below_threshold": "scored below stages.generate.score.keep_from",
}


@dataclass(kw_only=True)
class GenerateResources(TaskResources):
    """How it is computed. With `ray`, a pool of actors that each hold the model; an endpoint is asked by the stage itself."""

    actors: int = 1
    """Processes that hold the model, when it is a checkpoint."""
    cpus: float = 1.0
    """Logical CPUs that Ray reserves for each."""
    threads: int = 1
    """Threads of each one's tensor operations; another number may change the last digits of its logits."""
    concurrency: int = 8
    """Requests under way at an endpoint."""
    request_timeout_s: float = 120.0
    """Seconds that one request may take."""
    request_retries: int = 4
    """Further attempts at a request after 408, 409, 429, 5xx, a timeout or a lost connection, with doubling pauses up to 8 s or as
    the server asks (Retry-After)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("actors", "cpus", "threads", "concurrency", "request_timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"resources.{name} must be above 0, got {getattr(self, name)}")
        if self.request_retries < 0:
            raise ValueError(f"resources.request_retries must be 0 or more, got {self.request_retries}")

    def cpus_wanted(self) -> float:
        return 1.0 if self.inline() else self.actors * self.cpus


@dataclass(kw_only=True)
class GenerateConfig(StageConfig):
    """Options in `conf/generate/`. Takes `rows` or `corpus` (its training split), and a `checkpoint` or an endpoint."""

    ask: Ask = field(default_factory=Ask)
    """What the model is asked about a row."""
    decoding: Decoding = field(default_factory=Decoding)
    """How answers are chosen."""
    output: Output = field(default_factory=Output)
    """What becomes of an answer."""
    score: Score | None = None
    """Score rows instead of making new ones. Null: new rows."""
    endpoint: Endpoint | None = None
    """Who answers, when no checkpoint is connected."""
    batch_rows: int = 16
    """Rows that a checkpoint answers together. Rows of a batch change each other's last digits, so it belongs to the result."""
    limit: int | None = None
    """Ask only about the first so many rows. Null: about all of them."""
    max_bad_fraction: float = 0.01
    """The stage fails when more than this share of the rows cannot be asked about or answered (0 to 1)."""
    resources: GenerateResources = field(default_factory=GenerateResources)
    """How it is computed."""

    def __post_init__(self) -> None:
        for name in ("batch_rows", "limit"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.max_bad_fraction <= 1:
            raise ValueError(f"max_bad_fraction must be between 0 and 1, got {self.max_bad_fraction}")

    @property
    def measured(self) -> bool:
        return self.score is not None and self.score.by is ScoreBy.log_probability

    def check(self, connected: frozenset[str]) -> None:
        if len(connected & {"rows", "corpus"}) != 1:
            raise ValueError("inputs must name one of rows and corpus: what the model is asked about")
        if ("checkpoint" in connected) == (self.endpoint is not None):
            raise ValueError("one model must answer: connect a checkpoint, or set endpoint and connect none")
        if self.measured and self.endpoint is not None:
            raise ValueError("score.by=log_probability needs a checkpoint: an endpoint does not give them")


@stage(libraries=("torch", "transformers", "tokenizers", "jinja2", "openai", "peft", "pyarrow"), ray=True)
def generate(
    cfg: GenerateConfig,
    ctx: Context,
    rows: Rows | None = None,
    corpus: Corpus | None = None,
    checkpoint: Checkpoint | None = None,
) -> Rows:
    """Ask about each row, keep what came, and write it in the order of the rows."""
    from stages.text.corpus import TRAIN, shards
    from stages.text.generating import Origins, assemble
    from stages.text.journal import Journal
    from stages.text.shards import Table

    given = rows or corpus
    assert given is not None  # `check` saw to it
    origins = Origins(Table.of(shards(given.local())), TRAIN if corpus else None, cfg.limit)
    form, chat = _form(cfg), _as_chat(cfg, checkpoint)
    (ctx.work / "answers").mkdir(exist_ok=True)
    journal = Journal(ctx.work / "answers")
    ctx.progress(0.0, f"{origins.total:,} rows")
    if checkpoint is not None:
        _ask_checkpoint(cfg, ctx, origins, form, chat, checkpoint, journal)
    else:
        _ask_endpoint(cfg, ctx, origins, form, chat, journal)
    ctx.progress(0.95, "writing")
    tally = assemble(
        origins, journal, ctx.output, form=form, chat=chat,
        keep_unfinished=cfg.decoding.keep_unfinished, scoring=_scoring(cfg),
    )  # fmt: skip
    _refuse(cfg, tally)
    _report(cfg, ctx, tally)
    Rows.write(ctx.output, _summary(cfg, tally, given, checkpoint))
    return Rows(uri=ctx.output.resolve().as_uri())


def _form(cfg: GenerateConfig) -> "Form":
    from stages.text.questions import Form

    return Form(
        template=cfg.ask.template, system=cfg.ask.system, kind=cfg.output.kind.value, prompt=cfg.output.prompt,
        text=cfg.output.text, source=cfg.output.source,
    )  # fmt: skip


def _as_chat(cfg: GenerateConfig, checkpoint: Checkpoint | None) -> bool:
    if checkpoint is None or cfg.ask.form is AskAs.text:
        return cfg.ask.form is not AskAs.text
    from stages.text import template_source

    has = template_source.find(checkpoint.local(), None) is not None
    if cfg.ask.form is AskAs.chat and not has:
        raise StageError("stages.generate.ask.form=chat: the checkpoint has no chat template; set text, or give it one")
    return has


def _scoring(cfg: GenerateConfig) -> Any:
    from stages.text.generating import Scoring

    if cfg.score is None:
        return None
    score = cfg.score
    pattern = None if cfg.measured else score.pattern
    return Scoring(pattern=pattern, minimum=score.minimum, maximum=score.maximum, keep_from=score.keep_from)


def _ask_checkpoint(
    cfg: GenerateConfig, ctx: Context, origins: "Origins", form: "Form", chat: bool, checkpoint: Checkpoint,
    journal: "Journal",
) -> None:  # fmt: skip
    """Windows of rows, through the pool's copies of the model."""
    from stages.serving.answering import Answering, Task
    from stages.serving.sampling import Sampling
    from stages.text.blocks import pooled

    if not cfg.resources.inline():
        _require_room(cfg)
    decoding = cfg.decoding
    sampling = Sampling(
        max_tokens=decoding.max_tokens, temperature=decoding.temperature, top_p=decoding.top_p,
        stop=tuple(decoding.stop),
    )  # fmt: skip
    task = Task(
        form=form, chat=chat, sampling=sampling, measured=cfg.measured, batch_rows=cfg.batch_rows, seed=ctx.seed
    )
    shared = {"checkpoint": checkpoint.local(), "task": task, "origins": origins, "journal": journal.directory}
    done = 0
    for batch in pooled(origins.orders(), Answering, cfg.resources, threads=cfg.resources.threads, **shared):
        done += sum(batch.column("rows").to_pylist())
        ctx.progress(0.95 * done / origins.total, f"{done:,} of {origins.total:,} rows")


def _require_room(cfg: GenerateConfig) -> None:
    import ray

    from stages.storage.node import facts

    require(
        "CPU",
        workers=cfg.resources.actors,
        each=cfg.resources.cpus,
        nodes=facts(),
        free=ray.available_resources,
        fields=("stages.generate.resources.actors", "stages.generate.resources.cpus"),
    )


def _ask_endpoint(
    cfg: GenerateConfig, ctx: Context, origins: "Origins", form: "Form", chat: bool, journal: "Journal"
) -> None:
    """All rows that have no answer yet; those whose failure may pass are asked again."""
    from stages.serving.remote import Remote
    from stages.text.generating import ROWS_PER_WINDOW
    from stages.text.questions import Question, Unanswerable, seed_of

    assert cfg.endpoint is not None  # `check` saw to it
    decoding, resources = cfg.decoding, cfg.resources
    remote = Remote(
        base_url=cfg.endpoint.base_url, model=cfg.endpoint.model, key=_key(cfg.endpoint.api_key_env),
        temperature=decoding.temperature, top_p=decoding.top_p, max_tokens=decoding.max_tokens,
        stop=tuple(decoding.stop), concurrency=resources.concurrency, timeout_s=resources.request_timeout_s,
        retries=resources.request_retries,
    )  # fmt: skip
    done = failed = 0

    def questions() -> Iterator[tuple[int, int, Question]]:
        nonlocal done
        for order in origins.orders():
            known = journal.read(order["window"])
            for position, record in origins.rows(order):
                if position in known and not known[position].get("again"):
                    done += 1
                    continue
                try:
                    yield position, seed_of(ctx.seed, record.id), form.question(record, chat=chat)
                except Unanswerable as problem:
                    entry = {"bad": problem.reason, "detail": problem.detail}
                    journal.add(order["window"], [(position, entry)])

    for position, entry in remote.answers(questions()):
        journal.add(position // ROWS_PER_WINDOW, [(position, entry)])
        done, failed = done + 1, failed + ("bad" in entry)
        if failed > cfg.max_bad_fraction * origins.total:
            raise StageError(
                f"{failed:,} of {origins.total:,} rows were not answered by {cfg.endpoint.base_url} (the last: "
                f"{entry['bad']} {entry.get('detail', '')}), at most {cfg.max_bad_fraction:.1%} may fail "
                "(stages.generate.max_bad_fraction); what is answered is kept: run again to go on"
            )
        ctx.progress(0.95 * done / origins.total, f"{done:,} of {origins.total:,} rows")


def _key(variable: str | None) -> str:
    if variable is None:
        return "none"
    key = os.environ.get(variable, "")
    if not key:
        raise StageError(
            f"stages.generate.endpoint.api_key_env={variable}: this environment variable is not set; export it, or set null"
        )
    return key


def _refuse(cfg: GenerateConfig, tally: "Tally") -> None:
    bad = tally.quarantined.total()
    if bad > cfg.max_bad_fraction * tally.asked:
        table = "\n".join(f"  {count:>9,}  {reason}" for reason, count in tally.quarantined.most_common())
        raise StageError(
            f"{bad:,} of {tally.asked:,} rows could not be asked about or answered, at most {cfg.max_bad_fraction:.1%} may "
            f"(stages.generate.max_bad_fraction):\n{table}"
        )
    if not tally.rows:
        table = "\n".join(
            f"  {count:>9,}  {reason}: {DROPPED[reason]}" for reason, count in tally.dropped.most_common()
        )
        raise StageError(f"no row is left of {tally.asked:,}:\n{table}")


def _report(cfg: GenerateConfig, ctx: Context, tally: "Tally") -> None:
    numbers = {"rows_in": tally.asked, "rows": tally.rows, "characters": tally.characters}
    numbers |= {"quarantined": tally.quarantined.total(), **tally.tokens}
    numbers |= {f"dropped_{reason}": count for reason, count in tally.dropped.items()}
    ctx.tracker.log_metrics({name: float(value) for name, value in numbers.items()})
    left = ", ".join(f"{count:,} {reason}" for reason, count in sorted((tally.dropped + tally.quarantined).items()))
    made = "scored" if cfg.score else "made"
    if tally.scores:
        mean = tally.described_scores()["mean"]
        ctx.tracker.log_metrics({"score_mean": mean})
        made = f"scored {mean:.4g} on average"
    ctx.headline(f"{tally.rows:,} rows {made} of {tally.asked:,}; left: {left or 'none'}")


def _summary(
    cfg: GenerateConfig, tally: "Tally", given: Rows | Corpus, checkpoint: Checkpoint | None
) -> dict[str, Any]:
    """Facts of the artifact, with the name of the model that wrote it."""
    facts: dict[str, Any] = {"rows": tally.rows, "characters": tally.characters}
    facts |= {"kind": "scored" if cfg.score else "generated", "rows_in": tally.asked, "origin_digest": given.digest}
    facts |= {"quarantined": tally.quarantined.total(), "reasons": dict(tally.quarantined)}
    facts |= {"dropped": dict(tally.dropped), **tally.tokens}
    left = sorted((tally.quarantined + tally.dropped).items())
    steps = [("in", tally.asked), *left, ("out", tally.rows)]
    facts["waterfall"] = [{"step": step, "rows": rows} for step, rows in steps]
    if checkpoint is not None:
        facts["model"] = {"digest": checkpoint.digest}
    if cfg.endpoint is not None:
        facts["model"] = {name: getattr(cfg.endpoint, name) for name in ("base_url", "model", "revision")}
    if tally.scores:
        facts["scores"] = tally.described_scores()
    weights = {each["name"]: each.get("weight", 1.0) for each in given.summary().get("sources", [])}
    facts["sources"] = [
        {"name": name, "weight": weights.get(name, 1.0), "rows": counts["rows"], "characters": counts["characters"]}
        for name, counts in sorted(tally.sources.items())
    ]
    return facts
