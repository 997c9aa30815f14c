"""What a run's record says about its model and data, found out before anything starts.

Preparing a model may load torch, and an environment is somebody's own code, so this runs in a process of its
own: `python -m deploy.inspection`, which reads the configuration on stdin (nothing: prepare the small model) and
answers with one line of JSON.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import headrace.errors
from deploy.processes import Birth, describe_exit, end_group
from headrace.config import Config
from headrace.errors import HeadraceError, ModelError, ServiceError
from headrace.extras import needs_train

_LONGEST_S = 3600.0
"""For a download and conversion."""


@dataclass(frozen=True, slots=True)
class Facts:
    folder: str
    """The model's folder on this machine."""
    digests: dict[str, str]
    vocab_size: int
    dataset_sizes: dict[str, int]
    """As in the run's record."""


def inspect(config: Config) -> Facts:
    """Prepare the model if need be, load the environments once, and describe both.

    Raises ModelError and EnvironmentLoadError as the services would, ServiceError when the inspection itself broke.
    """
    return Facts(**_ask(config.model_dump_json()))


def prepare() -> str:
    """Convert the small model, if that was not done before; returns its folder. Raises ModelError."""
    return str(_ask("")["folder"])


def _ask(question: str) -> dict[str, Any]:
    """The child's answer; its chatter is only shown when it breaks."""
    needs_train("looking at the model", "torch", "transformers")
    # Files and no pipes: a process that an environment leaves behind would hold a pipe open for ever.
    with tempfile.TemporaryFile() as chatter, tempfile.TemporaryFile() as reply:
        code = _in_child(question, reply, chatter)
        chatter.seek(0)
        lines = chatter.read().decode("utf-8", "replace").strip().splitlines()
        reply.seek(0)
        said = reply.read()
    try:
        answer: dict[str, Any] = json.loads(said)
    except ValueError:
        reason = lines[-1] if lines else "without a word; an environment's code that ends its process does that"
        raise ServiceError(
            f"inspecting model and environments failed: the process {describe_exit(code)}: {reason}"
        ) from None
    if "error" in answer:
        kind: type[HeadraceError] = getattr(headrace.errors, answer["kind"])
        raise kind(answer["error"])
    return answer


def _in_child(question: str, reply: IO[bytes], chatter: IO[bytes]) -> int:
    """The exit code of the child, of which nothing is left, however this ends."""
    child = subprocess.Popen(
        [sys.executable, "-m", "deploy.inspection"],
        stdin=subprocess.PIPE,
        stdout=reply,
        stderr=chatter,
        start_new_session=True,
        preexec_fn=Birth(signal.SIGKILL, None, os.getpid()),  # noqa: PLW1509
    )
    try:
        child.communicate(question.encode(), _LONGEST_S)
        return child.returncode
    except subprocess.TimeoutExpired:
        raise ServiceError(f"model and environments were not ready after {_LONGEST_S:.0f} s") from None
    finally:
        child.kill()
        child.wait()
        end_group(child.pid)


def facts_of(config: Config) -> Facts:
    """What `inspect` returns, found in this process."""
    from consumers.reference import reference_folder
    from headrace.policy.loading import model_digests
    from headrace.policy.prepare import resolve_model

    folder = resolve_model(config.model.path).resolve()
    digests = model_digests(folder)
    reference_folder(config, folder, digests)
    sizes = dataset_sizes(config)
    check_names(config, sizes)
    if config.run.placement != "disaggregated":
        from consumers.parts import device_of
        from headrace.policy.footprint import check_memory

        check_memory(config, folder, device_of(config.model.device))
    return Facts(str(folder), digests, vocab_size(folder, config.model.path), sizes)


def check_names(config: Config, sizes: Mapping[str, int]) -> None:
    """What the services would only find out once they have loaded a model. Raises ConfigError."""
    from consumers.curriculum import Curriculum, check_held_out, held_out_of, sources_of
    from consumers.logs import check_loggers
    from producers.engines.registry import engine_factory

    engine_factory(config.producer.engine)
    check_loggers(config.logs.to)
    Curriculum(config.run.seed, sources_of(config, sizes))
    for source in held_out_of(config, sizes):
        check_held_out(source, config.evaluation.prompts)


def dataset_sizes(config: Config) -> dict[str, int]:
    """Indices of each environment's splits; the rewards named beside them load too. Raises EnvironmentLoadError."""
    from producers.environments.registry import build_environment, environments_of, sizes_of
    from producers.rewards.registry import check_rewards

    sizes = {}
    for name, entry in environments_of(config).items():
        environment = build_environment(entry)
        sizes[f"train/{name}"], sizes[f"eval/{name}"] = sizes_of(name, environment)
        check_rewards(entry)
    return sizes


def vocab_size(folder: Path, path: str) -> int:
    """From the model's config.json. Raises ModelError when it does not say."""
    try:
        fields: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"model.path = {path!r}: config.json cannot be read: {error}") from error
    size = fields.get("vocab_size") or (fields.get("text_config") or {}).get("vocab_size")
    if not isinstance(size, int) or size < 1:
        raise ModelError(f"model.path = {path!r}: config.json has no vocab_size")
    return size


def _answer(question: str) -> dict[str, Any]:
    if question:
        return asdict(facts_of(Config.model_validate_json(question)))
    from headrace.policy.prepare import prepare_smollm2

    return {"folder": str(prepare_smollm2())}


def main() -> int:
    # Whatever a library prints must not stand before our one line of JSON.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    with answers:
        try:
            json.dump(_answer(sys.stdin.read()), answers)
        except HeadraceError as error:
            json.dump({"error": str(error), "kind": type(error).__name__}, answers)
            return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
