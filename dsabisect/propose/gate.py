"""A source gate: one module-level switch becomes an attribute of each instance, off where a predicate holds.

`SWITCH = is_cuda and flag` stays as it is; `__init__` sets `self.attribute = SWITCH and not (predicate)`, and every
method reads the attribute, in nested functions, lambdas and comprehensions too. What has no instance at hand is left
alone and listed (module-level functions, decorators and defaults, static and class methods): it may now take the path
that an instance has turned off, so a person must look. libcst finds the scopes and keeps comments and formatting.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dsabisect.errors import EnvironmentFault, UsageError

if TYPE_CHECKING:
    import libcst as cst


@dataclass(frozen=True, kw_only=True)
class Use:
    line: int
    where: str  # "Indexer.forward", "pcg_split", "(module)", …


@dataclass(frozen=True, kw_only=True)
class Gated:
    source: str
    cls: str
    attribute: str
    assignment: str  # the line that __init__ got
    replaced: tuple[Use, ...]
    left: tuple[Use, ...]  # uses that still read the global switch


@dataclass(frozen=True, kw_only=True)
class _Read:
    node: Any
    use: Use
    cls: str  # module-level class around it, "" for none
    instance: str  # name of the instance there, "" when there is none at hand


class NoGate(UsageError):
    """This source cannot be gated this way; the message says why."""


def gate(source: str, *, switch: str, predicate: str, cls: str = "", name: str = "") -> Gated:
    """Turn the use of ``switch`` inside a class into an instance attribute that is off where ``predicate`` holds.

    Args:
        source: a Python module.
        switch: the expression that is read, a module-level name (`_use_fusion`) or a dotted one (`config.USE_FUSION`).
        predicate: an expression over arguments of `__init__`, such as `is_neox_style` or `cfg.is_neox_style`.
        cls: the class; "" when exactly one class reads the switch.
        name: name of the attribute; "" makes it from the switch: no underscores at its beginning, lower case.

    Raises:
        NoGate: no class or several, no `__init__` of its own, a predicate over other names, a name that is taken,
            or a switch that a function assigns.
        EnvironmentFault: libcst is not installed.
    """
    try:
        import libcst as cst
        from libcst import metadata
    except ModuleNotFoundError as error:
        raise EnvironmentFault(f"{error.name} is not installed", remedy="pip install libcst") from error

    attribute = name or switch.split(".")[-1].lstrip("_").lower()
    if not attribute.isidentifier() or not all(part.isidentifier() for part in switch.split(".")):
        raise NoGate(f"{switch!r} is no name")
    condition = _expression(predicate)
    wrapper = metadata.MetadataWrapper(_parsed(source))
    reads = _reads(wrapper, switch)
    chosen = _choose(reads, cls, switch)
    node = next(n for n in wrapper.module.body if isinstance(n, cst.ClassDef) and n.name.value == chosen)
    init = _init_of(node)
    parameters = [p.name.value for p in (*init.params.posonly_params, *init.params.params, *init.params.kwonly_params)]
    _check_predicate(condition, parameters, chosen)
    _check_free(node, attribute)
    replacing = {id(r.node): r for r in reads if r.cls == chosen and r.instance}
    shown = predicate if isinstance(condition, (ast.Name, ast.Attribute, ast.Call)) else f"({predicate})"
    assignment = f"{parameters[0]}.{attribute} = {switch} and not {shown}"
    code = wrapper.module.visit(_rewriter(replacing, attribute, chosen, assignment)).code
    compile(code, "<gated>", "exec", dont_inherit=True)  # ours to notice, not the candidate's
    return Gated(
        source=code, cls=chosen, attribute=attribute, assignment=assignment,
        replaced=tuple(r.use for r in reads if id(r.node) in replacing),
        left=tuple(r.use for r in reads if id(r.node) not in replacing),
    )  # fmt: skip


# ---- reading ------------------------------------------------------------------------------------------------


def _parsed(source: str) -> cst.Module:
    import libcst as cst

    try:
        return cst.parse_module(source)
    except cst.ParserSyntaxError as error:
        raise NoGate(f"the file does not parse: {str(error).splitlines()[0]}") from error


def _expression(predicate: str) -> ast.expr:
    """One line: a newline in it would begin another statement."""
    try:
        if "\n" in predicate or "#" in predicate:
            raise SyntaxError
        return ast.parse(predicate, mode="eval").body
    except (SyntaxError, ValueError) as error:
        raise NoGate(f"the predicate {predicate!r} is no expression") from error


def _reads(wrapper: Any, switch: str) -> list[_Read]:
    """Every read of the module's ``switch``, in order; locals and attributes of the same name are none."""
    from libcst import matchers, metadata

    provided = wrapper.resolve_many(
        (metadata.ScopeProvider, metadata.PositionProvider, metadata.ExpressionContextProvider)
    )
    scopes = provided[metadata.ScopeProvider]
    positions = provided[metadata.PositionProvider]
    contexts = provided[metadata.ExpressionContextProvider]
    head, *rest = switch.split(".")
    wanted: Any = matchers.Name(head)
    for part in rest:
        wanted = matchers.Attribute(value=wanted, attr=matchers.Name(part))
    found = []
    for node in matchers.findall(wrapper.module, wanted):
        scope, context = scopes.get(node), contexts.get(node)
        if scope is None or context is None or not _is_global(scope, head):
            continue  # part of an attribute, a keyword, an import, or a local of the same name
        cls, instance, where = _surroundings(scope)
        if context is not metadata.ExpressionContext.LOAD:
            if not isinstance(scope, metadata.GlobalScope):
                raise NoGate(f"{switch} is assigned in {where}: it is no constant switch")
            continue
        use = Use(line=positions[node].start.line, where=where)
        found.append(_Read(node=node, use=use, cls=cls, instance=instance))
    return sorted(found, key=lambda read: read.use.line)


def _is_global(scope: Any, name: str) -> bool:
    from libcst import metadata

    return all(isinstance(a.scope, (metadata.GlobalScope, metadata.BuiltinScope)) for a in scope[name])


def _surroundings(scope: Any) -> tuple[str, str, str]:
    """(module-level class, name of its instance as seen from ``scope``, dotted place)."""
    import libcst as cst
    from libcst import metadata

    chain: list[Any] = []
    at = scope
    while not isinstance(at, metadata.GlobalScope):
        if isinstance(at, (metadata.FunctionScope, metadata.ClassScope)):  # comprehensions have no name
            chain.insert(0, at)
        at = at.parent
    where = ".".join(s.name or "<lambda>" for s in chain) or "(module)"
    cls = (chain[0].name or "") if chain and isinstance(chain[0], metadata.ClassScope) else ""
    if not cls or len(chain) < 2 or not isinstance(chain[1], metadata.FunctionScope):
        return cls, "", where
    method = next(iter(chain[0][chain[1].name or ""]), None)
    definition = getattr(method, "node", None)
    if not isinstance(definition, cst.FunctionDef) or _without_instance(definition):
        return cls, "", where
    first = [*definition.params.posonly_params, *definition.params.params][:1]
    own = first[0].name.value if first else ""
    still_own = own and all(a.scope is chain[1] and _is_parameter(a, first[0]) for a in scope[own])
    return cls, own if still_own else "", where


def _is_parameter(assignment: Any, parameter: Any) -> bool:
    return assignment.node is parameter or assignment.node is parameter.name


def _without_instance(definition: Any) -> bool:
    from libcst import matchers

    plain = matchers.Decorator(matchers.Name("staticmethod") | matchers.Name("classmethod"))
    return definition.name.value in ("__new__", "__init_subclass__", "__class_getitem__") or any(
        matchers.matches(d, plain) for d in definition.decorators
    )


# ---- checking -----------------------------------------------------------------------------------------------


def _choose(reads: Sequence[_Read], asked: str, switch: str) -> str:
    classes = sorted({r.cls for r in reads if r.cls and r.instance})
    if asked and asked not in classes:
        raise NoGate(f"class {asked} does not read {switch}")
    if not asked and len(classes) != 1:
        what = f"several classes read it: {', '.join(classes)}" if classes else "no method reads it"
        raise NoGate(f"{switch} cannot be gated: {what}", remedy="Name the class" if classes else "")
    return asked or classes[0]


def _init_of(node: Any) -> Any:
    import libcst as cst

    for statement in node.body.body:
        if isinstance(statement, cst.FunctionDef) and statement.name.value == "__init__":
            if not isinstance(statement.body, cst.IndentedBlock):
                raise NoGate("__init__ has its body on the same line")
            return statement
    raise NoGate(f"class {node.name.value} has no __init__ of its own in which the switch could be set")


def _check_predicate(condition: ast.expr, parameters: Sequence[str], cls: str) -> None:
    names = {n.id for n in ast.walk(condition) if isinstance(n, ast.Name)}
    unknown = sorted(names - set(parameters[1:]))
    if unknown or not names:
        what = f"reads {', '.join(unknown)}" if unknown else "reads no argument"
        raise NoGate(f"the predicate {ast.unparse(condition)!r} {what}", where=f"{cls}.__init__",
                     remedy=f"Its arguments are: {', '.join(parameters[1:]) or 'none'}")  # fmt: skip


def _check_free(node: Any, attribute: str) -> None:
    from libcst import matchers

    taken = matchers.Attribute(attr=matchers.Name(attribute)) | matchers.FunctionDef(name=matchers.Name(attribute))
    if matchers.findall(node, taken | matchers.AssignTarget(target=matchers.Name(attribute))):
        raise NoGate(f"class {node.name.value} uses {attribute} already", remedy="Name another attribute")


# ---- writing ------------------------------------------------------------------------------------------------


def _rewriter(replacing: Mapping[int, _Read], attribute: str, cls: str, assignment: str) -> cst.CSTTransformer:
    import libcst as cst

    class Rewriter(cst.CSTTransformer):
        def __init__(self) -> None:
            super().__init__()
            self.place: list[str] = []

        def visit_ClassDef(self, node: cst.ClassDef) -> None:
            self.place.append(node.name.value)

        def leave_ClassDef(self, original_node: cst.ClassDef, updated_node: cst.ClassDef) -> cst.ClassDef:
            self.place.pop()
            return updated_node

        def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
            self.place.append(node.name.value)

        def leave_FunctionDef(self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef) -> cst.FunctionDef:
            here = self.place[:]
            self.place.pop()
            return _with_line(updated_node, assignment, attribute) if here == [cls, "__init__"] else updated_node

        def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.BaseExpression:
            return self._read(original_node, updated_node)

        def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> cst.BaseExpression:
            return self._read(original_node, updated_node)

        def _read(self, before: Any, after: Any) -> cst.BaseExpression:
            read = replacing.get(id(before))
            if read is None:
                return after  # type: ignore[no-any-return]
            value = cst.Name(read.instance)
            return cst.Attribute(value=value, attr=cst.Name(attribute), lpar=after.lpar, rpar=after.rpar)

    return Rewriter()


def _with_line(init: Any, assignment: str, attribute: str) -> Any:
    """`__init__` with one line more: before anything of its own reads it, after the docstring and `super().__init__`.

    An nn.Module takes no attributes before its own `__init__` ran. Where the attribute is needed before that, the
    line comes first.
    """
    import libcst as cst

    statements = list(init.body.body)
    texts = [cst.Module([]).code_for_node(statement) for statement in statements]
    supers = [at for at, text in enumerate(texts) if ".__init__(" in text]
    documented = [0] if init.get_docstring() is not None else []
    read = [at for at, text in enumerate(texts) if f".{attribute}" in text]
    at = min([max([0, *(n + 1 for n in documented + supers[:1])]), *read])
    return init.with_changes(
        body=init.body.with_changes(body=[*statements[:at], cst.parse_statement(assignment + "\n"), *statements[at:]])
    )
