"""One run of `generate` in a process of its own, so that a test can kill it: python -m tests.stages.generating_job JOB, a JSON
file with rows, digest, output, work, and checkpoint or base_url."""

import json
import sys
from pathlib import Path

from stages.artifacts import Checkpoint, Rows
from stages.contract import Context, Executor
from stages.generate import GenerateConfig, GenerateResources, generate
from stages.text.synthesis import Decoding, Endpoint
from tests.conftest import MemoryRegistry, MemoryTracker


def main(job: dict[str, str]) -> None:
    resources = GenerateResources(executor=Executor.inline, concurrency=4, request_retries=1)
    endpoint = Endpoint(base_url=job["base_url"], model="m", revision="1") if "base_url" in job else None
    decoding = Decoding(max_tokens=24, temperature=0.8, keep_unfinished=True)
    cfg = GenerateConfig(decoding=decoding, endpoint=endpoint, resources=resources, batch_rows=4)
    ctx = Context(
        output=Path(job["output"]), work=Path(job["work"]), state=Path(job["work"]), fingerprint="0" * 64, seed=3,
        tracker=MemoryTracker(), registry=MemoryRegistry(), progress=lambda fraction, text: None, headline=lambda text: None,
    )  # fmt: skip
    checkpoint = Checkpoint(uri=Path(job["checkpoint"]).as_uri(), digest=job["digest"]) if "checkpoint" in job else None
    generate(cfg, ctx, rows=Rows(uri=Path(job["rows"]).as_uri(), digest=job["digest"]), checkpoint=checkpoint)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text("utf-8")))
