"""The least time that a compiled program can take on a device, kernel by kernel.

A kernel takes max(operations / peak, bytes / bandwidth), a loop's body that much each
time it runs: the roofline of Williams et al. (2009). Nothing overlaps. What it leaves
out is counted beside it: launches, and bytes that products hide.
"""

import math
import re
from collections.abc import Collection, Iterator
from typing import NamedTuple

from benchmarks.compiled.devices import Device

_BYTES = {"f16": 2, "bf16": 2, "s16": 2, "u16": 2, "pred": 1, "s8": 1, "u8": 1}
_BYTES |= {"f64": 8, "s64": 8, "u64": 8, "token": 0, "opaque": 0}
_TENSOR = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
_LINE = re.compile(r"\s+(?:ROOT )?%(\S+) = (.*?) ([a-z][\w-]*)\((.*)")
_NAMES = re.compile(r"%([\w.-]+)")
# What moves nothing, or is counted where it starts.
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "iota"}
_FREE |= {"after-all", "copy-done", "slice-done", "async-done", "partition-id"}
_NO_KERNEL = 'custom_call_target="AllocateBuffer"'
# What gives the same numbers, element by element.
_SAME = {"bitcast", "convert"}
# What computes each element from those in its place.
_ELEMENTWISE = {"add", "subtract", "multiply", "divide", "maximum", "minimum", "select"}
_ELEMENTWISE |= {"exponential", "negate", "tanh", "compare"}
_BODIES = re.compile(r"(?:calls|to_apply|body|called_computations)=\{?%([\w.-]+)")


class _Instruction(NamedTuple):
    name: str
    shape: str
    operation: str
    rest: str
    operands: list[str]


class Product(NamedTuple):
    """A matrix product or convolution: its operations and the dtypes of operands."""

    operations: float
    operands: tuple[str, str]


class Cost(NamedTuple):
    """What a program takes.

    Attributes:
        seconds: the least time.
        products: matrix products and convolutions.
        launches: how many kernels run.
        hidden: bytes that are moved while products are computed. In practice they take
            about half of their time all the same.
    """

    seconds: float
    products: list[Product]
    launches: int
    hidden: float


def cost_of(text: str, device: Device) -> Cost:
    """Reads an optimized HLO module, as `compiled.as_text()` gives it."""
    program = _Program(text)
    seconds, products, launches, hidden = 0.0, [], 0, 0.0
    for instruction, where, times in program.kernels():
        found = list(program.products(instruction, where))
        operations = sum(p.operations / device.peak["f32" in p.operands] for p in found)
        moved = program.moved(instruction, where) / device.bandwidth
        seconds += times * max(operations, moved)
        products += found
        launches += times
        hidden += times * min(operations, moved) * device.bandwidth
    return Cost(seconds, products, launches, hidden)


class _Program:
    def __init__(self, text: str) -> None:
        self._computations: dict[str, list[_Instruction]] = {}
        self._entry = current = ""
        for line in text.splitlines():
            if start := re.match(r"(ENTRY )?%(\S+) \(", line):
                current = start[2]
                self._computations[current] = []
                self._entry = current if start[1] else self._entry
            elif (found := _LINE.match(line)) and current:
                name, shape, operation, rest = found.groups()
                operands = _NAMES.findall(_arguments(rest))
                instruction = _Instruction(name, shape, operation, rest, operands)
                self._computations[current].append(instruction)
        self._shapes = {
            (where, each.name): each.shape
            for where, instructions in self._computations.items()
            for each in instructions
        }

    def kernels(self) -> Iterator[tuple[_Instruction, str, int]]:
        """The instructions that run, each with its computation, and how often."""
        yield from self._kernels(self._entry, 1)

    def _kernels(
        self, where: str, times: int
    ) -> Iterator[tuple[_Instruction, str, int]]:
        for instruction in self._computations[where]:
            if instruction.operation == "while":
                trips = re.search(r'known_trip_count":\{"n":"(\d+)', instruction.rest)
                body = re.search(r"body=%([\w.-]+)", instruction.rest)
                if body is None or trips is None:
                    raise ValueError(f"a loop of unknown length: {instruction.name}")
                yield from self._kernels(body[1], times * int(trips[1]))
            elif (
                instruction.operation not in _FREE
                and _NO_KERNEL not in instruction.rest
            ):
                yield instruction, where, times

    def products(self, instruction: _Instruction, where: str) -> Iterator[Product]:
        """The products of an instruction and of what it calls."""
        found = self._product(instruction, where)
        if found:
            yield found
        for body in _BODIES.findall(instruction.rest):
            for each in self._computations.get(body, []):
                yield from self.products(each, body)

    def _product(self, instruction: _Instruction, where: str) -> Product | None:
        operation, rest = instruction.operation, instruction.rest
        library = re.search(r'custom_call_target="__(cublas|cudnn\$conv)', rest)
        if operation not in ("dot", "convolution") and not library:
            return None
        pair = instruction.operands[:2]
        a, b = (_tensors(self._shapes[where, name])[0] for name in pair)
        _, result = _tensors(instruction.shape)[0]
        labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", rest)
        if labels:
            sides = {"lhs": a[1], "rhs": b[1], "out": result}
            operations = _of_convolution(rest, labels.groups(), sides)
        else:
            axes = re.search(r'lhs_contracting_dim\w+"?[=:][{\[]([\d,"]*)[}\]]', rest)
            contracted = re.findall(r"\d+", axes[1]) if axes else []
            depth = math.prod(a[1][int(axis)] for axis in contracted)
            operations = 2.0 * math.prod(result) * depth
        return Product(operations, (a[0], b[0]))

    def moved(self, instruction: _Instruction, where: str) -> int:
        """The bytes that an instruction reads and writes."""
        shapes = {
            name: self._shapes[where, name]
            for name in instruction.operands
            if (where, name) in self._shapes
        }
        sizes = {name: _bytes(shape) for name, shape in shapes.items()}
        if instruction.operation in ("copy-start", "async-start", "slice-start"):
            return 2 * next(iter(sizes.values()), 0)
        written = _bytes(instruction.shape)
        if instruction.operation == "fusion":
            (body, *_) = _BODIES.findall(instruction.rest)
            written -= self._untouched(instruction, body, sizes)
        return written + sum(sizes.values())

    def _untouched(
        self, instruction: _Instruction, body: str, sizes: dict[str, int]
    ) -> int:
        """Reduces `sizes` to what a fusion reads; returns what it does not write.

        It touches only part of what it slices, gathers from or scatters into in place.
        """
        untouched = 0
        inner = self._computations[body]
        for parameter in inner:
            if parameter.operation != "parameter":
                continue
            number = int(re.match(r"\d+", parameter.rest)[0])  # type: ignore[index]
            if number >= len(instruction.operands):
                continue
            outer = instruction.operands[number]
            dtype = _tensors(parameter.shape)[0][0]
            # Of a sum, say, only the elements that are gathered are computed.
            users, first = _users(parameter, inner, _ELEMENTWISE)
            operations = {user.operation for user in users}
            if first and operations <= {"gather", "dynamic-slice", "slice"}:
                part = sum(_bytes(user.shape, dtype) for user in users)
                sizes[outer] = min(sizes.get(outer, 0), part)
                continue
            users, first = _users(parameter, inner)
            operations = {user.operation for user in users}
            if first and operations <= {"scatter", "dynamic-update-slice"}:
                updates = [
                    u.operands[1 if "dynamic" in u.operation else -1] for u in users
                ]
                part = sum(_bytes(self._shapes[body, name], dtype) for name in updates)
                part = min(part, sizes.get(outer, 0))
                untouched += sizes.get(outer, 0) - part
                # A scatter may add to what is there.
                sizes[outer] = part if "scatter" in operations else 0
        return untouched


def _users(
    parameter: _Instruction, inner: list[_Instruction], through: Collection[str] = ()
) -> tuple[list[_Instruction], bool]:
    """What uses a parameter in a fusion, and whether always as the first operand.

    Args:
        through: operations whose results of the same shape count as the parameter.
    """
    names, users = [parameter.name], []
    shape = _tensors(parameter.shape)[0][1]
    for name in names:  # It grows.
        for each in (each for each in inner if name in each.operands):
            same = each.operation in through and _tensors(each.shape)[0][1] == shape
            if same or each.operation in _SAME:
                names.append(each.name)
            else:
                users.append(each)
    return users, bool(users) and all(user.operands[0] in names for user in users)


def _of_convolution(rest: str, labels: tuple[str, ...], sides: dict) -> float:
    """The operations of a convolution, or of one of its gradients, which has as many.

    cuDNN's gradients name the output of the forward pass among their operands.
    """
    kernel, result = sides["rhs"], sides["out"]
    if "convBackwardFilter" in rest:
        kernel, result = sides["out"], sides["rhs"]
    elif "convBackwardInput" in rest:
        result = sides["lhs"]
    channels = kernel[labels[1].index("o")]
    return 2.0 * math.prod(result) * math.prod(kernel) / max(1, channels)


def _arguments(rest: str) -> str:
    """The text between the parentheses of a call; the first one is open already."""
    depth = 1
    for end, character in enumerate(rest):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth == 0:
            return rest[:end]
    return rest


def _tensors(shape: str) -> list[tuple[str, list[int]]]:
    return [
        (dtype, [int(x) for x in sizes.split(",") if x])
        for dtype, sizes in _TENSOR.findall(shape)
    ]


def _bytes(shape: str, dtype: str = "") -> int:
    """The bytes of tensors, in their own dtypes or in another."""
    tensors = _tensors(shape)
    return sum(_BYTES.get(dtype or d, 4) * math.prod(sizes) for d, sizes in tensors)
