"""Configurations written as Python functions: their assignments and keyword arguments, read off the syntax tree.

Nothing is executed or imported. A call is its keywords, with ``call`` for its name and ``args`` for the rest; a call of
a function of the same file is what that function returns. What cannot be told is an Unread.
"""

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from autoshard.errors import InputError

_DEEPEST = 12  # calls of functions of the file inside one another
_LONGEST = 80


@dataclass(frozen=True, slots=True)
class Unread:
    """An expression whose value only running would tell."""

    text: str


@dataclass(slots=True)
class _RecipeReader:
    """The functions and constants of one file."""

    functions: Mapping[str, ast.FunctionDef]
    constants: dict[str, Any] = field(default_factory=dict[str, Any])
    depth: int = 0

    def called(self, function: ast.FunctionDef, positional: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Return what a function of the file returns for such arguments."""
        parameters = function.args
        names = [parameter.arg for parameter in (*parameters.posonlyargs, *parameters.args)]
        local: dict[str, Any] = dict.fromkeys(
            (*names, *(parameter.arg for parameter in parameters.kwonlyargs)), Unread("argument")
        )
        pairs = zip(names[len(names) - len(parameters.defaults) :], parameters.defaults, strict=True)
        keyword_pairs = zip(parameters.kwonlyargs, parameters.kw_defaults, strict=True)
        local |= {name: self.value(node, {}) for name, node in pairs}
        local |= {parameter.arg: self.value(node, {}) for parameter, node in keyword_pairs if node is not None}
        local |= dict(zip(names, positional, strict=False))
        local |= {name: value for name, value in named.items() if name in local}
        self.depth += 1
        try:
            return self.followed(function.body, local)[1] if self.depth <= _DEEPEST else Unread(function.name)
        finally:
            self.depth -= 1

    def followed(self, body: Sequence[ast.stmt], local: dict[str, Any]) -> tuple[bool, Any]:
        """Follow statements; return whether they return, and what."""
        for statement in body:
            if isinstance(statement, ast.Return):
                return True, self.value(statement.value, local) if statement.value else None
            if isinstance(statement, ast.Assign):
                value = self.value(statement.value, local)
                for target in statement.targets:
                    self.assign(target, value, local)
            elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
                self.assign(statement.target, self.value(statement.value, local), local)
            elif isinstance(statement, ast.If):
                test = self.value(statement.test, local)
                if isinstance(test, bool) or test is None:
                    returns, value = self.followed(statement.body if test else statement.orelse, local)
                    if returns:
                        return True, value
            elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
                self.changed(statement.value, local)
        return False, None

    def changed(self, call: ast.Call, local: dict[str, Any]) -> None:
        """Follow a call that changes its argument: of a function of the file, or note that of another file."""
        function = self.functions.get(call.func.id) if isinstance(call.func, ast.Name) else None
        arguments = [self.value(argument, local) for argument in call.args]
        if function is not None:
            named = {keyword.arg: self.value(keyword.value, local) for keyword in call.keywords if keyword.arg}
            self.called(function, arguments, named)
        elif isinstance(call.func, ast.Name) and arguments and isinstance(arguments[0], dict):
            cast(dict[str, Any], arguments[0])["changed_by"] = call.func.id

    def assign(self, target: ast.expr, value: Any, local: dict[str, Any]) -> None:
        """Set a name, or an attribute of a configuration."""
        if isinstance(target, ast.Name):
            local[target.id] = value
        elif isinstance(target, ast.Attribute):
            owner = self.value(target.value, local)
            if isinstance(owner, dict):
                cast(dict[str, Any], owner)[target.attr] = value
            elif isinstance(target.value, ast.Name | ast.Attribute):
                self.assign(target.value, {target.attr: value}, local)

    def value(self, node: ast.expr, local: Mapping[str, Any]) -> Any:
        """Return the value of an expression, or Unread."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            return local.get(node.id, self.constants.get(node.id, Unread(node.id)))
        if isinstance(node, ast.List | ast.Tuple):
            return [self.value(item, local) for item in node.elts]
        if isinstance(node, ast.Attribute):
            return self.attribute(node, local)
        if isinstance(node, ast.Call):
            return self.call(node, local)
        if isinstance(node, ast.BinOp | ast.UnaryOp | ast.Compare | ast.BoolOp | ast.IfExp):
            return self.computed(node, local)
        if isinstance(node, ast.Dict):
            keys = [key.value if isinstance(key, ast.Constant) else None for key in node.keys]
            return {str(key): self.value(item, local) for key, item in zip(keys, node.values, strict=True) if key}
        return _unread(node)

    def attribute(self, node: ast.Attribute, local: Mapping[str, Any]) -> Any:
        """Return what a configuration has under a name; of a foreign module the name itself: torch.float32."""
        owner = self.value(node.value, local)
        if isinstance(owner, dict):
            return cast(dict[str, Any], owner).get(node.attr, _unread(node))
        return node.attr if isinstance(node.value, ast.Name) and node.value.id == "torch" else _unread(node)

    def call(self, node: ast.Call, local: Mapping[str, Any]) -> Any:
        """Return what a function of the file returns; of any other call its name and its arguments."""
        named = {keyword.arg: self.value(keyword.value, local) for keyword in node.keywords if keyword.arg}
        positional = [self.value(argument, local) for argument in node.args]
        function = self.functions.get(node.func.id) if isinstance(node.func, ast.Name) else None
        if function is not None:
            return self.called(function, positional, named)
        name = ast.unparse(node.func)
        inner = node.func.value if isinstance(node.func, ast.Attribute) else None
        if isinstance(inner, ast.Call):  # AutoBridge.from_hf_pretrained("name").get_model_config()
            within = self.value(inner, local)
            positional = [*(cast(dict[str, Any], within).get("args", ()) if isinstance(within, dict) else ())]
        return {**named, "call": name[-_LONGEST:], **({"args": positional} if positional else {})}

    def computed(self, node: ast.expr, local: Mapping[str, Any]) -> Any:
        """Return the value of products, sums, signs and comparisons of known numbers."""
        if isinstance(node, ast.UnaryOp):
            value = self.value(node.operand, local)
            if isinstance(node.op, ast.Not) and (isinstance(value, bool | str | int) or value is None):
                return not value
            return -value if isinstance(node.op, ast.USub) and isinstance(value, int | float) else _unread(node)
        if isinstance(node, ast.IfExp):
            test = self.value(node.test, local)
            is_open = isinstance(test, Unread | dict | list)
            return _unread(node) if is_open else self.value(node.body if test else node.orelse, local)
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            a, b = self.value(node.left, local), self.value(node.comparators[0], local)
            if isinstance(node.ops[0], ast.Is | ast.Eq) and not isinstance(a, Unread) and not isinstance(b, Unread):
                return a == b
            is_not = isinstance(node.ops[0], ast.IsNot | ast.NotEq)
            return a != b if is_not and not isinstance(a, Unread) and not isinstance(b, Unread) else _unread(node)
        if isinstance(node, ast.BoolOp):
            values = [self.value(operand, local) for operand in node.values]
            if all(isinstance(value, bool) or value is None for value in values):
                return any(values) if isinstance(node.op, ast.Or) else all(values)
        if isinstance(node, ast.BinOp):
            return _arithmetic(node, self.value(node.left, local), self.value(node.right, local))
        return _unread(node)


def _arithmetic(node: ast.BinOp, a: Any, b: Any) -> Any:
    if not (isinstance(a, int | float) and isinstance(b, int | float)) or max(abs(a), abs(b)) > 2**63:
        return _unread(node)
    if isinstance(node.op, ast.Pow):
        return a**b if 0 <= b <= 64 and abs(a) <= 1024 else _unread(node)
    if isinstance(node.op, ast.FloorDiv | ast.Div):
        return _unread(node) if b == 0 else a // b if isinstance(node.op, ast.FloorDiv) else a / b
    results: dict[type[ast.operator], Any] = {ast.Mult: a * b, ast.Add: a + b, ast.Sub: a - b}
    return results.get(type(node.op), _unread(node))


def _unread(node: ast.expr) -> Unread:
    text = ast.unparse(node)
    return Unread(text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}...")


def configurations(text: str, where: str) -> dict[str, dict[str, Any]]:
    """Return the nested values that each function of a file returns which returns a configuration, by its name.

    >>> code = '''
    ... def small(tp: int = 2):
    ...     cfg = common()
    ...     cfg.model.tensor_model_parallel_size = tp * 2
    ...     return cfg
    ... '''
    >>> configurations(code, "")["small"]
    {'call': 'common', 'model': {'tensor_model_parallel_size': 4}}
    """
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise InputError.of(where, f"is not Python that can be read: {error.msg} in line {error.lineno}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise InputError.of(where, f"is not Python that can be read: {error}") from None
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    reader = _RecipeReader(functions)
    results: dict[str, dict[str, Any]] = {}
    try:
        for node in tree.body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                value = reader.value(node.value, {})
                reader.constants |= {target.id: value for target in targets if isinstance(target, ast.Name)}
        for name, function in functions.items():
            result = reader.called(function, (), {})
            if isinstance(result, dict) and not name.startswith("_"):
                results[name] = cast(dict[str, Any], result)
    except RecursionError:
        raise InputError.of(where, "is nested too deeply") from None
    return results
