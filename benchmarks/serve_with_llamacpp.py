"""llama.cpp's own server around a GGUF file, as its arm of `benchmarks.serve_servers`. Apart, because it runs in an environment of its own
(`benchmarks/alternatives.py`) and imports nothing of ours: `python serve_with_llamacpp.py FILE PORT THREADS SLOTS`.
"""

import sys
import threading

import xllamacpp

CONTEXT_A_SLOT = 2048


def main(file: str, port: int, threads: int, slots: int) -> None:
    parameters = xllamacpp.CommonParams()
    parameters.model.path = file
    parameters.port = port
    parameters.n_parallel = slots
    parameters.n_ctx = CONTEXT_A_SLOT * slots
    parameters.cpuparams.n_threads = threads
    parameters.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(parameters)
    print(server.listening_address, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]))
