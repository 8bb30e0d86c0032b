"""The data stages in one process, without Ray: another process on another day gives the same bytes."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIFE = """
import hashlib, json, pathlib, sys
from stages.contract import Context, Executor
from stages.ingest import IngestConfig, IngestResources, SourceConfig, ingest
from stages.clean import CleanConfig, CleanResources, clean
from stages.tokenize import TokenizeConfig, TokenizeResources, tokenize

source, place, blocks = sys.argv[1], pathlib.Path(sys.argv[2]), int(sys.argv[3])

class Silent:
    def __getattr__(self, name):
        return lambda *a, **k: None

def context(name):
    output, work = place / name, place / f"{name}.work"
    output.mkdir(parents=True), work.mkdir()
    quiet = Silent()
    return Context(output=output, work=work, state=place, fingerprint="0" * 64, seed=0, tracker=quiet, registry=quiet,
                   progress=quiet.progress, headline=quiet.headline)

def digest(directory):
    files = sorted(f for f in directory.rglob("*") if f.is_file())
    return hashlib.sha256(b"".join(f.relative_to(directory).as_posix().encode() + f.read_bytes() for f in files)).hexdigest()

resources = IngestResources(blocks=blocks, executor=Executor.inline)
rows = ingest(IngestConfig(source=SourceConfig(path=source), resources=resources), context("ingest"))
corpus = clean(CleanConfig(resources=CleanResources(blocks=blocks, executor=Executor.inline)), context("clean"), rows)
resources = TokenizeResources(blocks=blocks, executor=Executor.inline)
tokens = tokenize(TokenizeConfig(vocab_size=300, sequence_length=32, resources=resources), context("tokenize"), corpus)
print(json.dumps({"digests": [digest(a.local()) for a in (rows, corpus, tokens)], "ray": "ray" in sys.modules}))
"""


def test_three_data_stages_give_one_digest_each_in_any_process_and_load_no_ray(tmp_path: Path) -> None:
    answers = []
    for hash_seed, blocks, place in ((1, 1, "a"), (2, 7, "another place")):
        source = tmp_path / place / "rows.jsonl"
        source.parent.mkdir()
        source.write_text("".join(json.dumps({"text": f"row {i % 250} of many, wörds"}) + "\n" for i in range(300)))
        command = [sys.executable, "-c", LIFE, str(source), str(tmp_path / place / "out"), str(blocks)]
        env = {**os.environ, "PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": str(ROOT)}
        run = subprocess.run(
            command, cwd=tmp_path / place, env=env, capture_output=True, text=True, timeout=100, check=False
        )
        assert run.returncode == 0, run.stderr
        answers.append(json.loads(run.stdout.splitlines()[-1]))
    assert answers[0] == answers[1]
    assert answers[0]["ray"] is False and len(set(answers[0]["digests"])) == 3
