"""Configuration: frozen, typed, read once at start, every key checked.

Layers, later over earlier: built-in defaults (`gateway.py`, `serving.py`, `policies.py`; `configs/default.yaml` shows
all of them), a preset from `configs/presets/`, the user's `--config` files, command-line options. Unknown or wrong keys
are a `ConfigError` that names file, key and what would be right. The process that starts a pipeline writes the merged
result to one file that all its processes read, so that they cannot disagree.
"""

from cohort.common.config.gateway import BatchConfig as BatchConfig
from cohort.common.config.gateway import GatewayConfig as GatewayConfig
from cohort.common.config.gateway import KeyLimits as KeyLimits
from cohort.common.config.gateway import KeysConfig as KeysConfig
from cohort.common.config.gateway import ResponsesConfig as ResponsesConfig
from cohort.common.config.gateway import StateConfig as StateConfig
from cohort.common.config.policies import PolicyConfig as PolicyConfig
from cohort.common.config.reading import CONFIGS_DIR as CONFIGS_DIR
from cohort.common.config.reading import dump_config as dump_config
from cohort.common.config.reading import load_config as load_config
from cohort.common.config.reading import nested as nested
from cohort.common.config.reading import parse_yaml as parse_yaml
from cohort.common.config.root import Config as Config
from cohort.common.config.serving import EndpointsConfig as EndpointsConfig
from cohort.common.config.serving import EngineConfig as EngineConfig
from cohort.common.config.serving import KvConfig as KvConfig
from cohort.common.config.serving import LoggingConfig as LoggingConfig
from cohort.common.config.serving import ManagerConfig as ManagerConfig
from cohort.common.config.serving import MetricsConfig as MetricsConfig
from cohort.common.config.serving import ModelConfig as ModelConfig
from cohort.common.config.serving import MonitorConfig as MonitorConfig
from cohort.common.config.serving import PredictorConfig as PredictorConfig
from cohort.common.config.serving import SecurityConfig as SecurityConfig
from cohort.common.config.serving import SpeculationConfig as SpeculationConfig
from cohort.common.config.serving import TracingConfig as TracingConfig
from cohort.common.config.serving import TransferConfig as TransferConfig
from cohort.common.config.serving import UcxConfig as UcxConfig
from cohort.common.config.serving import WorkerGroup as WorkerGroup
