"""What a question is about where it leaves length and batch open: what the vendor documents, or so many tokens."""

import math
from dataclasses import dataclass

from autoshard.errors import require
from autoshard.search.ask.vendor.documented import VendorLayout, vendor_layouts
from autoshard.spec.cluster import LOCAL, Cluster
from autoshard.spec.model import ModelSpec
from autoshard.spec.recipe import QuestionOptions, sequences_of
from autoshard.spec.workload import ROUTER_TRAINING, Precision, Workload

LONGEST_DEFAULT = 8192
# Tokens of a step, at most. Llama 3 was pre-trained with 4 M, 8 M and 16 M tokens a step, beginning with the least
# (arXiv 2407.21783, section 3.4.1).
TOKENS = 2**22
LOCAL_BATCH = 32
_OF_WORK = ("optimizer", "documents", "expert_imbalance", *ROUTER_TRAINING)  # which a workload holds as they are stated
_MORE_NODES = 2.0  # than a vendor documents: on more than so many times as many its batch says nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Length and batch of a question, and where those that it left open are from; "" if it left none open."""

    seq_len: int
    global_batch: int
    why: str = ""


def default_sizes(
    model: ModelSpec, cluster: Cluster, *, seq_len: int | None = None, global_batch: int | str | None = None
) -> Sizes:
    """Return length and batch of a question, of which some may be stated.

    >>> from autoshard.spec.cluster_catalogue import load_cluster
    >>> from autoshard.spec.model_catalogue import load_model
    >>> trn1, card = load_cluster("trn1.32xlarge", 16), load_model("llama3-70b")
    >>> default_sizes(card, trn1).why
    'length and batch: as AWS NxD Training 2.26 documents for llama3-70b on 16 x trn1.32xlarge'
    >>> default_sizes(card, trn1, seq_len=32768)
    Sizes(seq_len=32768, global_batch=128, why='batch: the largest power of two with at most 4,194,304 tokens')
    """
    documented = _documented(model, cluster, seq_len)
    of_data = model.traced is not None and bool(model.traced.data)  # which have one length
    context = model.max_positions if of_data else min(model.max_positions, LONGEST_DEFAULT)
    usual = documented.seq_len if documented else context
    length = usual if seq_len is None else seq_len
    fixed = documented.global_batch if documented else LOCAL_BATCH if cluster.name == LOCAL else None
    batch = fixed or 2 ** max(0, int(math.log2(TOKENS / max(1, length))))
    batch = batch if global_batch is None else sequences_of(global_batch, length)
    opened = [name for name, stated in (("length", seq_len), ("batch", global_batch)) if stated is None]
    if documented and opened:
        words = f"as {documented.vendor} documents for {documented.place(cluster.name)}"
        return Sizes(seq_len=length, global_batch=batch, why=f"{' and '.join(opened)}: {words}")
    why = {
        "length": "of the samples" if of_data else f"the model's context, at most {LONGEST_DEFAULT:,}",
        "batch": f"the largest power of two with at most {TOKENS:,} tokens" if fixed is None else "for this machine",
    }
    return Sizes(seq_len=length, global_batch=batch, why="; ".join(f"{name}: {why[name]}" for name in opened))


def default_workload(
    model: ModelSpec, cluster: Cluster, question: QuestionOptions | None = None
) -> tuple[Workload, str]:
    """Return the workload of a question that leaves some of it open, or all, and where these sizes are from."""
    options = question or QuestionOptions()
    sizes = default_sizes(model, cluster, seq_len=options.seq_len, global_batch=options.global_batch)
    stated = {name: options.given[name] for name in _OF_WORK if name in options.given}
    message = f"{model.name} has no experts, so none is busier than another. Leave it out"
    require((model.num_experts > 0 or "expert_imbalance" not in stated, "expert_imbalance", message))
    precision = Precision.named("bf16" if options.precision is None else options.precision)
    work = Workload(seq_len=sizes.seq_len, global_batch=sizes.global_batch, precision=precision, **stated)
    return work, sizes.why


def _documented(model: ModelSpec, cluster: Cluster, seq_len: int | None) -> VendorLayout | None:
    """Return what a vendor documents for a model on such a cluster, at this length if the question has a length."""
    nodes = cluster.num_nodes
    suited = [
        layout
        for layout in vendor_layouts()
        if layout.suits(model, cluster)
        and layout.seq_len <= model.max_positions
        and seq_len in (None, layout.seq_len)
        and (layout.nodes is None or nodes <= _MORE_NODES * layout.nodes)
    ]

    def distance(layout: VendorLayout) -> tuple[float, ...]:
        return math.inf if layout.nodes is None else abs(math.log2(layout.nodes / nodes)), layout.model != model.name

    return min(suited, key=distance, default=None)
