"""The command line as people type it (`python -m tests.faults.command run ...`), with the stages of this directory among the verbs."""

import sys

from pipelines.__main__ import main
from tests.faults import crowd, stages  # noqa: F401 (registered by being imported)

if __name__ == "__main__":
    sys.exit(main())
