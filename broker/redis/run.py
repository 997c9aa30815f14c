"""One run on Redis with every port: each service uses the part that is its own."""

from __future__ import annotations

from broker.redis.connection import Connection
from broker.redis.dead import RedisDead
from broker.redis.link import Link
from broker.redis.operator import RedisOperator
from broker.redis.producer import RedisProducer
from broker.redis.trainer import RedisTrainer
from broker.redis.weights import RedisWeights
from headrace.config import BrokerConfig


class RedisRun(RedisProducer, RedisTrainer, RedisWeights, RedisOperator, RedisDead):
    """ProducerPort, TrainerPort, WeightsPort and OperatorPort of one run. One object serves one service."""

    def __init__(self, url: str, run_id: str, config: BrokerConfig) -> None:
        """Connects at the first call. Raises ConfigError for a URL that is none, Refused for an impossible run id."""
        super().__init__(Link(Connection(url, config), run_id), config.max_deliveries)
