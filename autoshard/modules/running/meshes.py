"""The mesh of ranks on which a module runs, and the cluster that prices are based on."""

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autoshard.errors import InputError, require
from autoshard.modules.shard import sizes_of
from autoshard.run.protocol import HOST
from autoshard.spec.cluster import Cluster
from autoshard.spec.cluster_catalogue import load_cluster


def device_mesh_of(module: torch.nn.Module, mesh: DeviceMesh | Mapping[str, int] | str) -> DeviceMesh:
    """Return the mesh of devices; axes with sizes are laid on the ranks that torchrun has started."""
    if isinstance(mesh, DeviceMesh):
        require((mesh.mesh_dim_names is not None, "mesh", "has no names of its axes; give mesh_dim_names"))
        in_order = mesh.mesh.flatten().tolist() == list(range(dist.get_world_size()))
        require((in_order, "mesh", "must have all ranks in their order"))
        return mesh
    sizes = sizes_of(mesh)
    device = next((parameter.device.type for parameter in module.parameters()), HOST)
    if device == "meta":
        there = torch.accelerator.current_accelerator()
        has_module = there is not None and hasattr(torch, there.type)  # a backend may have a name and nothing else
        device = there.type if there and has_module and torch.accelerator.is_available() else HOST
    try:
        device_mesh = init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    except (dist.DistNetworkError, dist.DistStoreError):  # enough may run, and have not met
        raise
    except (ValueError, RuntimeError) as error:
        count = math.prod(sizes.values())
        if _begin_alone(error, count):
            return device_mesh_of(module, mesh)
        ranks = dist.get_world_size() if dist.is_initialized() else None  # the mesh has made the group by now
        remedy = f"start as many: torchrun --nproc-per-node {count} SCRIPT"
        raise InputError.of("mesh", f"{count} ranks do not run here ({ranks or 'none'} do); {remedy}") from error
    return device_mesh


def _begin_alone(error: Exception, count: int) -> bool:
    """Let a process that nobody has started as one of several be the only rank, as in a notebook."""
    is_alone = count == 1 and not dist.is_initialized() and "environment variable RANK" in str(error)
    if is_alone:
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)  # pyright: ignore[reportPrivateImportUsage]
    return is_alone


def cluster_of(cluster: Cluster | str, count: int) -> Cluster:
    """Return the cluster of a name, with as many ranks: whole nodes, or a part of one."""
    if isinstance(cluster, Cluster):
        return cluster
    if cluster == "local":
        return load_cluster("local", ranks=count)
    whole = load_cluster(cluster)
    node = whole.num_ranks
    if count < node and count % whole.ranks_per_chip == 0:  # a part of a node, as people rent GPUs
        return replace(whole, chips_per_node=count // whole.ranks_per_chip, placements=())
    require((count % node == 0, "cluster", f"{count} ranks do not fill nodes of {cluster}, which have {node}"))
    return load_cluster(cluster, count // node)
