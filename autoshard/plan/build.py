"""From a candidate to a plan: every default resolved, every size written down."""

from collections.abc import Mapping

from autoshard.errors import Fault, InputError
from autoshard.plan.candidate import Candidate, even_stages
from autoshard.plan.plan import SCHEMA, Buckets, Plan, Stage
from autoshard.plan.rules import shape
from autoshard.plan.rules.columns import Columns, Engine
from autoshard.plan.rules.rule import judge
from autoshard.schedule.schedule import Schedule
from autoshard.spec.cluster import Cluster
from autoshard.spec.mesh import Mesh
from autoshard.spec.model import ModelSpec
from autoshard.spec.recipe import HEADROOM
from autoshard.spec.workload import Workload

_MIB = 2**20
# aws-neuron/neuronx-distributed src/neuronx_distributed/trainer/trainer.py: larger buckets gave NaN, and the
# cap of the all-gather is that of the reduce-scatter divided by dp (without cp), in whole MiB of at least 1.
NXD_BUCKET_MIB = 130
# torch.nn.parallel.DistributedDataParallel, bucket_cap_mb (PyTorch 2.13).
TORCH_BUCKET_MIB = 25
_SHAPE = (shape.layers, shape.stages_count, shape.stages_sum, shape.recompute_count, shape.batch)


def build_plan(
    candidate: Candidate,
    model: ModelSpec,
    cluster: Cluster,
    workload: Workload,
    engine: Engine,
    *,
    provenance: Mapping[str, str] | None = None,
) -> Plan:
    """Make the plan of a candidate, without a prediction; a candidate that has no shape is an InputError.

    Whether the plan may run is for the other Rules to say.
    """
    mesh = mesh_of(candidate, model, cluster)
    misfits = judge(Columns.of(candidate, model, cluster, workload, engine), _SHAPE)
    if misfits:
        heads = (misfit.message.partition(": ") for misfit in misfits)
        raise InputError(Fault(where=where, message=message) for where, _, message in heads)
    schedule = Schedule(
        builder=candidate.schedule,
        num_ranks=candidate.pp,
        num_chunks=candidate.vp,
        num_micro_batches=workload.global_batch // (candidate.dp * candidate.mbs),
    )
    layers = candidate.stages or even_stages(model.num_layers, candidate.num_stages)
    stages: list[Stage] = []
    for number, size in enumerate(layers):
        (rank, chunk), recompute = schedule.place_of(number), candidate.recompute_of(number)
        before = sum(layers[:number])
        stages.append(Stage(rank=rank, chunk=chunk, first_layer=before, num_layers=size, recompute=recompute))
    return Plan(
        schema=SCHEMA,
        model=model,
        cluster=cluster,
        workload=workload,
        headroom=HEADROOM,
        engine=engine,
        kernels=candidate.kernels or cluster.kernels,
        mesh=mesh,
        micro_batch=candidate.mbs,
        sp=candidate.sequence_parallel,
        zero=candidate.zero,
        zero_group=candidate.zero_group,
        weight_group=candidate.weight_group,
        cp_kind=candidate.cp_kind,
        cp_order=candidate.cp_order,
        stages=tuple(stages),
        schedule=schedule,
        strategies={},
        boundary=candidate.boundary,
        fold=candidate.fold,
        buckets=bucket_sizes(candidate, engine),
        padding=padding_of(model, candidate.tp),
        prediction=None,
        provenance=provenance or {},
    )


def num_kv_replicas(model: ModelSpec, tp: int) -> int:
    """Say how many ranks of a tp group hold the same KV head: tp = kv * rep, beyond one head per rank they repeat."""
    return max(1, tp // model.num_kv_heads)


def mesh_of(candidate: Candidate, model: ModelSpec, cluster: Cluster) -> Mesh:
    """Lay the candidate's axes on the cluster."""
    sizes = {axis: getattr(candidate, axis) for axis in ("pp", "dp", "ep", "cp", "tp")}
    return Mesh.laid_on(cluster, {**sizes, "rep": num_kv_replicas(model, candidate.tp)}, candidate.place)


def cut_atoms(candidate: Candidate, model: ModelSpec) -> frozenset[str]:
    """Return the atoms that cut anything on the candidate's mesh, without laying it.

    >>> from autoshard.spec.model_catalogue import load_model
    >>> sorted(cut_atoms(Candidate(tp=32, dp=2), load_model("llama3-70b")))
    ['edp', 'kv', 'rep']
    """
    replicas = num_kv_replicas(model, candidate.tp)
    sizes = {"edp": candidate.dp // candidate.ep, "ep": candidate.ep, "cp": candidate.cp}
    sizes |= {"kv": candidate.tp // replicas, "rep": replicas}
    return frozenset(atom for atom, size in sizes.items() if size > 1)


def padding_of(model: ModelSpec, tp: int) -> Mapping[str, int]:
    """Return the dims that must grow to divide by tp; empty when all do.

    A vocabulary is cut over tp by embedding, head and loss; 50257 entries over 8 ranks become 50264. Where samples are
    no tokens there is none.
    """
    if model.traced and model.traced.data:
        return {}
    padded = -(-model.vocab // tp) * tp
    return {} if padded == model.vocab else {"vocab": padded}


def bucket_sizes(candidate: Candidate, engine: Engine) -> Buckets:
    """Return the sizes in which the engine sends gradients and parameters."""
    if engine == "torch":
        return Buckets(reduce_scatter_bytes=TORCH_BUCKET_MIB * _MIB, all_gather_bytes=TORCH_BUCKET_MIB * _MIB)
    gathered = max(1, NXD_BUCKET_MIB // candidate.dp)
    return Buckets(reduce_scatter_bytes=NXD_BUCKET_MIB * _MIB, all_gather_bytes=gathered * _MIB)
