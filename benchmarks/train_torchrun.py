"""One rank of the benchmark's job under torchrun: `torchrun ... -m benchmarks.train_torchrun <dataset> <work> <steps>`, then
options of `workload.config` as name=value.

The loop finds RANK and WORLD_SIZE by itself: this file is all that a launcher other than Ray needs.
"""

import sys
from pathlib import Path

from benchmarks import workload
from stages.training.loop import run

if __name__ == "__main__":
    run(workload.job(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), **workload.how_of(sys.argv[4:])))
