"""The configuration tree: frozen, validated, and the same for every service of a run.

How the values come together (TOML file < environment < command line) stands in `headrace/config_sources.py`, the
trainer's section in `headrace/config_trainer.py`.
Secrets do not belong here: the tree is stored in the broker and printed by `headrace config`.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from headrace.config_base import (
    LARGEST_COUNT,
    LARGEST_FACTOR,
    LARGEST_SIZE,
    LONGEST_NAME,
    WEEK_S,
    Dtype,
    PathText,
    Port,
    Section,
    Threads,
)
from headrace.config_trainer import TrainerConfig, check_ranks, check_trainer

_LABEL = re.compile("[A-Za-z0-9._-]*")


def _label(text: str) -> str:
    if not _LABEL.fullmatch(text):
        raise ValueError("may have letters A to Z, digits, dots, underscores and dashes only")
    return text


class RunConfig(Section):
    """What the run is called, how long it goes and where it writes."""

    folder: PathText = "runs"
    """The run's own folder is `<folder>/<run id>`."""
    seed: int = Field(0, ge=0, lt=1 << 63)
    steps: int = Field(100, ge=1, le=LARGEST_COUNT)
    """Optimizer steps of the whole run; a resumed run may have more."""
    placement: Literal["disaggregated", "colocated", "hybrid"] = "disaggregated"
    """"disaggregated": trainer and engines have devices of their own; "colocated": those of a host take turns on one;
    "hybrid": they use one at the same time (docs/placement.md)."""


class ModelConfig(Section):
    path: PathText = "smollm2"
    """A local folder or hub id of a Hugging Face causal LM; "smollm2" is the small model that set-up prepares."""
    dtype: Dtype = "auto"
    """What the engine computes in; "auto" is decided by a short measurement on CPU, and is bfloat16 on a GPU."""
    wire_dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """What weight versions are published in."""
    device: str = "auto"
    """"auto" is the first GPU where there is one, else the CPU."""
    context_length: int = Field(512, ge=8, le=LARGEST_SIZE)
    """Prompt and completion together, in tokens."""
    tool_format: Literal["auto", "hermes", "llama3", "mistral", "qwen3_coder"] = "auto"
    """How the model writes tool calls; "auto" is how its chat template writes them."""


OWN_REWARD = "environment"
"""The name of an environment's own reward."""


class RewardConfig(Section):
    """One reward of an environment, or one summand of it (docs/rewards.md)."""

    name: PathText = Field(min_length=1)
    """"environment" (its own), "math_verify", your own as `package.module:object` or `path/to/file.py:object`, or the
    URL of a service."""
    weight: float = Field(1.0, ge=-LARGEST_FACTOR, le=LARGEST_FACTOR)
    group: bool = False
    """The function takes all members of a group, as a list, and returns a number for each."""
    format: Literal["headrace", "sglang"] = "headrace"
    """What a service is asked in: headrace's own JSON, or as an SGLang server of a reward model (`/classify`)."""
    template: str = "{prompt}{completion}"
    """The text that format "sglang" sends."""
    batch: int = Field(32, ge=1, le=4096)
    """Rollouts of one request to a service at most."""
    requests: int = Field(2, ge=1, le=256)
    """Requests to a service at once; meanwhile, others gather for the next."""
    devices: int = Field(0, ge=0, le=1 << 20)
    """Devices that a service holds for this run, which nobody else would count in its device-hours."""
    token_env: str = Field("", max_length=LONGEST_NAME)
    """Environment variable of the producer with the bearer token of a service."""

    @property
    def is_service(self) -> bool:
        return self.name.startswith(("http://", "https://"))

    @model_validator(mode="after")
    def _fits_together(self) -> RewardConfig:
        if self.group and (self.is_service or self.name == OWN_REWARD):
            raise ValueError(f"group = true is for functions, and {self.name!r} is none; leave it out")
        if self.is_service:
            _check_service(self.name)
        elif self.devices:
            raise ValueError(f"devices = {self.devices} is for services, and {self.name!r} is none; leave it out")
        if self.format == "sglang" and "{completion}" not in self.template:
            raise ValueError(f"template = {self.template!r} has no place for {{completion}}, which is what is scored")
        return self


def _check_service(url: str) -> None:
    try:
        parts = urlsplit(url)
        named = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        named = False
    if not named:
        raise ValueError(f"{url!r} names no host; give a reward's service as http://host:port/path")
    if parts.username is not None:
        raise ValueError("the URL of a reward may hold no user or password; put a token into a variable, token_env")


def _reward_list(given: Any) -> Any:
    """A reward is given by its name, as a table, or as a list of these."""
    if isinstance(given, str):
        given = {"name": given} if given else []
    given = [given] if isinstance(given, dict | RewardConfig) else given
    if isinstance(given, list | tuple):
        return tuple({"name": each} if isinstance(each, str) else each for each in given)
    return given


def _distinct(rewards: tuple[RewardConfig, ...]) -> tuple[RewardConfig, ...]:
    names = [reward.name for reward in rewards]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"{twice!r} stands twice; leave one of the two out, or give it the weight of both")
    return rewards


class EnvironmentConfig(Section):
    name: PathText
    """"arithmetic", "guess_number", "tool_arithmetic", "dataset", "reasoning_gym", "verifiers" (docs/datasets.md), or
    your own as `package.module:object` or `path/to/file.py:object`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the environment's constructor as keywords."""
    reward: Annotated[tuple[RewardConfig, ...], BeforeValidator(_reward_list), AfterValidator(_distinct)] = ()
    """A reward by name, as a table, or a list of these, whose weighted sum it is; empty is the environment's own."""
    label: Annotated[str, AfterValidator(_label)] = Field("", max_length=64)
    """What tasks, metrics and `evaluation.environment` call it; empty is its name. One name may stand twice so."""
    weight: float = Field(1.0, ge=0, le=LARGEST_FACTOR)
    """Its share of the training prompts, relative to the weights of the others."""
    min_share: float = Field(0.0, ge=0, le=1)
    """It has at least this share of the training prompts, whatever the weights."""
    max_turns: int = Field(0, ge=0, le=LARGEST_COUNT)
    """An episode that goes on after so many completions is ended and scored; 0 is no limit but the context."""
    max_tokens_per_turn: int = Field(0, ge=0, le=LARGEST_SIZE)
    """New tokens of one completion; 0 is `sampling.max_new_tokens`."""
    max_tokens_per_episode: int = Field(0, ge=0, le=LARGEST_SIZE)
    """Tokens of a whole episode, prompts and observations counted; 0 is `model.context_length`."""

    @property
    def called(self) -> str:
        return self.label or self.name


class SamplingConfig(Section):
    temperature: float = Field(1.0, ge=0.0, le=10.0)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(0, ge=0, le=LARGEST_SIZE)
    max_new_tokens: int = Field(64, ge=1, le=LARGEST_SIZE)
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()


class ProducerConfig(Section):
    count: int = Field(1, ge=0, le=1024)
    """Producers that `headrace up` starts on this machine."""
    engine: str = "torch"
    """"torch", "sglang", "openai", "scripted", or your own as `package.module:object`."""
    engine_options: dict[str, Any] = Field(default_factory=dict)
    slots: int = Field(32, ge=1, le=4096)
    """Sequences decoded together."""
    threads: Threads = 1
    """CPU threads of the engine."""
    reward_deadline_s: float = Field(10.0, gt=0, le=WEEK_S)
    """A reward call, or one step of an environment, that takes longer fails its rollout."""
    reward_workers: int = Field(1, ge=1, le=64)
    """Worker processes of each environment that score beside decoding."""
    reward_memory_mb: int = Field(4096, ge=64, le=1 << 24)
    """MiB that one of them may hold, with every process that it started; one that holds more is killed."""
    min_group_size: int = Field(2, ge=1, le=4096)
    """A group with at least this many good rollouts is published without its failed members."""
    lease_s: float = Field(10.0, gt=0.5, le=WEEK_S)
    """A producer silent for this long is dead, and its tasks are taken over."""
    drain_s: float = Field(30.0, ge=0, le=WEEK_S)
    """A producer told to leave finishes what it plays for at most this long."""


class StalenessConfig(Section):
    max_lag: int = Field(4, ge=0, le=1024)
    """A token that is more steps behind is not trained on."""
    stale: Literal["drop", "mask"] = "drop"
    """"drop": a group with a token that is too old goes as a whole, and producers stop rollouts that would; "mask":
    only its too-old tokens leave the loss."""
    requeue: int = Field(1, ge=0, le=16)
    """How often a prompt whose group was dropped as stale is asked again, before new ones."""


class WeightsConfig(Section):
    max_live_versions: int = Field(3, ge=2, le=1024)
    """Shared-memory segments that the publisher keeps at most."""
    lease_s: float = Field(10.0, gt=0.5, le=WEEK_S)
    transport: Literal["auto", "shm", "tcp", "collective"] = "auto"
    """How weights come to a host: "auto" takes shared memory where the version is there, else "tcp"; "shm" nothing
    else; "collective" goes through torch.distributed between hosts."""
    collective_backend: Literal["auto", "nccl", "ucc", "gloo"] = "auto"
    """Of transport "collective"; "auto" is nccl for GPUs of both sides, else ucc where this torch has it, else gloo."""
    codec: Literal["auto", "raw", "sparse-ulp", "sparse-abs"] = "auto"
    """How changes travel between hosts: "auto" chooses by estimated seconds between all bytes and "sparse-ulp"."""
    bind: str = Field("127.0.0.1", min_length=1, max_length=LONGEST_NAME)
    """Address that a weight service serves other hosts on, as in "0.0.0.0"; a name or an IP address."""
    upload_slots: int = Field(1, ge=1, le=64)
    """Hosts that take weights from the trainer's host at once; the others take them from each other."""
    staging_share: float = Field(0.5, gt=0.0, le=1.0)
    """Share of its time that a producer's staging thread works, so that it does not slow decoding."""


class CheckpointConfig(Section):
    every: int = Field(10, ge=1, le=LARGEST_COUNT)
    """Optimizer steps between checkpoints."""
    keep: int = Field(2, ge=1, le=LARGEST_COUNT)


def _label_list(given: Any) -> Any:
    """Labels are given as one, or as a list."""
    if isinstance(given, str):
        return (given,) if given else ()
    return tuple(given) if isinstance(given, list) else given


class EvaluationConfig(Section):
    """Held-out evaluation before the first and after the last step, and beside the others; `prompts` 0 turns it off."""

    environment: Annotated[tuple[str, ...], BeforeValidator(_label_list)] = ()
    """Label of the environment to evaluate on, or a list of them; empty is the first of `environments`."""
    every: int = Field(0, ge=0, le=LARGEST_COUNT)
    """Optimizer steps between two evaluations while training goes on; 0 is none."""
    prompts: int = Field(0, ge=0, le=1_000_000)
    """Held-out prompts of each environment."""
    samples_per_prompt: int = Field(20, ge=1, le=4096)
    seed: int | None = Field(None, ge=0, lt=1 << 63)
    """The same seed asks and samples the same in each evaluation; none is `run.seed`."""
    temperature: float | None = Field(None, ge=0.0, le=10.0)
    """This and the next three: none is that of `sampling`."""
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    top_k: int | None = Field(None, ge=0, le=LARGEST_SIZE)
    max_new_tokens: int | None = Field(None, ge=1, le=LARGEST_SIZE)

    def sampling(self, training: SamplingConfig) -> SamplingConfig:
        """How held-out prompts are sampled, in a run that samples its training prompts so."""
        own = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k", "max_new_tokens")}
        return training.model_copy(update={name: value for name, value in own.items() if value is not None})


class BrokerConfig(Section):
    stream_block_ms: int = Field(2000, ge=10, le=60_000)
    """Longest single wait on a stream."""
    connect_timeout_s: float = Field(10.0, gt=0, le=WEEK_S)
    """How long a service waits for Redis before it gives up with a sentence."""
    task_deadline_s: float = Field(600.0, gt=0, le=WEEK_S)
    """A task that is not finished after this long fails."""
    max_deliveries: int = Field(4, ge=1, le=1000)
    """A task delivered more often is dead."""
    outage_s: float = Field(300.0, gt=0, le=WEEK_S)
    """How long a service that has reached Redis once waits for it to come back, or to have memory again."""
    retain_bytes: int = Field(512 << 20, ge=1 << 20, le=1 << 44)
    """Groups that the broker keeps until a checkpoint contains them, in bytes; near it a checkpoint is taken early."""


class TelemetryConfig(Section):
    host: Literal["127.0.0.1", "::1", "localhost"] = "127.0.0.1"
    """Loopback only: /metrics is open to whoever reaches it."""
    port: Port = 0
    """First port of /metrics and /healthz; 0 takes a free one. Each service of `headrace up` takes the next."""


class LogsConfig(Section):
    """Experiment logs, beside the JSON lines in the run's folder."""

    to: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """"tensorboard" (event files in the run's folder) and "wandb" (Weights & Biases); each needs the extra of its
    name."""
    wandb_project: str = Field("headrace", min_length=1, max_length=128)
    wandb_entity: str = Field("", max_length=128)
    """The team or user; empty is the one whose key it is."""
    wandb_mode: Literal["offline", "online"] = "offline"
    """"offline" writes into the run's folder, for `wandb sync`."""


class Config(Section):
    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    environments: tuple[EnvironmentConfig, ...] = (EnvironmentConfig(name="arithmetic"),)
    sampling: SamplingConfig = SamplingConfig()
    producer: ProducerConfig = ProducerConfig()
    trainer: TrainerConfig = TrainerConfig()
    staleness: StalenessConfig = StalenessConfig()
    weights: WeightsConfig = WeightsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    broker: BrokerConfig = BrokerConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    logs: LogsConfig = LogsConfig()

    @model_validator(mode="after")
    def _fits_together(self) -> Config:
        _check_environments(self.environments, self.evaluation.environment)
        if self.trainer.group_size > self.producer.slots:
            raise ValueError(
                f"trainer.group_size: {self.trainer.group_size} rollouts do not fit into producer.slots = "
                f"{self.producer.slots}; raise the slots or lower the group size"
            )
        if self.producer.min_group_size > self.trainer.group_size:
            raise ValueError(
                f"producer.min_group_size: {self.producer.min_group_size} is more than trainer.group_size = "
                f"{self.trainer.group_size}; lower it, or raise the group size"
            )
        if self.sampling.max_new_tokens >= self.model.context_length:
            raise ValueError(
                f"sampling.max_new_tokens: {self.sampling.max_new_tokens} leaves no room for a prompt in "
                f"model.context_length = {self.model.context_length}"
            )
        if (self.evaluation.max_new_tokens or 0) >= self.model.context_length:
            raise ValueError(
                f"evaluation.max_new_tokens: {self.evaluation.max_new_tokens} leaves no room for a prompt in "
                f"model.context_length = {self.model.context_length}"
            )
        check_trainer(self.trainer, self.sampling.max_new_tokens)
        check_ranks(self.trainer, self.trainer.ranks, self.run.placement)
        if self.run.placement != "disaggregated" and self.producer.engine in SERVER_ENGINES:
            raise ValueError(
                f"run.placement: {self.run.placement!r} is for engines within the producer, and the servers of "
                f'producer.engine = {self.producer.engine!r} keep a device of their own; use "disaggregated"'
            )
        return self


SERVER_ENGINES = ("sglang", "openai")


def _check_environments(environments: tuple[EnvironmentConfig, ...], evaluated: tuple[str, ...]) -> None:
    if not environments:
        raise ValueError("environments: at least one environment is needed")
    labels = [environment.called for environment in environments]
    if twice := next((label for label in labels if labels.count(label) > 1), None):
        raise ValueError(f"environments: {twice!r} stands twice; give one of the two a label of its own")
    if not any(environment.weight for environment in environments):
        raise ValueError("environments: every weight is 0; give those to be trained on one above 0")
    if torn := next((e for e in environments if e.min_share and not e.weight), None):
        raise ValueError(
            f"environments: {torn.called!r} has weight = 0, which is never trained on, and min_share = "
            f"{torn.min_share:g}; leave one of the two out"
        )
    # As written: 0.1 and 0.2 are 0.3 here.
    least = sum(Decimal(repr(environment.min_share)) for environment in environments)
    if least > 1:
        raise ValueError(f"environments: the min_share of all are {least} together, more than 1; lower them")
    if twice := next((label for label in evaluated if evaluated.count(label) > 1), None):
        raise ValueError(f"evaluation.environment: {twice!r} stands twice; leave one of the two out")
    if unknown := next((label for label in evaluated if label not in labels), None):
        raise ValueError(
            f"evaluation.environment: {unknown!r} is none of the environments ({', '.join(labels)}); add it to "
            "them, with weight = 0 when it is not to be trained on"
        )
