"""All errors that headrace raises on purpose.

    HeadraceError                 one sentence for the user; the command exits with `exit_code`
    ├── ConfigError               a key, a value or a file of the configuration
    ├── ModelError                a model folder, tokenizer or dtype that cannot serve
    ├── BrokerError               the message broker
    │   ├── BrokerUnavailable     it cannot be reached, or refuses us, after a bounded wait
    │   ├── Fenced                a newer trainer has taken the run; this one may change nothing
    │   ├── Refused               the run does not accept this process (digests, schema, unknown run)
    │   └── WireError             bytes that are not a valid message of this schema
    ├── EngineError               the generation engine cannot go on
    ├── EnvironmentLoadError         an environment or reward that does not load (one that fails in a rollout is data)
    ├── WeightError               a weight version that cannot be published, staged or committed
    ├── CheckpointError           a checkpoint that cannot be written or read
    └── ServiceError              a process or port of the run

Bad data is a value with a reason; only a broken service is an exception. Foreign exceptions are mapped to
this tree where the seam is.
"""

from __future__ import annotations


class HeadraceError(Exception):
    """Base of the tree. Its text is one clear sentence that names the thing, the value and the way out."""

    exit_code = 1


class ConfigError(HeadraceError):
    exit_code = 2


class ModelError(HeadraceError):
    exit_code = 2


class BrokerError(HeadraceError):
    exit_code = 3


class BrokerUnavailable(BrokerError):
    pass


class Fenced(BrokerError):
    # Its own code: whoever started this trainer must not start it again.
    exit_code = 8


class Refused(BrokerError):
    pass


class WireError(BrokerError):
    pass


class EngineError(HeadraceError):
    exit_code = 4


class EnvironmentLoadError(HeadraceError):
    exit_code = 2


class WeightError(HeadraceError):
    exit_code = 5


class CheckpointError(HeadraceError):
    exit_code = 6


class ServiceError(HeadraceError):
    exit_code = 7
