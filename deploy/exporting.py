"""`headrace export`: a checkpoint of a run as a model folder.

A process of its own writes it, because that loads torch:

python -m deploy.exporting RUN_FOLDER MODEL_FOLDER OUT DTYPE CHECKPOINT
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from deploy.run_folder import RunFolder
from headrace.config import Config
from headrace.errors import CheckpointError, HeadraceError, ModelError
from headrace.extras import needs_train

_LONGEST_S = 3600.0


def export_newest(run: RunFolder, out: Path) -> Path:
    """The newest checkpoint, as `export_checkpoint`."""
    return export_checkpoint(run, None, out)


def export_checkpoint(run: RunFolder, folder: Path | None, out: Path) -> Path:
    """Of the checkpoint in `folder`, or the newest one. Returns where it was written.

    Raises CheckpointError with the reason when there is no checkpoint, or it cannot be exported, ServiceError where
    this installation has no torch.
    """
    needs_train("an export", "torch", "transformers")
    facts = run.read_json(run.facts_file)
    if facts is None:
        raise ModelError(f"run {run.run_id} does not say where its model lies ({run.facts_file} is missing)")
    config = Config.model_validate(run.read_json(run.config_file) or {})
    arguments = [str(run.path), facts["folder"], str(out.absolute()), config.model.wire_dtype, str(folder or "")]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "deploy.exporting", *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LONGEST_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise CheckpointError(f"exporting run {run.run_id} was not done after {_LONGEST_S:.0f} s") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise CheckpointError(lines[-1] if lines else f"exporting run {run.run_id} failed, exit {done.returncode}")
    return out.absolute()


def main(folder: Path, model_folder: Path, out: Path, dtype: str, wanted: str) -> int:
    from consumers import checkpoint
    from consumers.export import export

    found = checkpoint.newest(folder)
    try:
        if found is None:
            raise CheckpointError(f"run {folder.name} has no checkpoint yet")
        export(Path(wanted) if wanted else found[1], model_folder, out, dtype)
    except HeadraceError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    run_folder, model_folder, out, dtype, wanted = sys.argv[1:]
    sys.exit(main(Path(run_folder), Path(model_folder), Path(out), dtype, wanted))
