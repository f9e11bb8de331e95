"""What must stand in the environment of every rank before its engine is imported, with a reason for every entry.

The engine sets it, and jobs write it into their files.
"""

from collections.abc import Mapping

from autoshard.plan.plan import Plan

COMPILER_FLAGS = "NEURON_CC_FLAGS"
_MIB = 2**20
# cited: aws-neuron/neuronx-distributed-training 9169aa0, examples/train_setup.sh, examples/training_orchestrator.py and
# examples/conf, where these are the same in all recipes for Llama-3.
_ALWAYS: Mapping[str, str] = {
    "MALLOC_ARENA_MAX": "128",
    "NEURON_EXPERIMENTAL_COMPRESS_RG": "0",
    "NEURON_FUSE_SOFTMAX": "1",
    "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS": "5",
    "NEURON_RT_EXEC_TIMEOUT": "100",
    "XLA_DISABLE_FUNCTIONALIZATION": "0",
}
_BETWEEN_NODES: Mapping[str, str] = {"FI_EFA_FORK_SAFE": "1", "FI_EFA_USE_DEVICE_RDMA": "1", "FI_PROVIDER": "efa"}
# cited: awslabs/awsome-distributed-training 7217859, scripts of 3.test_cases/pytorch: with huge pages os.fork() of a
# process that loads data finds no memory, and NCCL must not meet over bridges of containers.
_OF_GPUS_ON_EFA: Mapping[str, str] = {"FI_EFA_USE_HUGE_PAGE": "0", "NCCL_SOCKET_IFNAME": "^docker,lo,veth"}
# The formats of a plan are those of the tensors: nothing is to be computed in another than torch says. With
# XLA_DOWNCAST_BF16 what torch calls FP32 would be BF16 on the device, statistics of norms and the loss among it.
_AS_TORCH_SAYS: Mapping[str, str] = {"XLA_DOWNCAST_BF16": "0", "XLA_USE_BF16": "0"}


def environment(plan: Plan) -> Mapping[str, str]:
    """Return the variables of a plan, in alphabetical order; NxD needs more than PyTorch alone."""
    cluster, variables = plan.cluster, dict[str, str]()
    if cluster.num_nodes > 1 and (cluster.platform or cluster.links[-1].name.startswith("efa")):
        variables |= _BETWEEN_NODES  # what EFA needs, also of GPUs
        if not cluster.platform:
            variables |= _OF_GPUS_ON_EFA
    if cluster.lnc is not None:  # how the runtime joins cores to logical ones; older releases know the second name only
        variables |= dict.fromkeys(("NEURON_LOGICAL_NC_CONFIG", "NEURON_RT_VIRTUAL_CORE_SIZE"), str(cluster.lnc))
    if plan.engine == "nxd":
        variables |= {**_ALWAYS, **_AS_TORCH_SAYS, COMPILER_FLAGS: compiler_flags(plan)}
        variables["NEURON_RT_STOCHASTIC_ROUNDING_EN"] = str(int(plan.workload.precision.rounds_stochastically))
        variables["ALL_GATHER_REDUCE_SCATTER_BUCKET_CAP_MB"] = str(plan.buckets.reduce_scatter_bytes // _MIB)
    return dict(sorted(variables.items()))


def compiler_flags(plan: Plan) -> str:
    """Return the flags of neuronx-cc, which no longer chooses formats by itself."""
    flags = ["--model-type transformer", "--auto-cast none"]
    if plan.workload.precision.weights != "fp32":
        flags.append("--enable-mixed-precision-accumulation")
    if plan.model.num_experts:
        flags.append("--enable-saturate-infinity")  # as the recipes for Mixtral do
    return " ".join(flags)
