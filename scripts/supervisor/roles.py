"""The roles of an engine's processes: how many processes there are of each, and their commands."""

from protocol.config import EngineConfig
from protocol.config.gpu_defaults import computes_on_gpu
from protocol.lifecycle import Role
from protocol.process.machines import blocks_address

MODULES = {
    Role.API: "api_proc",
    Role.CORE: "core_proc",
    Role.WORKER: "worker_proc",
    Role.STANDBY: "worker_proc",
    Role.STANDBY_CORE: "core_proc",
    Role.PLACER: "scripts.placement",
    Role.BLOCK_SERVER: "scripts.block_server",
    Role.REPLICA: "scripts.supervisor",
}
"""The module that a process of each role runs; a zygote is started by `ForkServer`."""
ARGUMENTS = {
    Role.STANDBY: ["--standby"],
    Role.STANDBY_CORE: ["--standby"],
    Role.REPLICA: ["--no-api"],
}


def num_ranks(config: EngineConfig, *, has_api: bool) -> dict[Role, int]:
    """Return the number of processes of each role, in the order in which they are started."""
    num_apis = config.api.api_server_count if has_api else 0
    num_block_servers = int(config.run.replica is None and bool(blocks_address(config)))
    if config.parallel.data_parallel_size != 1:
        numbers = {
            Role.REPLICA: config.parallel.data_parallel_size,
            Role.API: num_apis,
            Role.PLACER: int(config.placement.ray is not None),
            Role.BLOCK_SERVER: num_block_servers,
        }
        return {role: number for role, number in numbers.items() if number}
    has_standby = bool(config.recovery.standby_workers)
    size = config.parallel.num_ranks
    uses_gpu = config.model.model != "null" and computes_on_gpu(config.model.device)
    numbers = {
        Role.ZYGOTE: size * (has_standby or (size > 1 and not uses_gpu)),
        Role.WORKER: size,
        Role.STANDBY: size * has_standby,
        Role.CORE: 1,
        Role.STANDBY_CORE: int(bool(config.recovery.standby_cores)),
        Role.API: num_apis,
        Role.BLOCK_SERVER: num_block_servers,
    }
    return {role: number for role, number in numbers.items() if number}
