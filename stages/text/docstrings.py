"""The documentation of the installed Python standard library as rows. Apart, because it runs as a program of its own.

Signatures rendered from live objects leak: a default such as `os.environ` prints the whole process environment, others
carry addresses and home paths. So Python modules are parsed and never imported (`ast`), only modules written in C are
imported, for their static `__doc__` and `__text_signature__`, and all of it happens in a child process that has no
environment to leak: `python -I -S docstrings.py` prints one JSON row a line, in the order of the qualified names.
"""

import ast
import contextlib
import functools
import hashlib
import importlib
import importlib.machinery
import inspect
import json
import os
import platform
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ALIASES = {
    "_collections_abc": "collections.abc",
    "_thread": "threading",
    "genericpath": "os.path",
    "posix": "os",
    "posixpath": "os.path",
}
"""Modules that people know under another name; a private C module `_x` counts as `x` where the library has an `x`."""

_EXCLUDED = (
    # tests and demonstrations
    "antigravity idlelib pydoc_data test this turtledemo"
    # what distributions pack apart from Python, so that it is on one machine and not on the next
    " curses distutils ensurepip lib2to3 readline tkinter turtle"
    # what speaks of another operating system
    " msilib msvcrt nt ntpath nturl2path winreg winsound"
    # what later Pythons no longer have (PEP 594 and the modules that went with it)
    " aifc asynchat asyncore audioop cgi cgitb chunk crypt imghdr imp mailcap nis nntplib ossaudiodev pipes sndhdr"
    " smtpd spwd sunau telnetlib uu xdrlib"
)
EXCLUDED = frozenset(_EXCLUDED.split())

ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,}")
"""What an object's address looks like, as in the examples of a few docstrings: no two machines print the same."""


def rows() -> list[tuple[str, str, str]]:
    """(qualified name, module, text) of every documented public object, by qualified name, collected in a child."""
    keep = {name: value for name, value in os.environ.items() if name == "LD_LIBRARY_PATH"}  # some builds need it
    command = [sys.executable, "-I", "-S", "-B", str(Path(__file__).resolve())]
    child = subprocess.run(command, env=keep, cwd="/", stdin=subprocess.DEVNULL, capture_output=True)
    if child.returncode:
        reason = child.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise ChildProcessError(f"reading the standard library's documentation failed: {reason}")
    return [tuple(json.loads(line)) for line in child.stdout.splitlines()]


@functools.cache
def identity() -> str:
    """`3.11.7-<64 hex>`: Python's version; digest of the modules that are parsed and of the names of those imported.
    Once a process: it reads 8 MB, and a sweep asks for it at every point."""
    digest = hashlib.sha256()
    for path in sources():
        digest.update(f"{path.relative_to(root()).as_posix()}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    digest.update("\0".join(extensions()).encode())
    return f"{platform.python_version()}-{digest.hexdigest()}"


@functools.cache
def root() -> Path:
    """Where the standard library of this interpreter lies."""
    return Path(sysconfig.get_path("stdlib"))


def sources() -> list[Path]:
    """The library's own Python modules that rows are taken from."""
    found = []
    for name in sys.stdlib_module_names - EXCLUDED:  # by name: site-packages lies in the same directory
        found += [root() / f"{name}.py", *(root() / name).rglob("*.py")]
    return sorted(path for path in found if path.is_file() and public_module(path) is not None)


def extensions() -> list[str]:
    """Names of the modules written in C that this interpreter can import."""
    suffixes = tuple(importlib.machinery.EXTENSION_SUFFIXES)
    loadable = {path.name.split(".")[0] for path in (root() / "lib-dynload").glob("*") if path.name.endswith(suffixes)}
    known = (loadable | set(sys.builtin_module_names)) & sys.stdlib_module_names
    return sorted(name for name in known - {"_ast"} if public_name(name) is not None)  # _ast is a grammar, no prose


def public_module(path: Path) -> str | None:
    """The name under which people import the module in this file, or None when it is private or left out."""
    parts = list(path.relative_to(root()).with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    if not parts or parts[0] not in sys.stdlib_module_names - EXCLUDED:  # Debian adds a sitecustomize of its own
        return None
    private = any(part.startswith("_") for part in parts) and parts[0] not in ALIASES
    if private or not {"test", "tests"}.isdisjoint(parts):
        return None
    return ALIASES.get(parts[0], ".".join(parts))


def public_name(extension: str) -> str | None:
    name = ALIASES.get(extension, extension.lstrip("_"))
    if name.split(".")[0] not in sys.stdlib_module_names or name in EXCLUDED:
        return None
    return name


def parsed(path: Path, module: str) -> Iterator[tuple[str, str]]:
    """(qualified name, text) of what one Python file documents, from its syntax tree."""
    yield from _definitions(ast.parse(path.read_bytes()).body, module, in_class=False)


def _definitions(nodes: list[ast.stmt], prefix: str, *, in_class: bool) -> Iterator[tuple[str, str]]:
    for node in _statements(nodes):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        name = f"{prefix}.{node.name}"
        if doc := ast.get_docstring(node):
            yield name, f"{name}{_signature(node, in_class=in_class)}\n\n{doc}"
        if isinstance(node, ast.ClassDef):
            yield from _definitions(node.body, name, in_class=True)


def _statements(nodes: list[ast.stmt]) -> Iterator[ast.stmt]:
    """What stands in a body, also below `if`, `try` and `with`, in the order of the source."""
    for node in nodes:
        if isinstance(node, ast.If | ast.Try | ast.With):
            for field in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, field, []))
            for handler in getattr(node, "handlers", []):
                yield from _statements(handler.body)
        else:
            yield node


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, *, in_class: bool) -> str:
    """`(a, *p)` as written in the source, without `self`; a class shows what its own `__init__` takes."""
    if isinstance(node, ast.ClassDef):
        makers = [x for x in _statements(node.body) if isinstance(x, ast.FunctionDef) and x.name == "__init__"]
        return _signature(makers[0], in_class=True).partition(" -> ")[0] if makers else ""
    decorators = {ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list}
    if decorators & {"property", "cached_property", "setter", "abstractproperty"}:
        return ""
    arguments = node.args
    if in_class and "staticmethod" not in decorators:
        (arguments.posonlyargs or arguments.args or [None]).pop(0)  # type: ignore[list-item]
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"({ast.unparse(arguments)}){returns}"


def imported(extension: str, name: str) -> Iterator[tuple[str, str]]:
    """(qualified name, text) of what a module written in C documents; values and defaults are never looked at."""
    own = {extension, name, None}
    for key, value in sorted(vars(importlib.import_module(extension)).items()):
        if not key.startswith("_") and getattr(value, "__module__", None) in own:
            yield from _static(value, key if name == "builtins" else f"{name}.{key}")


def _static(value: Any, name: str) -> Iterator[tuple[str, str]]:
    if not (inspect.isclass(value) or inspect.isroutine(value)):
        return
    doc = value.__doc__
    if isinstance(doc, str) and doc.strip():
        signature = " ".join((getattr(value, "__text_signature__", None) or "").split())
        signature = re.sub(r"^\(\$\w+(, /(?=[,)]))?(, )?", "(", signature)  # `$self` and `$module` are not for callers
        yield name, f"{name}{signature}\n\n{inspect.cleandoc(doc)}"
    if inspect.isclass(value):
        for key, member in sorted(vars(value).items()):
            if not key.startswith("_") and not inspect.isclass(member):
                yield from _static(member, f"{name}.{key}")


def collect() -> dict[str, tuple[str, str]]:
    """Qualified name -> (module, text). The Python source of an object goes before the C version of it."""
    found: dict[str, tuple[str, str]] = {}
    for path in sources():
        module = public_module(path)
        assert module is not None
        for name, text in parsed(path, module):
            found.setdefault(name, (module, text))
    for extension in extensions():
        module = public_name(extension)
        assert module is not None
        with contextlib.suppress(ImportError):  # it needs a library of the system that this machine lacks
            for name, text in imported(extension, module):
                found.setdefault(name, (module, text))
    return {name: row for name, row in found.items() if not ADDRESS.search(row[1])}


if __name__ == "__main__":
    for name, (module, text) in sorted(collect().items()):
        sys.stdout.write(json.dumps([name, module, text]) + "\n")
