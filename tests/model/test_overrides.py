"""What a user overrides or hooks is honoured by whole sequences, losses and sampling, or refused: never bypassed."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.utils import parametrizations, prune

import deeprnn
from deeprnn import DeepRNN, Plus, Predict, SequenceModel, UserError
from deeprnn.data.batching import Batch
from deeprnn.generation.one_step import FewRows, fastest_step
from deeprnn.model import overrides
from deeprnn.model import plus as plus_module
from deeprnn.model.export import export_program
from deeprnn.model.models import assemble, build
from deeprnn.training.updater import LARGE, Scored

T, B, I, H, O = 5, 2, 3, 4, 3
DEEP = {"intermediate_sizes": (5,), "shortcut": "last", "input_to": "all"}


class Paced(Plus):
    """h' = h + a ((x ⊕ h) − h): the ⊕ of the notebook on one's own operator."""

    def __init__(self, *sizes, **settings) -> None:
        super().__init__(*sizes, **settings)
        self.pace = nn.Parameter(torch.linspace(-2, 4, self.spec.hidden_size))

    def forward(self, x, h, skip=None):
        return torch.lerp(h, super().forward(x, h, skip), self.pace.sigmoid())


class Doubled(Plus):
    def forward(self, x, h):  # type: ignore[override]  # as people write it who have no skip
        return 2 * super().forward(x, h)


class OwnLayers(Plus):
    def layers(self, x, h, skip=None):
        return [z + 0.5 for z in super().layers(x, h, skip)]


class OwnProject(Plus):
    def project(self, x, skip=None):
        return super().project(x, skip) + 0.5


class OwnUnit(Plus):
    def _phi(self, suffix, unit):
        phi = super()._phi(suffix, unit)
        return lambda a: phi(2 * a)


def by_instance(plus: Plus) -> None:
    plain = plus.forward
    plus.forward = lambda x, h, skip=None: 0.5 * plain(x, h, skip)  # type: ignore[method-assign]


def by_hook(plus: Plus) -> None:
    plus.register_forward_hook(lambda module, inputs, output: output * 0.5)


def by_pre_hook(plus: Plus) -> None:
    plus.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1, *inputs[1:]))


def by_weight_norm(plus: Plus) -> None:
    nn.utils.weight_norm(plus, "W1")
    with torch.no_grad():
        plus.W1_g.mul_(3)  # type: ignore[operator]


def by_spectral_norm(plus: Plus) -> None:
    nn.utils.spectral_norm(plus, "W1")
    with torch.no_grad():
        plus.W1_orig.mul_(torch.linspace(-3, 3, H))  # type: ignore[operator]


def by_pruning(plus: Plus) -> None:
    prune.l1_unstructured(plus, "W1", amount=0.5)
    with torch.no_grad():
        plus.W1_orig.mul_(3)  # type: ignore[operator]


def by_parametrization(plus: Plus) -> None:
    parametrizations.orthogonal(plus, "W1")


CLASSES = {
    "forward": Paced,
    "short forward": Doubled,
    "layers": OwnLayers,
    "project": OwnProject,
    "_phi": OwnUnit,
}
CHANGES = {
    f.__name__: f
    for f in (
        by_instance,
        by_hook,
        by_pre_hook,
        by_weight_norm,
        by_spectral_norm,
        by_pruning,
        by_parametrization,
    )
}
OLD_STYLE = pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")


def operator(kind: str, **settings) -> Plus:
    """A ⊕ that somebody changed."""
    torch.manual_seed(1)
    plus = CLASSES.get(kind, Plus)(I, H, **settings)
    if kind in CHANGES:
        CHANGES[kind](plus)
    return plus.eval()


def model(kind: str, **settings) -> SequenceModel:
    net = deeprnn.rnn(input_size=I, hidden_size=H, output_size=O, seed=1)
    net.levels[0] = operator(kind, **settings)
    return net.eval()


def step_by_step(net: SequenceModel, x: Tensor) -> Tensor:
    state, logits = None, []
    for frame in x:
        y, state = net.step(frame, state)
        logits.append(y)
    return torch.stack(logits)


KINDS = [*CLASSES, *CHANGES]
EVERY = pytest.mark.parametrize("kind", KINDS)


@OLD_STYLE
@EVERY
@pytest.mark.parametrize("settings", [{}, DEEP], ids=["shallow", "deep"])
def test_a_sequence_is_what_its_steps_are(kind, settings):
    plus, x, h0 = operator(kind, **settings), torch.randn(T, B, I), torch.rand(B, H)
    states, inner = plus.unroll(x, h0)
    h = h0
    for t in range(T):
        h = plus(x[t], h)
        torch.testing.assert_close(states[t], h)
    assert not torch.allclose(states, operator("plain", **settings).unroll(x, h0)[0])
    assert inner.shape[:2] == (T, B)


@OLD_STYLE
@EVERY
def test_a_models_sequence_is_what_its_steps_are(kind):
    net, x = model(kind), torch.randn(T, B, I)
    torch.testing.assert_close(net(x)[0], step_by_step(net, x))


@OLD_STYLE
@EVERY
def test_sampling_takes_the_same_step(kind):
    net = model(kind)
    step = fastest_step(net)
    assert isinstance(step, FewRows) == (kind == "by_parametrization")
    with torch.no_grad():
        x, state = torch.rand(B, I), net.initial_state(B)
        for a, b in zip(step(x, state)[0], net.step(x, state)[0], strict=True):
            torch.testing.assert_close(a, b)


@OLD_STYLE
@pytest.mark.parametrize("kind", ["forward", "layers", "project", "by_instance", "by_hook", "by_weight_norm"])
def test_a_compiled_model_honours_it(kind):
    torch._dynamo.reset()
    net, x = model(kind), torch.randn(T, B, I)
    compiled = torch.compile(net, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x)[0], step_by_step(net, x))


@pytest.mark.parametrize("kind", ["forward", "by_hook"])
def test_an_exported_model_honours_it_for_any_length(kind):
    net = model(kind)
    program = export_program(net).module()
    x = torch.randn(9, 3, I)
    torch.testing.assert_close(program(x, torch.zeros(3, H))[0], step_by_step(net, x))


def test_an_exported_model_honours_it_with_resets():
    net, x, reset = model("forward"), torch.randn(T, B, I), torch.zeros(T, B, dtype=torch.bool)
    reset[2, 1] = True
    time = torch.export.Dim("time", min=2)
    dynamic = {"x": {0: time}, "state": None, "reset": {0: time}, "masks": None}
    program = torch.export.export(net, (x, None, reset, None), dynamic_shapes=dynamic).module()
    x, reset = torch.cat([x, x]), torch.cat([reset, reset])
    torch.testing.assert_close(program(x, None, reset, None)[0], net(x, None, reset)[0])
    assert not torch.allclose(net(x, None, reset)[0], net(x)[0])


def test_a_population_honours_it():
    models = [model("forward") for _ in range(3)]
    with torch.no_grad():
        for k, net in enumerate(models):
            net.levels[0].pace.add_(k)  # type: ignore[operator]
    parameters, _ = stack_module_state(models)  # type: ignore[arg-type]
    x = torch.randn(T, B, I)
    logits, _ = vmap(lambda p: functional_call(models[0], p, (x,)))(parameters)
    for mine, net in zip(logits, models, strict=True):
        torch.testing.assert_close(mine, step_by_step(net, x))


def test_gradients_reach_the_parameters_of_an_own_forward():
    net, x = model("forward"), torch.randn(T, B, I)
    parameters = list(net.parameters())
    mine = torch.autograd.grad(net(x)[0].square().sum(), parameters)
    want = torch.autograd.grad(step_by_step(net, x).square().sum(), parameters)
    for a, b in zip(mine, want, strict=True):
        torch.testing.assert_close(a, b)


def test_resets_carried_states_and_dropout_of_the_state_reach_an_own_forward():
    net, x = model("forward"), torch.randn(T, B, I)
    reset = torch.zeros(T, B, dtype=torch.bool)
    reset[2] = True
    torch.testing.assert_close(net(x, reset=reset)[0][2:], net(x[2:])[0])
    first, state = net(x[:2])
    torch.testing.assert_close(torch.cat([first, net(x[2:], state)[0]]), net(x)[0])
    for mask in (torch.zeros(B, H), torch.zeros(T, B, H)):
        alone = torch.stack([net(frame[None])[0][0] for frame in x])
        torch.testing.assert_close(net(x, masks={"0.state": mask})[0], alone)
    assert net(x[:0])[0].shape == (0, B, O)


def test_the_layers_inside_are_given_where_they_are_known():
    x, h0 = torch.randn(T, B, I), torch.zeros(B, H)
    plus = operator("layers", **DEEP)
    inner = plus.unroll(x, h0)[1]
    torch.testing.assert_close(inner[0], plus.layers(x[0], h0)[0])
    for kind in ("forward", "by_hook"):
        assert operator(kind, **DEEP).unroll(x, h0)[1].shape == (T, B, 0)


def test_an_own_forward_or_project_may_take_an_input_of_another_shape():
    class Pairs(Plus):
        def forward(self, x, h, skip=None):
            return super().forward(x.flatten(-2), h, skip)

    class Bits(Plus):
        def project(self, x, skip=None):
            return super().project(torch.stack([x == k for k in range(I)], -1).float(), skip)

    h0 = torch.zeros(B, 4)
    for plus, x in ((Pairs(6, 4), torch.randn(T, B, 2, 3)), (Bits(I, 4), torch.randint(I, (T, B)))):
        states = plus.unroll(x, h0)[0]
        torch.testing.assert_close(states[0], plus(x[0], h0))
        assert states.shape == (T, B, 4)


def test_a_patched_class_is_honoured(monkeypatch):
    plus, x, h0 = Plus(I, H), torch.randn(T, B, I), torch.zeros(B, H)
    monkeypatch.setattr(Plus, "forward", lambda self, x, h, skip=None: torch.full_like(h, 1000.0))
    assert plus.unroll(x, h0)[0].unique().tolist() == [1000.0]


def test_a_global_hook_is_honoured():
    plus, x, h0 = Plus(I, H), torch.randn(T, B, I), torch.zeros(B, H)
    handle = nn.modules.module.register_module_forward_hook(lambda module, inputs, output: output * 0 + 7)
    try:
        assert plus.unroll(x, h0)[0].unique().tolist() == [7.0]
    finally:
        handle.remove()
    assert plus.unroll(x, h0)[0].unique().numel() > 1


def test_the_plain_loop_is_logged_once(caplog):
    plus_module._log_once.cache_clear()
    plus, x, h0 = operator("forward"), torch.randn(T, B, I), torch.zeros(B, H)
    with caplog.at_level(logging.INFO, logger="deeprnn"):
        plus.unroll(x, h0)
        plus.unroll(x, h0)
    lines = [record.message for record in caplog.records if "step by step" in record.message]
    assert lines == ["⊕ is called step by step: Paced has its own forward"]


def test_what_an_own_forward_cannot_have_is_refused():
    plus, x, h0 = operator("forward", **DEEP), torch.randn(T, B, I), torch.zeros(B, H)
    with pytest.raises(UserError, match=r"backend 'cpu'.*Paced has its own forward.*backend='auto'"):
        plus.unroll(x, h0, backend="cpu")
    with pytest.raises(UserError, match=r"z1.*inside ⊕.*Paced has its own forward"):
        plus.unroll(x, h0, masks={"z1": torch.ones(B, 5)})


# ---- ▷ and the loss over many classes


class Tempered(Predict):
    def forward(self, h):  # type: ignore[override]  # as people write it who drop nothing
        return super().forward(h) * 3


def many_classes() -> SequenceModel:
    return deeprnn.rnn(input_size=LARGE, hidden_size=H, output_size=LARGE, output="categorical", seed=0)


def loss_of(net: SequenceModel) -> tuple[Tensor, Tensor]:
    """The training loss, and the same from the model's logits."""
    x, y = torch.randint(LARGE, (2, T, B), generator=torch.Generator().manual_seed(0))
    batch = Batch(x, y, torch.ones(T, B, dtype=torch.bool), torch.zeros(T, B, dtype=torch.bool))
    nats, _ = Scored(net)(batch, net.initial_state(B), None)
    logits = net(x)[0]
    return nats, nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum")


def swap_predict(net: SequenceModel) -> None:
    weights = net.predict.state_dict()
    net.predict = Tempered(H, LARGE)
    net.predict.load_state_dict(weights)


def hook_predict(net: SequenceModel) -> None:
    net.predict.register_forward_hook(lambda module, inputs, output: output * 3)


def normalise_predict(net: SequenceModel) -> None:
    nn.utils.weight_norm(net.predict, "V1")
    with torch.no_grad():
        net.predict.V1_g.mul_(20)  # type: ignore[operator]


def hook_model(net: SequenceModel) -> None:
    net.register_forward_hook(lambda module, inputs, output: (output[0] * 3, output[1]))


@OLD_STYLE
@pytest.mark.parametrize("change", [swap_predict, hook_predict, normalise_predict, hook_model])
def test_the_loss_is_that_of_the_models_own_logits(change):
    net = many_classes()
    plain = loss_of(net)[0]
    change(net)
    nats, want = loss_of(net)
    torch.testing.assert_close(nats, want)
    assert not torch.allclose(nats, plain)


@OLD_STYLE
@pytest.mark.parametrize("change", [hook_predict, normalise_predict])
def test_sampling_calls_a_changed_output(change):
    net = many_classes()
    assert isinstance(fastest_step(net), FewRows)
    change(net)
    assert fastest_step(net) == net.step


def test_sampling_calls_an_own_step():
    class Own(SequenceModel):
        def step(self, x, state=None):
            y, state = super().step(x, state)
            return y + 1, state

    net = Own(many_classes().spec)
    assert fastest_step(net) == net.step


@pytest.mark.parametrize("name", ["embed", "joined"])
def test_sampling_calls_what_a_step_is_made_of(name):
    net = many_classes()
    assert isinstance(fastest_step(net), FewRows)
    setattr(net, name, getattr(net, name))
    assert fastest_step(net) == net.step


# ---- levels and parts that are no operators


def symbols_model(**settings) -> SequenceModel:
    torch.manual_seed(0)
    spec = assemble(input_size=6, output_size=6, hidden_sizes=(H,), output="categorical", **settings)
    net = build(spec, seed=0)
    for p in net.parameters():
        nn.init.normal_(p)
    return net


def changed_by(net: SequenceModel, change) -> None:
    """A change has an effect, and the same one on sequences and on steps."""
    x, state, steps = torch.randint(6, (T, B)), None, []
    before = net(x)[0]
    change()
    after = net(x)[0]
    for symbols in x:
        y, state = net.step(symbols, state)
        steps.append(y)
    assert not torch.allclose(before, after)
    torch.testing.assert_close(torch.stack(steps), after)


def scale(module: nn.Module, name: str) -> None:
    """As an update would, after `weight_norm`."""
    with torch.no_grad():
        module.get_parameter(f"{name}_g").mul_(3)


@OLD_STYLE
@pytest.mark.parametrize("cell", ["", "gru"])
def test_an_embedding_is_called(cell):
    net = symbols_model(embedding=3, cell=cell)
    changed_by(net, lambda: net.embedding.register_forward_hook(lambda module, inputs, y: 2 * y))
    nn.utils.weight_norm(net.embedding, "weight")
    changed_by(net, lambda: scale(net.embedding, "weight"))


@OLD_STYLE
def test_a_tied_embedding_is_as_the_output_computes_it():
    net = symbols_model(embedding=H, tied=True)
    nn.utils.weight_norm(net.predict, "V1")
    changed_by(net, lambda: scale(net.predict, "V1"))


@OLD_STYLE
def test_symbols_of_a_level_of_cells_see_the_weights_that_a_hook_computes():
    net = symbols_model(cell="gru")
    nn.utils.weight_norm(net.levels[0], "embedding")
    changed_by(net, lambda: scale(net.levels[0], "embedding"))


def test_a_hook_on_a_level_of_cells_is_refused_for_it_would_never_run():
    net = symbols_model(cell="gru")
    changed_by(net, lambda: net.levels[0].cell.register_forward_hook(lambda module, inputs, h: 0.5 * h))
    net.levels[0].register_forward_hook(lambda *_: None)
    x = torch.zeros(T, B, dtype=torch.int64)
    for call in (lambda: net(x), lambda: net.step(x[0])):
        with pytest.raises(
            UserError, match=r"forward hook on a level of cells would never run.*levels\[0\]\.cell"
        ):
            call()


# ---- weights that are computed


@OLD_STYLE
@pytest.mark.parametrize("kind", [DeepRNN, deeprnn.GRU, deeprnn.LSTM])
def test_one_step_of_a_layer_sees_the_weights_that_a_hook_computes(kind):
    layer, x = kind(I, H), torch.randn(T, B, I)
    nn.utils.weight_norm(layer, "weight_hh_l0")
    with torch.no_grad():
        layer.weight_hh_l0_g.mul_(3)  # type: ignore[operator]
    h, outputs = None, []
    for frame in x:
        y, h = layer.step(frame, h)
        outputs.append(y)
    torch.testing.assert_close(torch.stack(outputs), layer(x)[0])


@OLD_STYLE
@pytest.mark.parametrize("kind", ["layer", "model"])
def test_a_cell_over_a_sequence_sees_the_weights_that_its_hook_computes(kind):
    """A sequence reads the cell's step, and never calls the cell itself, whose hook would compute the weight."""
    torch.manual_seed(0)
    layer = (
        deeprnn.RHN(I, H)
        if kind == "layer"
        else deeprnn.rnn(input_size=I, hidden_size=H, output_size=I, cell="gru", seed=0)
    )
    cell = layer.cells[0] if kind == "layer" else layer.levels[0].cell
    name = "weight_hh_d1" if kind == "layer" else "weight_hh"
    nn.utils.weight_norm(cell, name)
    layer(torch.randn(T, B, I))[0].sum().backward()
    with torch.no_grad():
        cell.get_parameter(f"{name}_g").mul_(3)
    x, h, outputs = torch.randn(T, B, I), None, []
    y = layer(x)[0]
    for frame in x:
        output, h = layer.step(frame, h)
        outputs.append(output)
    torch.testing.assert_close(y, torch.stack(outputs))
    y.sum().backward()  # through the weights as they are now


def test_initialising_reaches_behind_a_parametrization():
    plus = Plus(I, H)
    parametrizations.weight_norm(plus, "W1")
    before = plus.W1.clone()
    plus.reset_parameters(torch.Generator().manual_seed(3))
    fresh = Plus(I, H)
    fresh.reset_parameters(torch.Generator().manual_seed(3))
    assert not torch.allclose(plus.W1, before)
    torch.testing.assert_close(plus.W1, fresh.W1)


def test_initialising_what_a_hook_computes_is_refused():
    plus = operator("by_pruning")
    with pytest.raises(UserError, match="W1 of Plus is computed by a hook"):
        plus.reset_parameters()


def test_a_foreign_module_counts_as_changed():
    assert overrides.changed(nn.Linear(2, 2), "forward") == "Linear has its own forward"
