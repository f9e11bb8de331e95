"""Which sizes of tp a Neuron platform accepts, as data, and which of them a model can be cut into."""

from collections.abc import Mapping

from autoshard.spec.cluster import Cluster
from autoshard.spec.model import ModelSpec

# (platform, lnc) -> tp
NEURON_TP: Mapping[tuple[str, int | None], tuple[int, ...]] = {
    ("trn1", None): (1, 8, 32),
    ("trn2", 1): (1, 4, 8, 32, 64, 128),
    ("trn2", 2): (1, 4, 16, 32, 64),
}
_PLATFORMS: Mapping[str, str] = {"trainium1": "trn1", "trainium2": "trn2"}  # chip -> platform


def platform_of(cluster: Cluster) -> str:
    """Name the Neuron platform of a cluster; "" for others."""
    return _PLATFORMS.get(cluster.chip.name, "")


def platform_tp(cluster: Cluster) -> tuple[int, ...]:
    """List the sizes of tp that the platform's collectives serve; elsewhere any size that fits a node."""
    sizes = NEURON_TP.get((platform_of(cluster), cluster.lnc))
    return sizes or tuple(size for size in range(1, cluster.ranks_per_node + 1) if cluster.ranks_per_node % size == 0)


def allowed_tp(model: ModelSpec, cluster: Cluster) -> tuple[int, ...]:
    """List the platform's sizes of tp that divide the model; 1 is always one of them."""
    return tuple(size for size in platform_tp(cluster) if _divides(model, size))


def _divides(model: ModelSpec, size: int) -> bool:
    kv_fits = model.num_kv_heads % size == 0 or size % model.num_kv_heads == 0
    return model.num_heads % size == 0 and kv_fits and model.ffn % size == 0
