"""Real text that every Python installation carries, as bytes, in domains with held-out parts.

See DATA.md for what the domains are. Everything is a function of the Python version alone: no
download, no randomness but the seeds of samples.
"""

import ast
import functools
import hashlib
import html.entities
import importlib
import inspect
import pathlib
import pydoc_data.topics
import unicodedata
from collections.abc import Callable, Iterator

import numpy as np

VOCAB_SIZE = 256
# A domain is cut at this size, so that all weigh about the same and none is slow to make.
DOMAIN_BYTES = 400_000
# Text is cut into blocks of this size, every tenth of which is held out.
BLOCK_BYTES = 4_000
HELD_OUT_EVERY = 10

# Modules of pure Python that every installation has, in the order in which they are read.
MODULES = (
    "argparse ast base64 bisect calendar cmd codecs collections configparser contextlib copy csv "
    "dataclasses datetime difflib doctest enum fileinput fnmatch fractions functools gettext glob "
    "hashlib heapq inspect io json.decoder json.encoder keyword linecache locale logging "
    "mimetypes numbers operator optparse os pathlib pickle pickletools platform pprint queue "
    "random reprlib sched selectors shelve shlex shutil socket statistics string subprocess "
    "tarfile tempfile textwrap threading timeit tokenize trace traceback types typing urllib.parse "
    "uuid warnings weakref zipapp zipfile"
).split()
CODE_PAGES = (
    *(f"cp{n}" for n in (1250, 1251, 1252, 1253, 1254, 1255, 1256, 1257, 1258, 437, 850, 866)),
    *(f"iso8859_{n}" for n in (*range(1, 12), *range(13, 17))),
    *(f"mac_{name}" for name in ("roman", "greek", "cyrillic", "turkish", "iceland", "latin2")),
)


def prose() -> Iterator[str]:
    """The language reference's sections, as Python's own help shows them."""
    yield from (text for _, text in sorted(pydoc_data.topics.topics.items()))


def source() -> Iterator[str]:
    """Python source of the standard library."""
    yield from map(_source_of, MODULES)


def docstrings() -> Iterator[str]:
    """What the standard library's modules, classes and functions say of themselves."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for name in MODULES:
        for node in ast.walk(ast.parse(_source_of(name))):
            if isinstance(node, documented) and (text := ast.get_docstring(node)):
                yield text + "\n\n"


def characters() -> Iterator[str]:
    """Unicode's characters with their categories and names, in the order of their numbers."""
    for number in range(0x20, 0x3000):
        if name := unicodedata.name(chr(number), ""):
            yield f"U+{number:04X}\t{unicodedata.category(chr(number))}\t{name}\n"


def code_pages() -> Iterator[str]:
    """Decoding tables of 8-bit encodings."""
    yield from (_source_of(f"encodings.{name}") for name in CODE_PAGES)


def entities() -> Iterator[str]:
    """HTML's named characters."""
    for name, text in sorted(html.entities.html5.items()):
        points = " ".join(f"U+{ord(c):04X}" for c in text)
        yield f'<tr><td>&amp;{name}</td><td>{points}</td><td title="{text}">&{name}</td></tr>\n'


DOMAINS: dict[str, Callable[[], Iterator[str]]] = {
    f.__name__: f for f in (prose, source, docstrings, characters, code_pages, entities)
}


@functools.cache
def domain_bytes(name: str) -> np.ndarray:
    """The text of a domain in UTF-8: uint8 (n,), n at most `DOMAIN_BYTES`."""
    text, size = [], 0
    for piece in DOMAINS[name]():
        text.append(piece.encode())
        size += len(text[-1])
        if size >= DOMAIN_BYTES:
            break
    return np.frombuffer(b"".join(text)[:DOMAIN_BYTES], np.uint8)


@functools.cache
def blocks(name: str, held_out: bool = False) -> np.ndarray:
    """One part of a domain: uint8 (n_blocks, `BLOCK_BYTES`); what is left over is dropped."""
    data = domain_bytes(name)
    data = data[: len(data) // BLOCK_BYTES * BLOCK_BYTES].reshape(-1, BLOCK_BYTES)
    is_held_out = np.arange(len(data)) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
    return data[is_held_out == held_out]


def batch(name: str, rows: int, length: int, *, seed: int, first: int) -> np.ndarray:
    """Samples ``first`` to ``first + rows`` of an endless sequence: int32 (rows, length).

    Each is a window drawn from (seed, its number), so that a run that resumes, or cuts its batches
    elsewhere, sees what it would have seen.
    """
    part = blocks(name)
    sizes = (len(part), BLOCK_BYTES - length + 1)
    places = [np.random.default_rng([seed, first + i]).integers(sizes) for i in range(rows)]
    block, start = np.asarray(places).T[..., None]
    return part[block, start + np.arange(length)].astype(np.int32)


def held_out_batch(name: str, rows: int, length: int) -> np.ndarray:
    """The same held-out rows each time, spread over all held-out blocks: int32 (rows, length)."""
    part = blocks(name, held_out=True)
    places = np.linspace(0, len(part) * (BLOCK_BYTES // length) - 1, rows).astype(int)
    block, window = np.divmod(places, BLOCK_BYTES // length)
    return part[block[:, None], window[:, None] * length + np.arange(length)].astype(np.int32)


def card() -> str:
    """A markdown table of the domains: bytes, blocks, a digest and how one begins."""
    lines = [
        "| domain | what | bytes | train / held-out blocks | sha256 |",
        "|" + " --- |" * 5,
    ]
    for name, make in DOMAINS.items():
        data = domain_bytes(name)
        parts = f"{len(blocks(name))} / {len(blocks(name, held_out=True))}"
        digest = hashlib.sha256(data.tobytes()).hexdigest()[:12]
        what = inspect.getdoc(make).rstrip(".")
        lines.append(f"| `{name}` | {what} | {len(data):,} | {parts} | `{digest}` |")
    return "\n".join(lines)


def _source_of(module: str) -> str:
    return pathlib.Path(importlib.import_module(module).__file__).read_text(encoding="utf-8")


if __name__ == "__main__":
    print(card())
