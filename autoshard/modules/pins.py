"""Pins of a module: the layouts that a user wants of parameters, and of the results of submodules, by their paths."""

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

from autoshard.blocks.choices import op_cuts
from autoshard.errors import Fault, Faults, InputError, nearest
from autoshard.graph.block import Block
from autoshard.graph.op import Op
from autoshard.layout.layout import Cuts
from autoshard.layout.legal import cut_operations
from autoshard.modules.region import Positions

_EXAMPLE = '"[ffn/tp, hidden]", or "[/tp, _]": a dim for each axis of the tensor, or what lies there, and what cuts it'


Places = Mapping[str, tuple[str, Positions]]  # by path a tensor of the block, as torch sees it


def pinned_cuts(
    block: Block, places: Places, atoms: Mapping[str, int], pins: Mapping[str, str]
) -> Mapping[str, tuple[Cuts, ...]]:
    """Return the cuts that pins leave to the operations that they touch; a path may be a pattern.

    The pin of a parameter fixes the layout in which operations read it, that of a module the layout of its result.
    """
    faults = Faults()
    pinned: dict[str, dict[str, tuple[str, ...]]] = {}
    ops = {op.name: op for op in cut_operations(block)}
    for path, text in pins.items():
        matches = [name for name in places if fnmatchcase(name, path)]
        if not matches:
            message = f"is no parameter and no module with a result. {nearest(path, list(places))}"
            faults.append(Fault(where=f"pins.{path}", message=message))
        for place in matches:
            tensor, positions = places[place]
            with faults.of(f"pins.{path}"):
                cuts = _parse(text, positions, atoms)
                for op in _touched(block, tensor, ops):
                    pinned_cuts = pinned.setdefault(op.name, {})
                    differing = [dim for dim, cut in cuts.items() if pinned_cuts.get(dim, cut) != cut]
                    if differing:
                        raise InputError.of(
                            "", f"asks for another cut of {differing[0]} in {op.name} than a pin before"
                        )
                    pinned_cuts |= cuts
    faults.refuse()
    allowed: dict[str, tuple[Cuts, ...]] = {}
    for name, cuts in pinned.items():
        choices = op_cuts(block, ops[name], [atom for atom, size in atoms.items() if size > 1])
        allowed[name] = tuple(
            choice for choice in choices if all(tuple(choice.get(dim, ())) == cut for dim, cut in cuts.items())
        )
        if not allowed[name]:
            raise InputError.of(
                "pins", f"{name} cannot be cut so: it needs {', '.join(ops[name].kind.whole_dims())} whole"
            )
    return allowed


def _touched(block: Block, tensor: str, ops: Mapping[str, Op]) -> Iterator[Op]:
    """Yield the operations that read a parameter, or the one that makes a result."""
    is_parameter = block.tensors[tensor].role in ("parameter", "input")
    return (op for op in ops.values() if tensor in (op.inputs if is_parameter else op.outputs))


def _parse(text: str, positions: Positions, atoms: Mapping[str, int]) -> Cuts:
    """Read a layout as torch sees the tensor; a product of dims is cut along its first one, or along the one named."""
    inside = text.strip().removeprefix("[").removesuffix("]")
    entries = [part.strip() for part in inside.split(",")] if inside else []
    if len(entries) != len(positions) or len(inside) != len(text.strip()) - 2:
        raise InputError.of("", f"{text!r} does not fit a tensor of {len(positions)} axes. Write {_EXAMPLE}")
    cuts: dict[str, tuple[str, ...]] = {}
    for entry, position in zip(entries, positions, strict=True):
        name, _, cut = entry.partition("/")
        names = tuple(axis for axis in cut.split(".") if axis)
        unknown = [axis for axis in names if axis not in atoms]
        if unknown:
            raise InputError.of("", f"{unknown[0]!r} is no axis of the mesh. {nearest(unknown[0], list(atoms))}")
        position_names = ("_", *position, ".".join(position))
        if name and name not in position_names:  # without a name it is what lies there
            raise InputError.of("", f"{name!r} is not what lies there. {nearest(name, position_names)}")
        if names and not position:
            raise InputError.of("", f"{entry}: an axis of size 1 cannot be cut")
        which = name if name in position else next(iter(position), "")
        cuts |= {dim: names if dim == which else () for dim in position}
    return {dim: tuple(atom for atom in cut if atoms[atom] > 1) for dim, cut in cuts.items()}
