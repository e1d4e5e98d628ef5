"""What recurrent layers share with `torch.nn.RNN`: arguments, checks, and how sequences are laid out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from deeprnn.backends.unrolling import autocasts
from deeprnn.model.arguments import check_dtype, check_settings
from deeprnn.model.direct_call import WIRED
from deeprnn.model.tracing import Traceable, is_symbolic, is_tensor, leaf

Hidden = Tensor | None
States = list[list[Tensor]]  # of every level and direction: the sequence of each layer, the state last


class RecurrentBase(Traceable, nn.RNNBase):
    """An `nn.RNNBase` whose parameters are ordinary ones: neither flattened nor kept a second time.

    A subclass registers its parameters, lists their names in `_all_weights` (for each level and direction) and
    runs the levels in `_run_levels`.
    """

    _all_weights: list[list[str]]

    def __init__(
        self,
        mode: str,
        input_size: int,
        hidden_size: int,
        num_layers: int,
        bias: bool,
        batch_first: bool,
        dropout: float,
        bidirectional: bool,
        backend: str,
    ) -> None:
        nn.Module.__init__(self)
        check_settings(
            input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, backend
        )
        self.mode, self.num_layers = mode, num_layers
        self.input_size, self.hidden_size = input_size, hidden_size
        self.bias, self.batch_first, self.dropout = bias, batch_first, float(dropout)
        self.bidirectional, self.proj_size, self.backend = bidirectional, 0, backend
        self._all_weights = []

    # `nn.RNNBase` looks after its second copy of the weights in these.
    __setattr__ = nn.Module.__setattr__  # type: ignore[assignment]
    __setstate__ = nn.Module.__setstate__  # type: ignore[assignment]
    _apply = nn.Module._apply  # type: ignore[assignment]
    _replicate_for_data_parallel = nn.Module._replicate_for_data_parallel  # type: ignore[assignment]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != WIRED}

    def flatten_parameters(self) -> None:
        """Nothing to do: parameters are never flattened here. For code written with `nn.RNN` in mind."""

    @property
    def _flat_weights_names(self) -> list[str]:
        return [name for names in self._all_weights for name in names]

    @property
    def _flat_weights(self) -> list[Tensor]:
        return [getattr(self, name) for name in self._flat_weights_names]

    @property
    def num_directions(self) -> int:
        """2 where the sequence is also read backwards."""
        return 2 if self.bidirectional else 1

    def _dtype(self) -> torch.dtype:
        """The parameters' dtype, without computing a parametrized one."""
        for own in self.__dict__["_parameters"].values():  # ordinarily: no walk through all submodules
            if own is not None:
                return own.dtype
        weight = next(self.parameters(), None)  # a replica of `nn.DataParallel` has them as plain attributes
        return (getattr(self, self._all_weights[0][0]) if weight is None else weight).dtype

    def check_input(self, input: Tensor, batch_sizes: Tensor | None) -> None:
        """Refuse a (T, B, I) input, or the data of a packed one, of another dtype or size, as `nn.RNN` does."""
        check_dtype(type(self).__name__, input, self._dtype())
        dims = 2 if batch_sizes is not None else 3
        if input.dim() != dims:
            raise RuntimeError(f"input must have {dims} dimensions, got {input.dim()}")
        if input.shape[-1] != self.input_size:
            raise RuntimeError(
                f"input.size(-1) must be equal to input_size. Expected {self.input_size}, got {input.shape[-1]}"
            )

    def _call_directly(self, input: Any, hx: Any) -> tuple[Tensor, Tensor] | None:
        """Output and last states by the short way, None where there is none for this call."""
        return None

    def _run_levels(
        self, x: Tensor, h0: Tensor, lengths: Tensor | None, return_all_states: bool
    ) -> tuple[Tensor, Tensor, States]:
        """Output, last states, and every layer's sequence where that is wanted; x is (T, B, I)."""
        raise NotImplementedError

    @overload
    def forward(
        self, input: Tensor, hx: Hidden = None, return_all_states: Literal[False] = False
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    def forward(
        self, input: PackedSequence, hx: Hidden = None, return_all_states: Literal[False] = False
    ) -> tuple[PackedSequence, Tensor]: ...
    @overload
    def forward(
        self, input: Tensor, hx: Hidden = None, *, return_all_states: Literal[True]
    ) -> tuple[Tensor, Tensor, list[list[Tensor]]]: ...
    @overload
    def forward(
        self, input: PackedSequence, hx: Hidden = None, *, return_all_states: Literal[True]
    ) -> tuple[PackedSequence, Tensor, list[list[PackedSequence]]]: ...

    def forward(self, input, hx=None, return_all_states=False):
        """(output, h_n); with `return_all_states` also every level's layers, as a list of lists.

        input is (T, B, I), (B, T, I) with batch_first, (T, I) unbatched, or a PackedSequence; hx and
        h_n are (levels x directions, B, H). The third result has, for every level and direction, the
        sequence of each transition layer, the last being the state; all are laid out as output is.
        Under autocast the results keep the parameters' type (`nn.RNN` gives autocast's).
        """
        if is_symbolic(input):
            return leaf(self, input, hx, return_all_states)
        if not return_all_states and (done := self._call_directly(input, hx)) is not None:
            return done
        if isinstance(input, PackedSequence):
            return self._forward_packed(input, hx, return_all_states)
        if not is_tensor(input):
            raise TypeError(f"{type(self).__name__}: input must be a Tensor or a PackedSequence, "
                            f"got {type(input).__name__}")  # fmt: skip
        if input.dim() not in (2, 3):
            raise ValueError(
                f"{type(self).__name__}: Expected input to be 2D or 3D, got {input.dim()}D tensor instead"
            )
        batched = input.dim() == 3
        x = input if batched else input.unsqueeze(1)
        if self.batch_first and batched:
            x = x.transpose(0, 1)
        self.check_input(x, None)
        if not x.shape[0]:
            raise RuntimeError(f"Expected sequence length to be larger than 0 in {type(self).__name__}")
        h0 = self._initial(hx, x, x.shape[1], batched)
        output, h_n, states = self._run_levels(x, h0, None, return_all_states)

        def arrange(y: Tensor) -> Tensor:
            return y.squeeze(1) if not batched else y.transpose(0, 1) if self.batch_first else y

        output, h_n = arrange(output), h_n if batched else h_n.squeeze(1)
        if not return_all_states:
            return output, h_n
        return output, h_n, [[arrange(z) for z in level] for level in states]

    if TYPE_CHECKING:  # for `nn.Module` a call takes and gives anything; here it is as `forward`

        @property
        def __call__(self):  # type: ignore[override]
            return self.forward

    def _forward_packed(self, packed: PackedSequence, hx: Hidden, return_all_states: bool) -> Any:
        data, batch_sizes, order, back = packed
        self.check_input(data, batch_sizes)
        x, lengths = pad_packed_sequence(PackedSequence(data, batch_sizes))
        h0 = self._initial(hx, x, int(batch_sizes[0]), True)
        if order is not None:
            h0 = h0.index_select(1, order)
        output, h_n, states = self._run_levels(x, h0, lengths.to(x.device), return_all_states)
        if back is not None:
            h_n = h_n.index_select(1, back)

        def pack(y: Tensor) -> PackedSequence:
            return PackedSequence(pack_padded_sequence(y, lengths).data, batch_sizes, order, back)

        if not return_all_states:
            return pack(output), h_n
        return pack(output), h_n, [[pack(z) for z in level] for level in states]

    def _initial(self, hx: Hidden, x: Tensor, batch: int, batched: bool) -> Tensor:
        """The first states, checked and with a batch dimension, zeros where none are given; x is the input."""
        want = (self.num_layers * self.num_directions, batch, self.hidden_size)
        dtype = self._dtype()
        if hx is None:
            return torch.zeros(want, dtype=dtype, device=x.device)
        if not is_tensor(hx):
            raise TypeError(f"{type(self).__name__}: hx must be a Tensor or None, got {type(hx).__name__}")
        if hx.dim() != (3 if batched else 2):
            kind = "batched 3-D input, hx should also be 3-D" if batched else (
                "unbatched 2-D input, hx should also be 2-D")  # fmt: skip
            raise RuntimeError(f"For {kind} but got {hx.dim()}-D tensor")
        hx = hx if batched else hx.unsqueeze(1)
        self.check_hidden_size(hx, want)
        if hx.device != x.device:
            raise RuntimeError("Input and hidden tensors are not at the same device, found input tensor at "
                               f"{x.device} and hidden tensor at {hx.device}")  # fmt: skip
        if hx.dtype != dtype and not autocasts(x.device.type):
            raise RuntimeError(f"hx has dtype {hx.dtype} but the parameters have {dtype}: use hx.to({dtype})")
        return hx.to(dtype)


def reverse(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Each sequence of (T, B, ·) backwards within its own length; padding stays where it is."""
    if lengths is None:
        return x.flip(0)
    t = torch.arange(x.shape[0], device=x.device).unsqueeze(1)  # (T, 1)
    index = torch.where(t < lengths, lengths - 1 - t, t)  # (T, B)
    return x.gather(0, index.unsqueeze(-1).expand_as(x))
