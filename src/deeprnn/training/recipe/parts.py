"""A recipe's sections: every field with its default and what it means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from deeprnn.cells import lookup
from deeprnn.errors import UserError
from deeprnn.model.models import assemble
from deeprnn.model.specs import Dropout, ModelSpec


@dataclass(frozen=True)
class DataPart:
    """What is learnt from, and how it is cut into updates."""

    name: str = "bach"
    """a named data set, or a path"""
    level: Literal["auto", "music", "char", "word"] = "auto"
    """how a text is read; auto: by what the data is"""
    chunk: int = 200
    """steps of one update: truncated backpropagation through time, the state carried on"""
    lanes: int = 1
    """sequences side by side in one update; the paper's is 1"""
    order: Literal["shared", "own"] = "shared"
    """whether members of a population see one order of songs or each its own"""
    order_seed: int = 0
    """seed of the shared order, apart from the members' seeds so that a member equals the model alone"""
    steps_per_beat: int = 0
    """bach and MIDI files: the grid in time; 0: the loader's own choice"""
    low: int = 21
    """bach and MIDI files: lowest MIDI number kept"""
    high: int = 108
    """bach and MIDI files: highest MIDI number kept"""
    drums: bool = False
    """MIDI files: keep drum tracks, as pitches"""
    transpose: bool = False
    """bach and people's own music: every song to C major or C minor"""
    random_transpose: int = 0
    """music: semitones by which each training song is moved up or down at most, drawn anew every epoch"""
    minimum: int = 1
    """text files: the least count of a symbol that enters the vocabulary"""


@dataclass(frozen=True)
class ModelPart:
    """The model by its sizes; input and output sizes come from the data."""

    kind: str = "rnn"
    """the paper's name for it (rnn, dts, dots, srnn, dots-star), for tables and the paper's number"""
    hidden: tuple[int, ...] = (200,)
    """state size of each level"""
    intermediate: tuple[int, ...] = ()
    """hidden layers of the transition"""
    output_hidden: tuple[int, ...] = ()
    """hidden layers of the output function"""
    shortcut: Literal["none", "last", "all"] = "none"
    input_to: Literal["first", "last", "all"] = "first"
    unit: str = "sigmoid"
    intermediate_unit: str = ""
    """empty: as `unit`"""
    output_unit: str = "sigmoid"
    output_from: Literal["top", "all"] = "top"
    input_to_levels: Literal["first", "all"] = "first"
    cell: str = ""
    """a cell in place of the paper's ⊕: lstm, gru, rhn, …, my_cells.py:Paced or my_package.my_module:Paced"""
    cell_options: tuple[str, ...] = ()
    """arguments of the cell: depth=5,zoneout=0.1"""
    output: Literal["plain", "nade"] = "plain"
    """nade: notes of a frame that depend on each other; plain: independent ones, of a text a softmax"""
    nade_size: int = 200
    """hidden units of a NADE"""
    embedding: int = 0
    """text: length of a learned vector for each symbol; 0: a cell's is as wide as its state, ⊕ has none"""
    tied: bool = False
    """text: the embedding is the output's last matrix"""
    input_hidden: tuple[int, ...] = ()
    """hidden layers between the input and the first level: the deep input-to-hidden function of Sec. 3.2"""

    @property
    def name(self) -> str:
        """What the model is called in folders and tables."""
        return f"{lookup.short(self.cell)}{'-nade' * (self.output == 'nade')}" if self.cell else self.kind

    def spec(self, size: int, categorical: bool, dropout: Dropout) -> ModelSpec:
        """The whole model for data with `size` inputs and outputs."""
        if categorical and self.output == "nade":
            raise UserError(
                "model.output='nade' is for music: a text has one symbol at a time, choose 'plain'"
            )
        if self.cell and self.input_hidden:
            raise UserError(
                f"model.input_hidden={list(self.input_hidden)} stands before the paper's ⊕, not before the cell "
                f"{self.cell}: leave one of the two out"
            )
        return assemble(
            input_size=size,
            output_size=size,
            hidden_sizes=self.hidden,
            input_mlp=self.input_hidden,
            intermediate=self.intermediate,
            output_hidden=self.output_hidden,
            shortcut=self.shortcut,
            input_to=self.input_to,
            unit=self.unit,
            intermediate_unit=self.intermediate_unit or None,
            output_unit=self.output_unit,
            output="nade" if self.output == "nade" else "categorical" if categorical else "bernoulli",
            nade_size=self.nade_size,
            output_from=self.output_from,
            input_to_levels=self.input_to_levels,
            dropout=dropout,
            cell=self.cell,
            cell_options=self.cell_options,
            embedding=self.embedding,
            tied=self.tied,
        )


@dataclass(frozen=True)
class OptimiserPart:
    """How a gradient becomes a step."""

    name: Literal["sgd", "momentum", "adam", "adamw"] = "sgd"
    rate: float = 1.0
    clip: float = 1.0
    """largest norm of the gradient of the mean loss per step; 0: never clipped"""
    momentum: float = 0.9
    betas: tuple[float, ...] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    """decoupled, for adamw"""
    average: Literal["none", "ema", "tail"] = "none"
    """evaluate and keep averaged weights: exponentially, or all since epoch `average_from`"""
    average_decay: float = 0.999
    average_from: int = 1
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16: autocast; the recurrent state stays in fp32"""
    nonfinite: Literal["stop", "skip"] = "stop"
    """what a NaN or infinite loss or gradient does"""


@dataclass(frozen=True)
class SchedulePart:
    """The rate over time."""

    name: Literal["paper", "halving", "cosine", "constant"] = "paper"
    beta: float = 1000.0
    """paper: updates after which the decaying rate has halved"""
    patience: int = 4
    """paper: epochs without a new best before the decay starts; halving: before each halving"""
    restore_best: bool = True
    """go back to the best parameters where the decay starts or the rate is halved"""
    factor: float = 1.0002
    """halving: by how much the validation cost must improve in an epoch"""
    minimum: float = 5e-7
    """halving: the rate below which training stops"""
    floor: float = 0.0
    """cosine: the last rate as a share of the first"""
    warmup: int = 0
    """updates over which the rate rises from zero"""


@dataclass(frozen=True)
class RegulariserPart:
    """Weight noise, dropout and a commutative ⊕, all in training alone."""

    weight_noise: float = 0.0
    """standard deviation of the Gaussian added to every weight matrix for each gradient"""
    dropout_input: float = 0.0
    dropout_state: float = 0.0
    """on the recurrent path, one mask per sequence; a cell's too"""
    dropout_intermediate: float = 0.0
    dropout_output: float = 0.0
    dropout_per_sequence: bool = False
    """one mask for all steps of an update ("variational"), rather than one a step"""
    dropout_levels: float = 0.0
    """between one level of a stack and the next"""
    dropout_symbols: float = 0.0
    """whole symbols of an embedding"""
    dropconnect: float = 0.0
    """share of the recurrent matrices' entries that are zero, others for every update"""
    commutative: float = 0.0
    """weight of ‖e ⊕ h − h ⊕ e‖², averaged over steps: Sec. 4's suggestion; input and state need one size"""

    @property
    def dropout(self) -> Dropout:
        """As the model's spec holds it."""
        return Dropout(
            self.dropout_input,
            self.dropout_state,
            self.dropout_intermediate,
            self.dropout_output,
            self.dropout_per_sequence,
            self.dropout_levels,
            self.dropout_symbols,
        )


@dataclass(frozen=True)
class StopPart:
    """When training ends; 0 switches a rule off."""

    patience: int = 20
    """epochs without a new best (under the paper's schedule: counted once the decay has started)"""
    epochs: int = 0
    minutes: float = 0.0


@dataclass(frozen=True)
class PretrainPart:
    """A first stage whose parameters the model starts from (Sec. 5.2)."""

    recipe: str = ""
    """recipe that the first stage is trained by; its model is this one without the deep output or upper levels"""
    run: str = ""
    """or a finished run to start from"""
    rate: float = 0.1
    """the transferred parameters' rate, as a share of the others'"""
    epochs: int = 0
    """of the first stage at most; 0: as many as its recipe says"""
    minutes: float = 0.0
    """of the first stage at most; 0: as its recipe says"""


@dataclass(frozen=True)
class SavePart:
    """When the training state is saved besides each epoch's end; 0 switches a rule off."""

    seconds: float = 60.0
    updates: int = 0


@dataclass(frozen=True)
class EvaluationPart:
    """How a split is scored."""

    chunk: int = 200
    width: int = 64
    """songs side by side"""
    streams: int = 1
    """parallel streams of a text; 1 is exact"""
    test: bool = True
    """false: the test part is not even kept in memory, so that nothing can score it; for runs of a search"""
