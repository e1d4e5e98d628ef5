"""A layer that takes the place of one of torch.nn: a `torch.nn.RNNBase` with ordinary parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from deeprnn.model.arguments import LayerSettings
from deeprnn.model.direct_call import WIRED
from deeprnn.model.sequence_layer import SequenceLayer


class RecurrentBase(SequenceLayer, nn.RNNBase):
    """An `nn.RNNBase` whose parameters are neither flattened nor kept a second time.

    A subclass adds the parameters of every level and direction by `add_parameters`, in `nn.RNNBase`'s order.
    """

    def __init__(
        self,
        mode: str,
        input_size: int,
        hidden_size: int,
        proj_size: int = 0,
        **settings: Unpack[LayerSettings],
    ) -> None:
        nn.Module.__init__(self)
        self.set_up(sizes=(input_size, hidden_size), **settings)
        self.mode, self.bias, self.proj_size = mode, settings["bias"], proj_size
        self.input_size, self.hidden_size = input_size, hidden_size
        self._all_weights: list[list[str]] = []

    def add_parameters(
        self, shapes: Mapping[str, Iterable[int]], device: Any, dtype: torch.dtype | None
    ) -> None:
        """Register what the next level or direction has, by name."""
        for name, shape in shapes.items():
            parameter = nn.Parameter(torch.empty(tuple(shape), device=device, dtype=dtype))
            self.register_parameter(name, parameter)
        self._all_weights.append(list(shapes))

    # `nn.RNNBase` looks after its second copy of the weights in these.
    __setattr__ = nn.Module.__setattr__  # type: ignore[assignment]
    __setstate__ = nn.Module.__setstate__  # type: ignore[assignment]
    _apply = nn.Module._apply  # type: ignore[assignment]
    _replicate_for_data_parallel = nn.Module._replicate_for_data_parallel  # type: ignore[assignment]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != WIRED}

    def flatten_parameters(self) -> None:
        """Nothing to do: parameters are never flattened here. For code written with torch.nn in mind."""

    @property
    def _flat_weights_names(self) -> list[str]:
        return [name for names in self._all_weights for name in names]

    @property
    def _flat_weights(self) -> list[Tensor]:
        return [getattr(self, name) for name in self._flat_weights_names]

    def first_weight(self) -> Tensor:
        """A parameter, without computing a parametrized one."""
        for parameter in self.__dict__["_parameters"].values():  # ordinarily: no walk through all submodules
            if parameter is not None:
                return parameter
        weight = next(self.parameters(), None)  # a replica of `nn.DataParallel` has them as plain attributes
        return getattr(self, self._all_weights[0][0]) if weight is None else weight

    def extra_repr(self) -> str:
        return ", ".join([str(self.input_size), str(self.hidden_size), *self.changed_settings()])
