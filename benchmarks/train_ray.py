"""The same job through the train stage, as `make run` does it, on the running local head:
`python -m benchmarks.train_ray <dataset> <work> <steps> <state>`, then options of `workload.config` as name=value."""

import hashlib
import sys
from pathlib import Path

from benchmarks import bare, workload
from pipelines import cluster
from pipelines.config import ClusterConfig
from stages.artifacts import TokenDataset
from stages.train import train


def main(dataset: Path, work: Path, steps: int, state: Path, **how: int) -> None:
    output = work / "published"
    output.mkdir(parents=True)
    fingerprint = hashlib.sha256(str(work).encode()).hexdigest()  # a Ray Train run of its own, never resumed
    context = bare.context(output, work, fingerprint)
    with cluster.connect(ClusterConfig(), state):
        train(workload.config(steps, **how), context, TokenDataset(uri=dataset.as_uri()))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), **workload.how_of(sys.argv[5:]))
