"""``GroupedTensor``: G groups of rows, or G matrices, as one tensor that holds the components of a format.

The wrapper has the shape and dtype of the represented values and no memory of its own. Its components are ordinary
tensors, one allocation each: a graph that writes several of them (``quantize_``) then knows that they do not overlap,
which it would not for views of one allocation, and every allocation is aligned for all kernels.

Everything else is a constant of the graph: the dtype, the options of ``group_quantize`` and, for a list of matrices,
their shapes. The number of rows is the only dynamic size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from ..meta import checks
from ..meta.components import Components
from ..meta.quantized import SOURCES, Options
from ..meta.specs import Dim, TensorSpec
from . import _autograd, _dispatch, _saved_form, _structure
from ._structure import CLASSES, Shapes, Static

COMPONENTS = ("rowwise_data", "rowwise_scale", "rowwise_amax", "columnwise_data", "columnwise_scale", "columnwise_amax")
"""Attributes that hold the components, in the order of ``Components``; None for a missing component."""

NAMES = (*COMPONENTS, "offs")
_OWN = {*NAMES, "static", "shapes"}  # attributes of a GroupedTensor itself; all others belong to users

_OWN = {*NAMES, "static", "shapes"}


class GroupedTensor(Tensor):
    """Abstract base of ``DenseGroupedTensor`` and of one class per quantised format.

    Make one with ``tgl.quantize``, allocate one with ``GroupedTensor.empty``. It represents one of

    - ``[T, K]``, rows in groups: ``offs`` int32 ``[G]`` holds the cumulative group ends, on the device;
    - ``[G, N, K]``, G matrices of one shape, such as the weights of G experts; ``offs`` is None;
    - ``[N, K]``, one matrix, such as an element of ``split()``; ``offs`` is None;
    - ``[numel]``, matrices of any shapes one after the other (``shapes``), for storage; ``offs`` is None.

    Its dtype is that of the quantised values (bfloat16, float16 or float32), and the default of ``dequantize``.
    Gradients of a GroupedTensor are dense tensors of its shape. It can be cloned, detached, moved, copied into, stacked
    and unbound, saved and loaded; every other op raises ``NotImplementedError`` with its name.

    Attributes:
        format: name of the format.
        rowwise_data, rowwise_scale, rowwise_amax: components with blocks along K, or None.
        columnwise_data, columnwise_scale, columnwise_amax: components with blocks along the rows, or None.
        offs: int32 ``[G]``, or None.
        shapes: shapes of the matrices of a list, or None.
    """

    format: ClassVar[str] = ""
    rowwise_data: Tensor | None
    rowwise_scale: Tensor | None
    rowwise_amax: Tensor | None
    columnwise_data: Tensor | None
    columnwise_scale: Tensor | None
    columnwise_amax: Tensor | None
    offs: Tensor | None
    shapes: Shapes | None
    static: Static

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.format:
            CLASSES[cls.format] = cls

    # --- a traceable wrapper ------------------------------------------------------------------------------------------

    @staticmethod
    def __new__(
        cls: type[GroupedTensor],
        shape: Sequence[Dim] | Tensor,
        dtype: torch.dtype | None = None,
        static: Static | None = None,
        parts: dict[str, Tensor] | None = None,
        shapes: Shapes | None = None,
        **attributes: Any,
    ) -> GroupedTensor:
        """Wrap components without checks; use ``tgl.quantize`` or ``empty`` to make a consistent GroupedTensor.

        ``type(parameter)(value, requires_grad=...)`` with a GroupedTensor as the only positional argument makes a
        parameter: other code writes it for ``nn.Parameter(value, requires_grad)``.
        """
        if isinstance(shape, Tensor):
            return _parameter(cls, shape, attributes)
        if not cls.format:
            raise TypeError("GroupedTensor is abstract: make one with tgl.quantize or GroupedTensor.empty")
        assert dtype is not None
        assert static is not None
        assert parts is not None
        data = parts["rowwise_data"] if "rowwise_data" in parts else parts["columnwise_data"]
        self = Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=data.device)
        self.rowwise_data = parts.get("rowwise_data")
        self.rowwise_scale = parts.get("rowwise_scale")
        self.rowwise_amax = parts.get("rowwise_amax")
        self.columnwise_data = parts.get("columnwise_data")
        self.columnwise_scale = parts.get("columnwise_scale")
        self.columnwise_amax = parts.get("columnwise_amax")
        self.offs = parts.get("offs")
        self.static = static
        self.shapes = shapes
        return self

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return list(self.parts()), (self.dtype, self.static, self.shapes)

    @classmethod
    def __tensor_unflatten__(
        cls, inner_tensors: dict[str, Tensor], context: Any, outer_size: Any, outer_stride: Any
    ) -> GroupedTensor:
        dtype, static, shapes = context
        return cls(outer_size, dtype, static, inner_tensors, shapes)

    def __coerce_tangent_metadata__(self) -> Tensor:
        # The gradient of a graph's output is a dense tensor. AOTAutograd reads the components of the returned tensor
        # before it treats it as a plain tensor, so this one reports no components.
        tangent = next(iter(self.parts().values())).new_empty(self.shape, dtype=self.dtype)
        tangent.__tensor_flatten__ = lambda: ((), None)  # type: ignore[attr-defined]
        return tangent

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _dispatch.call(GroupedTensor, func, args, kwargs or {})

    def parts(self) -> dict[str, Tensor]:
        """Return the components that are not None, and ``offs`` if there is one, by name."""
        return {name: t for name in NAMES if (t := getattr(self, name)) is not None}

    def _map(self, function: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None) -> GroupedTensor:
        """Return a GroupedTensor with ``function`` applied to every part; ``dtype``: new dtype of its values."""
        parts = {name: function(t) for name, t in self.parts().items()}
        return type(self)(self.shape, dtype or self.dtype, self.static, parts, self.shapes)

    # --- what it is ---------------------------------------------------------------------------------------------------

    @property
    def options(self) -> Options:
        """The options of ``group_quantize`` that the tensor was made with."""
        return _structure.options_of(self.static)

    @property
    def num_groups(self) -> Dim:
        """G, the number of groups or matrices."""
        if self.offs is not None:
            return self.offs.shape[0]
        if self.shapes is not None:
            return len(self.shapes)
        return self.shape[0] if self.dim() == 3 else 1

    @property
    def _one(self) -> bool:
        """Whether the tensor is one matrix ``[N, K]``, which the ops take as a stack of one."""
        return self.offs is None and self.dim() == 2

    def components(self) -> Components:
        """Return the components as arguments of ops: shape ``[0]`` if missing, and one matrix as a stack of one."""
        found: list[Tensor] = []
        for name, dtype in zip(COMPONENTS, self._component_dtypes * 2):
            part = getattr(self, name)
            if part is None:
                part = torch.empty(0, dtype=dtype, device=self.device)
            elif self._one:
                part = self._stack_of_one(name, part)
            found.append(part)
        return Components._make([*found, torch.empty(0, dtype=torch.float32, device=self.device)])

    @property
    def _component_dtypes(self) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
        """dtypes of data, scales and amax."""
        raise NotImplementedError

    def _stack_of_one(self, name: str, part: Tensor) -> Tensor:
        """Return a component of one matrix as that of a stack of one."""
        return part[None]

    def same_structure(self, other: GroupedTensor) -> bool:
        """Return whether the components of both tensors have equal shapes, dtypes and meaning."""
        return (
            type(self) is type(other)
            and (self.shape, self.static, self.shapes) == (other.shape, other.static, other.shapes)
            and [(n, t.shape) for n, t in self.parts().items()] == [(n, t.shape) for n, t in other.parts().items()]
        )

    def _describe(self) -> list[str]:
        """Return the format's options as shown in ``repr``."""
        return []

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        words = [f"shape={tuple(self.shape)}", f"dtype={self.dtype}", f"device={self.device}"]
        words += [f"groups={self.num_groups}", *self._describe()]
        if self.requires_grad:
            words.append("requires_grad=True" if self.grad_fn is None else f"grad_fn=<{self.grad_fn.name()}>")
        return f"{type(self).__name__}({', '.join(words)})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = {name: value for name, value in self.__dict__.items() if name not in _OWN}
        kind = (self.format, tuple(self.shape), self.dtype, asdict(self.options), self.shapes)
        # As bytes, because plain pickle does not support torch's 8-bit floating dtypes.
        parts = {name: (t.view(torch.uint8) if t.itemsize == 1 else t, t.dtype) for name, t in self.parts().items()}
        return rebuild, (*kind, parts, self.requires_grad, state)

    # --- values -------------------------------------------------------------------------------------------------------

    @classmethod
    def _component_specs(
        cls, options: Options, shape: tuple[Dim, ...], groups: Dim, dtype: torch.dtype, device: torch.device, rows: bool
    ) -> dict[str, TensorSpec]:
        """Return the component specs of rows in groups (``rows``) or of a stack of matrices, by name."""
        raise NotImplementedError

    def _read_matrix(self, dtype: torch.dtype, columnwise: bool | None) -> Tensor:
        """Return the values of rows in groups, of a stack or of one matrix."""
        raise NotImplementedError

    def _check_matrix(self, x: Tensor, **tensors: Tensor | None) -> None:
        """Check the arguments of ``_write_matrix`` for one matrix."""
        raise NotImplementedError

    def _write_matrix(self, x: Tensor, noop: Tensor | None, offs: Tensor | None, **tensors: Tensor | None) -> None:
        """Quantise rows in groups, a stack or one matrix into the components."""
        raise NotImplementedError

    def _cast(self, dtype: torch.dtype) -> GroupedTensor:
        """Return a tensor of another dtype with these components."""
        raise NotImplementedError

    def _read(self, dtype: torch.dtype, columnwise: bool | None = None) -> Tensor:
        """Return the values as a dense tensor, outside autograd."""
        if self.shapes is None:
            return self._read_matrix(dtype, columnwise)
        matrices = [part._read_matrix(dtype, columnwise).reshape(-1) for part in self.split()]
        return torch.cat([torch.empty(0, dtype=dtype, device=self.device), *matrices])

    @torch.no_grad()
    def _overwrite(
        self,
        x: Tensor,
        noop: Tensor | None = None,
        *,
        offs: Tensor | None = None,
        scale: Tensor | None = None,
        **rest: Tensor | None,
    ) -> None:
        """Implement ``quantize_`` outside autograd."""
        op = "quantize_"
        checks.require(not isinstance(x, GroupedTensor), op, "x", "a dense tensor", type(x).__name__, TypeError)
        checks.shape(op, "x", x, tuple(self.shape), "of this GroupedTensor")
        checks.same_device(op, "x", x, "self", self.device)
        if offs is not None:
            checks.require(self.offs is not None, op, "offs", "None for a tensor without groups of rows", "a tensor")
            checks.offsets(op, offs, self.num_groups, "self", self.device)
        if self.shapes is None:
            self._write_matrix(x, noop, self.offs if offs is None else offs, scale=scale, **rest)
            if offs is not None:
                assert self.offs is not None
                self.offs.copy_(offs if noop is None else torch.where(noop != 0, self.offs, offs))
            return
        if scale is not None:
            checks.shape(op, "scale", scale, (len(self.shapes),), "[G]")
        matrices = x.split([n * k for n, k in self.shapes])
        calls = [
            (part, matrix.view(part.shape), {"scale": None if scale is None else scale[g : g + 1], **rest})
            for g, (part, matrix) in enumerate(zip(self.split(), matrices))
        ]
        for part, matrix, tensors in calls:  # check all first, so that an error leaves nothing written
            part._check_matrix(matrix, **tensors)
        for part, matrix, tensors in calls:
            part._write_matrix(matrix, noop, None, **tensors)

    def dequantize(self, dtype: torch.dtype | None = None, *, columnwise: bool | None = None) -> Tensor:  # type: ignore[override]
        """Return the values as a dense tensor of this shape; rows past ``offs[-1]`` are zero.

        Differentiable by the straight-through estimator; the gradient is zero past ``offs[-1]``.

        Args:
            dtype: bfloat16, float16 or float32; default the tensor's own.
            columnwise: whether to read the columnwise components; default the rowwise ones if there are any. Columnwise
                NVFP4 components made with ``rht`` are transformed back.

        Raises:
            ValueError: there are no such components.
        """
        dtype = self.dtype if dtype is None else dtype
        checks.require(dtype in SOURCES, "dequantize", "dtype", "bfloat16, float16 or float32", dtype, TypeError)
        if self.requires_grad and torch.is_grad_enabled():
            return _autograd.Dequantize.apply(self, dtype, columnwise)
        return self._read(dtype, columnwise)

    def quantize_(
        self,
        x: Tensor | Sequence[Tensor],
        noop: Tensor | None = None,
        *,
        offs: Tensor | None = None,
        scale: Tensor | None = None,
        row_scale: Tensor | None = None,
        rng: Tensor | None = None,
    ) -> GroupedTensor:
        """Quantise ``x`` into the components of this tensor with its options; nothing is allocated.

        An optimizer step updates a quantised parameter by ``weight.quantize_(master)``. Not differentiable:
        call it under ``torch.no_grad()`` if this tensor or ``x`` requires grad.

        Args:
            x: dense, of this tensor's shape, bfloat16, float16 or float32; for a list of matrices a list of tensors of
                their shapes, or their concatenated elements.
            noop: float32 or bool, one element, on the device: if it is not zero nothing is written. It is not read on
                the host.
            offs: int32 ``[G]``: new group ends, copied into ``self.offs``; default: the current ones.
            scale, row_scale, rng: as in ``tgl.quantize``.

        Returns:
            self.

        Raises:
            RuntimeError: a gradient would be lost.
            TypeError, ValueError: arguments that do not fit; nothing has been written.
        """
        if not isinstance(x, Tensor):
            x = _flat(x, self.shapes)
        if torch.is_grad_enabled() and (self.requires_grad or x.requires_grad):
            name = "self" if self.requires_grad else "x"
            raise RuntimeError(f"tgl::quantize_: writes in place and has no derivative, but `{name}` requires grad; "
                               "use torch.no_grad(), or tgl.quantize for a differentiable result")  # fmt: skip
        self._overwrite(x, noop, offs=offs, scale=scale, row_scale=row_scale, rng=rng)
        if (
            torch.compiler.is_compiling() or not self.is_inference()
        ):  # the ops bump the versions of the components, but not that of the wrapper
            torch.autograd.graph.increment_version(self)
        return self

    @staticmethod
    def empty(
        shape: Sequence[Dim] | Sequence[Sequence[int]],
        format: str | Options,
        *,
        num_groups: int | None = None,
        source_dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> GroupedTensor:
        """Allocate a GroupedTensor from sizes; fill it with ``quantize_``.

        Args:
            shape: ``(T, K)`` with ``num_groups``; ``(G, N, K)``; ``(N, K)``; or a list of shapes ``(N, K)``.
            format: as in ``tgl.quantize``.
            num_groups: G, for rows in groups. ``offs`` is zero (empty groups) until ``quantize_`` gets other ends.
            source_dtype: dtype of the tensor, that of the represented values: bfloat16, float16 or float32.
            device: default: the current default device.
            options: as in ``tgl.quantize``; ``dtype`` is the element dtype.

        Returns:
            A tensor with uninitialised components (zero for a list of matrices).
        """
        op = "empty"
        resolved = _structure.resolve(op, format, options)
        cls, static = CLASSES[resolved.format], _structure.fields(resolved)
        must = "bfloat16, float16 or float32"
        checks.require(source_dtype in SOURCES, op, "source_dtype", must, source_dtype, TypeError)
        target = torch.empty(0, dtype=torch.float32, device=device).device
        shapes: Shapes | None = None
        if shape and isinstance(shape[0], Sequence):
            shapes = tuple([(n, k) for n, k in cast("Sequence[Sequence[int]]", shape)])
            size: tuple[Dim, ...] = (sum(n * k for n, k in shapes),)
            _, specs = _structure.slots(cls, resolved, shapes, source_dtype, target)
        else:
            size = tuple(cast("Sequence[Dim]", shape))
            checks.require(num_groups is None or num_groups >= 0, op, "num_groups", "None or not negative", num_groups)
            fits = len(size) == 2 if num_groups is not None else len(size) in (2, 3)
            checks.require(fits, op, "shape", "(T, K) with `num_groups`, (G, N, K), (N, K) or a list of those", size)
            specs = _structure.component_specs(cls, resolved, size, num_groups, source_dtype, target)
        # The group ends must be valid, and the padding between the matrices of a list is saved with them.
        zero = {"offs"} if shapes is None else set(specs)
        parts = {name: spec.empty().zero_() if name in zero else spec.empty() for name, spec in specs.items()}
        return cls(size, source_dtype, static, parts, shapes)

    # --- groups -------------------------------------------------------------------------------------------------------

    def split(self, sizes: Sequence[int] | None = None) -> list[GroupedTensor]:  # type: ignore[override]
        """Return one GroupedTensor ``[rows, K]`` per group, as views that share memory and carry no gradient.

        Args:
            sizes: rows of each group; only for rows in groups. ``split_host`` reads them from ``offs`` on the device.
        """
        return _structure.split(self, sizes)

    def split_host(self) -> list[GroupedTensor]:
        """Return ``split`` with the sizes read from ``offs``, which synchronises with the device."""
        if self.offs is None:
            return self.split()
        ends = self.offs.tolist()
        return self.split([end - start for start, end in zip([0, *ends], ends)])


def _parameter(cls: type[GroupedTensor], value: Tensor, attributes: dict[str, Any]) -> GroupedTensor:
    """Return ``nn.Parameter(value)`` with ``attributes``, which may be all attributes of another parameter.

    Components among them are ignored in favour of those of ``value``.

    Raises:
        TypeError: ``value`` is not of this class.
    """
    if not isinstance(value, cls):
        raise TypeError(
            f"`value` must be a {cls.__name__}, but got {type(value).__name__}: dense values are quantised by "
            "tgl.quantize, and into a parameter by its `quantize_` or by load_state_dict"
        )
    made = torch.nn.Parameter(value, attributes.pop("requires_grad", True))
    vars(made).update({name: given for name, given in attributes.items() if name not in _OWN})
    return cast("GroupedTensor", made)


def _flat(matrices: Sequence[Tensor], shapes: Shapes | None) -> Tensor:
    have = tuple(tuple(m.shape) for m in matrices)
    if shapes is None:
        checks.require(len(set(have)) == 1, "quantize_", "x", "a tensor, or matrices of one shape", have)
        return torch.stack(tuple(matrices))
    checks.require(have == shapes, "quantize_", "x", f"matrices of the shapes {shapes}", have)
    return torch.cat([m.reshape(-1) for m in matrices])


def rebuild(
    format: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    options: dict[str, Any],
    shapes: Shapes | None,
    parts: dict[str, tuple[Tensor, torch.dtype]],
    requires_grad: bool,
    state: dict[str, Any],
) -> GroupedTensor:
    """Rebuild a pickled tensor from constants and tensors only, so that ``torch.load`` need not trust other types.

    Raises:
        TypeError, ValueError: the arguments are not those of a GroupedTensor.
    """
    found = _saved_form.options(format, options)
    _saved_form.sizes(found, shape, dtype, shapes, grouped=type(parts) is dict and "offs" in parts)
    components = _saved_form.components(found, shape, dtype, shapes, parts)
    cls = CLASSES[format]
    _saved_form.attributes(cls, requires_grad, state, _OWN)
    self = cls(shape, dtype, _structure.fields(found), components, shapes)
    self.requires_grad_(requires_grad)
    self.__dict__.update(state)
    return self


torch.serialization.add_safe_globals([rebuild])
