"""Folders that are there whole or not at all, and symbolic links that stay inside them."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from dsabisect.errors import StoreError


@contextlib.contextmanager
def appearing(dest: Path) -> Iterator[Path]:
    """A temporary folder beside ``dest`` that takes its name when the block ends well, and goes when it does not."""
    temporary = dest.with_name(f".{dest.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        dest.parent.mkdir(parents=True, exist_ok=True)
        if dest.is_dir() and any(dest.iterdir()):
            raise StoreError("the folder for a checkout is not empty", where=str(dest), remedy="Remove it first")
        temporary.mkdir()
        yield temporary
        os.rename(temporary, dest)
    except OSError as error:
        raise StoreError(f"cannot write a checkout: {error.strerror or error}", where=str(dest),
                         remedy="Free some space, or give another folder with --out") from error  # fmt: skip
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def inside(path: Path, folder: Path) -> bool:
    real, root = os.path.realpath(path), os.path.realpath(folder)
    return os.path.commonpath([real, root]) == root


def drop_escaping_links(folder: Path, links: Sequence[str]) -> None:
    """Remove symbolic links that lead out of ``folder``, until none does: one may have led through another."""
    left = [folder / link for link in links]
    while True:
        escaping = [x for x in left if os.path.isabs(os.readlink(x)) or not inside(x, folder)]
        for link in escaping:
            link.unlink()
        left = [link for link in left if link not in escaping]
        if not escaping:
            return


def copy_folder(source: Path, target: Path) -> None:
    """Copy the files of ``source``, without anything called .git and without links that lead out of it."""
    with appearing(target) as temporary:
        try:
            shutil.copytree(source, temporary, symlinks=True, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".git"))
        except shutil.Error as error:
            raise StoreError(f"cannot copy a submodule: {error.args[0][0][2]}", where=str(source),
                             remedy="Check that its files can be read and that there is space") from error  # fmt: skip
        found = (Path(root) / name for root, folders, files in os.walk(temporary) for name in folders + files)
        drop_escaping_links(temporary, [str(x.relative_to(temporary)) for x in found if x.is_symlink()])
