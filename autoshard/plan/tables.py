"""The Strategy table of a plan: made from cuts, read back into programs; lines that cannot be executed are named."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache

from autoshard.errors import Fault, Faults, InputError
from autoshard.graph.block import WIDE, Block
from autoshard.graph.kinds.linear import Collect, Deliver, Einsum
from autoshard.graph.kinds.opaque import Opaque, OpaqueGradient
from autoshard.graph.op import Op, OpKind
from autoshard.layout.layout import Collective, Cutting, local_sizes, whole_axes
from autoshard.layout.program import Program, written_by
from autoshard.layout.table import Table, TableSetting, program_of, strategies, strategy_lines, table_for_sizes
from autoshard.plan.candidate import boundary_cuts
from autoshard.plan.codec import plan_hash
from autoshard.plan.lowering import ATOMS, NOMINAL_PRICE, StepGraph, lowered, nominal_sizes, split_pending
from autoshard.plan.plan import Plan
from autoshard.plan.recompute import Recompute
from autoshard.plan.rules.columns import Engine
from autoshard.spec.workload import DTYPE_BYTES


def with_tables(plan: Plan, cutting: Cutting) -> Plan:
    """Return the plan with the tables of a cutting; a prediction stays, because it was made for just this sharding.

    A table for a kind of recompute holds what differs from the block without it.
    """
    check_kernels(plan_blocks(plan).values(), plan.engine)
    setting, tables = table_setting(plan), dict[str, Table]()
    real = frozenset(atom for atom, size in setting.atoms.items() if size > 1)
    for kind, drop in table_kinds(plan):
        table = table_for_sizes(_table(step_graph_of(plan), kind, drop, cutting.only(real), real), setting.atoms)
        plain: Table = tables[kind] if drop.kind != "none" else {}
        tables[table_name(kind, drop)] = {entry: line for entry, line in table.items() if plain.get(entry) != line}
    full = with_strategies(plan, tables)
    return replace(full, prediction=plan.prediction and replace(plan.prediction, of=plan_hash(full)))


def with_strategies(plan: Plan, tables: Mapping[str, Table]) -> Plan:
    """Return the plan with these tables, and with the units that follow from them."""
    full = replace(plan, strategies=tables)
    return replace(full, units=units_of(full))


def units_of(plan: Plan) -> Mapping[str, str]:
    """Return by block kind what ranks send under ZeRO-3 for all weights of a block together, with the bytes of all.

    It follows from the pending gradients, and is no choice. W stands for the end of a backward that is not split.
    """
    if plan.zero != 3:
        return {}
    atoms, dtypes, programs = table_setting(plan).atoms, plan.workload.precision, plan_programs(plan)
    units: dict[str, str] = {}
    for name, block in plan_blocks(plan).items():
        sent: Counter[tuple[str, str]] = Counter()
        weights = programs[name].by_pass(block.gives[0]).weights
        late = {name for entry in weights for name in written_by(entry)}
        for tensor in block.parameters if name == block.kind else ():
            total = programs[name].results[f"{tensor.name}.sum"]
            shards = tuple(atom for atom in split_pending(total.layout.sums)[0] if atoms[atom] > 1)
            count = tensor.num_elements(local_sizes(step_graph_of(plan).graph.sizes, dict(total.layout.dims), atoms))
            if shards:
                over = whole_axes(shards, atoms)
                gather = Collective(kind="all_gather", dim="flat", atoms=over)
                scatter = Collective(kind="reduce_scatter", dim="flat", atoms=over)
                sent["F", str(gather)] += count * DTYPE_BYTES[dtypes.weights]
                sent["I", str(gather)] += count * DTYPE_BYTES[dtypes.weights]
                apart = plan.schedule.splits_backward and total.name not in late
                sent["I" if apart else "W", str(scatter)] += count * DTYPE_BYTES[dtypes.gradients]
        if sent:
            units[name] = " | ".join(f"{pass_} {line} {size} B" for (pass_, line), size in sorted(sent.items()))
    return units


def plan_programs(plan: Plan) -> Mapping[str, Program]:
    """Turn a plan's tables into programs, or raise one InputError with every line that cannot be executed."""
    setting, found = table_setting(plan), Faults()
    programs: dict[str, Program] = {}
    blocks = plan_blocks(plan)
    for name in sorted(plan.strategies.keys() - blocks.keys()):
        message = f"the plan has no such block; it has {', '.join(blocks)}"
        found.append(Fault(where=f"strategies.{name}", message=message))
    for name, block in blocks.items():
        table = {**plan.strategies.get(block.kind, {}), **plan.strategies.get(name, {})}
        with found.of(f"strategies.{name}"):
            programs[name] = program_of(block, table, setting)
    found.refuse()
    return programs


def plan_blocks(plan: Plan) -> Mapping[str, Block]:
    """Return the blocks that have a table: embedding, head, and every kind of layer under its kinds of recompute."""
    return {table_name(kind, drop): step_graph_of(plan).block(kind, drop) for kind, drop in table_kinds(plan)}


def table_name(kind: str, drop: Recompute) -> str:
    """Return the name of a block's table: its kind, and what is computed again."""
    return kind if drop.kind == "none" else f"{kind} {drop.on_device}"


def table_setting(plan: Plan) -> TableSetting:
    """Return what the tables of a plan are read against."""
    atoms = {atom: plan.mesh.size(atom) for atom in ATOMS}
    return TableSetting(
        atoms=atoms,
        price=NOMINAL_PRICE,
        boundary=boundary_cuts(plan.boundary, sequence_parallel=plan.sp),
        keeps_gathered=step_graph_of(plan).platform.keeps_gathered,
    )


def table_kinds(plan: Plan) -> tuple[tuple[str, Recompute], ...]:
    """Return the blocks that have a table: kind, and what is computed again."""
    kinds = step_graph_of(plan).kinds
    again = {(kind, drop.on_device) for kind, drop in plan.layers if drop.kind != "none"}
    ordered = sorted(again, key=lambda layer: (kinds.index(layer[0]), str(layer[1])))
    return (*((kind, Recompute()) for kind in kinds), *ordered)


def step_graph_of(plan: Plan) -> StepGraph:
    """Return what the graph of a plan is made of."""
    return StepGraph(model=plan.model, workload=plan.workload, kernels=plan.kernels)


@cache
def _table(step: StepGraph, kind: str, drop: Recompute, cutting: Cutting, atoms: frozenset[str]) -> Table:
    program = lowered(step, kind, drop, cutting, atoms)
    return strategy_lines(strategies(program, step.block(kind, drop)), nominal_sizes(atoms))


def check_kernels(blocks: Iterable[Block], engine: Engine) -> None:
    """Refuse operations that the engine cannot compute, and those that it would hold whole though nobody said so.

    Autograd finds the backward pass of nxd. What code does that no kind says, nobody asks an engine to compute.
    """
    faults = [
        Fault(where=f"{block.kind}.{op.name}", message=message)
        for block in blocks
        for op in (block.ops if engine == "torch" else block.select("micro_batch", "F"))
        if not isinstance(op.kind, Deliver | Collect | Opaque | OpaqueGradient)
        for message in _kernel_faults(block, op, engine)
    ]
    if faults:
        raise InputError(faults)


def _kernel_faults(block: Block, op: Op, engine: Engine) -> Iterator[str]:
    if not has_kernel(op.kind, engine):
        yield missing_kernel(op.kind, engine)
    wide = any(set(WIDE) <= set(block.tensors[name].dims) for name in (*op.inputs, *op.outputs))
    if engine == "torch" and wide and op.kind.by_token is None and not isinstance(op.kind, Einsum):
        yield (
            f"{op.kind.label} reads or makes a value for every token and word of the vocabulary. Give the class "
            "by_token = True, if it computes every token from that token alone, and a few tokens are computed at a "
            "time; else by_token = False, and the whole value is held"
        )


def has_kernel(kind: OpKind, engine: Engine) -> bool:
    """Say whether an engine computes a kind: it has a kernel for this very class, or the kind brings one for torch."""
    by_engine = engine in vars(type(kind)).get("engines", ())
    return by_engine or (engine == "torch" and type(kind).torch_kernel is not OpKind.torch_kernel)


def missing_kernel(kind: OpKind, engine: Engine) -> str:
    """Say that an engine cannot compute a kind, and what to write."""
    name = type(kind).__name__
    if engine == "nxd":
        return f"the nxd engine has no layer or module for the kind {name}. Use --engine torch"
    return (
        f"the torch engine has no kernel for the kind {name}. Give the class a method torch_kernel(self, call) that "
        "returns a function from tensors of torch to a tuple of them (docs/developers/extending.md)"
    )
