#!/usr/bin/env python3
"""Builds an image with the server as an OCI archive, without Docker and without root.

  image.py build   target/image/fencepost-VERSION-ARCHITECTURE.oci.tar, from target/release/fencepost
                   or the program in FENCEPOST_BINARY, and packages of this machine's Debian
  image.py check   unpacks the archive, and runs the program in it as root of that folder

What it holds is what a run needs: the program, the C library, certificates of authorities and time
zones. There is no shell. Two builds from the same program and packages have the same digest.
"""

import gzip
import hashlib
import io
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
WORK = ROOT / "target" / "image"
# What the program links to, and what it reads.
PACKAGES = ["base-files", "ca-certificates", "libc6", "libgcc-s1", "tzdata"]
# Folders of these that no run reads.
DROPPED = ["usr/share/doc-base", "usr/share/lintian", "usr/share/man", "usr/sbin", "usr/bin", "sbin"]
# Folders of packages that only root reads.
ROOTS = ["root"]
# The user of the images of distroless, so that either image has the same right to mounted files.
USER_ID = 65532
USERS = f"root:x:0:0:root:/root:/sbin/nologin\nnonroot:x:{USER_ID}:{USER_ID}:nonroot:/:/sbin/nologin\n"
GROUPS = f"root:x:0:\nnonroot:x:{USER_ID}:\n"
PROGRAM = "usr/local/bin/fencepost"
LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar+gzip"
CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
# As in ops/Dockerfile.
RUN = {
    "User": str(USER_ID),
    "ExposedPorts": {"7070/tcp": {}, "7071/tcp": {}},
    "Entrypoint": ["/" + PROGRAM],
    "Cmd": ["serve"],
    "Env": ["SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt"],
    "WorkingDir": "/",
    "StopSignal": "SIGTERM",
}


def printed(*command):
    run = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return run.stdout.strip()


def version():
    found = json.loads(printed("cargo", "metadata", "--no-deps", "--offline", "--format-version=1"))
    return next(it["version"] for it in found["packages"] if it["name"] == "fencepost")


def archive_path():
    return WORK / f"fencepost-{version()}-{printed('dpkg', '--print-architecture')}.oci.tar"


def unpack_packages(into):
    """The files of the packages, and what their installation would make of them."""
    downloads = WORK / "packages"
    shutil.rmtree(downloads, ignore_errors=True)
    downloads.mkdir(parents=True)
    # Downloads need no root, but a folder that apt's own user may write to, or none.
    options = ["-q", "-o", "APT::Sandbox::User=root"] if os.geteuid() == 0 else ["-q"]
    subprocess.run(["apt-get", *options, "download", *PACKAGES], cwd=downloads, check=True)
    for package in sorted(downloads.glob("*.deb")):
        subprocess.run(["dpkg-deb", "--extract", str(package), str(into)], check=True)
    for path in DROPPED:
        shutil.rmtree(into / path, ignore_errors=True)
    authorities = sorted((into / "usr/share/ca-certificates").rglob("*.crt"))
    bundle = into / "etc/ssl/certs/ca-certificates.crt"
    bundle.parent.mkdir(parents=True, exist_ok=True)
    bundle.write_text("".join(it.read_text() for it in authorities))
    (into / "etc/passwd").write_text(USERS)
    (into / "etc/group").write_text(GROUPS)
    return sorted(it.name for it in downloads.glob("*.deb"))


def layer(folder, moment):
    """An archive of a folder, the same for the same files."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in sorted(folder.rglob("*")):
            entry = tar.gettarinfo(path, str(path.relative_to(folder)))
            entry.uid = entry.gid = 0
            entry.uname = entry.gname = ""
            entry.mtime = moment
            if path.is_file() and not path.is_symlink():
                # Hard links would depend on the order of extraction.
                entry.type, entry.linkname, entry.size = tarfile.REGTYPE, "", path.stat().st_size
                with path.open("rb") as file:
                    tar.addfile(entry, file)
            else:
                tar.addfile(entry)
    return plain.getvalue()


class Image:
    """An OCI layout, as files by their names."""

    def __init__(self):
        self.files = {"oci-layout": json.dumps({"imageLayoutVersion": "1.0.0"}).encode()}

    def add(self, media_type, content):
        digest = hashlib.sha256(content).hexdigest()
        self.files[f"blobs/sha256/{digest}"] = content
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(content)}

    def write(self, path):
        with tarfile.open(path, "w") as tar:
            for name, content in sorted(self.files.items()):
                entry = tarfile.TarInfo(name)
                entry.size, entry.mode = len(content), 0o644
                tar.addfile(entry, io.BytesIO(content))


def build():
    # The image's user is another one.
    os.umask(0o022)
    program = pathlib.Path(os.environ.get("FENCEPOST_BINARY", ROOT / "target/release/fencepost"))
    if not program.exists():
        sys.exit(f"image: {program} is missing: `cargo build --locked --release -p fencepost`")
    for old in WORK.glob("*.oci.tar"):
        old.unlink()
    base, own = WORK / "base", WORK / "own"
    for folder in (base, own):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    packages = unpack_packages(base)
    (own / PROGRAM).parent.mkdir(parents=True)
    shutil.copy(program, own / PROGRAM)
    (own / PROGRAM).chmod(0o755)
    moment = int(os.environ.get("SOURCE_DATE_EPOCH") or printed("git", "log", "-1", "--format=%ct"))
    image, layers, diffs = Image(), [], []
    for folder in (base, own):
        plain = layer(folder, moment)
        diffs.append(f"sha256:{hashlib.sha256(plain).hexdigest()}")
        layers.append(image.add(LAYER_TYPE, gzip.compress(plain, mtime=0)))
    created = printed("date", "--utc", f"--date=@{moment}", "+%Y-%m-%dT%H:%M:%SZ")
    labels = {
        "org.opencontainers.image.title": "Fencepost",
        "org.opencontainers.image.version": version(),
        "org.opencontainers.image.licenses": "MIT OR Apache-2.0",
        "org.opencontainers.image.revision": printed("git", "rev-parse", "HEAD"),
    }
    config = {
        "created": created,
        "architecture": printed("dpkg", "--print-architecture"),
        "os": "linux",
        "config": {**RUN, "Labels": labels},
        "rootfs": {"type": "layers", "diff_ids": diffs},
        "history": [
            {"created": created, "created_by": "packages: " + " ".join(packages)},
            {"created": created, "created_by": "fencepost"},
        ],
    }
    config = image.add(CONFIG_TYPE, json.dumps(config, sort_keys=True).encode())
    manifest = {
        "schemaVersion": 2, "mediaType": MANIFEST_TYPE, "config": config, "layers": layers,
    }
    manifest = image.add(MANIFEST_TYPE, json.dumps(manifest, sort_keys=True).encode())
    names = {"org.opencontainers.image.ref.name": version()}
    index = {"schemaVersion": 2, "manifests": [{**manifest, "annotations": names}]}
    image.files["index.json"] = json.dumps(index, sort_keys=True).encode()
    # `docker load` of older versions reads this instead of the index.
    paths = ["blobs/" + it["digest"].replace(":", "/") for it in [config, *layers]]
    old = [{"Config": paths[0], "RepoTags": [f"fencepost:{version()}"], "Layers": paths[1:]}]
    image.files["manifest.json"] = json.dumps(old).encode()
    path = archive_path()
    image.write(path)
    size = path.stat().st_size / 1e6
    print(f"image: {path.relative_to(ROOT)}, {size:.0f} MB, {manifest['digest']}")


def blob(archive, described):
    content = archive.extractfile("blobs/" + described["digest"].replace(":", "/")).read()
    if described["digest"] != f"sha256:{hashlib.sha256(content).hexdigest()}":
        sys.exit(f"image: {described['digest']} has another content")
    return content


def check():
    """The archive is whole, and the program runs with nothing but its files."""
    inside = WORK / "inside"
    shutil.rmtree(inside, ignore_errors=True)
    with tarfile.open(archive_path()) as archive:
        index = json.loads(archive.extractfile("index.json").read())
        manifest = json.loads(blob(archive, index["manifests"][0]))
        config = json.loads(blob(archive, manifest["config"]))
        for it in manifest["layers"]:
            content = gzip.decompress(blob(archive, it))
            digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
            if digest not in config["rootfs"]["diff_ids"]:
                sys.exit(f"image: the config does not list {digest}")
            with tarfile.open(fileobj=io.BytesIO(content)) as tar:
                hidden = [it.name for it in tar if not it.issym() and not it.mode & 0o004]
                if hidden := [it for it in hidden if it not in ROOTS]:
                    sys.exit(f"image: its user cannot read {hidden}")
                tar.extractall(inside, filter="tar")
    entry = config["config"]["Entrypoint"][0]
    run = ["unshare", "--map-root-user", "--root", str(inside), entry, "--version"]
    try:
        print(f"image: {printed(*run)} runs in it")
    except subprocess.CalledProcessError as error:
        sys.exit(f"image: the program does not run in it ({error}): has this host user namespaces?")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["build"]:
            build()
        case ["check"]:
            check()
        case _:
            sys.exit(__doc__)
