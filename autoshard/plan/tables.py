"""The Strategy table of a plan: made from cuts, read back into programs; lines that cannot be executed are named."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

from autoshard.errors import Fault, InputError
from autoshard.graph.block import Block
from autoshard.graph.decoder import decoder_graph
from autoshard.graph.recompute import recompute
from autoshard.layout.natural_cuts import natural_boundary, natural_cuts
from autoshard.layout.program import Program
from autoshard.layout.redistribute import bytes_price
from autoshard.layout.table import Setting, Table, program_of, table_of
from autoshard.plan.codec import fingerprint
from autoshard.plan.plan import Plan
from autoshard.spec.kernels import load_kernels
from autoshard.spec.model import ModelSpec
from autoshard.spec.workload import Workload

_ATOMS = ("edp", "ep", "cp", "kv", "rep")
_NOMINAL_BYTES = 1.0  # which way a layout is changed does not depend on the size of the tensor


def strategy_tables(plan: Plan) -> Mapping[str, Table]:
    """Write the tables of a plan: per block kind, then per kind of recompute what differs from the block without it."""
    setting = table_setting(plan)
    tables: dict[str, Table] = {}
    for name, block in plan_blocks(plan).items():
        table = table_of(block, natural_cuts(block, plan.sp), setting)
        plain = tables.get(block.kind, {})
        tables[name] = {entry: line for entry, line in table.items() if plain.get(entry) != line}
    return tables


def with_tables(plan: Plan) -> Plan:
    """Return the plan with its tables; a prediction stays, because it was made for just this sharding."""
    full = replace(plan, strategies=strategy_tables(plan))
    if plan.prediction is None:
        return full
    return replace(full, prediction=replace(plan.prediction, of=fingerprint(full)))


def plan_programs(plan: Plan) -> Mapping[str, Program]:
    """Turn a plan's tables into programs, or raise one InputError with every line that cannot be executed."""
    setting, found = table_setting(plan), list[Fault]()
    programs: dict[str, Program] = {}
    blocks = plan_blocks(plan)
    for name in sorted(plan.strategies.keys() - blocks.keys()):
        message = f"the plan has no such block; it has {', '.join(blocks)}"
        found.append(Fault(where=f"strategies.{name}", message=message))
    for name, block in blocks.items():
        table = {**plan.strategies.get(block.kind, {}), **plan.strategies.get(name, {})}
        try:
            programs[name] = program_of(block, table, setting)
        except InputError as error:
            found.extend(error.under(f"strategies.{name}").faults)
    if found:
        raise InputError(found)
    return programs


def plan_blocks(plan: Plan) -> Mapping[str, Block]:
    """Return the blocks that have a table: embedding, layer, head, and the layer under every kind of recompute."""
    kinds = {kind for stage in plan.stages for kind in stage.recompute.kinds if kind.kind != "none"}
    blocks = {block.kind: block for block in _blocks(plan.model, plan.workload, plan.kernels)}
    for kind in sorted(kinds, key=str):
        names = None if kind.kind == "full" else kind.ops
        blocks[f"layer {kind}"] = recompute(blocks["layer"], load_kernels(plan.kernels), names)
    return blocks


def table_setting(plan: Plan) -> Setting:
    """Return what the tables of a plan are read against."""
    atoms = {atom: plan.mesh.size(atom) for atom in _ATOMS}
    return Setting(
        atoms=atoms,
        price=bytes_price(_NOMINAL_BYTES, atoms),
        boundary=natural_boundary(plan.sp),
        keeps_gathered=load_kernels(plan.kernels).keeps_gathered,
    )


@cache
def _blocks(model: ModelSpec, workload: Workload, kernels: str) -> tuple[Block, ...]:
    return decoder_graph(model, workload, load_kernels(kernels), micro_batch=1).blocks
