"""A sharded module in words: which axes cut each parameter, and what a rank sends in a step."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from autoshard.layout.layout import Cuts
from autoshard.layout.program import Given, Program, Value
from autoshard.modules.blocks import TracedBlock
from autoshard.modules.region import Positions
from autoshard.spec.mesh import Mesh
from autoshard.spec.workload import DTYPE_BYTES
from autoshard.units import format_bytes

_FLAT = "flat/"
_SIDES = ("columns", "rows")  # of weights
_PASSES = {"F": "forward", "I": "backward", "W": "backward", "": "step"}


def cut_lines(parameters: Mapping[str, str], traced: TracedBlock, cuts: Mapping[str, Cuts]) -> Iterator[str]:
    """Yield a line for submodules whose products are cut alike: by columns or rows of weights, by heads, by tokens."""
    roles: dict[str, dict[tuple[str, str], list[str]]] = defaultdict(lambda: defaultdict(list))
    weight_dims = {dim for name in parameters for dim in traced.block.tensors[name].dims}
    for op in (
        op for op in traced.block.ops if op.pass_ == "F" and op.kind.matrix_flops(traced.block.call(op, traced.sizes))
    ):
        dims = {name: {*traced.block.tensors[name].dims} for name in (*op.inputs, *op.outputs)}
        weights = [name for name in op.inputs if name in parameters]
        inputs = set[str]().union(*(dims[name] for name in op.inputs if name not in parameters))
        results = set[str]().union(*(dims[name] for name in op.outputs))
        path = parameters[weights[0]].removesuffix(".weight") if weights else f"{traced.paths.get(op.name, '')}."
        parent, _, leaf = path.rpartition(".")
        of_path = roles[parent]
        for dim, axes in cuts.get(op.name, {}).items():
            if not weights:
                role = "heads" if dim in weight_dims else "tokens"
            elif not any(dim in dims[name] for name in weights):
                role = "tokens"
            else:
                role = "columns" if dim in results else "rows" if dim in inputs else "experts"
            of_path[role, ".".join(axes)] += [leaf] if leaf else []
    yield from (
        f"{pattern or 'the module'}: {words}"
        for pattern, words in _grouped({path: _role_words(of) for path, of in roles.items()})
    )


def _role_words(roles: Mapping[tuple[str, str], Sequence[str]]) -> str:
    """Say what axes cut of a submodule, from the names of its parts by role and axes.

    >>> _role_words({("columns", "tp"): ["up"], ("rows", "tp"): ["down"], ("tokens", "dp"): ["up", "down"]})
    'up by columns and down by rows over tp, as in Megatron-LM; tokens over dp'
    >>> _role_words({("rows", "tp"): ["up"], ("columns", "tp"): ["down"]}), _role_words({})
    ('up by rows and down by columns over tp', 'nothing is cut')
    """

    def named(role: str, axes: str) -> str:
        return f"{', '.join(dict.fromkeys(roles[role, axes]))} by {role}"

    words = [f"heads over {axes}" for role, axes in roles if role == "heads"]
    for axes in dict.fromkeys(axes for role, axes in roles if role in _SIDES):
        sides = [role for role, over in roles if over == axes and role in _SIDES]  # in the order of the products
        as_usual = ", as in Megatron-LM" if sides == [*_SIDES] else ""
        words.append(f"{' and '.join(named(role, axes) for role in sides)} over {axes}{as_usual}")
    words += [f"{named(role, axes)} over {axes}" for role, axes in roles if role == "experts"]
    tokens = sorted(axes for role, axes in roles if role == "tokens")
    words += [f"tokens over {' and '.join(tokens)}"] if tokens else []
    return "; ".join(words) or "nothing is cut"


def parameter_lines(
    parameters: Mapping[str, str], traced: TracedBlock, program: Program, rests: Mapping[str, str]
) -> Iterator[str]:
    """Yield a line for parameters that are cut alike: ``parameters`` are the names of tensors and their paths.

    Brackets hold the axes that cut each dim, as pins of modules do.
    """
    cuts = {entry.value.tensor: entry.value.layout.cuts for entry in program.instructions if isinstance(entry, Given)}
    words: dict[str, str] = {}
    for name, path in parameters.items():
        pieces = f", in pieces over {rests[name].removeprefix(_FLAT)} between uses" if name in rests else ""
        words[path] = f"[{', '.join(_axes(traced.dims[name], cuts[name]))}]{pieces}"
    grouped = [*_grouped(words)]
    width = max((len(pattern) for pattern, _ in grouped), default=0)
    yield from (f"{pattern:<{width}}  {word}" for pattern, word in grouped)


def sent_lines(traced: TracedBlock, program: Program, mesh: Mesh, rests: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for what submodules send alike in a step, with the bytes that a rank holds of its tensors.

    Weights that rest in pieces are gathered for their uses.
    """
    makers = {name: op.source for op in traced.block.ops for name in op.outputs}
    sent: dict[tuple[str, str], list[float]] = defaultdict(list)
    for entry in (entry for entry in program.collectives() if entry.collective.kind != "slice"):  # which sends nothing
        path = traced.paths.get(makers.get(entry.reads.tensor, ""), "")
        what = f"{entry.collective.kind} over {'.'.join(entry.collective.atoms)}, {_PASSES[entry.pass_]}"
        size = max(_bytes(traced, value, mesh) for value in (entry.reads, entry.writes))
        sent[_collapsed(path) or "inputs and results", what].append(size)
    for tensor in traced.block.parameters:
        value = program.results[f"{tensor.name}.sum"]
        if tensor.name in rests:
            what = f"gathered from pieces over {rests[tensor.name].removeprefix(_FLAT)}"
            sent["weights", what].append(_bytes(traced, value, mesh))
        if value.layout.sums:
            sent["gradients", f"sums over {'.'.join(value.layout.sums)}"].append(_bytes(traced, value, mesh))
    for (path, what), sizes in sent.items():
        count = f"{len(sizes)} x " if len(sizes) > 1 else ""
        yield f"{path}: {count}{what}, {format_bytes(round(sum(sizes)))}"


def _bytes(traced: TracedBlock, value: Value, mesh: Mesh) -> float:
    tensor = traced.block.tensors[value.tensor]
    numbers = math.prod(
        traced.sizes[dim] / math.prod(mesh.size(atom) for atom in atoms) for dim, atoms in value.layout.dims
    )
    return numbers * DTYPE_BYTES[tensor.dtype]


def _axes(positions: Positions, cuts: Cuts) -> Iterator[str]:
    """Yield for each dim, as torch has it, the axes that cut it."""
    for dims in positions:
        axes = ".".join(axis for dim in dims for axis in cuts.get(dim, ()))
        yield f"/{axes}" if axes else "_"


def _grouped(words: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Join paths of the same word that differ in numbers alone, then those that differ in one name.

    >>> words = {"h.0.q.weight": "[/tp, _]", "h.1.q.weight": "[/tp, _]", "h.0.k.weight": "[/tp, _]"}
    >>> list(_grouped(words | {"h.1.k.weight": "[/tp, _]", "norm.weight": "[_]"}))
    [('h.*.{q,k}.weight', '[/tp, _]'), ('norm.weight', '[_]')]
    >>> list(_grouped({f"h.{number}.weight": "[_]" if number else "[/tp]" for number in range(4)}))
    [('h.0.weight', '[/tp]'), ('h.1-3.weight', '[_]')]
    """
    by_pattern: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for path, word in words.items():
        by_pattern[_collapsed(path)][word].append(path)
    joined: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for pattern, by_word in by_pattern.items():
        for word, paths in by_word.items():
            for path in [pattern] if len(by_word) == 1 and len(paths) > 1 else _ranged(paths):
                parent, _, leaf = path.rpartition(".")
                above, _, name = parent.rpartition(".")
                joined[above, leaf, word].append(name)
    for (above, leaf, word), names in joined.items():
        middle = names[0] if len(names) == 1 else f"{{{','.join(names)}}}"
        yield ".".join(part for part in (above, middle, leaf) if part), word


def _ranged(paths: Sequence[str]) -> Sequence[str]:
    """Join paths that differ in one number into one path, with the ranges of the number; else return them as they are.

    >>> _ranged(["h.0.q", "h.2.q", "h.3.q"]), _ranged(["0.q.0", "1.q.1"]), _ranged(["norm"])
    (['h.0,2-3.q'], ['0.q.0', '1.q.1'], ['norm'])
    """
    parts = [*zip(*(path.split(".") for path in paths), strict=True)]
    differ = [number for number, column in enumerate(parts) if len({*column}) > 1]
    if len(differ) != 1:
        return paths
    ranges: list[list[int]] = []
    for number in sorted(map(int, parts[differ[0]])):
        if ranges and ranges[-1][1] + 1 == number:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    text = ",".join(f"{low}" if low == high else f"{low}-{high}" for low, high in ranges)
    return [".".join(text if number in differ else column[0] for number, column in enumerate(parts))]


def _collapsed(path: str) -> str:
    """Replace the numbers of a path.

    >>> _collapsed("model.layers.11.mlp.2"), _collapsed("0.weight"), _collapsed("conv1.weight")
    ('model.layers.*.mlp.*', '*.weight', 'conv1.weight')
    """
    return ".".join("*" if part.isdecimal() else part for part in path.split("."))
