"""An S3-compatible server of one's own on loopback: `python -m tests.s3_server PORT`. Apart, because moto looks and then writes:
a lock around each PUT makes its create-if-absent as atomic as the one that object stores promise.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any


def one_put_at_a_time(application: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
    lock = threading.Lock()

    def serve(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] != "PUT":
            return application(environ, start_response)
        with lock:
            return list(application(environ, start_response))

    return serve


def main(port: int) -> None:
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    application = one_put_at_a_time(DomainDispatcherApplication(create_backend_app))
    make_server("127.0.0.1", port, application, threaded=True).serve_forever()


if __name__ == "__main__":
    os.environ["MOTO_S3_DEFAULT_KEY_BUFFER_SIZE"] = str(64 * 2**20)
    main(int(sys.argv[1]))
