"""Divides the GPUs of a machine among the replicas of an engine, without loading a library."""

from collections.abc import Mapping, MutableMapping
from pathlib import Path

from protocol.config import ConfigError, EngineConfig
from protocol.config.gpu_defaults import computes_on_gpu

VISIBLE = "CUDA_VISIBLE_DEVICES"
_DEVICE_FILES = Path("/dev")


def visible_gpus(environment: Mapping[str, str], directory: Path = _DEVICE_FILES) -> list[str]:
    """Return the names of the GPUs that CUDA shows, as in its variable: numbers or UUIDs.

    CUDA ignores what follows an invalid name, such as -1.
    """
    if VISIBLE not in environment:
        return [str(number) for number in range(len(list(directory.glob("nvidia[0-9]*"))))]
    names = [name.strip() for name in environment[VISIBLE].split(",")]
    ends = [index for index, name in enumerate(names) if not name or name.startswith("-")]
    return names[: min(ends, default=len(names))]


def gpus_of(gpus: list[str], replica: int, num_replicas: int) -> list[str]:
    """Return the GPUs of one replica; ConfigError: they cannot be divided evenly."""
    if len(gpus) % num_replicas:
        raise ConfigError(
            f"data_parallel_size {num_replicas} does not divide the {len(gpus)} visible GPUs:"
            f" choose another number, or name some of them in {VISIBLE}"
        )
    size = len(gpus) // num_replicas
    return gpus[replica * size : (replica + 1) * size]


def divide_gpus(config: EngineConfig, environment: MutableMapping[str, str]) -> None:
    """Check that replicas can share the GPUs; a replica's supervisor shows it only its own GPUs.

    GPUs that cannot be counted are not divided. ConfigError: there are too few.
    """
    has_engine = config.parallel.data_parallel_size > 0
    if not has_engine or config.model.model == "null" or not computes_on_gpu(config.model.device):
        return
    gpus, replica = visible_gpus(environment), config.run.replica
    if replica is not None:
        gpus = gpus_of(gpus, replica, config.run.num_replicas)
        if gpus:
            environment[VISIBLE] = ",".join(gpus)
    elif config.parallel.data_parallel_size > 1:
        gpus = gpus_of(gpus, 0, config.parallel.data_parallel_size)
    num_ranks = config.parallel.tensor_parallel_size
    if gpus and num_ranks > max(1, len(gpus)):
        raise ConfigError(
            f"tensor_parallel_size {num_ranks} needs as many GPUs for each engine, and"
            f" {len(gpus)} are visible: choose a smaller number, or --device cpu"
        )
