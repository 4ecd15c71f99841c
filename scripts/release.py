#!/usr/bin/env python3
"""Puts together what a release publishes, in target/publish/: the package, the image, the list of
parts (CycloneDX), their checksums, and RELEASE.md, the page that lists them.

Run it by `make release`, which builds them.
"""

import hashlib
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
INTO = ROOT / "target" / "publish"
LISTER = "cargo-cyclonedx@0.5.9"
PAGE = """# Fencepost {version}

{changes}

## Files

| file | what it is | bytes | SHA-256 |
|---|---|---:|---|
{rows}

`SHA256SUMS` has these sums, and `SHA256SUMS.asc` is its signature. Check both first:

```sh
gpg --verify SHA256SUMS.asc SHA256SUMS && sha256sum --check SHA256SUMS
```

## Install

```sh
dpkg --install {package}                                  # Debian, Ubuntu
docker load --input {image}                               # or `podman load`
skopeo copy oci-archive:{image} docker://REGISTRY/fencepost:{version}
```

An upgrade from the last release is the runbook *Upgrade* of the documentation: migrate first, then
replace one node after the other.
"""
ABOUT = {
    ".deb": "package for Debian and Ubuntu, with units, manual pages and completions",
    ".oci.tar": "image, as an OCI archive",
    ".cdx.json": "list of all parts, as CycloneDX",
}


def run(*command, cwd=ROOT):
    subprocess.run(command, cwd=cwd, check=True)


def only(folder, pattern):
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        sys.exit(f"release: {folder} has {len(found)} files {pattern}, and should have one")
    return found[0]


def list_parts(into):
    """The lister writes beside each crate, so it works in a copy."""
    tools, copy = ROOT / "target" / "tools", ROOT / "target" / "source"
    run("cargo", "install", "--locked", "--quiet", "--root", str(tools), LISTER)
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir()
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True)
    subprocess.run(["tar", "-x"], cwd=copy, input=archive.stdout, check=True)
    run(str(tools / "bin" / "cargo-cyclonedx"), "cyclonedx", "--format", "json", cwd=copy)
    shutil.copy(copy / "fencepost.cdx.json", into)


def changes(version):
    """What the changelog says of a version."""
    text = (ROOT / "CHANGELOG.md").read_text()
    sections = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    named = {section.split("\n")[0].split(" ")[0]: section for section in sections}
    if version not in named:
        sys.exit(f"release: CHANGELOG.md has no section {version}")
    text = named[version].partition("\n")[2].strip()
    return re.sub(r"^### ", "## ", text, flags=re.MULTILINE)


def main():
    shutil.rmtree(INTO, ignore_errors=True)
    INTO.mkdir(parents=True)
    package = only(ROOT / "target" / "debian", "*.deb")
    image = only(ROOT / "target" / "image", "*.oci.tar")
    version = package.name.split("_")[1].split("-")[0]
    for file in (package, image):
        shutil.copy(file, INTO)
    list_parts(INTO / f"fencepost-{version}.cdx.json")
    rows, sums = [], []
    for file in sorted(INTO.iterdir()):
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        about = next(text for end, text in ABOUT.items() if file.name.endswith(end))
        rows.append(f"| `{file.name}` | {about} | {file.stat().st_size} | `{digest}` |")
        sums.append(f"{digest}  {file.name}\n")
    (INTO / "SHA256SUMS").write_text("".join(sums))
    page = PAGE.format(
        version=version, changes=changes(version), rows="\n".join(rows), package=package.name,
        image=image.name,
    )
    (INTO / "RELEASE.md").write_text(page)
    print(f"release: {len(rows)} files, SHA256SUMS and RELEASE.md are in {INTO.relative_to(ROOT)}")
    print("release: sign the sums: gpg --armor --detach-sign target/publish/SHA256SUMS")


if __name__ == "__main__":
    main()
