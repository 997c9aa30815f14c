"""`headrace weights export`: a version as a model folder, out of this host's memory.

A process of its own writes it, because that loads torch; it reads the manifest from its standard input:

python -m deploy.weights_export MODEL OUT DIGESTS
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from broker.api import RunRecord, WeightsPort
from headrace.config_sources import stored
from headrace.errors import HeadraceError, Refused, WeightError
from headrace.extras import needs_train
from headrace.hosts import host_name
from headrace.version import PolicyVersion
from weightsync.leasing import exporter, leased

LONGEST_S = 3600.0


async def export(run_id: str, port: WeightsPort, version: PolicyVersion, out: Path) -> Path:
    """Under a lease, into an absolute path, which is returned.

    Raises WeightError with the reason where this host's memory does not have the version whole.
    """
    needs_train("an export", "torch", "transformers")
    record = await port.record()
    lease_s, holder = stored(record.config).weights.lease_s, exporter(host_name(), str(os.getpid()))
    async with leased(port, version, holder, lease_s):
        manifest = await port.manifest(version)
        if manifest is None:
            raise WeightError(f"run {run_id} has no weight version {version} (any more); see `headrace weights list`")
        await _write(record, manifest, out)
    return out


async def _write(record: RunRecord, manifest: bytes, out: Path) -> None:
    arguments = record.config["model"]["path"], str(out), json.dumps(record.digests)
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "deploy.weights_export", *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(LONGEST_S):
            _, said = await child.communicate(manifest)
    except TimeoutError:
        raise WeightError(f"exporting into {out} was not done after {LONGEST_S:.0f} s") from None
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    if child.returncode:
        lines = said.decode(errors="replace").strip().splitlines()
        raise WeightError(lines[-1] if lines else f"exporting into {out} failed, exit {child.returncode}")


def main(model: str, out: Path, digests: dict[str, str], data: bytes) -> int:
    from consumers.contents import tensors_of
    from consumers.export import Origin, check_place, export_tensors
    from headrace.policy.loading import model_digests
    from headrace.policy.prepare import resolve_model
    from weightsync.arena import Arena
    from weightsync.manifest import decode
    from weightsync.transports.api import Unavailable
    from weightsync.whole import read_whole

    try:
        manifest, folder = decode(data), resolve_model(model)
        check_place(out, folder)
        for name, digest in model_digests(folder).items():
            if digests.get(name, digest) != digest:
                raise Refused(f"{name} in {folder} is not that of run {manifest.run_id}; export on a host that has it")
        read = asyncio.run(read_whole(manifest, Arena()))
        if isinstance(read, Unavailable):
            raise WeightError(f"it cannot be exported: {read.reason}")
        origin, dtype = Origin(manifest.run_id, manifest.version), manifest.layout.tensors[0].dtype
        export_tensors(tensors_of(manifest.layout, read), origin, folder, out, dtype)
    except HeadraceError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    model, out, digests = sys.argv[1:]
    sys.exit(main(model, Path(out), json.loads(digests), sys.stdin.buffer.read()))
