"""Configuration: frozen, typed, read once at start, every key checked.

Layers, later over earlier: built-in defaults (`gateway.py`, `serving.py`, `policies.py`; `configs/default.yaml` shows
all of them), a preset from `configs/presets/`, the user's `--config` files, command-line options. Unknown or wrong keys
are a `ConfigError` that names file, key and what would be right. The process that starts a pipeline writes the merged
result to one file that all its processes read, so that they cannot disagree.
"""

from cohort.common.config.gateway import BatchConfig, GatewayConfig, KeyLimits, KeysConfig, ResponsesConfig
from cohort.common.config.policies import PolicyConfig
from cohort.common.config.reading import CONFIGS_DIR, dump_config, load_config, nested, parse_yaml
from cohort.common.config.root import Config
from cohort.common.config.serving import (
    EndpointsConfig,
    EngineConfig,
    KvConfig,
    LoggingConfig,
    ManagerConfig,
    MetricsConfig,
    ModelConfig,
    MonitorConfig,
    PredictorConfig,
    SecurityConfig,
    SpeculationConfig,
    TracingConfig,
    TransferConfig,
    UcxConfig,
    WorkerGroup,
)

__all__ = [
    "BatchConfig",
    "CONFIGS_DIR",
    "Config",
    "EndpointsConfig",
    "EngineConfig",
    "GatewayConfig",
    "KeyLimits",
    "KeysConfig",
    "KvConfig",
    "LoggingConfig",
    "ManagerConfig",
    "MetricsConfig",
    "ModelConfig",
    "MonitorConfig",
    "PolicyConfig",
    "PredictorConfig",
    "ResponsesConfig",
    "SecurityConfig",
    "SpeculationConfig",
    "TracingConfig",
    "TransferConfig",
    "UcxConfig",
    "WorkerGroup",
    "dump_config",
    "load_config",
    "nested",
    "parse_yaml",
]
