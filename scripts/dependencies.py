#!/usr/bin/env python3
"""Keeps the compiled dependencies of debug builds outside of the clone, for the next clone.

  dependencies.py restore   puts them into an empty target/
  dependencies.py keep      keeps those of target/, instead of any others

Crates of the registry compile to the same in each clone. Those of the workspace are not kept, nor
those whose build script writes the clone's path into the crate's source.
"""

import fcntl
import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
TARGET = ROOT / "target" / "debug"
PARTS = (".fingerprint", "build", "deps")
CACHE = pathlib.Path(os.environ.get("FENCEPOST_CACHE", pathlib.Path.home() / ".cache/fencepost"))
# One build has less than 2 GB of them; more are not kept.
MAX_BYTES = 4 * 1024**3


def folder():
    """Where the dependencies of this lock file and this compiler are, as this script keeps them."""
    rustc = subprocess.run(["rustc", "-vV"], check=True, capture_output=True).stdout
    key = hashlib.sha256(rustc)
    for file in (ROOT / "Cargo.lock", ROOT / "Cargo.toml", pathlib.Path(__file__)):
        key.update(file.read_bytes())
    return CACHE / "dependencies" / key.hexdigest()[:16]


def restore():
    kept = folder()
    if not kept.exists() or TARGET.exists():
        return
    # Under another name until it is complete: Cargo trusts what it finds.
    part = TARGET.with_name("debug.part")
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(kept, part, symlinks=True)
    part.rename(TARGET)
    print(f"dependencies: compiled ones are those of {kept}")


def of_workspace():
    """Names that files of the workspace's own crates begin with."""
    command = "cargo metadata --no-deps --format-version 1 --locked --offline"
    found = subprocess.run(command.split(), cwd=ROOT, check=True, capture_output=True)
    names = set()
    for package in json.loads(found.stdout)["packages"]:
        names.add(package["name"])
        names.update(target["name"] for target in package["targets"])
    return names | {name.replace("-", "_") for name in names}


def crate_of(path):
    """The crate of the folder `NAME-HASH`, or of the file `libNAME-HASH.rlib` or `NAME-HASH.d`."""
    return path.name.split(".")[0].rpartition("-")[0]


def of_this_place():
    """Names of crates with generated source that names this clone. Another one could not read it
    when it compiles the crate again, for other features or without code."""
    place, names = str(ROOT).encode(), set()
    for folder in (TARGET / "build").iterdir():
        if any(place in file.read_bytes() for file in folder.glob("out/**/*.rs")):
            names.add(crate_of(folder))
    return names | {name.replace("-", "_") for name in names}


def size(path):
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def keep():
    kept = folder()
    if kept.exists():
        return
    left = of_workspace() | of_this_place()
    taken = []
    for part in PARTS:
        for path in (TARGET / part).iterdir():
            name = crate_of(path)
            if name and name not in left and name.removeprefix("lib") not in left:
                taken.append(path)
    bytes_taken = sum(size(path) for path in taken)
    if bytes_taken > MAX_BYTES:
        print(f"dependencies: not kept, {bytes_taken / 1e9:.1f} GB are too many")
        return
    shutil.rmtree(kept.parent, ignore_errors=True)
    part = kept.with_name("part")
    for path in taken:
        copy = part / path.relative_to(TARGET)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            shutil.copytree(path, copy, symlinks=True)
        else:
            shutil.copy2(path, copy)
    part.rename(kept)
    print(f"dependencies: kept {bytes_taken / 1e9:.1f} GB in {kept}")


if __name__ == "__main__":
    commands = {"restore": restore, "keep": keep}
    if len(sys.argv) != 2 or sys.argv[1] not in commands:
        sys.exit(__doc__)
    CACHE.mkdir(parents=True, exist_ok=True)
    try:
        with (CACHE / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            commands[sys.argv[1]]()
    except OSError as error:
        # Without them a build takes longer, and no more than that.
        print(f"dependencies: {error}")
